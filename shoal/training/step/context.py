"""The context of a step: all its inputs except the members and the batch."""

from dataclasses import dataclass

from torch import Tensor

from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.processes.mesh import Mesh
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import PassContext
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion
from shoal.training.options.adversarial import Adversarial
from shoal.training.step.stages import Stages

__all__ = ["StepContext"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepContext(PassContext):
    """The inputs of a step.

    Attributes:
        posterior: gives the driving force.
        repulsion: gives the repulsive force; None for a plain ensemble.
        annealing: factor of the driving force (likelihood and prior).
        adversarial: adds adversarial neighbours of the inputs.
        stages: the arithmetic stages, compiled or not.
        own_inputs: every member has its own inputs [M, B, ...].
        own_targets: every member has its own targets [M, B, ...].
        frozen: frozen members, in evaluation mode.
        mesh: the processes that train the other members; None for one process.
    """

    posterior: Posterior
    repulsion: Repulsion | None
    annealing: float | Tensor = 1.0
    adversarial: Adversarial | None = None
    stages: Stages = Stages()
    own_inputs: bool = False
    own_targets: bool = False
    frozen: Ensemble | None = None
    mesh: Mesh | None = None

    def at(
        self, step: int | Tensor, annealing: float | Tensor, mapping: MemberRunner
    ) -> "StepContext":
        """The context of one step of training.

        `dataclasses.replace` does the same but takes one percent of a small step.
        """
        other = object.__new__(StepContext)
        other.__dict__.update(self.__dict__, step=step, annealing=annealing, mapping=mapping)
        return other

    @property
    def others(self) -> dict[str, Mesh]:
        """The argument with which a stage reaches the members of other processes."""
        return {} if self.mesh is None else {"mesh": self.mesh}

    @property
    def base(self) -> str | None:
        """What the repulsion acts on: "weights", "outputs" or "gradients"; None without any."""
        return None if self.repulsion is None else self.repulsion.space.base

    @property
    def shares_drives(self) -> bool:
        """Whether the flow mixes the drives of members, as a Stein flow does."""
        return self.repulsion is not None and isinstance(self.repulsion.flow, Stein)

    @property
    def weight(self) -> float | Tensor:
        """Factor of the likelihood's gradient at the clean inputs."""
        return self.annealing if self.adversarial is None else 0.5 * self.annealing

    @property
    def at_outputs(self) -> bool:
        """Whether repulsion or a functional prior acts on the outputs."""
        return self.base == "outputs" or isinstance(self.posterior.prior, FunctionalPrior)

    @property
    def compares_passes(self) -> bool:
        """Whether the backward pass of a member needs the forward passes of all members."""
        return self.at_outputs or self.base == "gradients"

    @property
    def in_chunks(self) -> int | None:
        """Number of members per forward and backward pass; None for all members.

        Adversarial neighbours that members share need all members at once.
        """
        adversarial = self.adversarial
        together = adversarial is not None and (adversarial.shared or self.shares_drives)
        return None if together else self.mapping.chunk

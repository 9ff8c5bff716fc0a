"""The context of a step: all that it is computed with but the members and the batch."""

from dataclasses import dataclass

from torch import Tensor

from shoal.engine.member_runner import MemberRunner
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import PassContext
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion
from shoal.training.adversarial import Adversarial
from shoal.training.stages import Stages

__all__ = ["StepContext"]


@dataclass(frozen=True, kw_only=True, eq=False)
class StepContext(PassContext):
    """What a step is computed with.

    Attributes:
        posterior: what drives the members.
        repulsion: what keeps them apart; None for a plain ensemble.
        annealing: factor of the drive (likelihood and prior).
        adversarial: trains on worst-case neighbours of the inputs as well.
        stages: the arithmetic between the networks, as it is or compiled.
        own_inputs: every member has inputs of its own [M, B, ...].
        frozen: members, in evaluation mode, that push the others and stay where they are.
    """

    posterior: Posterior
    repulsion: Repulsion | None
    annealing: float | Tensor = 1.0
    adversarial: Adversarial | None = None
    stages: Stages = Stages()
    own_inputs: bool = False
    frozen: Ensemble | None = None

    def at(
        self, step: int | Tensor, annealing: float | Tensor, mapping: MemberRunner
    ) -> "StepContext":
        """The context of one step of training.

        As `dataclasses.replace`, which would take one percent of a small step.
        """
        other = object.__new__(StepContext)
        other.__dict__.update(self.__dict__, step=step, annealing=annealing, mapping=mapping)
        return other

    @property
    def base(self) -> str | None:
        """Where the repulsion acts: "weights", "outputs" or "gradients"; None without any."""
        return None if self.repulsion is None else self.repulsion.space.base

    @property
    def shares_drives(self) -> bool:
        """Members are driven by each other's gradients, as in a Stein flow."""
        return self.repulsion is not None and isinstance(self.repulsion.flow, Stein)

    @property
    def weight(self) -> float | Tensor:
        """Factor of the likelihood's gradient at the inputs that are shown."""
        return self.annealing if self.adversarial is None else 0.5 * self.annealing

    @property
    def at_outputs(self) -> bool:
        """More than the likelihood acts on the outputs."""
        return self.base == "outputs" or isinstance(self.posterior.prior, FunctionalPrior)

    @property
    def in_chunks(self) -> int | None:
        """How many members go through the networks and back at a time; None for all.

        Worst-case neighbours that several members make together need all of them.
        """
        adversarial = self.adversarial
        together = adversarial is not None and (adversarial.shared or self.shares_drives)
        return None if together else self.mapping.chunk

r"""One step: the velocity of every member, from one batch.

$$ v_i = \sum_j mix_{ij} ∇ \log p(θ_j | D) / N - (T / N) \, strength \, J_i^T \sum_j B_{ij} z_j $$

For a space of outputs, drive and push are both cotangents at the outputs, so that one backward pass
through the networks carries the two. For input gradients the push is a cotangent at the gradients,
and one backward pass through the networks and their first backward pass carries both. For the
weights, the drive comes back first and the push is added to it.
"""

from dataclasses import dataclass

from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.tree import member_norms
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping
from shoal.inference.posterior import Posterior
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion
from shoal.training.adversarial import Adversarial
from shoal.training.drive import Drive
from shoal.training.fraction import share_of, with_part_repelled
from shoal.training.stages import Company, Stages, measured

__all__ = ["Batch", "StepInfo", "forces"]

Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True)
class StepInfo:
    """What a step tells about itself; everything stays on the device.

    Attributes:
        loss: mean negative log likelihood of each member [M].
        alive: which members are finite [M].
        measures: drive, push, h2 and effective [4]. Drive and push are measured where the space
            lives; for input gradients, on the weights of the last layer.
        statistics: what the likelihood learns from; None where it learns nothing.
    """

    loss: Tensor
    alive: Tensor
    measures: Tensor
    statistics: Tensor | None = None

    @property
    def drive(self) -> Tensor:
        """Root mean square, over members, of the length of the drive where the space lives."""
        return self.measures[0]

    @property
    def push(self) -> Tensor:
        """The same of the push, scaled as it enters the velocity."""
        return self.measures[1]

    @property
    def ratio(self) -> Tensor:
        """Push over drive."""
        return self.push / self.drive

    @property
    def h2(self) -> Tensor:
        """Mean squared bandwidth over the sites."""
        return self.measures[2]

    @property
    def effective(self) -> Tensor:
        """How many members the kernel tells apart."""
        return self.measures[3]


def forces(
    ensemble: Ensemble,
    posterior: Posterior,
    repulsion: Repulsion | None,
    batch: Batch,
    *,
    annealing: float | Tensor = 1.0,
    adversarial: Adversarial | None = None,
    mapping: Mapping = Mapping(),  # noqa: B008
    seed: int = 0,
    step: int | Tensor = 0,
    stages: Stages = Stages(),  # noqa: B008
    own_inputs: bool = False,
    frozen: Ensemble | None = None,
) -> tuple[Tree, StepInfo]:
    """The velocity of every member, in the direction of ascent, and what there is to know of it.

    Args:
        ensemble: the members, in training or evaluation mode.
        posterior: what drives them.
        repulsion: what keeps them apart; None for a plain ensemble.
        batch: inputs [B, ...] and targets [B, ...].
        annealing: factor of the drive (likelihood and prior).
        adversarial: trains on worst-case neighbours of the inputs as well.
        mapping: how the members run.
        seed: of dropout and of a functional prior's draws.
        step: of the same.
        stages: the arithmetic between the networks, when it has been compiled.
        own_inputs: the inputs are [M, B, ...], every member's its own.
        frozen: members, in evaluation mode, that push those of `ensemble` and stay where they are;
            the velocity is then that of the last members of the whole.

    Returns:
        Tensors [M, ...] named like the module's parameters, and a `StepInfo`.
    """
    _check_space(ensemble, repulsion)
    x, y = batch
    how = annealing, adversarial, mapping, seed, step, stages, own_inputs, frozen
    drive = Drive(posterior, repulsion, y, *how)
    partial = repulsion is not None and share_of(repulsion) < 1
    answer, velocity = with_part_repelled(drive, ensemble, x) if partial else drive(ensemble, x)
    if answer.head is not None:
        lengths = _head_lengths(ensemble, answer.head, velocity)
        answer = answer._replace(measures=measured(*lengths, answer.alive, answer.measures))
    company = None if frozen is None else _company(frozen, posterior, repulsion, batch, annealing)
    weights = {name: tensor.detach() for name, tensor in ensemble.weights.items()}
    spans = ensemble.spans if len(ensemble.groups) > 1 else None
    settled = stages.settle(
        posterior, repulsion, velocity, weights, answer.alive, annealing, answer.mix, spans, company
    )
    measures = answer.measures if settled.measures is None else settled.measures
    assert measures is not None, "a space lives at the outputs or at the weights"
    info = StepInfo(answer.loss, settled.alive, measures, answer.statistics)
    return settled.velocity, info


def _head_lengths(ensemble: Ensemble, drive: Tree, velocity: Tree) -> tuple[Tensor, Tensor]:
    """Lengths of the drive, and of the push that came back with it, at the last layers, each [M].

    Drive and push meet only at the weights. To tell them apart everywhere would take another
    backward pass; at the last layer it takes next to nothing.
    """
    spans = list(ensemble.heads.values())
    push = {name: velocity[name].detach() - tensor for name, tensor in drive.items()}
    return member_norms(drive, spans), member_norms(push, spans)


def _company(
    frozen: Ensemble,
    posterior: Posterior,
    repulsion: Repulsion | None,
    batch: Batch,
    annealing: float | Tensor,
) -> Company | None:
    """The frozen members' weights, where these are what repels."""
    if repulsion is None or repulsion.space.base != "weights":
        return None
    weights = {name: tensor.detach() for name, tensor in frozen.weights.items()}
    shared = isinstance(repulsion.flow, Stein)
    drive = forces(frozen, posterior, None, batch, annealing=annealing)[0] if shared else None
    return Company(weights, frozen.alive, drive)


def _check_space(ensemble: Ensemble, repulsion: Repulsion | None) -> None:
    if repulsion is None:
        return
    if share_of(repulsion) < 1 and isinstance(repulsion.flow, Stein):
        raise ConfigError("the Stein flow mixes drives of whole batches; use it with fraction = 1")
    if len(ensemble.groups) > 1 and repulsion.space.base == "weights":
        raise ConfigError(
            "members of different architectures have no common weight space; "
            "use a function-space method such as 'f-kde'"
        )

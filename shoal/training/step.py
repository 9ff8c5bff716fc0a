r"""One step: the velocity of every member, from one batch.

$$ v_i = \sum_j mix_{ij} ∇ \log p(θ_j | D) / N - (T / N) \, strength \, J_i^T \sum_j B_{ij} z_j $$

For a space of outputs, drive and push are both cotangents at the outputs, so that one backward pass
through the networks carries the two. For input gradients the push is a cotangent at the gradients,
and one backward pass through the networks and their first backward pass carries both. For the
weights, the drive comes back first and the push is added to it.

The way of a batch from `fit` to the weights, in the order of the calls:

1. `training.fit.fit` checks options and data, and makes the batches.
2. `training.session.Session.run` opens the folder and loops; it saves between steps.
3. `training.trainer.Trainer.move` takes the batch; `training.graph` replays it on a GPU.
4. `training.memory.within_memory` runs fewer members at a time where memory is short.
5. `training.step.forces_in` makes the velocity, in a `StepContext` that holds all the rest.
6. `training.drive.Drive` goes forward and back; `training.fraction` lets a part of a batch repel.
7. `inference.ensemble.Ensemble` is called; for input gradients by `training.look.looked_at`.
8. `inference.group.Group.run` gathers the tensors of one architecture.
9. `inference.mapping.Mapping.outputs` calls the networks: vmap, loop or chunks.
10. `training.stages.respond` finds what the outputs ask for: likelihood and push (`repel`).
11. `training.backward.pull_back` brings it back to the weights.
12. `training.stages.settle` adds the weight prior and the push on weights; `Trainer.move` clips the
    velocity and takes the step of the optimiser.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.tree import add_scaled, member_norms
from shoal.core.types import Tree
from shoal.engine.member_runner import MemberRunner
from shoal.engine.plan import has_batch_norm
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import some_of
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import innermost
from shoal.training.adversarial import Adversarial
from shoal.training.context import StepContext
from shoal.training.drive import Drive
from shoal.training.stages import FrozenState, OutputResult, Stages, measured

__all__ = ["Batch", "StepInfo", "forces", "forces_in", "forces_on_fraction", "share_of"]


def share_of(repulsion: Repulsion) -> float:
    """Share of each batch on which the members are compared."""
    return getattr(innermost(repulsion.space), "fraction", 1.0)


def forces_on_fraction(drive: Drive, ensemble: Ensemble, x: Tensor) -> tuple[OutputResult, Tree]:
    """The drive of the whole batch, and the push of a part of it."""
    context, repulsion = drive.context, drive.context.repulsion
    assert repulsion is not None, "without repulsion there is no part"
    rows, rest = some_of(share_of(repulsion), len(x), context.seed, context.step, x.device)
    share = len(rows) / len(x)
    counted = share if repulsion.per == "batch" else 1.0
    repulsion = replace(repulsion, strength=counted * repulsion.strength)
    drive = drive.within(repulsion=repulsion)
    if len(rest) == 0:
        return drive(ensemble, x)
    if not _divisible(drive, ensemble):
        return replace(drive, rows=rows)(ensemble, x)
    part = drive.within(y=drive.y[rows], annealing=share * context.annealing)
    left = drive.within(y=drive.y[rest], annealing=(1 - share) * context.annealing, repulsion=None)
    pushed, velocity = part(ensemble, x[rows])
    answer, driven = left(ensemble, x[rest])
    loss = share * pushed.loss + (1 - share) * answer.loss
    head = None if pushed.head is None else {n: t + driven[n] for n, t in pushed.head.items()}
    pushed = pushed._replace(loss=loss, alive=answer.alive & pushed.alive, head=head)
    if pushed.statistics is not None and answer.statistics is not None:
        both = share * pushed.statistics + (1 - share) * answer.statistics
        pushed = pushed._replace(statistics=both)
    return pushed, add_scaled(velocity, driven, 1.0)


def _divisible(drive: Drive, ensemble: Ensemble) -> bool:
    """Every point is driven by itself: no layer and no prior on functions looks at several at once.

    Adversarial training and chunks of members take batches whole.
    """
    context = drive.context
    if drive.y.is_cuda or context.adversarial is not None or context.mapping.chunk is not None:
        return False
    prior = context.posterior.prior
    coupled = has_batch_norm(ensemble.groups) or isinstance(prior, FunctionalPrior)
    return not (coupled or ensemble.buffers)


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
    mapping: MemberRunner = MemberRunner(),  # noqa: B008
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
        seed: with the step, decides dropout masks and the draws of a functional prior.
        step: number of the training step.
        stages: the arithmetic between the networks, when it has been compiled.
        own_inputs: the inputs are [M, B, ...], every member's its own.
        frozen: members, in evaluation mode, that push those of `ensemble` and stay where they are;
            the velocity is then that of the last members of the whole.

    Returns:
        Tensors [M, ...] named like the module's parameters, and a `StepInfo`.
    """
    context = StepContext(
        posterior=posterior, repulsion=repulsion, annealing=annealing, adversarial=adversarial,
        mapping=mapping, seed=seed, step=step, stages=stages, own_inputs=own_inputs, frozen=frozen,
    )  # fmt: skip
    return forces_in(context, ensemble, batch)


def forces_in(context: StepContext, ensemble: Ensemble, batch: Batch) -> tuple[Tree, StepInfo]:
    """The same in a context that has been put together before, as a trainer has one."""
    posterior, repulsion, annealing = context.posterior, context.repulsion, context.annealing
    _check_space(ensemble, repulsion)
    x, y = batch
    drive = Drive(context, y)
    partial = repulsion is not None and share_of(repulsion) < 1
    answer, velocity = forces_on_fraction(drive, ensemble, x) if partial else drive(ensemble, x)
    if answer.head is not None:
        lengths = _head_lengths(ensemble, answer.head, velocity)
        answer = answer._replace(measures=measured(*lengths, answer.alive, answer.measures))
    company = _company(context, batch)
    weights = {name: tensor.detach() for name, tensor in ensemble.weights.items()}
    spans = ensemble.spans if len(ensemble.groups) > 1 else None
    settled = context.stages.weight_stage(
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


def _company(context: StepContext, batch: Batch) -> FrozenState | None:
    """The frozen members' weights, where these are what repels."""
    frozen = context.frozen
    if frozen is None or context.base != "weights":
        return None
    weights = {name: tensor.detach() for name, tensor in frozen.weights.items()}
    if not context.shares_drives:
        return FrozenState(weights, frozen.alive, None)
    alone = StepContext(posterior=context.posterior, repulsion=None, annealing=context.annealing)
    return FrozenState(weights, frozen.alive, forces_in(alone, frozen, batch)[0])


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

r"""One step: the velocity of every member, from one batch.

$$ v_i = \sum_j mix_{ij} ∇ \log p(θ_j | D) / N - (T / N) \, strength \, J_i^T \sum_j B_{ij} z_j $$

For a space of outputs, drive and push are both cotangents at the outputs, and one backward pass
carries both, also if members are compared at other points than the batch. For input gradients the
push is a cotangent at the gradients, and one second-order backward pass carries both. For weights,
the push is added after the backward pass.

The path of a batch from `fit` to the weights, in the order of the calls:

1. `training.fit.fit` checks options and data, and makes the batches.
2. `training.loop.session.Session.run` opens the folder, runs the loop and saves between steps.
3. `training.mover.mover.Mover.move` takes the batch; `engine.resources.graph` may replay it.
4. `engine.resources.memory.within_memory` runs fewer members at a time when memory is short.
5. `training.step.forces.forces_in` computes the velocity in a `StepContext`, with the settings.
6. `training.step.drive.Drive` runs both passes; `forces_on_fraction` compares a batch fraction.
7. `inference.ensemble.Ensemble` is called; for input gradients by `inference.network_pass`.
8. `engine.members.group.Group.run` gathers the tensors of one architecture.
9. `engine.members.member_runner.MemberRunner.outputs` calls the networks: vmap, loop or chunks.
10. `training.step.stages.output_stage` computes the cotangents: likelihood, and push (`repel`).
11. `core.differentiate.pull_back` runs the backward pass, from the cotangents to the weights.
12. `training.step.stages.weight_stage` adds the weight prior and the push on weights; `Mover.move`
    clips the velocity and calls the optimiser.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.errors import ConfigError
from shoal.core.random import key
from shoal.core.structure import Inputs
from shoal.core.tree import add_scaled, member_norms
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.resources.plan import has_batch_norm, has_convolutions
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import random_rows
from shoal.inference.posterior import Posterior
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.points import Batch as SameBatch
from shoal.interaction.points import Drawn
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import innermost
from shoal.training.members.mesh_cloud import begin_columns
from shoal.training.members.parts import Parts
from shoal.training.options.adversarial import Adversarial
from shoal.training.step.context import StepContext
from shoal.training.step.drive import Drive
from shoal.training.step.probabilities import likelihood_gradient
from shoal.training.step.shared_velocity import shared_velocity, shares_of_drives
from shoal.training.step.stages import (
    FrozenState,
    OutputResult,
    Stages,
    WeightResult,
    has_weight_forces,
    measured,
)

__all__ = [
    "Batch",
    "StepInfo",
    "check_space",
    "forces",
    "forces_in",
    "forces_on_fraction",
    "head_lengths",
    "passes",
    "share_of",
]


def share_of(repulsion: Repulsion) -> float:
    """Batch fraction on which the members are compared."""
    return getattr(innermost(repulsion.space), "fraction", 1.0)


def forces_on_fraction(drive: Drive, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
    """The drive of the whole batch, and the push of a batch fraction."""
    context, repulsion = drive.context, drive.context.repulsion
    assert repulsion is not None, "without repulsion there is no batch fraction"
    rows, rest = random_rows(share_of(repulsion), len(x), context.seed, context.step, x.device)
    share = len(rows) / len(x)
    counted = share if repulsion.per == "batch" else 1.0
    repulsion = replace(repulsion, strength=counted * repulsion.strength)
    drive = drive.within(repulsion=repulsion)
    if len(rest) == 0:
        return drive(ensemble, x)
    if not _divisible(drive, ensemble):
        if _drops_out(ensemble) or _reads_the_batch(drive, ensemble, x):
            order = torch.cat([rows, rest])
            first = replace(drive.within(y=drive.y[order]), rows=slice(len(rows)))
            return first(ensemble, x[order])
        return replace(drive, rows=rows)(ensemble, x)
    part = drive.within(y=drive.y[rows], annealing=share * context.annealing)
    left = drive.within(y=drive.y[rest], annealing=(1 - share) * context.annealing, repulsion=None)
    pushed, velocity = part(ensemble, x[rows])
    result, driven = left(ensemble, x[rest])
    loss = share * pushed.loss + (1 - share) * result.loss
    head = None if pushed.head is None else {n: t + driven[n] for n, t in pushed.head.items()}
    pushed = pushed._replace(loss=loss, alive=result.alive & pushed.alive, head=head)
    if pushed.statistics is not None and result.statistics is not None:
        both = share * pushed.statistics + (1 - share) * result.statistics
        pushed = pushed._replace(statistics=both)
    return pushed, add_scaled(velocity, driven, 1.0)


def _divisible(drive: Drive, ensemble: Ensemble) -> bool:
    """Whether the drive of each data point depends on no other: no batch norm, no functional prior.

    Adversarial training and chunks of members need whole batches. Dropout masks are those of the
    whole batch: divided, the rest would get the masks of the fraction again.
    """
    context = drive.context
    if drive.y.is_cuda or context.adversarial is not None or context.mapping.chunk is not None:
        return False
    if drive.parts is not None:
        return False
    prior = context.posterior.prior
    coupled = has_batch_norm(ensemble.groups) or isinstance(prior, FunctionalPrior)
    return not (coupled or ensemble.buffers or _drops_out(ensemble))


def _drops_out(ensemble: Ensemble) -> bool:
    """Whether the masks of a row depend on its place in the batch."""
    return any(group.keys for group in ensemble.groups)


def _reads_the_batch(drive: Drive, ensemble: Ensemble, x: Inputs) -> bool:
    """Whether the rows can read results of the batch: convolutions by kernels, rows that lead."""
    alike = isinstance(x, Tensor) and not drive.context.own_inputs
    return alike and x.is_cuda and has_convolutions(ensemble.groups)


Batch = tuple[Inputs, Targets]


@dataclass(frozen=True)
class StepInfo:
    """Measures of a step; all tensors stay on the device.

    Attributes:
        loss: mean negative log-likelihood of each member [M].
        alive: which members are finite [M].
        measures: drive, push, h2 and effective [4]. Drive and push are measured in the base of the
            space; for input gradients, on the weights of the last layer.
        statistics: what the likelihood learns from; None if it learns nothing.
        count: number of finite members of all processes; None for those of `alive`.
    """

    loss: Tensor
    alive: Tensor
    measures: Tensor
    statistics: Tensor | None = None
    count: Tensor | None = None

    @property
    def drive(self) -> Tensor:
        """Root mean square, over members, of the driving force's norm in the base of the space."""
        return self.measures[0]

    @property
    def push(self) -> Tensor:
        """Root mean square norm of the repulsive force, scaled as it enters the velocity."""
        return self.measures[1]

    @property
    def ratio(self) -> Tensor:
        """Force ratio, push / drive."""
        return self.push / self.drive

    @property
    def h2(self) -> Tensor:
        """Squared bandwidth, mean over the sites."""
        return self.measures[2]

    @property
    def effective(self) -> Tensor:
        """Effective number of members under the kernel, from 1 to M."""
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
    """The velocity of every member, in the direction of ascent, and the measures of the step.

    Args:
        ensemble: the members, in training or evaluation mode.
        posterior: gives the driving force.
        repulsion: gives the repulsive force; None for a plain ensemble.
        batch: inputs [B, ...] and targets [B, ...]; see `shoal.data.batches.batch`.
        annealing: factor of the driving force (likelihood and prior).
        adversarial: adds adversarial neighbours of the inputs.
        mapping: the member runner.
        seed: fixes dropout masks and the draws of a functional prior, together with `step`.
        step: number of the training step.
        stages: the arithmetic stages, compiled or not.
        own_inputs: the inputs are [M, B, ...], one batch per member.
        frozen: frozen members, in evaluation mode. They repel the members of `ensemble` and come
            first in the kernel.

    Returns:
        Tensors [M, ...] named like the module's parameters, [...] for those that all members train
        together, and a `StepInfo`.
    """
    context = StepContext(
        posterior=posterior, repulsion=repulsion, annealing=annealing, adversarial=adversarial,
        mapping=mapping, seed=seed, step=step, stages=stages, own_inputs=own_inputs, frozen=frozen,
    )  # fmt: skip
    return forces_in(context, ensemble, batch)


def forces_in(context: StepContext, ensemble: Ensemble, batch: Batch) -> tuple[Tree, StepInfo]:
    """`forces` with a ready context, as a trainer has one."""
    context, batch = _with_neighbours(context, ensemble, batch)
    posterior, repulsion, annealing = context.posterior, context.repulsion, context.annealing
    shares = shares_of_drives(context, ensemble)
    begin_columns(context.mesh, repulsion, ensemble.weights)
    result, velocity = passes(context, ensemble, batch, shares)
    if result.head is not None:
        lengths = head_lengths(ensemble, result.head, velocity)
        result = result._replace(measures=measured(*lengths, result.alive, result.measures))
    frozen = _frozen_state(context, batch)
    weights = {name: tensor.detach() for name, tensor in ensemble.weights.items()}
    spans = ensemble.spans if len(ensemble.groups) > 1 else None
    gradients = {name: velocity.pop(name) for name in ensemble.trained_shared}
    moved = WeightResult(velocity, result.alive, None)
    if has_weight_forces(posterior, repulsion):
        here = velocity, weights, result.alive
        moved = context.stages.weight_stage(
            posterior, repulsion, *here, annealing, result.mix, spans, frozen, **context.others
        )
    measures = result.measures if moved.measures is None else moved.measures
    assert measures is not None, "the base of a space is outputs or weights"
    info = StepInfo(result.loss, moved.alive, measures, result.statistics)
    if not gradients:
        return moved.velocity, info
    if result.mix is not None:
        shares = result.mix.sum(0)
    common = shared_velocity(context, ensemble, gradients, result.alive, shares)
    return moved.velocity | common, info


def passes(
    context: StepContext,
    ensemble: Ensemble,
    batch: Batch,
    shares: Tensor | None = None,
    parts: Parts | None = None,
) -> tuple[OutputResult, Tree]:
    """Both passes of all members: what the outputs give, and J^T times the cotangents.

    Args:
        context: the settings of the step.
        ensemble: the members.
        batch: inputs and targets.
        shares: weight of each member's drive, see `Drive`.
        parts: the members part by part, see `Drive`.
    """
    repulsion, (x, y) = context.repulsion, batch
    check_space(ensemble, repulsion)
    drive = Drive(context, y, shares=shares, points=_points(context, x), parts=parts)
    partial = repulsion is not None and share_of(repulsion) < 1
    return forces_on_fraction(drive, ensemble, x) if partial else drive(ensemble, x)


def _with_neighbours(
    context: StepContext, ensemble: Ensemble, batch: Batch
) -> tuple[StepContext, Batch]:
    """Adversarial neighbours that join the batch make one batch of 2 B points, without others."""
    adversarial, (x, y) = context.adversarial, batch
    if adversarial is None or not adversarial.joined:
        return context, batch
    shown = adversarial.watch(x, ensemble.members)
    how = context.mapping, True, context.seed, context.step
    outputs = ensemble.without_side_effects()(shown, *how)
    found = likelihood_gradient(context.posterior, outputs.detach(), y, ensemble.alive)
    at_inputs = pull_back(outputs, found[2], {"": shown})[""]
    worst = adversarial.neighbours(shown, at_inputs, found[1], context.mesh)
    twice = torch.arange(len(worst), device=worst.device).repeat(2)
    return replace(context, adversarial=None), (torch.cat([shown[0].detach(), worst]), y[twice])


def _points(context: StepContext, x: Inputs) -> Drawn | None:
    """The points of this step at which members are compared; None for the batch."""
    repulsion = context.repulsion
    if repulsion is None or isinstance(repulsion.points, SameBatch):
        return None
    if context.own_inputs:
        raise ConfigError(
            "points are inputs that members share, but members have batches of their own; leave "
            "points out, or give a common batch"
        )
    return repulsion.points.draw(x, key(context.seed, "points", context.step, x.device))


def head_lengths(ensemble: Ensemble, drive: Tree, velocity: Tree) -> tuple[Tensor, Tensor]:
    """Norms of drive and push at the last layers, each [M].

    Drive and push meet only at the weights. To separate them in all layers needs another backward
    pass; in the last layer it costs almost nothing.
    """
    spans = list(ensemble.heads.values())
    push = {name: velocity[name].detach() - tensor for name, tensor in drive.items()}
    return member_norms(drive, spans), member_norms(push, spans)


def _frozen_state(context: StepContext, batch: Batch) -> FrozenState | None:
    """The frozen members' weights, if the repulsion acts on weights."""
    frozen = context.frozen
    if frozen is None or context.base != "weights":
        return None
    weights = {name: tensor.detach() for name, tensor in frozen.weights.items()}
    if not context.shares_drives:
        return FrozenState(weights, frozen.alive, None)
    alone = StepContext(posterior=context.posterior, repulsion=None, annealing=context.annealing)
    return FrozenState(weights, frozen.alive, forces_in(alone, frozen, batch)[0])


def check_space(ensemble: Ensemble, repulsion: Repulsion | None) -> None:
    """Refuse a repulsion that these members, or this fraction of a batch, cannot have."""
    if repulsion is None:
        return
    if share_of(repulsion) < 1 and isinstance(repulsion.flow, Stein):
        raise ConfigError("the Stein flow mixes drives of whole batches; set fraction=1")
    if len(ensemble.groups) > 1 and repulsion.space.base == "weights":
        raise ConfigError(
            "members of different architectures have no common weight space; "
            "use a function-space method such as 'f-kde'"
        )

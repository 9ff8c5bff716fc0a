r"""One step: the velocity of every member, from one batch.

$$ v_i = \sum_j mix_{ij} ∇ \log p(θ_j | D) / N - (T / N) \, strength \, J_i^T \sum_j B_{ij} z_j $$

For a space of outputs, drive and push are both cotangents at the outputs, and one backward pass
carries both, also if members are compared at other points than the batch. For input gradients the
push is a cotangent at the gradients, and one second-order backward pass carries both. For weights,
the push is added after the backward pass.
"""

import functools
from dataclasses import replace

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.errors import ConfigError
from shoal.core.random import key
from shoal.core.structure import Inputs, points_in, rows_of
from shoal.core.tree import add_scaled, member_norms
from shoal.core.types import Tree
from shoal.engine.resources.plan import has_batch_norm, has_convolutions
from shoal.inference.ensemble import Ensemble
from shoal.inference.network_pass import random_rows
from shoal.inference.priors import FunctionalPrior
from shoal.interaction.flows import Stein
from shoal.interaction.points import Batch as SameBatch
from shoal.interaction.points import Drawn
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import innermost
from shoal.training.step.drive import Batch, Drive, StepContext
from shoal.training.step.placebo import with_placebo
from shoal.training.step.probabilities import likelihood_gradient
from shoal.training.step.results import OutputResult, StepInfo, WeightResult
from shoal.training.step.shared_velocity import shared_velocity, shares_of_drives
from shoal.training.step.stage_kernels import gram_ahead
from shoal.training.step.stages import has_weight_forces, measured

__all__ = [
    "both_passes",
    "check_space",
    "forces_on_fraction",
    "head_lengths",
    "share_of",
    "velocity_of",
]


def share_of(repulsion: Repulsion) -> float:
    """Batch fraction on which the members are compared."""
    return getattr(innermost(repulsion.space), "fraction", 1.0)


def forces_on_fraction(drive: Drive, ensemble: Ensemble, x: Inputs) -> tuple[OutputResult, Tree]:
    """The drive of the whole batch, and the push of a batch fraction."""
    context, repulsion = drive.context, drive.context.repulsion
    assert repulsion is not None, "without repulsion there is no batch fraction"
    own = context.own_inputs
    count = points_in(x, own)
    rows, rest = random_rows(share_of(repulsion), count, context.seed, context.step, x.device)
    share = len(rows) / count
    counted = share if repulsion.per == "batch" else 1.0
    repulsion = repulsion.in_step(strength=counted * repulsion.strength)
    drive = drive.within(repulsion=repulsion)
    if len(rest) == 0:
        return drive(ensemble, x)
    if not _divisible(drive, ensemble):
        if _drops_out(ensemble) or _reads_the_batch(drive, ensemble, x):
            order = torch.cat([rows, rest])
            first = replace(drive.within(y=rows_of(drive.y, order, own)), rows=slice(len(rows)))
            return first(ensemble, rows_of(x, order, own))
        return replace(drive, rows=rows)(ensemble, x)
    part = drive.within(y=rows_of(drive.y, rows, own), annealing=share * context.annealing)
    left = drive.within(
        y=rows_of(drive.y, rest, own), annealing=(1 - share) * context.annealing, repulsion=None
    )
    pushed, velocity = part(ensemble, rows_of(x, rows, own))
    result, driven = left(ensemble, rows_of(x, rest, own))
    loss = share * pushed.loss + (1 - share) * result.loss
    head = None if pushed.head is None else {n: t + driven[n] for n, t in pushed.head.items()}
    pushed = pushed._replace(loss=loss, alive=result.alive & pushed.alive, head=head)
    if pushed.statistics is not None and result.statistics is not None:
        both = share * pushed.statistics + (1 - share) * result.statistics
        pushed = pushed._replace(statistics=both)
    return pushed, add_scaled(velocity, driven, 1.0)


def _divisible(drive: Drive, ensemble: Ensemble) -> bool:
    """Whether the drive of each data point depends on no other: no batch norm, no functional prior.

    Adversarial training needs whole batches, and so do members that run one after another. Dropout
    masks are those of the whole batch: divided, the rest would get the fraction's masks again.
    """
    context = drive.context
    if drive.y.is_cuda or context.adversarial is not None:
        return False
    if not context.members.run_at_once(context):
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


def velocity_of(context: StepContext, ensemble: Ensemble, batch: Batch) -> tuple[Tree, StepInfo]:
    """The velocity of every member, in the direction of ascent, and the measures of the step.

    Returns:
        Tensors [M, ...] named like the module's parameters, [...] for those that all members train
        together, and a `StepInfo`.
    """
    context, batch = _with_neighbours(context, ensemble, batch)
    posterior, repulsion, annealing = context.posterior, context.repulsion, context.annealing
    others = context.members.others_by_weights(context, ensemble, batch)
    shares = shares_of_drives(context, ensemble, others)
    weights = {name: tensor.detach() for name, tensor in ensemble.weights.items()}
    same = len(ensemble.groups) == 1
    ahead = gram_ahead(repulsion, weights, ensemble.alive, others) if same else None
    result, velocity = both_passes(context, ensemble, batch, shares)
    if result.head is not None:
        lengths = head_lengths(ensemble, result.head, velocity)
        result = result._replace(measures=measured(*lengths, result.alive, result.measures))
    spans = ensemble.spans if len(ensemble.groups) > 1 else None
    gradients = {name: velocity.pop(name) for name in ensemble.trained_shared}
    moved = WeightResult(velocity, result.alive, None)
    if has_weight_forces(posterior, repulsion):
        moved = context.stages.weight_stage(
            posterior, repulsion, velocity, weights, result.alive, annealing, result.mix, spans,
            others, ahead, context.delays and not gradients,
        )  # fmt: skip
    if moved.pushed is not None:
        random = with_placebo(ensemble, moved.velocity, moved.pushed, context.seed, context.step)
        moved = moved._replace(velocity=random)
    measures = result.measures if moved.measures is None else moved.measures
    if moved.delayed is not None:
        measures = result.loss.new_empty(4)
    assert measures is not None, "the base of a space is outputs or weights"
    info = StepInfo(result.loss, moved.alive, measures, result.statistics, delayed=moved.delayed)
    if not gradients:
        return moved.velocity, info
    if result.mix is not None:
        shares = result.mix.sum(0)
    common = shared_velocity(context, ensemble, gradients, result.alive, shares)
    return moved.velocity | common, info


def both_passes(
    context: StepContext, ensemble: Ensemble, batch: Batch, shares: Tensor | None = None
) -> tuple[OutputResult, Tree]:
    """Both passes of all members: what the outputs give, and J^T times the cotangents.

    Args:
        context: the settings of the step.
        ensemble: the members.
        batch: inputs and targets.
        shares: weight of each member's drive, see `Drive`.
    """
    repulsion, (x, y) = context.repulsion, batch
    check_space(ensemble, repulsion)
    drive = Drive(context, y, shares=shares, points=_points(context, x))
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
    outputs = ensemble.without_side_effects()(
        shown, context.mapping, True, context.seed, context.step
    )
    _, alive, gradient = likelihood_gradient(context.posterior, outputs.detach(), y, ensemble.alive)
    at_inputs = pull_back(outputs, gradient, {"": shown})[""]
    worst = adversarial.neighbours(shown, at_inputs, alive, context.members.total)
    twice = torch.arange(len(worst), device=worst.device).repeat(2)
    return replace(context, adversarial=None), (torch.cat([shown[0].detach(), worst]), y[twice])


def _points(context: StepContext, x: Inputs) -> Drawn | None:
    """The points of this step at which members are compared; None for the batch."""
    repulsion = context.repulsion
    if repulsion is None or repulsion.space.base == "weights":
        return None
    if not isinstance(repulsion.points, SameBatch):
        seen = x[0] if context.own_inputs else x
        return repulsion.points.draw(seen, key(context.seed, "points", context.step, x.device))
    if not context.common or repulsion.space.base != "outputs":
        return None
    count = min(context.common, points_in(x, own=True))
    return Drawn(x[0][:count], _first_rows(count, x.device), leading=True)


@functools.lru_cache(maxsize=8)
def _first_rows(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, device=device)


def head_lengths(ensemble: Ensemble, drive: Tree, velocity: Tree) -> tuple[Tensor, Tensor]:
    """Norms of drive and push at the last layers, each [M].

    Drive and push meet only at the weights. To separate them in all layers needs another backward
    pass; in the last layer it costs almost nothing.
    """
    spans = list(ensemble.heads.values())
    push = {name: velocity[name].detach() - tensor for name, tensor in drive.items()}
    return member_norms(drive, spans), member_norms(push, spans)


def check_space(ensemble: Ensemble, repulsion: Repulsion | None) -> None:
    """Refuse a repulsion that these members, or this fraction of a batch, cannot have."""
    if repulsion is None:
        return
    if share_of(repulsion) < 1 and isinstance(repulsion.flow, Stein):
        raise ConfigError("the Stein flow mixes drives of whole batches; set fraction=1")
    if repulsion.placebo and ensemble.trained_shared and repulsion.space.base != "weights":
        raise ConfigError(
            "a placebo needs the push of each member alone, and these members train tensors "
            "together; leave placebo out"
        )
    if len(ensemble.groups) > 1 and repulsion.space.base == "weights":
        raise ConfigError(
            "members of different architectures have no common weight space; "
            "use a function-space method such as 'f-kde'"
        )

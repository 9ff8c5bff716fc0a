r"""The arithmetic stages of a step, between the passes of the networks and after them.

    outputs --output_stage--> cotangent --backward pass--> drive --weight_stage--> velocity

The repulsion acts in the base of its space: on outputs in `output_stage`, or in `point_stage` if
they are those of other points than the batch; on input gradients in `gradient_stage`, on weights in
`weight_stage`. No stage waits for the device, and `torch.compile` accepts all of them.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.structure import parted
from shoal.core.tree import finite, member_norms
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports
from shoal.engine.processes.mesh import Mesh
from shoal.inference.posterior import Posterior, target_weights
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import Outputs
from shoal.training.members.all_members import FrozenState, mixed_drives, pushed_members
from shoal.training.step.probabilities import (
    act_on_probabilities,
    at_outputs,
    forces_act_at,
    likelihood_gradient,
)
from shoal.training.step.stage_kernels import in_columns, reads_weights_once, takes_outputs

__all__ = [
    "FrozenState",
    "GradientResult",
    "OutputResult",
    "Stages",
    "WeightResult",
    "gradient_stage",
    "has_weight_forces",
    "measured",
    "output_stage",
    "point_stage",
    "weight_stage",
]

Factor = float | Tensor


class OutputResult(NamedTuple):
    """Result of the output stage.

    Attributes:
        loss: mean negative log-likelihood [M].
        alive: which members are finite [M].
        gradient: gradient of the mean log-likelihood with respect to the outputs [M, B, C].
        cotangent: input of the backward pass at the outputs [M, B, C].
        mix: matrix that mixes the drives [M, M]; None is the identity.
        measures: see `WeightResult`; None if the space is not of outputs.
        push: input of the backward pass at the input gradients, of all rows or some rows
            [M, B, ...], or at the outputs of points other than the batch; None without either.
        head: the drive at the last layers; None if drive and push are already measured.
        statistics: what the likelihood learns from; None if it learns nothing.
    """

    loss: Tensor
    alive: Tensor
    gradient: Tensor
    cotangent: Tensor
    mix: Tensor | None
    measures: Tensor | None
    push: Tensor | None = None
    head: Tree | None = None
    statistics: Tensor | None = None


class GradientResult(NamedTuple):
    """Result of the gradient stage or point stage; the fields are those of `OutputResult`."""

    alive: Tensor
    cotangent: Tensor
    mix: Tensor | None
    measures: Tensor
    push: Tensor


class WeightResult(NamedTuple):
    """Result of the weight stage: the velocity of the members.

    Attributes:
        velocity: tensors [M, ...] like the weights.
        alive: which members are finite [M].
        measures: drive, push, squared bandwidth and effective members, in the base of the space;
            None if the space is not of weights.
    """

    velocity: Tree
    alive: Tensor
    measures: Tensor | None


def output_stage(
    posterior: Posterior,
    repulsion: Repulsion | None,
    outputs: Tensor,
    y: Targets,
    alive: Tensor,
    weight: Factor,
    prior: Tensor | None,
    frozen: FrozenState | None = None,
    mesh: Mesh | None = None,
) -> OutputResult:
    """Gradients of the likelihood (times `weight`) and a functional prior; push on outputs.

    Prior and frozen members are those of the probabilities if all forces act on these.
    """
    squashed = act_on_probabilities(posterior, repulsion)
    compared = forces_act_at(outputs, squashed)
    if not squashed and isinstance(y, Tensor) and takes_outputs(posterior, outputs, y):
        apart = repulsion is not None and repulsion.space.base == "outputs"
        found = fused.likelihood_kernels.categorical(outputs, y, alive, weight, apart=apart)
        loss, alive, gradient, drive, lengths = found
    else:
        loss, alive, gradient = likelihood_gradient(posterior, compared, y, alive, squashed)
        drive, lengths = weight * gradient, None
    if squashed and repulsion is not None:
        repulsion = replace(repulsion, space=Outputs())
    if prior is not None:
        drive, lengths = drive + prior, None
    rows = target_weights(posterior.likelihood, y, outputs.shape[1:-1])
    if rows is not None and rows.ndim == outputs.ndim - 1:
        rows = rows.mean(0)  # members with weights of their own are compared where any counts
    here = {"outputs": drive}, {"outputs": compared}
    velocity, alive, mix, measures = _act(
        posterior, repulsion, "outputs", *here, alive, frozen, rows, mesh=mesh
    )
    if repulsion is None:
        measures = measured(member_norms(here[0]) if lengths is None else lengths, None, alive)
    statistics = posterior.likelihood.statistics(outputs, parted(y)[0], alive, rows)
    cotangent = velocity["outputs"]
    if squashed:
        gradient, cotangent = at_outputs(compared, gradient), at_outputs(compared, cotangent)
    found = loss, alive, gradient, cotangent, mix, measures
    return OutputResult(*found, statistics=statistics)


def gradient_stage(
    posterior: Posterior,
    repulsion: Repulsion,
    alive: Tensor,
    cotangent: Tensor,
    gradients: Tensor,
    frozen: FrozenState | None = None,
    weight: Tensor | None = None,
    counted: Factor | None = None,
    mesh: Mesh | None = None,
) -> GradientResult:
    """The push on input gradients, and the mixed drives at the outputs if the flow mixes drives.

    Of the measures, only bandwidth and effective members are known here. Drive and push meet only
    at the weights. `counted` is the number of data points in the batch, if others are compared.
    """
    push, own = pushed_members(repulsion, {"gradients": gradients}, alive, frozen, weight, mesh)
    interaction = push.interaction
    points = gradients.shape[1] if weight is None else weight.sum()
    points = points if counted is None else counted
    scale = -_push_scale(posterior, repulsion, points) * repulsion.strength
    drive, mix = mixed_drives(interaction, {"outputs": cotangent}, own, frozen, mesh)
    push_back = scale * push.tree()["gradients"]
    alive = interaction.cloud.alive[own]
    return GradientResult(alive, drive["outputs"], mix, interaction.summary, push_back)


def point_stage(
    posterior: Posterior,
    repulsion: Repulsion,
    alive: Tensor,
    cotangent: Tensor,
    outputs: Tensor,
    frozen: FrozenState | None,
    counted: Factor,
    mesh: Mesh | None = None,
) -> GradientResult:
    """The push on outputs at points other than the batch, and the mixed drives at the batch.

    Args:
        posterior: scales the push.
        repulsion: the repulsion.
        alive: which members are finite [M].
        cotangent: the drive at the outputs of the batch [M, B, C].
        outputs: at the points [M, P, C].
        frozen: frozen members, their outputs at the points and their drives at the batch.
        counted: number of targets in the batch, or their total weight.
        mesh: the processes that train the other members; None for one process.
    """
    push, own = pushed_members(repulsion, {"outputs": outputs}, alive, frozen, None, mesh)
    interaction = push.interaction
    scale = -_push_scale(posterior, repulsion, counted) * repulsion.strength
    drive, mix = mixed_drives(interaction, {"outputs": cotangent}, own, frozen, mesh)
    pushed = {"outputs": scale * push.tree()["outputs"]}
    alive = interaction.cloud.alive[own]
    lengths = member_norms(drive), member_norms(pushed)
    measures = measured(*lengths, alive, interaction.summary)
    return GradientResult(alive, drive["outputs"], mix, measures, pushed["outputs"])


def weight_stage(
    posterior: Posterior,
    repulsion: Repulsion | None,
    velocity: Tree,
    weights: Tree,
    alive: Tensor,
    annealing: Factor,
    mix: Tensor | None,
    spans: Sequence[slice] | None,
    frozen: FrozenState | None = None,
    mesh: Mesh | None = None,
) -> WeightResult:
    """Add the weight prior's gradient and the push on weights to the backward pass's result."""
    # A weight prior has no gradient at the outputs to mix: it is scaled like the drives.
    balance = annealing if mix is None else annealing * mix.sum(-1)
    once = mesh is None and reads_weights_once(repulsion, velocity, weights)
    multiples = posterior.prior_multiples(velocity, balance) if once else None
    if multiples is None:
        velocity = posterior.add_prior(velocity, weights, balance, spans)
    here = velocity, weights, alive, frozen
    velocity, alive, _, measures = _act(
        posterior, repulsion, "weights", *here, multiples=multiples, mesh=mesh
    )
    return WeightResult(velocity, alive, measures)


def has_weight_forces(posterior: Posterior, repulsion: Repulsion | None) -> bool:
    """Whether `weight_stage` computes anything; it must not be called otherwise.

    `torch.compile` gives up for good on a function that it has once seen without arithmetic. Later
    methods would then be compiled in fragments, which separate a derivative from its function.
    """
    return posterior.has_weight_prior or (repulsion is not None and _acts_on(repulsion, "weights"))


class Stages(NamedTuple):
    """The stages, compiled or not."""

    output_stage: Callable[..., OutputResult] = output_stage
    weight_stage: Callable[..., WeightResult] = weight_stage
    gradient_stage: Callable[..., GradientResult] = gradient_stage
    point_stage: Callable[..., GradientResult] = point_stage


def _acts_on(repulsion: Repulsion, where: str) -> bool:
    return repulsion.space.base == where


def _act(
    posterior: Posterior,
    repulsion: Repulsion | None,
    where: str,
    drive: Tree,
    base: Tree,
    alive: Tensor,
    frozen: FrozenState | None,
    weight: Tensor | None = None,
    multiples: Sequence[float] | None = None,
    mesh: Mesh | None = None,
) -> tuple[Tree, Tensor, Tensor | None, Tensor | None]:
    """Mix the drives and add the push, if the repulsion's space has this base.

    `multiples` of the base belong to the drives, see `Push.added_to`.
    """
    if repulsion is None or not _acts_on(repulsion, where):
        return drive, alive, None, None
    points = base["outputs"][0, ..., 0].numel() if where == "outputs" else 1
    points = points if weight is None else weight.sum()
    alone = frozen is None and mesh is None
    turned = alone and weight is None and in_columns(repulsion, base)
    if turned:  # in the order of the memory, which saves two copies
        drive, base = ({name: t.mT for name, t in tree.items()} for tree in (drive, base))
    push, own = pushed_members(repulsion, base, alive, frozen, weight, mesh)
    interaction = push.interaction
    alive = interaction.cloud.alive[own]
    drive, mix = mixed_drives(interaction, drive, own, frozen, mesh)
    scale = -_push_scale(posterior, repulsion, points) * repulsion.strength
    velocity, driven, pushed = push.added_to(drive, scale, multiples)
    if turned:
        velocity = {name: t.mT for name, t in velocity.items()}
    return velocity, alive, mix, measured(driven, pushed, alive, interaction.summary)


def _push_scale(
    posterior: Posterior, repulsion: Repulsion, points: float | Tensor
) -> float | Tensor:
    return posterior.push_scale(points if repulsion.per == "batch" else None)


def measured(
    drive: Tensor, push: Tensor | None, alive: Tensor, kernel: Tensor | None = None
) -> Tensor:
    """Root mean square norms of drive and push over finite members; bandwidth; members."""
    if kernel_supports(*(tensor for tensor in (drive, push, alive, kernel) if tensor is not None)):
        return fused.step_kernels.measures(drive, push, alive, kernel)
    count = alive.sum().clamp(min=1)
    lengths = torch.stack([drive, torch.zeros_like(drive) if push is None else push])
    squares = torch.where(alive & finite(lengths), lengths, 0.0).square().sum(1)
    forces = (squares / count).sqrt().float()
    if kernel is None:
        kernel = torch.stack([torch.zeros_like(count), count])
    return torch.cat([forces, kernel.float()])

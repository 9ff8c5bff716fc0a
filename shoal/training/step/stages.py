r"""The arithmetic stages of a step, between the passes of the networks and after them.

    outputs --output_stage--> cotangent --backward pass--> drive --weight_stage--> velocity

The repulsion acts in the base of its space: on outputs in `output_stage`, or in `point_stage` if
they are those of other points than the batch; on input gradients in `gradient_stage`, on weights in
`weight_stage`. No stage waits for the device, and `torch.compile` accepts all of them.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.structure import parted
from shoal.core.tree import finite, member_norms
from shoal.core.types import Tree
from shoal.data.batches.batch import Targets
from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports
from shoal.inference.posterior import Posterior, target_weights
from shoal.interaction.cloud import GramAhead
from shoal.interaction.repulsion import Repulsion
from shoal.interaction.spaces import Outputs
from shoal.training.step.others import Others, mixed_drives, repelled
from shoal.training.step.probabilities import (
    act_on_probabilities,
    at_outputs,
    forces_act_at,
    likelihood_gradient,
)
from shoal.training.step.results import (
    DelayedPush,
    GradientResult,
    OutputResult,
    WeightResult,
)
from shoal.training.step.stage_kernels import (
    in_columns,
    reads_weights_once,
    takes_many_outputs,
    takes_outputs,
)

__all__ = [
    "Stages",
    "gradient_stage",
    "has_weight_forces",
    "measured",
    "output_stage",
    "point_stage",
    "weight_stage",
]

Factor = float | Tensor


def output_stage(
    posterior: Posterior,
    repulsion: Repulsion | None,
    outputs: Tensor,
    y: Targets,
    alive: Tensor,
    weight: Factor,
    prior: Tensor | None,
    others: Others | None = None,
) -> OutputResult:
    """Gradients of the likelihood (times `weight`) and a functional prior; push on outputs.

    Prior and other members are those of the probabilities if all forces act on these.
    """
    squashed = act_on_probabilities(posterior, repulsion)
    compared = forces_act_at(outputs, squashed)
    rows = target_weights(posterior.likelihood, y, outputs.shape[1:-1])
    apart = repulsion is not None and repulsion.space.base == "outputs"
    if not squashed and isinstance(y, Tensor) and takes_outputs(posterior, outputs, y):
        loss, alive, gradient, drive, lengths = fused.likelihood_kernels.categorical(
            outputs, y, alive, weight, apart=apart
        )
    elif not squashed and takes_many_outputs(posterior, outputs, y, rows):
        loss, alive, gradient, drive, lengths = fused.likelihood_kernels.many_categorical(
            outputs, parted(y)[0], rows, alive, weight, apart=apart
        )
    else:
        loss, alive, gradient = likelihood_gradient(posterior, compared, y, alive, squashed)
        drive, lengths = weight * gradient, None
    if squashed and repulsion is not None:
        repulsion = repulsion.in_step(space=Outputs())
    if prior is not None:
        drive, lengths = drive + prior, None
    if rows is not None and rows.ndim == outputs.ndim - 1:
        rows = rows.mean(0)  # members with weights of their own are compared where any counts
    here = {"outputs": drive}, {"outputs": compared}
    velocity, alive, mix, measures, apart = _act(
        posterior, repulsion, "outputs", *here, alive, others, rows, driven=lengths
    )
    if repulsion is None:
        lengths = member_norms(here[0]) if lengths is None else lengths
        measures = measured(lengths, None, alive)
    statistics = posterior.likelihood.statistics(outputs, parted(y)[0], alive, rows)
    cotangent, push = velocity["outputs"], None if apart is None else apart["outputs"]
    if squashed:
        gradient, cotangent = at_outputs(compared, gradient), at_outputs(compared, cotangent)
        push = None if push is None else at_outputs(compared, push)
    known = None if squashed else lengths
    return OutputResult(
        loss, alive, gradient, cotangent, mix, measures, push, None, statistics, known
    )


def gradient_stage(
    posterior: Posterior,
    repulsion: Repulsion,
    alive: Tensor,
    cotangent: Tensor,
    gradients: Tensor,
    others: Others | None = None,
    weight: Tensor | None = None,
    counted: Factor | None = None,
) -> GradientResult:
    """The push on input gradients, and the mixed drives at the outputs if the flow mixes drives.

    Of the measures, only bandwidth and effective members are known here. Drive and push meet only
    at the weights. `counted` is the number of data points in the batch, if others are compared.
    """
    push, mine = repelled(repulsion, {"gradients": gradients}, alive, weight, others)
    interaction = push.interaction
    points = gradients.shape[1] if weight is None else weight.sum()
    points = points if counted is None else counted
    scale = -_push_scale(posterior, repulsion, points) * repulsion.strength
    drive, mix = mixed_drives(interaction, {"outputs": cotangent}, mine, others)
    push_back = scale * push.tree()["gradients"]
    alive = interaction.cloud.alive[mine]
    return GradientResult(alive, drive["outputs"], mix, interaction.summary, push_back)


def point_stage(
    posterior: Posterior,
    repulsion: Repulsion,
    alive: Tensor,
    cotangent: Tensor,
    outputs: Tensor,
    others: Others | None,
    counted: Factor,
    driven: Tensor | None = None,
    leading: bool = False,
) -> GradientResult:
    """The push on outputs at points other than the batch, and the mixed drives at the batch.

    Args:
        posterior: scales the push.
        repulsion: the repulsion.
        alive: which members are finite [M].
        cotangent: the drive at the outputs of the batch [M, B, C].
        outputs: at the points [M, P, C].
        others: other members, by their outputs at the points and their drives at the batch.
        counted: number of targets in the batch, or their total weight.
        driven: norms of the drives [M], if they are known.
        leading: the points are the first rows of the batch, so that the drive takes up the push.
    """
    push, mine = repelled(repulsion, {"outputs": outputs}, alive, None, others)
    interaction = push.interaction
    scale = -_push_scale(posterior, repulsion, counted) * repulsion.strength
    drive, mix = mixed_drives(interaction, {"outputs": cotangent}, mine, others)
    alive = interaction.cloud.alive[mine]
    driven = member_norms(drive) if driven is None or mix is not None else driven
    if leading and not repulsion.placebo:
        whole = drive["outputs"].clone() if mix is None else drive["outputs"]
        head = {"outputs": whole[:, : outputs.shape[1]]}
        moved, _, length = push.added_to(head, scale, driven=driven)
        head["outputs"].copy_(moved["outputs"])
        measures = measured(driven, length, alive, interaction.summary, abs(scale))
        return GradientResult(alive, whole, mix, measures, None)
    pushed = {"outputs": scale * push.tree()["outputs"]}
    measures = measured(driven, member_norms(pushed), alive, interaction.summary)
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
    others: Others | None = None,
    ahead: GramAhead | None = None,
    delays: bool = False,
) -> WeightResult:
    """Add the weight prior's gradient and the push on weights to the backward pass's result.

    With `delays`, the push is left to the optimiser if kernels of our own add it.
    """
    # A weight prior has no gradient at the outputs to mix: it is scaled like the drives.
    balance = annealing if mix is None else annealing * mix.sum(-1)
    whole = others is None or others.is_complete()
    once = whole and reads_weights_once(repulsion, velocity, weights)
    multiples = posterior.prior_multiples(velocity, balance) if once else None
    if multiples is None:
        velocity = posterior.add_prior(velocity, weights, balance, spans)
    if delays and once and others is None and repulsion is not None:
        push, _ = repelled(repulsion, weights, alive, ahead=ahead)
        scale = -posterior.heat * repulsion.strength
        delayed = DelayedPush(push, scale, multiples)
        return WeightResult(velocity, push.interaction.cloud.alive, None, delayed=delayed)
    velocity, alive, _, measures, apart = _act(
        posterior, repulsion, "weights", velocity, weights, alive, others, None, multiples, ahead
    )
    return WeightResult(velocity, alive, measures, None if apart is None else member_norms(apart))


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
    others: Others | None,
    weight: Tensor | None = None,
    multiples: Sequence[float] | None = None,
    ahead: GramAhead | None = None,
    driven: Tensor | None = None,
) -> tuple[Tree, Tensor, Tensor | None, Tensor | None, Tree | None]:
    """Mix the drives and add the push, if the repulsion's space has this base.

    `multiples` of the base belong to the drives, see `Push.added_to`. A push that a placebo
    replaces is not added: it is the last of the results. `driven` are the norms of the drives, if
    they are known.
    """
    if repulsion is None or not _acts_on(repulsion, where):
        return drive, alive, None, None, None
    points = base["outputs"][0, ..., 0].numel() if where == "outputs" else 1
    points = points if weight is None else weight.sum()
    turned = others is None and weight is None and in_columns(repulsion, base)
    if turned:  # in the order of the memory, which saves two copies
        drive, base = ({name: t.mT for name, t in tree.items()} for tree in (drive, base))
    push, mine = repelled(repulsion, base, alive, weight, others, ahead)
    interaction = push.interaction
    alive = interaction.cloud.alive[mine]
    drive, mix = mixed_drives(interaction, drive, mine, others)
    scale = -_push_scale(posterior, repulsion, points) * repulsion.strength
    apart, factor = None, abs(scale)
    if repulsion.placebo:
        apart, factor = {name: scale * tensor for name, tensor in push.tree().items()}, 1.0
        velocity, driven, pushed = drive, member_norms(drive), member_norms(apart)
    else:
        driven = driven if mix is None else None
        velocity, driven, pushed = push.added_to(drive, scale, multiples, driven)
    if turned:
        velocity = {name: t.mT for name, t in velocity.items()}
        apart = None if apart is None else {name: t.mT for name, t in apart.items()}
    measures = measured(driven, pushed, alive, interaction.summary, factor)
    return velocity, alive, mix, measures, apart


def _push_scale(
    posterior: Posterior, repulsion: Repulsion, points: float | Tensor
) -> float | Tensor:
    return posterior.push_scale(points if repulsion.per == "batch" else None)


def measured(
    drive: Tensor,
    push: Tensor | None,
    alive: Tensor,
    kernel: Tensor | None = None,
    scale: Factor = 1.0,
) -> Tensor:
    """Root mean square norms of drive and scaled push over finite members; bandwidth; members."""
    known = [tensor for tensor in (drive, push, alive, kernel) if tensor is not None]
    if not isinstance(scale, Tensor) and kernel_supports(*known):
        return fused.step_kernels.measures(drive, push, alive, kernel, scale)
    push = None if push is None else scale * push
    count = alive.sum().clamp(min=1)
    lengths = torch.stack([drive, torch.zeros_like(drive) if push is None else push])
    squares = torch.where(alive & finite(lengths), lengths, 0.0).square().sum(1)
    forces = (squares / count).sqrt().float()
    if kernel is None:
        kernel = torch.stack([torch.zeros_like(count), count])
    return torch.cat([forces, kernel.float()])

r"""The stages of a step that are pure arithmetic, between and after the networks.

    outputs --respond--> cotangent --backward through the networks--> drive --settle--> velocity

The interaction acts where its space lives: on cotangents at the outputs in `respond`, at the input
gradients in `part`, or on the weights in `settle`. No stage waits for the device, and all can be
compiled.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.differentiate import with_pullback
from shoal.core.tree import finite, member_norms, mixed, per_member
from shoal.core.types import Tree
from shoal.inference.posterior import Posterior
from shoal.interaction.repulsion import Interaction, Push, Repulsion, repel

__all__ = [
    "FrozenState",
    "GradientResult",
    "OutputResult",
    "Stages",
    "WeightResult",
    "compiled_stages",
    "gradient_stage",
    "judge",
    "measured",
    "output_stage",
    "weight_stage",
]

Factor = float | Tensor


class FrozenState(NamedTuple):
    """Members that push the others and stay where they are, as the repulsion's space sees them.

    Attributes:
        base: their tensors where the space lives [F, ...].
        alive: which of them are finite [F].
        drive: what would drive them, for flows in which members share drives; None for others.
    """

    base: Tree
    alive: Tensor
    drive: Tree | None


class OutputResult(NamedTuple):
    """What the outputs of the members ask for.

    Attributes:
        loss: mean negative log likelihood [M].
        alive: which members are finite [M].
        gradient: of the mean log likelihood with respect to the outputs [M, B, C].
        cotangent: what is pulled back through the networks [M, B, C].
        mix: of the drives [M, M]; None is the identity.
        measures: see `Settled`; None when the space is not here.
        push: what is pulled back from the input gradients, of all points or of a part
            [M, B, ...]; None without them.
        head: of what comes back to the last layers, the part that is drive; None where drive and
            push have been measured before.
        statistics: what the likelihood learns from; None where it learns nothing.
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
    """What an answer becomes where input gradients push each other away; fields as there."""

    alive: Tensor
    cotangent: Tensor
    mix: Tensor | None
    measures: Tensor
    push: Tensor


class WeightResult(NamedTuple):
    """The velocity of the members.

    Attributes:
        velocity: tensors [M, ...] like the weights.
        alive: which members are finite [M].
        measures: drive, push, squared bandwidth and effective members, where the space lives; None
            when it is not here.
    """

    velocity: Tree
    alive: Tensor
    measures: Tensor | None


def judge(
    posterior: Posterior, outputs: Tensor, y: Tensor, alive: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [M], who is still finite [M], and the gradient of the log likelihood [M, B, C]."""
    (value,), pull = with_pullback(
        lambda tree: [posterior.log_likelihood(tree["outputs"], y)], {"outputs": outputs}
    )
    gradient = pull([torch.ones_like(value)])["outputs"]
    alive = alive & finite(value)
    return -value, alive, torch.where(per_member(alive, gradient), gradient, 0.0)


def output_stage(
    posterior: Posterior,
    repulsion: Repulsion | None,
    outputs: Tensor,
    y: Tensor,
    alive: Tensor,
    weight: Factor,
    prior: Tensor | None,
    company: FrozenState | None = None,
) -> OutputResult:
    """The likelihood's gradient times `weight`, a functional prior's, and the push on outputs."""
    loss, alive, gradient = judge(posterior, outputs, y, alive)
    drive = weight * gradient
    drive = drive if prior is None else drive + prior
    here = {"outputs": drive}, {"outputs": outputs}
    velocity, alive, mix, measures = _act(posterior, repulsion, "outputs", *here, alive, company)
    if repulsion is None:
        measures = measured(member_norms(here[0]), None, alive)
    statistics = posterior.likelihood.statistics(outputs, y, alive)
    found = loss, alive, gradient, velocity["outputs"], mix, measures
    return OutputResult(*found, statistics=statistics)


def gradient_stage(
    posterior: Posterior,
    repulsion: Repulsion,
    alive: Tensor,
    cotangent: Tensor,
    gradients: Tensor,
    company: FrozenState | None = None,
) -> GradientResult:
    """The push on input gradients, and the drives at the outputs mixed if the flow mixes them.

    Of the measures only bandwidth and effective members are known here: drive and push meet at the
    weights.
    """
    push, own = _pushed(repulsion, {"gradients": gradients}, alive, company)
    interaction = push.interaction
    scale = -_push_scale(posterior, repulsion, gradients.shape[1]) * repulsion.strength
    drive, mix = _shared(interaction, {"outputs": cotangent}, own, company)
    push_back = scale * push.tree()["gradients"]
    alive = interaction.cloud.alive[own]
    return GradientResult(alive, drive["outputs"], mix, _kernel(interaction), push_back)


def weight_stage(
    posterior: Posterior,
    repulsion: Repulsion | None,
    velocity: Tree,
    weights: Tree,
    alive: Tensor,
    annealing: Factor,
    mix: Tensor | None,
    spans: Sequence[slice] | None,
    company: FrozenState | None = None,
) -> WeightResult:
    """The weight prior's gradient and the push on weights, added to what came back."""
    # A weight prior has no gradient at the outputs to be mixed: it is scaled as the drives are.
    balance = annealing if mix is None else annealing * mix.sum(-1)
    velocity = posterior.add_prior(velocity, weights, balance, spans)
    here = velocity, weights, alive, company
    velocity, alive, _, measures = _act(posterior, repulsion, "weights", *here)
    return WeightResult(velocity, alive, measures)


class Stages(NamedTuple):
    """The stages as they are, or compiled."""

    output_stage: Callable[..., OutputResult] = output_stage
    weight_stage: Callable[..., WeightResult] = weight_stage
    gradient_stage: Callable[..., GradientResult] = gradient_stage


@functools.cache
def compiled_stages() -> Stages:
    """The stages through `torch.compile`, once for all runs of a process."""
    # Every method and shape is a version of its own, and a grid has many of them.
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, 512)
    # Inductor of torch 2.11 fails on the weight-space stage when it reorders loops.
    compiled: Any = functools.partial(
        torch.compile, dynamic=False, options={"loop_ordering_after_fusion": False}
    )
    return Stages(compiled(output_stage), compiled(weight_stage), compiled(gradient_stage))


def _act(
    posterior: Posterior,
    repulsion: Repulsion | None,
    where: str,
    drive: Tree,
    base: Tree,
    alive: Tensor,
    company: FrozenState | None,
) -> tuple[Tree, Tensor, Tensor | None, Tensor | None]:
    """Mix the drives and add the push, if the repulsion's space lives here."""
    if repulsion is None or repulsion.space.base != where:
        return drive, alive, None, None
    push, own = _pushed(repulsion, base, alive, company)
    interaction = push.interaction
    alive = interaction.cloud.alive[own]
    drive, mix = _shared(interaction, drive, own, company)
    points = base["outputs"].shape[1] if where == "outputs" else 1
    scale = -_push_scale(posterior, repulsion, points) * repulsion.strength
    velocity, driven, pushed = push.added_to(drive, scale)
    return velocity, alive, mix, measured(driven, pushed, alive, _kernel(interaction))


def _push_scale(posterior: Posterior, repulsion: Repulsion, points: int) -> float:
    return posterior.push_scale(points if repulsion.per == "batch" else None)


def _kernel(interaction: Interaction) -> Tensor:
    h2, alive = interaction.h2, interaction.cloud.alive
    if h2.shape[-1] > 1:  # one for each member: those of the living count
        h2 = torch.where(alive, h2, 0.0).sum(-1) / alive.sum().clamp(min=1)
    h2 = h2.mean()
    return torch.stack([h2, interaction.effective.to(h2.dtype)])


def _pushed(
    repulsion: Repulsion, base: Tree, alive: Tensor, company: FrozenState | None
) -> tuple[Push, slice]:
    """The push on the members that move, and which of all members they are."""
    if company is None:
        return repel(repulsion, base, alive), slice(None)
    own = slice(len(company.alive), len(company.alive) + len(alive))
    others = iter(repulsion.space(company.base))
    everyone = torch.cat([company.alive, alive])
    gather = lambda leaf: torch.cat([next(others).to(leaf), leaf])  # noqa: E731
    return repel(repulsion, base, everyone, gather, own), own


def _shared(
    interaction: Interaction, drive: Tree, own: slice, company: FrozenState | None
) -> tuple[Tree, Tensor | None]:
    """The drives of the members that move, mixed if the flow mixes drives, and by what."""
    if interaction.mix is None:
        return drive, None
    mix, drive = interaction.mix[own], _joined(drive, company)
    living = interaction.cloud.alive & finite(member_norms(drive))
    return mixed(mix, _of_living(drive, living)), mix


def _joined(drive: Tree, company: FrozenState | None) -> Tree:
    """The drives of all members, those that stay first."""
    if company is None or company.drive is None:
        return drive
    return {name: torch.cat([company.drive[name].to(t), t]) for name, t in drive.items()}


def _of_living(tree: Tree, alive: Tensor) -> Tree:
    # Zero times NaN is NaN: what a dead member says must not reach the others through the mixing.
    return {name: torch.where(per_member(alive, t), t, 0.0) for name, t in tree.items()}


def measured(
    drive: Tensor, push: Tensor | None, alive: Tensor, kernel: Tensor | None = None
) -> Tensor:
    """Root mean square lengths of drive and push over the living, then bandwidth and members."""
    count = alive.sum().clamp(min=1)
    lengths = torch.stack([drive, torch.zeros_like(drive) if push is None else push])
    squares = torch.where(alive & finite(lengths), lengths, 0.0).square().sum(1)
    forces = (squares / count).sqrt().float()
    if kernel is None:
        kernel = torch.stack([torch.zeros_like(count), count])
    return torch.cat([forces, kernel.float()])

"""Class-activation maps and input gradients of the members, small enough for the report."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shoal.core.errors import DataError
from shoal.core.opaque import Opaque
from shoal.core.structure import parted
from shoal.data.dataset import Split
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.network_call import member_call
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.inference.network_pass import PassContext, forward_with_gradients
from shoal.interaction.spaces import InputGradients, Normalised
from shoal.prediction.metrics.similarity import COMPARED as MEMBERS

__all__ = [
    "AttentionMaps",
    "attention_maps",
    "attention_samples",
    "gradient_samples",
    "gradient_similarity",
    "is_image",
    "overlap",
]

Size = tuple[int, int]


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """Class-activation maps of all members at several depths.

    Attributes:
        maps: maps [M, B, height, width] of values up to 1, by their size, in order of depth.
    """

    maps: dict[Size, Tensor]

    @property
    def diversity(self) -> dict[Size, float]:
        """One minus the mean cosine between the maps of two members, at each depth."""
        return {size: 1 - _others(overlap(maps)) for size, maps in self.maps.items()}


def attention_maps(ensemble: Ensemble, x: Tensor, y: Tensor) -> AttentionMaps:
    """Class-activation maps of every member for images x [B, C, H, W] and classes y [B].

    A depth is the last layer with one size of the image. Members of several architectures are
    compared at the sizes that all of them have.
    """
    if x.ndim != 4:
        raise DataError(f"class-activation maps need images [B, C, H, W], not {tuple(x.shape)}")
    x = x.to(ensemble.device, ensemble.dtype)
    y = y.to(ensemble.device)
    member_maps = [_maps(ensemble.member(i).eval(), x, y) for i in range(ensemble.members)]
    common = [size for size in member_maps[0] if all(size in maps for maps in member_maps)]
    if not common:
        raise DataError("the networks have no layer in common whose outputs are images")
    return AttentionMaps(
        {size: torch.stack([maps[size] for maps in member_maps]) for size in common}
    )


def overlap(maps: Tensor) -> Tensor:
    """Mean over images of the cosine between the maps of each pair of members [M, M].

    Images for which one of the two maps is empty do not count.
    """
    flat = maps.flatten(2).double()
    norms = flat.norm(dim=-1)
    products = torch.einsum("ibd,jbd->ijb", flat, flat)
    lengths = torch.einsum("ib,jb->ijb", norms, norms)
    known = lengths > 0
    cosines = torch.where(known, products / torch.where(known, lengths, 1.0), 0.0)
    return cosines.sum(-1) / known.sum(-1).clamp(min=1)


def _others(matrix: Tensor) -> float:
    M = len(matrix)
    return float((matrix.sum() - matrix.diagonal().sum()) / max(M * (M - 1), 1))


def _maps(module: nn.Module, x: Tensor, y: Tensor) -> dict[Size, Tensor]:
    last: dict[Size, Tensor] = {}

    def note(_: nn.Module, inputs: tuple, output: object) -> None:
        if isinstance(output, Tensor) and output.ndim == 4 and output.shape[2:].numel() > 1:
            last[output.shape[2], output.shape[3]] = output

    hooks = [layer.register_forward_hook(note) for layer in module.modules()]
    with torch.enable_grad():
        # Layers of a frozen trunk have a gradient only if their inputs do.
        outputs = member_call(module, x.detach().requires_grad_())
    for hook in hooks:
        hook.remove()
    if not last:
        return {}
    score = outputs.gather(-1, y[:, None]).sum()
    gradients = torch.autograd.grad(score, list(last.values()), allow_unused=True)
    pairs = zip(last.items(), gradients, strict=True)
    return {size: _map(A, g) for (size, A), g in pairs if g is not None}


def _map(activations: Tensor, gradient: Tensor) -> Tensor:
    weights = gradient.mean((2, 3), keepdim=True)
    raw = (weights * activations).sum(1).clamp(min=0).detach()
    top = raw.amax((1, 2), keepdim=True)
    return raw / torch.where(top > 0, top, 1.0)


_CHUNK = 32


def gradient_similarity(
    ensemble: Ensemble, x: Tensor, y: Tensor, likelihood: Likelihood, target: str = "logit"
) -> Tensor:
    """Mean cosine between the input gradients of each pair of members [M, M].

    1 means that the gradients have the same direction everywhere, 0 that they are orthogonal.

    Args:
        ensemble: the members, evaluated in evaluation mode.
        x: inputs [B, ...].
        y: targets, which select the output to differentiate.
        likelihood: what the outputs mean.
        target: see `InputGradients`.
    """
    space = Normalised(InputGradients(target), eps=1e-15)
    real = ensemble.dtype if x.is_floating_point() else None
    x, y = x.to(ensemble.device, real), y.to(ensemble.device)
    training = ensemble.training
    ensemble.train(False)
    total: Tensor | float = 0.0
    context = PassContext(mapping=MemberRunner("loop"))
    for batch in zip(x.split(_CHUNK), y.split(_CHUNK), strict=True):
        passed = forward_with_gradients(ensemble, batch, likelihood, space, context, live=False)
        assert passed.gradients is not None, "input gradients were requested"
        (unit,) = space({"gradients": passed.gradients.detach()})
        total = total + torch.einsum("ibd,jbd->ij", unit.double(), unit.double())
    ensemble.train(training)
    return torch.as_tensor(total) / len(x)


COMPARED = 64
"""Number of test inputs on which input gradients are compared; of at most `MEMBERS` members."""

SHOWN = 3
"""Number of images whose class-activation maps are kept."""


def gradient_samples(run: Any, split: Split) -> dict[str, Tensor]:
    """Similarity of at most 64 members' input gradients; empty if inputs have no gradients."""
    if split.y is None or run.ensemble.members < 2 or isinstance(split.x, Opaque):
        return {}
    x, y = split.x[:COMPARED], split.y[:COMPARED]
    ensemble = run.ensemble.spaced(MEMBERS)
    try:
        matrix = gradient_similarity(ensemble, x, y, run.likelihood)
    except DataError:
        return {}
    return {"test/gradient_similarity": matrix.float().cpu()}


def is_image(x: Any) -> bool:
    """Whether inputs are images [B, C, H, W] in grey or colour, and nothing else."""
    return isinstance(x, Tensor) and x.ndim == 4 and x.shape[1] in (1, 3)


def attention_samples(run: Any, split: Split) -> dict[str, Tensor]:
    """Class-activation maps of a few images at every depth, and their diversity over more."""
    y, _ = parted(split.y)
    labels = isinstance(y, Tensor) and y.ndim == 1 and not y.is_floating_point()
    if not labels or not is_image(split.x) or run.ensemble.members < 2:
        return {}
    try:
        attention = attention_maps(run.ensemble.spaced(MEMBERS), split.x[:COMPARED], y[:COMPARED])
    except DataError:
        return {}
    kept = {
        f"attention/{height}x{width}": (255 * maps[:, :SHOWN]).round().to(torch.uint8).cpu()
        for (height, width), maps in attention.maps.items()
    }
    images = split.x[:SHOWN].float()
    low, high = (float(end) for end in split.x.aminmax())
    pixels = (images - low) / max(high - low, 1e-12)
    diversity = torch.tensor(list(attention.diversity.values())).float()
    return {
        **kept,
        "attention/images": (255 * pixels).round().to(torch.uint8).cpu(),
        "attention/diversity": diversity,
        "attention/sides": torch.tensor(list(attention.maps)),
    }

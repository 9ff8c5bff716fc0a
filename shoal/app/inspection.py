"""What a run's members look at, in a few small tensors for the page."""

from typing import Any

import torch
from torch import Tensor

from shoal.analysis.attention_maps import attention_maps
from shoal.analysis.input_gradients import gradient_similarity
from shoal.core.errors import DataError
from shoal.data.dataset import Split

__all__ = ["attention_samples", "gradient_samples"]

COMPARED = 64
"""Test inputs on which input gradients are compared."""

SHOWN = 3
"""Images whose class-activation maps are kept."""


def gradient_samples(run: Any, split: Split) -> dict[str, Tensor]:
    """Similarity of the members' input gradients, where inputs have gradients."""
    if split.y is None or run.ensemble.members < 2:
        return {}
    x, y = split.x[:COMPARED], split.y[:COMPARED]
    try:
        matrix = gradient_similarity(run.ensemble, x, y, run.likelihood)
    except DataError:
        return {}
    return {"test/gradient_similarity": matrix.float().cpu()}


def attention_samples(run: Any, split: Split) -> dict[str, Tensor]:
    """Class-activation maps of a few images at every depth, and their diversity over more."""
    y = split.y
    if y is None or y.is_floating_point() or split.x.ndim != 4 or run.ensemble.members < 2:
        return {}
    if split.x.shape[1] not in (1, 3):
        return {}
    try:
        found = attention_maps(run.ensemble, split.x[:COMPARED], y[:COMPARED])
    except DataError:
        return {}
    kept = {
        f"attention/{height}x{width}": (255 * maps[:, :SHOWN]).round().to(torch.uint8).cpu()
        for (height, width), maps in found.maps.items()
    }
    images = split.x[:SHOWN].float()
    low, high = (float(end) for end in split.x.aminmax())
    pixels = (images - low) / max(high - low, 1e-12)
    diversity = torch.tensor(list(found.diversity.values())).float()
    return {
        **kept,
        "attention/images": (255 * pixels).round().to(torch.uint8).cpu(),
        "attention/diversity": diversity,
        "attention/sides": torch.tensor(list(found.maps)),
    }

"""The columns of a table of predictions, one row per data point."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError

__all__ = ["frame_columns", "main_columns"]

Columns = dict[str, np.ndarray]


def main_columns(pred: Any) -> Columns:
    """The prediction in few columns, as `shoal predict` writes them."""
    if not pred.likelihood.about.has_classes:
        return _numbered({"mean": pred.mean, "stddev": pred.stddev})
    if pred.probs.ndim > 2:
        return {f"probability_{k}": _array(column) for k, column in enumerate(pred.mean.T)}
    return {
        "class": _array(pred.labels()),
        "probability": _array(pred.confidence()),
        "entropy": _array(pred.entropy()),
        "disagreement": _array(pred.disagreement()),
    }


def frame_columns(pred: Any, level: float, classes: Sequence[str] | None) -> Columns:
    """All columns of `Predictive.to_frame`; sites of a data point have rows of their own."""
    points, sites = len(pred), pred.members.shape[2:-1].numel()
    place = {}
    if pred.members.ndim > 3:
        place = {
            "point": np.repeat(np.arange(points), sites),
            "site": np.tile(np.arange(sites), points),
        }
        pred = pred.points()[0]
    if "loss" in pred.likelihood.about.kinds:
        return (
            place | _numbered({"mean": pred.mean}) | {"disagreement": _array(pred.disagreement())}
        )
    found = main_columns(pred)
    if pred.likelihood.about.has_classes:
        found |= _of_classes(pred, found, classes)
    elif {"intervals", "gaussian"} & {*pred.likelihood.about.kinds}:
        low, high = pred.interval(level)
        found |= _numbered({"low": low, "high": high})
    return place | found


def _of_classes(pred: Any, found: Columns, classes: Sequence[str] | None) -> Columns:
    parts = {
        "entropy": pred.entropy(),
        "aleatoric": pred.aleatoric(),
        "mutual_information": pred.mutual_information(),
        "disagreement": pred.disagreement(),
    }
    more = {name: _array(values) for name, values in parts.items()}
    if pred.probs.ndim > 2:  # several labels at once
        return more
    count = pred.probs.shape[-1]
    if classes is not None and len(classes) != count:
        raise ConfigError(f"the prediction has {count} classes, but {len(classes)} names came")
    names = np.arange(count) if classes is None else np.asarray(list(classes), dtype=object)
    each = {f"p({name})": _array(pred.probs[:, k]) for k, name in enumerate(names)}
    return {"class": names[found["class"]], **more, **each}


def _numbered(values: dict[str, Tensor]) -> Columns:
    """Columns [B, K] side by side: `mean` and `stddev`, or `mean_0`, `stddev_0`, `mean_1`, ..."""
    width = next(iter(values.values())).shape[-1]
    return {
        name if width == 1 else f"{name}_{k}": _array(columns[:, k])
        for k in range(width)
        for name, columns in values.items()
    }


def _array(values: Tensor) -> np.ndarray:
    return torch.as_tensor(values).detach().cpu().numpy()

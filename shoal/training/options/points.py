"""Preparation of the points at which members are compared, before the first step.

`resolved` turns what the user gave (arrays, loaders, names of data sets, augmentations) into inputs
on the CPU and plain settings, which the config of the run holds. `placed` moves the inputs to the
members' device and adds the statistics of the training inputs, which a run keeps with its axes.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.structure import Inputs, Structured, joined
from shoal.core.types import Tree
from shoal.data.batches import augment as augmentations
from shoal.data.batches.arrays import inputs_digest
from shoal.data.batches.augment import is_per_member
from shoal.data.batches.sources import input_batches
from shoal.data.dataset import Dataset
from shoal.data.load import load
from shoal.data.sets.images import fitted, in_range, in_unit
from shoal.inference.ensemble import Ensemble
from shoal.interaction.methods import Method
from shoal.interaction.points import (
    Augmented,
    Batch,
    OtherData,
    Points,
    Unlabelled,
    real_tensors,
    registry,
)

__all__ = ["needs_statistics", "placed", "resolved", "statistics"]

PREFIX = "points."
"""Start of the names of the statistics, in the file of the axes."""


def resolved(
    method: Method, ensemble: Ensemble, first: Callable[[], Inputs], data: Any = None
) -> Method:
    """The method with inputs and functions for its points, and with settings that a file can hold.

    Args:
        method: the method as the user gave it.
        ensemble: the members, which know whether they take integers.
        first: gives some training inputs.
        data: the training data; a `Dataset` knows the range of its images.
    """
    points: Any = None if method.repulsion is None else method.repulsion.points
    if points is None or isinstance(points, Batch):
        return method
    x = first()
    if isinstance(points, OtherData):
        points = _with_inputs(points, x, data)
    if isinstance(points, Unlabelled):
        pool = _gathered(points.x, ensemble, x)
        points = replace(points, x=pool, sha256=inputs_digest(pool))
    if isinstance(points, Augmented):
        points = _with_function(points)
    pool = getattr(points, "x", None)
    if pool is not None:
        _check_alike(pool, x)
    _check_real(points, x)
    return method.with_points(points)


def _with_inputs(points: OtherData, x: Inputs, data: Any) -> OtherData | Unlabelled:
    """Inputs of another data set; a data set that no name loads again is the user's own."""
    other = points.data if isinstance(points.data, Dataset) else _loaded(points.data)
    inputs = _converted(other, x, data)
    if other.spec is None:
        return Unlabelled(inputs, points.count)
    return replace(points, data=other.spec, x=inputs)


def _loaded(spec: Any) -> Dataset:
    if not spec:
        raise ConfigError(
            "points 'dataset' need a data set; type points={'name': 'dataset', 'data': 'digits'}"
        )
    return load(spec)


def _converted(other: Dataset, x: Inputs, data: Any) -> Tensor:
    """Training inputs of another data set, in shape and range of the training inputs."""
    if not isinstance(x, Tensor) or not isinstance(other.train.x, Tensor):
        raise DataError(
            "points 'dataset' need inputs of one tensor; give structures of your own as "
            "points=shoal.points.Unlabelled(x)"
        )
    inputs = fitted(other.train.x, tuple(x.shape[1:]), f"the data set '{other.name}'")
    pixels = data.pixel_range if isinstance(data, Dataset) else None
    if pixels is not None and other.pixel_range is not None:
        inputs = in_range(in_unit(inputs, other.pixel_range), pixels)
    return inputs


def _gathered(source: Any, ensemble: Ensemble, x: Inputs) -> Tensor | Structured:
    """Inputs of the user's as one tensor or structure, without targets; a loader is read once."""
    if source is None:
        raise ConfigError(
            "the points are unlabelled inputs of your own, which no file or run stores; "
            "type points=shoal.points.Unlabelled(x)"
        )
    if isinstance(source, Dataset):
        source = source.train
    dtype = x.dtype if isinstance(x, Tensor) and x.is_floating_point() else ensemble.dtype
    parts = [
        batch.to("cpu")
        for batch in input_batches(
            source, dtype=dtype, whole=ensemble.takes_whole, takes=ensemble.takes_inputs
        )
    ]
    pool = joined(parts) if parts else None
    if not isinstance(pool, (Tensor, Structured)) or len(pool) == 0:
        raise DataError(
            "unlabelled points must be inputs of one shape, one row per point; pad sequences to "
            "one length"
        )
    return pool


def _with_function(points: Augmented) -> Augmented:
    """Augmented points with their function, and its plain settings."""
    spec = points.augment
    if isinstance(spec, Mapping) and "custom" in spec:
        raise ConfigError(
            f"the augmentation of these points was your own '{spec['custom']}', which a run "
            f"cannot store; type points=shoal.points.Augmented({spec['custom']})"
        )
    function: Any = augmentations.registry.make(spec)
    if is_per_member(function) or not callable(function):
        raise ConfigError(
            "augmented points need one augmentation for all members: a name, a table, or a "
            "function of (x, key), without per_member"
        )
    try:
        spec = augmentations.registry.spec(function)
    except ConfigError:
        spec = {"custom": getattr(function, "__qualname__", type(function).__qualname__)}
    return replace(points, augment=spec, function=function)


def _check_alike(pool: Tensor | Structured, x: Inputs) -> None:
    """Refuse points that the networks would not take as they take the training inputs."""

    def forms(inputs: Any) -> dict[str, tuple]:
        tensors = {"x": inputs} if isinstance(inputs, Tensor) else getattr(inputs, "tensors", {})
        # Sequences may be longer; tokens have no other axis.
        return {
            name: (t.is_floating_point(), t.ndim, tuple(t.shape[1:]) * t.is_floating_point())
            for name, t in tensors.items()
        }

    shapes, wanted = forms(pool), forms(x)
    if type(pool) is not type(x) or shapes != wanted:
        raise DataError(
            f"points have inputs {_shapes(pool)}, but training inputs are {_shapes(x)}; "
            f"they must agree"
        )


def _shapes(x: Any) -> str:
    tensors = {"x": x} if isinstance(x, Tensor) else getattr(x, "tensors", {})
    shapes = [f"{name} {[*t.shape[1:]]}" for name, t in tensors.items() if t.ndim > 0]
    return ", ".join(shapes) or type(x).__name__


def _check_real(points: Any, x: Inputs) -> None:
    """Refuse noise and mixtures of tokens before training."""
    names = [name for name in registry if type(points) is registry[name]]
    if names and names[0] in ("noise", "uniform", "mixup"):
        real_tensors(x, names[0])


def needs_statistics(points: Points) -> bool:
    """Whether the points depend on statistics of the training inputs."""
    return bool(getattr(points, "fits", ()))


def statistics(points: Points, batches: Callable[[], Iterable[Inputs]]) -> Tree:
    """The statistics that the points need, from one pass over the training inputs.

    Returns:
        `points.std/NAME`, `points.low/NAME` and `points.high/NAME` for every real input.
    """
    wanted = getattr(points, "fits", ())
    summary = _summarised(batches()) if wanted else {}
    return {f"{PREFIX}{name}": t for name, t in summary.items() if name.partition("/")[0] in wanted}


def placed(points: Any, tensors: Tree, device: torch.device, dtype: torch.dtype) -> Any:
    """The points with inputs and statistics on the members' device."""
    pool = getattr(points, "x", None)
    if isinstance(pool, Structured):
        return replace(points, x=pool.to(device).to(dtype))
    if isinstance(pool, Tensor):
        return replace(points, x=pool.to(device, dtype if pool.is_floating_point() else None))
    if not needs_statistics(points):
        return points
    stored = {n.removeprefix(PREFIX): t for n, t in tensors.items() if n.startswith(PREFIX)}
    return replace(points, statistics=stored)


def _summarised(batches: Iterable[Inputs]) -> Tree:
    """Smallest and largest value and standard deviation of every coordinate."""
    start: dict[str, Tensor] = {}
    low, high, total, squares = ({} for _ in range(4))
    count = 0
    for x in batches:
        count += len(x)
        for name, t in _wide(x):
            if name not in start:
                start[name] = t[0]  # a constant coordinate has deviation zero to the last bit
                low[name], high[name] = t.amin(0), t.amax(0)
                total[name], squares[name] = torch.zeros_like(t[0]), torch.zeros_like(t[0])
            away = t - start[name]
            low[name], high[name] = low[name].minimum(t.amin(0)), high[name].maximum(t.amax(0))
            total[name], squares[name] = total[name] + away.sum(0), squares[name] + (away**2).sum(0)
    summary = {}
    for name in start:
        variance = squares[name] / count - (total[name] / count).square()
        std = variance.clamp(min=0).sqrt()
        summary |= {f"std/{name}": std, f"low/{name}": low[name], f"high/{name}": high[name]}
    return summary


def _wide(x: Inputs) -> Iterator[tuple[str, Tensor]]:
    for name, t in real_tensors(x, "noise").items():
        yield name, t.to(torch.float32 if t.device.type == "mps" else torch.float64)

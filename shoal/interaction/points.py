"""Points: the inputs at which members are compared, in function space and by input gradients.

On the training data the likelihood fixes what the members say, so repulsion there can only oppose
the data. Between and beyond the data nothing fixes the members, and repulsion at such points keeps
them different. Steger et al. (2024), arXiv 2412.15758, compare members at augmented and unlabelled
inputs for this reason.

A kind of points draws P inputs at every step, from the batch and a key (`shoal.core.random`). The
draw depends on seed and step alone, and never waits for the device. Every point also has a *row* of
the batch, from whose target the score of input gradients is taken: the row that the point was made
from, or a random row for points from elsewhere. Points have no weights of their own, and weights of
data points do not apply to them.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.random import hashed, many_normal, many_uniform, uniform
from shoal.core.registry import Registry, unstored_field
from shoal.core.structure import Inputs, Structured
from shoal.core.types import Tree

__all__ = [
    "Augmented",
    "Batch",
    "Drawn",
    "Mixup",
    "Noise",
    "OtherData",
    "Points",
    "Uniform",
    "Unlabelled",
    "beta",
    "points_of",
    "real_tensors",
    "registry",
]

registry = Registry("kind of points")


class Drawn(NamedTuple):
    """Points of one step.

    Attributes:
        x: inputs [P, ...].
        rows: for every point, a row of the batch [P].
        leading: the points are the first rows of the batch of every member.
    """

    x: Inputs
    rows: Tensor
    leading: bool = False


class Points(Protocol):
    """A kind of points."""

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """Points for a batch of inputs [B, ...]."""
        ...


def points_of(value: Any) -> Points:
    """An entry of the registry, from itself, its name, its table, or inputs of the user's.

    >>> points_of("mixup"), points_of({"name": "noise", "scale": 0.5})
    (Mixup(alpha=1.0, count=None), Noise(scale=0.5, count=None))
    """
    if isinstance(value, str):
        return registry.make(value)
    inputs: Any = value
    if isinstance(value, Mapping) and isinstance(value.get("name"), str):
        return registry.make({**value})
    return inputs if hasattr(inputs, "draw") else Unlabelled(inputs)


@registry.register("batch")
@dataclass(frozen=True)
class Batch:
    """The data points of the batch themselves."""

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """The batch, unchanged."""
        return _some(x, None, key)


@registry.register("augmented", cite=("steger2024function",))
@dataclass(frozen=True)
class Augmented:
    """The batch, augmented: images that are cropped, mirrored or changed by your own function.

    Attributes:
        augment: name or table of `shoal list augmentations`, or a function of (x, key).
        count: points per step; by default as many as data points in the batch.
        function: the augmentation, once the name is known.
    """

    augment: Any = "crop-flip"
    count: int | None = None
    function: Any = unstored_field()

    def __post_init__(self) -> None:
        _check_count(self.count)

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """augment(x) for rows x of the batch."""
        function = _prepared(self.function, "augmented")
        base = _some(x, self.count, key)
        if not isinstance(base.x, Tensor):
            raise DataError("augmented points need inputs of one tensor; choose points='noise'")
        return Drawn(function(base.x, hashed(key + 1)), base.rows)


@registry.register("unlabelled", cite=("steger2024function",))
@dataclass(frozen=True)
class Unlabelled:
    """Inputs of your own without targets: an array, a tensor, a structure, a data set or a loader.

    Every step draws `count` of them at random. A loader is read once, before training. A run stores
    the digest of the inputs and not the inputs: to resume, give the same inputs again.

    Attributes:
        x: the inputs.
        count: points per step; by default as many as data points in the batch.
        sha256: digest of the inputs, set by `fit`.
    """

    x: Any = unstored_field()
    count: int | None = None
    sha256: str = ""

    def __post_init__(self) -> None:
        _check_count(self.count)

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """Random inputs of the user's."""
        return _from_pool(self.x, x, self.count, key, "unlabelled")


@registry.register("dataset", cite=("steger2024function",))
@dataclass(frozen=True)
class OtherData:
    """Training inputs of another data set, by its name or as a `Dataset`.

    Attributes:
        data: name or table of `shoal list datasets`, or a `Dataset`.
        count: points per step; by default as many as data points in the batch.
        x: the inputs, once the data set is loaded.
    """

    data: Any = ""
    count: int | None = None
    x: Any = unstored_field()

    def __post_init__(self) -> None:
        _check_count(self.count)

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """Random inputs of the other data set."""
        return _from_pool(self.x, x, self.count, key, "dataset")


@registry.register("noise")
@dataclass(frozen=True)
class Noise:
    """Gaussian noise around the data: x + scale * std * normal.

    The standard deviation std of every coordinate is that of the training inputs. Integers of a
    structure stay those of the row.

    Attributes:
        scale: size of the noise in standard deviations.
        count: points per step; by default as many as data points in the batch.
        statistics: `std/NAME` of every real input, fitted by `fit`.
    """

    scale: float = 1.0
    count: int | None = None
    statistics: Tree | None = unstored_field()

    fits = ("std",)

    def __post_init__(self) -> None:
        _check_count(self.count)
        if not self.scale > 0:
            raise ConfigError(f"scale of the noise must be positive, not {self.scale}")

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """x + scale * std * normal for rows x of the batch."""
        known = _prepared(self.statistics, "noise")
        base, tensors = _some(x, self.count, key), {}
        for index, (name, t) in enumerate(real_tensors(base.x, "noise").items()):
            normal = many_normal(hashed(key + 1 + index), t.shape, t.dtype)
            tensors[name] = t + self.scale * known[f"std/{name}"].to(t) * normal
        return Drawn(_replaced(base.x, tensors), base.rows)


@registry.register("uniform")
@dataclass(frozen=True)
class Uniform:
    """Uniform noise in the box of the data: from low - margin * width to high + margin * width.

    Every coordinate is drawn by itself, within its range in the training inputs. Integers of a
    structure are those of a row of the batch.

    Attributes:
        margin: share of the width that is added on each side.
        count: points per step; by default as many as data points in the batch.
        statistics: `low/NAME` and `high/NAME` of every real input, fitted by `fit`.
    """

    margin: float = 0.1
    count: int | None = None
    statistics: Tree | None = unstored_field()

    fits = ("low", "high")

    def __post_init__(self) -> None:
        _check_count(self.count)
        if not self.margin > -0.5:
            raise ConfigError(f"margin of a box must be above -0.5, not {self.margin}")

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """low - margin * width + (1 + 2 margin) * width * uniform."""
        known = _prepared(self.statistics, "uniform")
        base, tensors = _some(x, self.count, key), {}
        for index, (name, t) in enumerate(real_tensors(base.x, "uniform").items()):
            low, high = (known[f"{end}/{name}"].to(t) for end in self.fits)
            u = many_uniform(hashed(key + 1 + index), t.shape, t.dtype)
            width = high - low
            tensors[name] = low - self.margin * width + (1 + 2 * self.margin) * width * u
        return Drawn(_replaced(base.x, tensors), base.rows)


@registry.register("mixup", cite=("zhang2018mixup",))
@dataclass(frozen=True)
class Mixup:
    r"""Mixtures of two different rows of the batch: $λ x_i + (1 - λ) x_j$, λ ~ Beta(alpha, alpha).

    Points lie between the data. Integers of a structure are those of row i, which also gives the
    target of the score. Zhang et al. (2018), arXiv 1710.09412.

    Attributes:
        alpha: 1 draws λ uniformly; below 1 near the rows, above 1 near their middle.
        count: points per step; by default as many as data points in the batch.
    """

    alpha: float = 1.0
    count: int | None = None

    def __post_init__(self) -> None:
        _check_count(self.count)
        if not self.alpha > 0:
            raise ConfigError(f"alpha of a mixture must be positive, not {self.alpha}")

    def draw(self, x: Inputs, key: Tensor) -> Drawn:
        """Mixtures of rows x of the batch with other rows."""
        base = _some(x, self.count, key)
        size = len(x)
        step = 1 + _whole_below(max(size - 1, 1), uniform(hashed(key + 1), base.rows.shape))
        other = x[(base.rows + step) % size]
        share = beta(self.alpha, hashed(key + 2), base.rows.shape)
        tensors = {}
        for name, t in real_tensors(base.x, "mixup").items():
            part = share.to(t.dtype).reshape(-1, *(1,) * (t.ndim - 1))
            tensors[name] = part * t + (1 - part) * real_tensors(other, "mixup")[name]
        return Drawn(_replaced(base.x, tensors), base.rows)


def beta(alpha: float, key: Tensor, shape: torch.Size) -> Tensor:
    r"""Numbers from Beta(alpha, alpha) in double precision, without rejection.

    $T = \sqrt{2a (U^{-1/a} - 1)} \cos 2πV$ has a Student distribution of 2a degrees of freedom
    (Bailey, 1994), and $\frac12 + T / (2 \sqrt{2a + T²})$ has the Beta distribution (Devroye, 1996,
    "Random variate generation in one line of code").
    """
    u, v = uniform(key, (2, *shape))
    # The exponent is limited, since infinity over infinity is no number.
    square = torch.expm1((-(1 - u).log() / alpha).clamp(max=80.0))
    turn = (2 * math.pi * v).cos()
    away = square.sqrt() * turn / (1 + square * turn.square()).sqrt()
    return (0.5 + 0.5 * away).clamp(0.0, 1.0)


def real_tensors(x: Inputs, kind: str) -> Tree:
    """The real inputs by name; a single tensor is called "x"."""
    if isinstance(x, Tensor) and x.is_floating_point():
        return {"x": x}
    real = {}
    if isinstance(x, Structured):
        real = {name: t for name, t in x.tensors.items() if t.is_floating_point() and t.ndim > 0}
    if not real:
        raise DataError(
            f"points '{kind}' change real inputs, and these are integers or objects; give inputs "
            f"of your own, points=shoal.points.Unlabelled(x)"
        )
    return real


def _replaced(x: Inputs, tensors: Tree) -> Inputs:
    if isinstance(x, Structured):
        return type(x)({**x.tensors, **tensors}, x.form)
    return tensors["x"]


def _some(x: Inputs, count: int | None, key: Tensor) -> Drawn:
    """All rows of a batch, or `count` random ones."""
    if not isinstance(x, (Tensor, Structured)):
        raise DataError(
            f"a {type(x).__name__} has no rows from which points could be drawn; leave points out"
        )
    if count is None:
        return Drawn(x, torch.arange(len(x), device=x.device))
    rows = _whole_below(len(x), uniform(hashed(key), (count,)))
    return Drawn(x.index_select(0, rows), rows)


def _from_pool(pool: Any, x: Inputs, count: int | None, key: Tensor, kind: str) -> Drawn:
    """Random rows of a pool of inputs, and random rows of the batch."""
    pool = _prepared(pool if isinstance(pool, (Tensor, Structured)) else None, kind)
    places, rows = uniform(hashed(key), (2, len(x) if count is None else count))
    return Drawn(pool.index_select(0, _whole_below(len(pool), places)), _whole_below(len(x), rows))


def _whole_below(size: int, u: Tensor) -> Tensor:
    """Whole numbers from 0 to size - 1, from numbers in [0, 1)."""
    return (u * size).long().clamp(max=size - 1)


def _prepared(value: Any, kind: str) -> Any:
    """What `fit` prepared for the points."""
    if value is None:
        raise ConfigError(
            f"points '{kind}' are prepared before training; train with shoal.fit or shoal.Stepper"
        )
    return value


def _check_count(count: Any) -> None:
    whole = isinstance(count, int) and not isinstance(count, bool)
    if count is not None and not (whole and count >= 1):
        raise ConfigError(f"count must be a whole number of points from 1 on, not {count!r}")

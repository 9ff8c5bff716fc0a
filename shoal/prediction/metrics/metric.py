"""The registry of metrics: a function, the predictions it applies to, the better direction."""

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry
from shoal.prediction.predictive import prediction

__all__ = [
    "ANY",
    "BINARY",
    "CLASSES",
    "INTERVALS",
    "LOSS",
    "NUMBERS",
    "ORDINAL",
    "OUTPUTS",
    "RANKED",
    "Better",
    "Metric",
    "average",
    "of_points",
    "point_weight",
    "register",
    "registry",
    "weighing",
]

registry = Registry("metric")

Better = Literal["lower", "higher", "neither"]
F = TypeVar("F", bound=Callable[..., Any])

ANY = ("any",)
CLASSES = ("classes",)
BINARY = ("binary",)
ORDINAL = ("ordinal",)
NUMBERS = ("numbers",)
RANKED = ("ranked", "gaussian")
INTERVALS = ("intervals", "gaussian")
LOSS = ("loss",)
OUTPUTS = ("any", "loss")
"""Metrics that need the outputs alone."""


@dataclass(frozen=True)
class Metric:
    """A metric: one number for a prediction.

    Attributes:
        function: `function(pred, y)`, or `function(pred_test, pred_ood)` when `ood` is set.
        kinds: kinds of predictions that the metric applies to; see `Task`.
        better: "lower", "higher", or "neither" for descriptive numbers.
        ood: whether the metric compares test and OOD predictions.
        weighs: whether data points may have weights that are not whole numbers.
    """

    function: Callable[..., float]
    kinds: tuple[str, ...]
    better: Better
    ood: bool = False
    weighs: bool = True

    def __post_init__(self) -> None:
        vars(self)["__doc__"] = inspect.getdoc(self.function)

    def fits(self, pred: Any) -> bool:
        """Whether the metric applies to a prediction."""
        return any(kind in pred.likelihood.about.kinds for kind in self.kinds)

    def __call__(self, pred: Any, other: Any) -> float:
        return self.function(pred, other)


def register(
    name: str,
    kinds: tuple[str, ...],
    better: Better,
    *,
    ood: bool = False,
    weighs: bool = True,
    cite: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Decorator that registers a function as a metric, of the data points that count."""

    def file(function: F) -> F:
        metric_function = of_points(function, kinds, ood)
        registry.register(name, cite=cite)(Metric(metric_function, kinds, better, ood, weighs))
        return metric_function

    return file


def of_points(function: F, kinds: tuple[str, ...] = (), ood: bool = False) -> F:
    """Decorator that calls `function(pred, y)` with sites as data points, without ignored ones.

    The second argument is a prediction for OOD metrics. Predictions of other kinds are refused.
    """
    first, second = list(inspect.signature(function).parameters)[:2]

    @functools.wraps(function)
    def wrapped(*args: Any, **options: Any) -> Any:
        given = dict(zip((first, second), args, strict=False))
        given |= {name: options.pop(name) for name in (first, second) if name in options}
        if first not in given:
            return function(*args, **options)  # which says that it is missing
        pred, y = prediction(first, given[first]), given.get(second)
        if kinds and not {*kinds} & {*pred.likelihood.about.kinds}:
            raise ConfigError(
                f"{pred.task} has no {function.__name__}; see shoal.evaluate(pred, y)"
            )
        if ood:
            others = prediction(second, y).points()[0]
            return function(pred.points()[0], others, *args[2:], **options)
        return function(*pred.points(y), *args[2:], **options)

    return wrapped  # pyright: ignore[reportReturnType]


def average(values: Tensor) -> float:
    """Mean of all entries, summed in double precision; weighted inside of `weighing`."""
    weight = point_weight()
    if weight is None:
        return float(values.double().mean())
    rows = values.double().reshape(len(values), -1).mean(1)
    return float((rows * weight).sum() / weight.sum())


_WEIGHT: ContextVar[Tensor | None] = ContextVar("weight of the data points", default=None)


def point_weight() -> Tensor | None:
    """Weights of the data points [B] of the present evaluation; None for equal weights."""
    return _WEIGHT.get()


@contextmanager
def weighing(weight: Tensor | None) -> Iterator[None]:
    """A block in which metrics are weighted means over the data points."""
    token = _WEIGHT.set(None if weight is None else weight.double())
    try:
        yield
    finally:
        _WEIGHT.reset(token)

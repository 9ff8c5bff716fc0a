"""The registry of metrics: a function, the predictions it applies to, the better direction."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

from torch import Tensor

from shoal.core.registry import Registry

__all__ = [
    "ANY",
    "CLASSES",
    "GAUSSIAN",
    "NUMBERS",
    "Better",
    "Metric",
    "average",
    "register",
    "registry",
]

registry = Registry("metric")

Better = Literal["lower", "higher", "neither"]
F = TypeVar("F", bound=Callable[..., float])

ANY = ("any",)
CLASSES = ("classes",)
NUMBERS = ("numbers",)
GAUSSIAN = ("gaussian",)


@dataclass(frozen=True)
class Metric:
    """A metric: one number for a prediction.

    Attributes:
        function: `function(pred, y)`, or `function(pred_test, pred_ood)` when `ood` is set.
        kinds: kinds of predictions that the metric applies to; see `inference.likelihood.Task`.
        better: "lower", "higher", or "neither" for descriptive numbers.
        ood: whether the metric compares test and OOD predictions.
    """

    function: Callable[..., float]
    kinds: tuple[str, ...]
    better: Better
    ood: bool = False

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
    cite: tuple[str, ...] = (),
) -> Callable[[F], F]:
    """Decorator that registers a function as a metric; the function itself does not change."""

    def file(function: F) -> F:
        registry.register(name, cite=cite)(Metric(function, kinds, better, ood))
        return function

    return file


def average(values: Tensor) -> float:
    """Mean of all entries, summed in double precision."""
    return float(values.double().mean())

"""The registry of metrics: a function, what it judges, and which direction is better."""

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
    """One number about a prediction.

    Attributes:
        function: `function(pred, y)`, or `function(pred_test, pred_ood)` when `ood` is set.
        kinds: of the predictions it judges; `inference.likelihood.Task` says what they are.
        better: "lower", "higher", or "neither" for numbers that describe and do not judge.
        ood: whether it compares with a prediction for data of another kind.
    """

    function: Callable[..., float]
    kinds: tuple[str, ...]
    better: Better
    ood: bool = False

    def __post_init__(self) -> None:
        vars(self)["__doc__"] = inspect.getdoc(self.function)

    def fits(self, pred: Any) -> bool:
        """Whether it can judge a prediction."""
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
    """Decorator that files a function as a metric and leaves the function as it is."""

    def file(function: F) -> F:
        registry.register(name, cite=cite)(Metric(function, kinds, better, ood))
        return function

    return file


def average(values: Tensor) -> float:
    """Mean of all entries, summed in double precision."""
    return float(values.double().mean())

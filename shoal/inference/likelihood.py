"""The interface of a likelihood, which defines the task of the targets."""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import Registry
from shoal.data.dataset import Scaling

__all__ = ["Likelihood", "Task", "registry", "task_of"]

registry = Registry("likelihood")


@dataclass(frozen=True)
class Task:
    """Description of a likelihood's task for metrics and the report, as plain data.

    Metrics are named, not imported: a metric registers itself with its kind and its better
    direction. Every likelihood has the kind "any". The kind "classes" has class probabilities,
    "numbers" a mean and a variance, "gaussian" a mixture of Gaussians.

    Attributes:
        name: name of the task, such as "classification".
        kinds: the kinds of metrics that apply.
        measures: metrics in the report, the most important first.
        under_shift: metrics that the report plots against corruption severity. The first metric
            determines the worst shift.
        uncertainty: the score for OOD detection, such as "entropy".
    """

    name: str
    kinds: tuple[str, ...] = ("any", "numbers")
    measures: tuple[str, ...] = ("rmse", "nll", "sharpness", "effective_functions")
    under_shift: tuple[str, ...] = ("rmse", "nll")
    uncertainty: str = "variance"

    @property
    def has_classes(self) -> bool:
        """Whether the targets are labels with class probabilities."""
        return "classes" in self.kinds

    @property
    def plain(self) -> dict[str, Any]:
        """Plain values for a file; `task_of` reads them."""
        return {k: [*v] if isinstance(v, tuple) else v for k, v in asdict(self).items()}


def task_of(known: str | Mapping[str, Any]) -> Task:
    """The task that a file describes; older files have only its name.

    >>> task_of("classification").measures[0]
    'accuracy'
    """
    if not isinstance(known, str):
        fields: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in known.items()
        }
        try:
            return Task(**fields)
        except TypeError as error:
            raise ConfigError(f"the description of the task is not valid: {error}") from None
    for name in registry:
        if registry[name].about.name == known:
            return registry[name].about
    raise ConfigError(f"no likelihood has the task '{known}'; import the file that defines it")


class Likelihood:
    """log p(y | outputs) of every data point, and quantities derived from it.

    A new likelihood is one class: write `about`, `log_prob`, `mean` and `variance`, decorate the
    class with `@dataclass(frozen=True)` and `@registry.register(name)`. The other methods have
    defaults for real targets. Leading axes of the outputs broadcast everywhere.
    """

    about: ClassVar[Task]

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.about.name

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of each target, outputs [..., B, C] and y [B, ...] to [..., B]."""
        raise NotImplementedError

    def mean(self, outputs: Tensor) -> Tensor:
        """Mean of y under each member [..., B, K]; for classes, their probabilities."""
        raise NotImplementedError

    def variance(self, outputs: Tensor) -> Tensor:
        """Variance of y under each member [..., B, K]."""
        raise NotImplementedError

    def width(self, targets: int) -> int:
        """Number of outputs that a member needs for this many classes or target columns."""
        return targets

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y under each member, both [..., B, K]."""
        return self.mean(outputs), self.variance(outputs)

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy [..., B] of a prediction with this mean and variance [..., B, K], in nats.

        By default the entropy of independent Gaussians, the largest for this variance.
        """
        return 0.5 * (2 * math.pi * math.e * variance()).log().sum(-1)

    def affinity(self, outputs: Tensor) -> Tensor:
        r"""Bhattacharyya affinity of members [M, M], the mean over the inputs.

        By default the affinity of independent Gaussians with the same means and variances.
        """
        mean, variance = (moment.double() for moment in self.moments(outputs))
        rows = zip(mean, variance, strict=True)
        return torch.stack([_gaussian_affinity(m, v, mean, variance) for m, v in rows])

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The output of each member for target y [..., B]; input gradients are gradients of it."""
        return outputs[..., : _columns(y)].sum(-1)

    def check(self, y: Tensor, outputs: int) -> None:
        """Refuse targets that do not fit this number of network outputs."""
        columns = _columns(y)
        if outputs != self.width(columns):
            raise DataError(
                f"targets have {columns} columns, for which the likelihood needs "
                f"{self.width(columns)} outputs, but the network has {outputs}"
            )

    def prepared(self, y: Tensor, outputs: int) -> Tensor:
        """Targets in the form that `log_prob` and the metrics take: [B, K]."""
        y = y.unsqueeze(-1) if y.ndim == 1 else y
        if outputs != self.width(y.shape[-1]):
            raise DataError(
                f"y has {y.shape[-1]} columns but the members predict {outputs // self.width(1)}; "
                f"give the columns that the ensemble was trained on"
            )
        return y

    def in_units(self, scaling: Scaling) -> Self:
        """The likelihood of the original targets, if training used targets scaled by `scaling`."""
        raise ConfigError(f"{self} has no standardised targets; evaluate without a scaling")

    # Learned numbers besides the weights. Most likelihoods learn nothing.

    def begun(self, y: Tensor) -> Self:
        """The likelihood at the start of a run on these targets."""
        return self

    @property
    def state(self) -> dict[str, Tensor]:
        """Learned numbers, for a checkpoint."""
        return {}

    def restored(self, state: Mapping[str, Tensor]) -> Self:
        """The likelihood with the learned numbers of a checkpoint."""
        return self

    def statistics(self, outputs: Tensor, y: Tensor, alive: Tensor) -> Tensor | None:
        """Input of `learn` from a batch: outputs [M, B, C] of the finite members [M]."""
        return None

    def learn(self, statistics: Tensor, points: int, n: int) -> None:
        """Learn from a batch of `points` of `n` data points, in place and on the device."""


def _columns(y: Tensor) -> int:
    return 1 if y.ndim == 1 else y.shape[-1]


def _gaussian_affinity(m: Tensor, v: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    total = v + variance
    log_width = 0.5 * (math.log(2) + 0.5 * (v.log() + variance.log()) - total.log())
    return (log_width - 0.25 * (m - mean).square() / total).sum(-1).exp().mean(-1)

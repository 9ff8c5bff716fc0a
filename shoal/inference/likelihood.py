"""What a likelihood is: the one object that knows what kind of task the targets set."""

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
    """What metrics and the report need to know of a likelihood, as plain data.

    Metrics are named, not imported: they register themselves under a kind, together with the
    direction that is better. Every likelihood has the kind "any". "classes" has probabilities of
    classes, "numbers" a mean and a variance, "gaussian" a mixture of Gaussians.

    Attributes:
        name: of the task, such as "classification".
        kinds: the kinds of metrics that apply.
        measures: metrics that the report shows, the most telling first.
        under_shift: metrics that the report draws against the severity of a shift; the first of
            them decides which shift is the worst.
        uncertainty: by which OOD data are detected, such as "entropy".
    """

    name: str
    kinds: tuple[str, ...] = ("any", "numbers")
    measures: tuple[str, ...] = ("rmse", "nll", "sharpness", "effective_functions")
    under_shift: tuple[str, ...] = ("rmse", "nll")
    uncertainty: str = "variance"

    @property
    def has_classes(self) -> bool:
        """The targets are labels, and every class has a probability."""
        return "classes" in self.kinds

    @property
    def plain(self) -> dict[str, Any]:
        """For a file; `task_of` reads it again."""
        return asdict(self)


def task_of(known: str | Mapping[str, Any]) -> Task:
    """The task that a file describes, or names where it is older than descriptions.

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
            raise ConfigError(f"this is not the description of a task: {error}") from None
    for name in registry:
        if registry[name].about.name == known:
            return registry[name].about
    raise ConfigError(f"no likelihood is for the task '{known}'; import the file that defines it")


class Likelihood:
    """log p(y | outputs) of every data point, and all that follows from it.

    A new likelihood is one class: write `about`, `log_prob`, `mean` and `variance`, decorate the
    class with `@dataclass(frozen=True)` and `@registry.register(name)`. The rest has defaults for
    targets that are numbers. Leading axes of the outputs broadcast everywhere.
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
        """Mean of y under each member [..., B, K]; of a class, its probability."""
        raise NotImplementedError

    def variance(self, outputs: Tensor) -> Tensor:
        """Variance of y under each member [..., B, K]."""
        raise NotImplementedError

    def width(self, targets: int) -> int:
        """How many outputs a member needs for this many classes or target columns."""
        return targets

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y under each member, both [..., B, K]."""
        return self.mean(outputs), self.variance(outputs)

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy [..., B] of a prediction with this mean and variance [..., B, K], in nats.

        By default that of independent Gaussians, the largest for the variance.
        """
        return 0.5 * (2 * math.pi * math.e * variance()).log().sum(-1)

    def affinity(self, outputs: Tensor) -> Tensor:
        r"""Bhattacharyya affinity of members [M, M], the mean over the inputs.

        By default that of independent Gaussians with the same means and variances.
        """
        mean, variance = (moment.double() for moment in self.moments(outputs))
        rows = zip(mean, variance, strict=True)
        return torch.stack([_gaussian_affinity(m, v, mean, variance) for m, v in rows])

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The output of each member that speaks about y [..., B]; input gradients are of it."""
        return outputs[..., : _columns(y)].sum(-1)

    def check(self, y: Tensor, outputs: int) -> None:
        """Refuse targets that networks with so many outputs cannot be trained on."""
        columns = _columns(y)
        if outputs != self.width(columns):
            raise DataError(
                f"targets have {columns} columns, for which the likelihood needs "
                f"{self.width(columns)} outputs, but the network has {outputs}"
            )

    def prepared(self, y: Tensor, outputs: int) -> Tensor:
        """Targets to evaluate by, as `log_prob` and the metrics take them: [B, K]."""
        y = y.unsqueeze(-1) if y.ndim == 1 else y
        if outputs != self.width(y.shape[-1]):
            raise DataError(
                f"y has {y.shape[-1]} columns but the members predict {outputs // self.width(1)}; "
                f"give the columns that the ensemble was trained on"
            )
        return y

    def in_units(self, scaling: Scaling) -> Self:
        """The same about targets that had been standardised by `scaling` before training."""
        raise ConfigError(f"{self} is not about standardised targets; evaluate without a scaling")

    # What is learned beside the weights. Most likelihoods learn nothing.

    def begun(self, y: Tensor) -> Self:
        """The likelihood that a run on these targets trains with."""
        return self

    @property
    def state(self) -> dict[str, Tensor]:
        """Learned numbers, for a checkpoint."""
        return {}

    def restored(self, state: Mapping[str, Tensor]) -> Self:
        """The same with the learned numbers of a checkpoint."""
        return self

    def statistics(self, outputs: Tensor, y: Tensor, alive: Tensor) -> Tensor | None:
        """What `learn` needs of a batch, from outputs [M, B, C] of the members [M] that count."""
        return None

    def learn(self, statistics: Tensor, points: int, n: int) -> None:
        """Take in a batch of `points` of `n` data points, in place and on the device."""


def _columns(y: Tensor) -> int:
    return 1 if y.ndim == 1 else y.shape[-1]


def _gaussian_affinity(m: Tensor, v: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    total = v + variance
    log_width = 0.5 * (math.log(2) + 0.5 * (v.log() + variance.log()) - total.log())
    return (log_width - 0.25 * (m - mean).square() / total).sum(-1).exp().mean(-1)

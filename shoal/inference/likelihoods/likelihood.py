"""The interface of a likelihood, which defines the task of the targets."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.core.registry import Registry
from shoal.data.dataset import Scaling

__all__ = [
    "PAIRED",
    "Likelihood",
    "Task",
    "as_columns",
    "gaussian_affinity",
    "gaussian_distance",
    "registry",
    "shares_of",
    "task_of",
    "weighted",
]

registry = Registry("likelihood")

_SMALLEST = torch.finfo(torch.float64).tiny

_REACH, _PLACES = 9.0, 181
"""Standard deviations, as sinh of the first number, and places of the integral over targets."""

PAIRED = 256
"""Most Gaussian members whose expected distances are summed over all pairs."""

_TAIL, _PER_WIDTH, _FEWEST, _MOST = 8.5, 3.0, 33, 257
"""Standard deviations beyond the means, places per standard deviation, and how many in all."""


@dataclass(frozen=True)
class Task:
    """Description of a likelihood's task for metrics and the report, as plain data.

    Metrics are named, not imported: a metric registers itself with its kind and its better
    direction. Every likelihood has the kind "any", except a custom loss, which has only the kind
    "loss". The kind "classes" has class probabilities, "binary" two classes per column, "ordinal"
    classes in order. "numbers" has a mean and a variance, "intervals" a distribution function
    (`cdf`), "ranked" expected distances too (`distance`, `own_distance`), for CRPS. "gaussian" is a
    mixture of Gaussians, which has all of them.

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
            task = Task(**fields)
        except TypeError as error:
            raise ConfigError(f"the description of the task is not valid: {error}") from None
        for name, value in vars(task).items():
            words = value if isinstance(getattr(Task, name, ""), tuple) else (value,)
            if not (isinstance(words, tuple) and all(isinstance(word, str) for word in words)):
                raise ConfigError(f"the description of the task is not valid: {name} is not text")
        return task
    for name in registry:
        if registry[name].about.name == known:
            return registry[name].about
    raise ConfigError(f"no likelihood has the task '{known}'; import the file that defines it")


class Likelihood:
    """log p(y | outputs) of every data point, and quantities derived from it.

    A new likelihood is one class: write `about`, `log_prob`, `mean` and `variance`, decorate the
    class with `@dataclass(frozen=True)` and `@registry.register(name)`. The other methods have
    defaults for real targets.

    Outputs are [..., B, *S, C] with leading axes that broadcast everywhere. S is empty, (T,) for
    tokens or (H, W) for dense labels: the sites of a data point. Targets are [B, *S] or, with K
    columns, [B, *S, K].

    Attributes:
        about: the task.
        discrete: the targets are whole numbers, so `cdf` is a staircase.
        standardises: real targets may stay in double precision, since their unit is removed.
        derivatives_by: derivatives that the outputs of members end in; None for outputs alone.
    """

    about: ClassVar[Task]
    discrete: ClassVar[bool] = False
    standardises: ClassVar[bool] = False
    derivatives_by: ClassVar[Any] = None

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.about.name

    def __repr__(self) -> str:
        """The settings of a registered likelihood, and the numbers of its calibration."""
        if not registry.has_kind(type(self)):
            return super().__repr__()
        settings = {k: repr(v) for k, v in registry.spec(self).items() if k != "name"}
        for name, values in self.calibration.items():
            settings[name] = ", ".join(f"{value:.3g}" for value in values)
        return f"{type(self).__name__}({', '.join(f'{k}={v}' for k, v in settings.items())})"

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of each target, outputs [..., B, *S, C] to [..., B, *S]."""
        raise NotImplementedError

    def objective(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What training maximises for each target [..., B, *S]; by default `log_prob`."""
        return self.log_prob(outputs, y)

    def with_gradient(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """`objective`, and its gradient [..., B, *S, C] by a formula; None where there is none.

        A class inherits no formula, since it may have another density.
        """
        return None

    def weight(self, y: Tensor) -> Tensor | None:
        """How much each target counts in training [B, *S]; None if all count 1."""
        return None

    def counted(self, y: Tensor) -> Tensor | None:
        """Which targets metrics count [B, *S]; None for all."""
        return None

    def mean(self, outputs: Tensor) -> Tensor:
        """Mean of y under each member [..., B, *S, K]; for classes, their probabilities."""
        raise NotImplementedError

    def variance(self, outputs: Tensor) -> Tensor:
        """Variance of y under each member [..., B, *S, K]."""
        raise NotImplementedError

    def width(self, targets: int) -> int:
        """Number of outputs that a member needs for this many classes or target columns."""
        return targets

    def width_for(self, y: Tensor, classes: int) -> int:
        """Number of outputs for targets [B] or [B, K] that have `classes` classes, if any."""
        return self.width(classes if self.about.has_classes else _columns(y))

    def moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of y under each member, both [..., B, *S, K]."""
        return self.mean(outputs), self.variance(outputs)

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """P(Y <= y) of each column [..., B, *S, K], in double precision, for intervals.

        By default Phi((y - mean) / std), if the likelihood has the kind "gaussian".
        """
        if "gaussian" not in self.about.kinds:
            raise ConfigError(
                f"{self.task} has no distribution function, so there are no intervals"
            )
        mean, variance = (moment.double() for moment in self.moments(outputs))
        y = as_columns(y, mean, mean.shape[-1])
        return torch.special.ndtr((y - mean) / variance.sqrt())

    def distance(self, outputs: Tensor, y: Tensor) -> Tensor:
        """E|Y - y| of each column under each member [..., K]; by default of Gaussians."""
        mean, variance = (moment.double() for moment in self.moments(outputs))
        return gaussian_distance(as_columns(y, mean, mean.shape[-1]) - mean, variance)

    def own_distance(self, outputs: Tensor) -> Tensor:
        """E|Y - Y'| of two targets of the same member [..., K]; by default of Gaussians."""
        return 2 * (self.variance(outputs).double() / math.pi).sqrt()

    def mixture_distance(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """E|Y - Y'| of two targets of the mixture [B, *S, K], of members [M, B, *S, C]."""
        if len(outputs) > PAIRED and (known := self.gaussian_members(outputs)) is not None:
            places = _at_places(*known, shares_of(known[0], weights))
            return sum(((1 - below.square()) * size for _, below, size in places), torch.zeros(()))
        each = self.distances_to_mixture(outputs, weights)
        return weighted(shares_of(each, weights), each)

    def distances_to_mixture(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        r"""E|Y_i - Y'| of a target of each member and one of the mixture [M, B, *S, K].

        By default that of Gaussians; for other kinds $\int F_i (1 - F) + F (1 - F_i)$, by the
        trapezoidal rule in u of y = mean + std sinh u. More than 256 Gaussian or log-normal members
        take the integral, too. Its relative error is below 1e-3 for the mixture and 1e-2 for one
        member, and 3 % if some members lie thousands of standard deviations away.
        """
        if len(outputs) > PAIRED and (known := self.gaussian_members(outputs)) is not None:
            places = _at_places(*known, shares_of(known[0], weights))
            return sum(((1 - each * below) * size for each, below, size in places), torch.zeros(()))
        mean, variance = (moment.double() for moment in self.moments(outputs))
        shares = shares_of(mean, weights)
        if "gaussian" in self.about.kinds:
            rows = zip(mean, variance, strict=True)
            each = [gaussian_distance(m - mean, v + variance) for m, v in rows]
            return torch.stack([weighted(shares, row) for row in each])
        middle = weighted(shares, mean)
        width = weighted(shares, variance + (mean - middle).square()).sqrt()
        places = torch.linspace(-_REACH, _REACH, _PLACES).tolist()
        total = torch.zeros_like(mean)
        for u in places:
            each = self.cdf(outputs, middle + width * math.sinh(u))
            below = weighted(shares, each)
            total += (each * (1 - below) + below * (1 - each)) * math.cosh(u)
        return width * total * (places[1] - places[0])

    def gaussian_members(self, outputs: Tensor) -> tuple[Tensor, Tensor, bool] | None:
        """Means and variances of members whose y, or log y if True, is Gaussian; None for others.

        In double precision.
        """
        if "gaussian" not in self.about.kinds:
            return None
        mean, variance = self.moments(outputs)
        return mean.double(), variance.double(), False

    def ranked_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """CRPS of each column under each member [..., K]: E|Y - y| - E|Y - Y'| / 2."""
        return self.distance(outputs, y) - 0.5 * self.own_distance(outputs)

    @property
    def unit(self) -> Tensor | float:
        """Typical size of the targets' deviations in each column [K], for sums over columns."""
        return 1.0

    def mixture_log_prob(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """Log density under a mixture of the members [M, B, *S, C] with weights [M]."""
        each = self.log_prob(outputs, y)
        if weights is None:
            return each.logsumexp(0) - math.log(len(each))
        return (each + weights.log().view(-1, *[1] * (each.ndim - 1))).logsumexp(0)

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy [..., B, *S] of a prediction with this mean and variance, in nats.

        By default the entropy of independent Gaussians, the largest for this variance.
        """
        return 0.5 * (2 * math.pi * math.e * variance()).log().sum(-1)

    def affinity(self, outputs: Tensor) -> Tensor:
        r"""Bhattacharyya affinity of members [M, M], the mean over the inputs.

        By default the affinity of independent Gaussians with the same means and variances.
        """
        return gaussian_affinity(*self.moments(outputs))

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The output of each member for target y [..., B, *S]; the source of input gradients."""
        at_sites = y.ndim > 1 and y.shape == outputs.shape[-1 - y.ndim : -1]
        one = y.ndim == 1 or at_sites
        return outputs[..., : outputs.shape[-1] // self.width(1) if one else y.shape[-1]].sum(-1)

    # Classes. A likelihood of the kind "classes" may have targets that are probabilities.

    def probs(self, outputs: Tensor) -> Tensor:
        """Class probabilities [..., C]; by default the mean."""
        return self.mean(outputs)

    def predicted(self, outputs: Tensor) -> Tensor:
        """The most probable class of each member."""
        return self.probs(outputs).argmax(-1)

    def labels(self, y: Tensor) -> Tensor:
        """The class of each target; for soft labels, the most probable class."""
        return y

    def target_probs(self, y: Tensor, classes: int) -> Tensor:
        """The class probabilities [..., C] of targets: one-hot rows, or the soft labels."""
        return torch.nn.functional.one_hot(y, classes)

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse targets that do not fit this number of network outputs and axes of sites."""
        columns = _columns(y, sites)
        if outputs != self.width(columns):
            raise DataError(
                f"targets have {columns} columns, for which the likelihood needs "
                f"{self.width(columns)} outputs, but the network has {outputs}"
            )

    def prepared(self, y: Tensor, outputs: int, sites: int = 0) -> Tensor:
        """Targets in the form that `log_prob` and the metrics take: [B, *S, K]."""
        y = y.unsqueeze(-1) if y.ndim == 1 + sites else y
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

    def initialised_from(self, y: Tensor, sites: int = 0, weight: Tensor | None = None) -> Self:
        """The likelihood at the start of a run on these targets with weights [B]."""
        return self.uncalibrated

    @property
    def state(self) -> dict[str, Tensor]:
        """Learned numbers, for a checkpoint."""
        return {}

    def restored(self, state: Mapping[str, Tensor]) -> Self:
        """The likelihood with the learned numbers of a checkpoint."""
        return self

    @property
    def calibration(self) -> dict[str, list[float]]:
        """The numbers of a calibration, by name; empty before one."""
        return {}

    def calibrated(self, values: Tensor) -> Self:
        """The likelihood with the numbers of a calibration; see `shoal.calibrate`."""
        raise ConfigError(
            f"{self.task} has no noise and no logits to calibrate; "
            f"use shoal.decisions.conformal_intervals"
        )

    @property
    def uncalibrated(self) -> Self:
        """The likelihood without its calibration, as it trains members."""
        return self

    def moved_apart(self, outputs: Tensor, factor: float) -> Tensor:
        """Outputs [M, ..., C] whose locations or logits lie `factor` times as far from their mean.

        By default the first output of each column, or all logits of classes.
        """
        count = outputs.shape[-1] // (1 if self.about.has_classes else self.width(1))
        location, rest = outputs[..., :count], outputs[..., count:]
        mean = location.mean(0)
        return torch.cat([mean + factor * (location - mean), rest], -1)

    def statistics(
        self, outputs: Tensor, y: Tensor, alive: Tensor, weight: Tensor | None = None
    ) -> Tensor | None:
        """Input of `learn` from a batch: outputs [M, B, *S, C] of the finite members [M].

        `weight` [B, *S] says how much each target counts; None if all count 1.
        """
        return None

    def learn(self, statistics: Tensor, points: float, n: float) -> None:
        """Learn from a batch of `points` of `n` data points, in place and on the device."""


def as_columns(y: Tensor, outputs: Tensor, columns: int) -> Tensor:
    """Targets with their column axis, [B, *S, K], for outputs [..., B, *S, C] of K columns.

    A target [B, *S] without the axis has one column.

    >>> as_columns(torch.zeros(5, 7), torch.zeros(2, 5, 7, 1), 1).shape
    torch.Size([5, 7, 1])
    """
    if y.ndim <= 1:
        return y.unsqueeze(-1)
    fits = y.shape[-1] == columns and y.shape[:-1] == outputs.shape[-y.ndim : -1]
    at_sites = y.shape == outputs.shape[-1 - y.ndim : -1]
    if columns == 1 and at_sites and not fits:
        return y.unsqueeze(-1)
    if y.shape[-1] != columns:
        raise DataError(
            f"targets have {y.shape[-1]} columns but the members predict {columns}; "
            f"give the network one mean per column"
        )
    return y


def _columns(y: Tensor, sites: int = 0) -> int:
    if y.ndim not in (1 + sites, 2 + sites):
        wanted = ", ".join(["N", *(["site"] * sites)])
        raise DataError(
            f"y has shape {tuple(y.shape)}; wanted ({wanted}) or ({wanted}, columns), as the "
            f"outputs of the network"
        )
    return 1 if y.ndim == 1 + sites else y.shape[-1]


def shares_of(members: Tensor, weights: Tensor | None) -> Tensor:
    """The weights of members [M, ...] in their type, equal ones for None."""
    equal = torch.full(members.shape[:1], 1 / len(members), dtype=torch.float64)
    return (equal if weights is None else weights).to(members)


def weighted(shares: Tensor, values: Tensor) -> Tensor:
    """The mean of values [M, ...] with weights [M]."""
    return torch.tensordot(shares, values, 1)


def gaussian_affinity(mean: Tensor, variance: Tensor) -> Tensor:
    """Mean affinity [M, M] of independent Gaussians with moments [M, B, *S, K]."""
    mean, variance = (moment.double().flatten(1, -2) for moment in (mean, variance))
    variance = variance.clamp_min(_SMALLEST)
    rows = []
    for m, v in zip(mean, variance, strict=True):
        total = v + variance
        log_width = 0.5 * (math.log(2) + 0.5 * (v.log() + variance.log()) - total.log())
        exponent = (log_width - 0.25 * (m - mean).square() / total).sum(-1)
        rows.append(exponent.exp().mean(-1))
    return torch.stack(rows)


def gaussian_distance(shift: Tensor, variance: Tensor) -> Tensor:
    r"""E|X| of X ~ N(shift, variance): $2 σ φ(μ/σ) + μ (2 Φ(μ/σ) - 1)$.

    >>> gaussian_distance(torch.zeros(1), torch.full((1,), torch.pi))
    tensor([1.4142])
    """
    scale = variance.sqrt()
    density = (-0.5 * shift.square() / variance).exp() / math.sqrt(2 * math.pi)
    return 2 * scale * density + shift * torch.special.erf(shift / (scale * math.sqrt(2)))


def _at_places(
    mean: Tensor, variance: Tensor, logs: bool, shares: Tensor
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    r"""For places y of an integral: 2 F_i - 1 [M, ...] and 2 F - 1 of Gaussians, and dy / 2.

    The trapezoidal rule in u of y = middle + width sinh u. Its error vanishes exponentially in the
    places per standard deviation, so few places are enough.

    Args:
        mean: means [M, ...].
        variance: variances [M, ...].
        logs: the moments are those of log y, and dy is of y.
        shares: weights of the members [M].
    """
    std = variance.clamp_min(_SMALLEST).sqrt()
    middle = weighted(shares, mean)
    width = weighted(shares, (mean - middle).abs() + std)
    top = mean + variance if logs else mean  # y times a Gaussian of log y is a shifted Gaussian
    ends = (mean - _TAIL * std).amin(0), (top + _TAIL * std).amax(0)
    low, high = (((end - middle) / width).asinh() for end in ends)
    needed = (high - low) * _PER_WIDTH * width * weighted(shares, std.pow(-2)).sqrt()
    count = int(needed.nan_to_num(_MOST).amax().clamp(_FEWEST, _MOST))
    step, scale = (high - low) / (count - 1), math.sqrt(0.5) / std
    # single precision is six times as fast; exp y would enlarge its error in the tail
    dtype = torch.float64 if logs else torch.float32
    for place in range(count):
        u = low + place * step
        y = middle + width * u.sinh()
        each = ((y - mean) * scale).to(dtype).erf_()
        size = width * u.cosh() * step / 2
        yield each, weighted(shares.to(dtype), each).double(), size * y.exp() if logs else size

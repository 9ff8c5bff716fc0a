"""Likelihoods of real targets: Gaussian, with heavy tails, positive, and with several peaks.

Targets may have any unit; noise is known, learned, or learned per input.
"""

import copy
import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from functools import cached_property
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError
from shoal.core.registry import later_field
from shoal.data.dataset import Scaling, standardise
from shoal.inference.likelihoods.counts import log_rate
from shoal.inference.likelihoods.incomplete_beta import student_cdf
from shoal.inference.likelihoods.likelihood import (
    PAIRED,
    Likelihood,
    Task,
    as_columns,
    gaussian_affinity,
    gaussian_distance,
    registry,
    shares_of,
    weighted,
)

__all__ = [
    "LEAST",
    "Gaussian",
    "HeteroscedasticGaussian",
    "HomoscedasticGaussian",
    "Learned",
    "LogNormal",
    "MixtureDensity",
    "NoisePerInput",
    "Normal",
    "RealTargets",
    "Standardising",
    "StudentT",
]

LEAST = 1e-6
"""Smallest learned variance, in units of the variance of the targets."""

_TINY = 1e-5


@dataclass(frozen=True, eq=False)
class Learned:
    """Learned numbers, each [K]: y = location + scale * z, and the noise variance of z.

    A calibration multiplies the standard deviation of the noise by `noise_factor`.
    """

    location: Tensor
    scale: Tensor
    variance: Tensor | None = None
    noise_factor: Tensor | None = None

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Learned):
            return NotImplemented
        mine, theirs = self.tensors, other.tensors
        same = mine.keys() == theirs.keys()
        return same and all(torch.equal(t.cpu(), theirs[name].cpu()) for name, t in mine.items())

    def __hash__(self) -> int:
        return hash(tuple(self.tensors))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The known numbers, by name."""
        return {name: t for name, t in vars(self).items() if isinstance(t, Tensor)}

    @cached_property
    def needs_double(self) -> bool:
        """Whether float32 would lose predictions in units of y, such as 1e12 plus or minus 1."""
        location, scale = self.location.abs(), self.scale
        return bool(((location > 1e3 * scale) | (scale < 1e-15) | (scale > 1e15)).any())


@dataclass(frozen=True, repr=False)
class RealTargets(Likelihood):
    r"""Independent real target columns in any unit.

    Outputs describe standardised targets: $y = a + b z$, so that
    $\log p(y) = \log p_z((y - a) / b) - \sum_k \log b_k$. Without learned numbers a = 0 and b = 1.
    A subclass gives moments, log density and distribution function of z.
    """

    about: ClassVar[Task] = Task(
        "regression",
        kinds=("any", "numbers", "intervals", "ranked"),
        measures=("rmse", "nll", "crps", "coverage_90", "sharpness", "effective_functions"),
    )
    learns_noise: ClassVar[bool] = False
    learned: Learned | None = field(default=None, init=False, repr=False)

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of the standardised targets, both [..., K]."""
        raise NotImplementedError

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        """Log density of the standardised targets in each column [..., K]."""
        raise NotImplementedError

    def _standard_cdf(self, outputs: Tensor, z: Tensor) -> Tensor:
        """Distribution function of the standardised targets [..., K]."""
        raise NotImplementedError

    def mean(self, outputs: Tensor) -> Tensor:
        """Mean of y under each member [..., K]."""
        mean, known = self._standard(self._precise(outputs))[0], self.learned
        return mean if known is None else known.location.to(mean) + known.scale.to(mean) * mean

    def variance(self, outputs: Tensor) -> Tensor:
        """Variance of y under each member [..., K]."""
        variance, known = self._standard(self._precise(outputs))[1], self.learned
        return variance if known is None else known.scale.square().to(variance) * variance

    def _precise(self, outputs: Tensor) -> Tensor:
        """The outputs, in double precision if predictions in units of y need it."""
        known = self.learned
        double = known is not None and outputs.device.type != "mps" and known.needs_double
        return outputs.double() if double else outputs

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of the targets y [B, *S] or [B, *S, K]."""
        z = self._standardised(y, outputs)
        return self._in_unit(self._log_density(outputs, z), z)

    def _in_unit(self, each: Tensor, z: Tensor) -> Tensor:
        """Log density of y from those of the standardised columns z [..., K]."""
        value, known = each.sum(-1), self.learned
        if known is None:
            return value
        return value - known.scale.log().expand(each.shape[-1]).sum().to(value)

    def cdf(self, outputs: Tensor, y: Tensor) -> Tensor:
        """P(Y <= y) of each column [..., K], in double precision."""
        outputs = outputs.double()
        return self._standard_cdf(outputs, self._standardised(y.double(), outputs))

    def _standardised(self, y: Tensor, outputs: Tensor) -> Tensor:
        y = as_columns(y, outputs, outputs.shape[-1] // self.width(1))
        known = self.learned
        if known is not None:
            y = (y - known.location.to(y)) / known.scale.to(y)
        return y.to(outputs.dtype)

    def distance(self, outputs: Tensor, y: Tensor) -> Tensor:
        """E|Y - y| of each column under each member [..., K]."""
        outputs = outputs.double()
        z = self._standardised(y.double(), outputs)
        return self._in_length(self._standard_distance(outputs, z))

    def own_distance(self, outputs: Tensor) -> Tensor:
        """E|Y - Y'| of two targets of the same member [..., K]."""
        return self._in_length(self._standard_own_distance(outputs.double()))

    def _standard_distance(self, outputs: Tensor, z: Tensor) -> Tensor:
        """E|Z - z| of the standardised targets [..., K]."""
        raise NotImplementedError

    def _standard_own_distance(self, outputs: Tensor) -> Tensor:
        """E|Z - Z'| of two standardised targets [..., K]."""
        raise NotImplementedError

    def _in_length(self, distance: Tensor) -> Tensor:
        """A distance of standardised targets [..., K] in the unit of y."""
        known = self.learned
        return distance if known is None else distance * known.scale.to(distance)

    @property
    def unit(self) -> Tensor | float:
        """Standard deviation of the training targets [K]; 1 before training."""
        return 1.0 if self.learned is None else self.learned.scale

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse integer targets, and targets whose columns do not fit the outputs."""
        if not y.is_floating_point():
            raise DataError("regression needs real targets, not integers; convert y to float")
        if y.ndim == 1 and outputs != self.width(1) and bool((y == y.round()).all()):
            raise DataError(
                f"y holds floats, which are values to regress on, so the network needs "
                f"{self.width(1)} output{'' if self.width(1) == 1 else 's'}, but it has {outputs}; "
                f"for classes type y = y.astype(int) (y.long() for a tensor)"
            )
        super().check(y, outputs, sites)

    def in_units(self, scaling: Scaling) -> Self:
        """The likelihood of the original targets, if training used targets scaled by `scaling`."""
        mean, std = torch.tensor([[scaling.mean], [scaling.std]], dtype=torch.float64)
        known = self.learned
        if known is None:
            return self._with(Learned(mean, std))
        location, scale = mean + std * known.location, std * known.scale
        return self._with(replace(known, location=location, scale=scale))

    def _with(self, learned: Learned) -> Self:
        other = copy.copy(self)
        object.__setattr__(other, "learned", learned)
        return other

    @property
    def state(self) -> dict[str, Tensor]:
        """Location, scale and variance, if they are learned."""
        return {} if self.learned is None else self.learned.tensors

    def restored(self, state: Mapping[str, Tensor]) -> Self:
        """The likelihood with the numbers of a checkpoint; older checkpoints have none."""
        if not state:
            return self
        names = {"location", "scale", *(["variance"] if self.learns_noise else [])}
        names |= {"noise_factor"} & state.keys()
        lengths = {tuple(t.shape) for t in state.values()}
        sound = all(bool(t.isfinite().all()) for t in state.values())
        sound &= all(bool((t > 0).all()) for name, t in state.items() if name != "location")
        if state.keys() != names or not sound or len(lengths) > 1 or len(lengths.pop()) != 1:
            raise CheckpointCorrupt(
                f"the checkpoint has no numbers for a {type(self).__name__}; use another"
            )
        return self._with(Learned(**state))

    @property
    def calibration(self) -> dict[str, list[float]]:
        """The factor of the noise's standard deviation in each column."""
        factor = None if self.learned is None else self.learned.noise_factor
        return {} if factor is None else {"noise_factor": factor.tolist()}

    def calibrated(self, values: Tensor) -> Self:
        """The likelihood whose noise has `values` [K] times the standard deviation of training."""
        factor = values.detach().double().flatten()
        known = self.learned
        if known is None:
            ones = torch.ones_like(factor)
            known = Learned(torch.zeros_like(factor), ones, ones if self.learns_noise else None)
        where = known.scale.device, known.scale.dtype
        return self._with(replace(known, noise_factor=factor.to(*where)))

    @property
    def uncalibrated(self) -> Self:
        """The likelihood without its calibration, as it trains members."""
        known = self.learned
        if known is None or known.noise_factor is None:
            return self
        return self._with(replace(known, noise_factor=None))

    def _scaled(self, square: Tensor) -> Tensor:
        """Squared scales [..., K] of the noise, times the squared factor of a calibration."""
        factor = None if self.learned is None else self.learned.noise_factor
        return square if factor is None else square * factor.square().to(square)


_SMALLEST, _LARGEST = 1e-150, 1e150


def _check_squares(y: Tensor) -> None:
    """Refuse real targets [N, K] whose variance is no number of double precision."""
    low, high = y.amin(0), y.amax(0)
    span = high - low
    if bool(((span > 0) & (span < _SMALLEST) | (span > _LARGEST)).any()):
        unit = float(y.abs().max())
        raise DataError(
            f"y has values of size {unit:.3g}, whose squares no number can hold; give y in another "
            f"unit, such as y / {unit:.0e}"
        )


class Standardising(RealTargets):
    """Standardises its training targets, which may have any unit."""

    standardises: ClassVar[bool] = True

    def initialised_from(self, y: Tensor, sites: int = 0, weight: Tensor | None = None) -> Self:
        """Standardise by these targets; numbers learned before stay."""
        where = y.device, torch.float32 if y.device.type == "mps" else torch.float64
        if self.learned is not None:
            kept = {n: t.to(*where, copy=True) for n, t in self.uncalibrated.state.items()}
            return self._with(Learned(**kept))
        columns = y.shape[-1] if y.ndim == 2 + sites else 1
        real = y.detach().reshape(-1, columns).cpu().double()
        if weight is not None:
            weight = weight.double().cpu().flatten()
            weight = weight.repeat_interleave(len(real) // len(weight))
        _check_squares(real)
        _, location, scale = standardise(real, real, weight)
        # Standardised targets stay the same, bit for bit.
        if bool((location.abs() < _TINY).all() and ((scale - 1).abs() < _TINY).all()):
            location, scale = torch.zeros_like(location), torch.ones_like(scale)
        learned = {"location": location, "scale": scale}
        learned |= {"variance": torch.ones_like(scale)} if self.learns_noise else {}
        return self._with(Learned(**{name: t.to(*where) for name, t in learned.items()}))


WINDOW = 10_000
"""Data points in the average of learned noise: enough for a precision of one percent."""


@dataclass(frozen=True, repr=False)
class Normal(RealTargets):
    """Independent Gaussian target columns in any unit."""

    about: ClassVar[Task] = replace(
        RealTargets.about, kinds=("any", "numbers", "intervals", "gaussian")
    )

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        mean, variance = self._standard(outputs)
        square = (z - mean).square() / variance
        return -0.5 * (square + variance.log() + math.log(2 * math.pi))

    def _with_slope(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        """log p, and ∂ log p / ∂f = (z - f) / s² for outputs f that are means."""
        z = self._standardised(y, outputs)
        slope = (z - outputs) / self._standard(outputs)[1]
        return self._in_unit(self._log_density(outputs, z), z), slope

    def _standard_distance(self, outputs: Tensor, z: Tensor) -> Tensor:
        mean, variance = self._standard(outputs)
        return gaussian_distance(z - mean, variance)

    def _standard_own_distance(self, outputs: Tensor) -> Tensor:
        return 2 * (self._standard(outputs)[1] / math.pi).sqrt()

    cdf = Likelihood.cdf


@registry.register("gaussian")
@dataclass(frozen=True, repr=False)
class Gaussian(Normal):
    """Real targets with known noise: y ~ N(f, noise_std²), independent columns.

    Attributes:
        noise_std: standard deviation of the observation noise, in units of y.
    """

    noise_std: float = 1.0

    def __post_init__(self) -> None:
        if not self.noise_std > 0:
            raise ConfigError(f"noise_std must be positive, not {self.noise_std}")

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return outputs, self._scaled(torch.full_like(outputs, self.noise_std**2))

    with_gradient = Normal._with_slope


@registry.register("homoscedastic")
@dataclass(frozen=True, repr=False)
class HomoscedasticGaussian(Normal, Standardising):
    r"""Real targets with one learned noise per column: y ~ N(a + b f, b² s²).

    a and b are mean and standard deviation of the training targets. Expectation maximisation finds
    the noise of largest type II likelihood. With the M members as samples of the posterior, the
    M-step has the closed form $s^2 = \frac{1}{MN} \sum_{m,n} (z_n - f_m(x_n))^2$, z = (y - a) / b.
    Each step updates a moving average over about the last min(N, 10,000) data points. The noise
    belongs to the data, so all members share it.
    """

    learns_noise: ClassVar[bool] = True

    def __repr__(self) -> str:
        noise = ", ".join(f"{value:.3g}" for value in self.noise_std)
        return f"HomoscedasticGaussian({f'noise_std={noise}' if noise else ''})"

    @property
    def noise_std(self) -> list[float]:
        """Learned standard deviation of the noise in each column, in units of y."""
        known = self.learned
        if known is None or known.variance is None:
            return []
        return (known.scale * self._scaled(known.variance).sqrt()).tolist()

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        known = self.learned
        if known is None or known.variance is None:
            return outputs, torch.ones_like(outputs)
        return outputs, self._scaled(known.variance.to(outputs)).expand_as(outputs)

    with_gradient = Normal._with_slope

    def statistics(
        self, outputs: Tensor, y: Tensor, alive: Tensor, weight: Tensor | None = None
    ) -> Tensor | None:
        """Mean square of z - f over the finite members and the batch [K]; NaN without any."""
        square = (self._standardised(y, outputs) - outputs).detach().square().flatten(1, -2)
        if weight is None:
            error = square.mean(-2)
        else:
            own = weight.ndim == outputs.ndim - 1  # every member has its own weights
            weight = weight.flatten(1) if own else weight.flatten()
            shares = (weight / weight.sum(-1, keepdim=True)).to(square)
            error = (square * shares.unsqueeze(-1)).sum(-2)
        counts = alive.unsqueeze(-1) & error.isfinite()
        return torch.where(counts, error, 0.0).sum(0) / counts.sum(0)

    def learn(self, statistics: Tensor, points: float, n: float) -> None:
        """Move the variance towards the variance of the batch."""
        if self.learned is None or self.learned.variance is None:
            return
        variance = self.learned.variance
        share = min(1.0, points / min(n, WINDOW))
        moved = variance.lerp(statistics.to(variance), share).clamp(min=LEAST)
        variance.copy_(torch.where(moved.isfinite(), moved, variance))


@dataclass(frozen=True, repr=False)
class NoisePerInput(Standardising):
    r"""Columns with a location mu and a squared scale v = softplus(s) + 1e-6 that inputs determine.

    The network returns (mu, s). Where v is small, the plain NLL has large gradients, and where it
    is large, small ones: members neglect points that they fit badly at first. Damping weighs each
    column by a power of v that has no gradient, so training maximises
    $\sum_k \mathrm{sg}[v_k^d] \log p(z_k)$. With d = 1, mu has the gradient of squared errors.
    Predictions and metrics have the plain log density. Seitzer et al. (2022), arXiv 2203.09168.

    Attributes:
        damping: the exponent d, from 0 (the log density) to 1.
    """

    _: KW_ONLY
    damping: float = later_field(0.0)

    def __post_init__(self) -> None:
        if not 0 <= self.damping <= 1:
            raise ConfigError(f"damping must be from 0 to 1, not {self.damping}")

    def width(self, targets: int) -> int:
        """A location and a raw squared scale per column."""
        return 2 * targets

    def _located(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Location and squared scale of the standardised targets, both [..., K]."""
        location, raw = outputs.chunk(2, -1)
        return location, self._scaled(F.softplus(raw) + LEAST)

    def objective(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The log density, each column times its squared scale to the power of `damping`."""
        if not self.damping:
            return self.log_prob(outputs, y)
        z = self._standardised(y, outputs)
        power = self._located(outputs)[1].detach().pow(self.damping)
        return self._in_unit(power * self._log_density(outputs, z), z)


@registry.register("heteroscedastic", cite=("lakshminarayanan2017simple", "seitzer2022pitfalls"))
@dataclass(frozen=True, repr=False)
class HeteroscedasticGaussian(NoisePerInput, Normal):
    """Real targets with learned noise per input: y ~ N(a + b mu, b² (softplus(s) + 1e-6)).

    The network returns (mu, s); a and b are mean and standard deviation of the training targets.
    Lakshminarayanan et al. (2017), arXiv 1612.01474.

    Attributes:
        damping: weighs training points by their variance to this power, from 0 to 1; 0.5 helps
            members that fit some points badly. Seitzer et al. (2022), arXiv 2203.09168.
    """

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        return self._located(outputs)

    def with_gradient(self, outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor] | None:
        """log p, and with e = z - mu its gradient (e / v, (e² / v - 1) / (2 v) sigmoid(s))."""
        if self.damping or (self.learned is not None and self.learned.noise_factor is not None):
            return None
        z, (location, raw) = self._standardised(y, outputs), outputs.chunk(2, -1)
        variance = F.softplus(raw).add_(LEAST)
        away = z - location
        slope = away / variance
        square = away.mul_(slope)
        value = self._in_unit((square + variance.log()).add_(math.log(2 * math.pi)).mul_(-0.5), z)
        other = square.sub_(1).div_(variance).mul_(0.5).mul_(raw.sigmoid())
        return value, torch.cat([slope, other], -1)


@registry.register("student-t", cite=("lange1989robust",))
@dataclass(frozen=True, repr=False)
class StudentT(NoisePerInput):
    """Real targets with outliers: y ~ a + b (mu + sqrt(v) T), T Student's t with `df` degrees.

    The network returns (mu, s) per column, and v = softplus(s) + 1e-6 is the squared scale. a and b
    are mean and standard deviation of the training targets. The variance is b² v df / (df - 2).
    Lange et al. (1989), doi 10.1080/01621459.1989.10478852.

    Attributes:
        df: degrees of freedom, above 2; fewer degrees allow larger outliers.
        damping: weighs training points by v to this power, as for `HeteroscedasticGaussian`.
    """

    df: float = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.df > 2:
            raise ConfigError(f"df must be above 2, where the variance is finite, not {self.df}")

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        location, square = self._located(outputs)
        return location, square * (self.df / (self.df - 2))

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        df, (location, square) = self.df, self._located(outputs)
        constant = math.lgamma((df + 1) / 2) - math.lgamma(df / 2) - 0.5 * math.log(df * math.pi)
        ratio = (z - location).square() / (df * square)
        return constant - 0.5 * square.log() - 0.5 * (df + 1) * ratio.log1p()

    def _standard_cdf(self, outputs: Tensor, z: Tensor) -> Tensor:
        location, square = self._located(outputs)
        return student_cdf((z - location) / square.sqrt(), self.df)

    def _standard_distance(self, outputs: Tensor, z: Tensor) -> Tensor:
        df, (location, square) = self.df, self._located(outputs)
        t = (z - location) / square.sqrt()
        density = (self._log_density(outputs, z) + 0.5 * square.log()).exp()
        inside = 2 * self._standard_cdf(outputs, z) - 1
        return square.sqrt() * (t * inside + 2 * density * (df + t.square()) / (df - 1))

    def _standard_own_distance(self, outputs: Tensor) -> Tensor:
        df = self.df
        logs = _log_beta(0.5, df - 0.5) - 2 * _log_beta(0.5, df / 2)
        return self._located(outputs)[1].sqrt() * (4 * math.sqrt(df) / (df - 1) * math.exp(logs))


def _log_beta(a: float, b: float) -> float:
    return math.lgamma(a) + math.lgamma(b) - math.lgamma(a + b)


@registry.register("lognormal", cite=("crow1988lognormal",))
@dataclass(frozen=True, repr=False)
class LogNormal(NoisePerInput):
    r"""Positive, skewed targets: log y ~ N(m, v), m = a + b mu and v = b² (softplus(s) + 1e-6).

    The network returns (mu, s); a and b are mean and standard deviation of the logarithms of the
    training targets. The mean of y is $\exp(m + v / 2)$, its median $\exp m$, and its variance
    $(\exp v - 1) \exp(2 m + v)$. Above exp(a + 20) the mean grows linearly.
    Crow & Shimizu (1988), Lognormal Distributions, doi 10.1201/9780203748664.

    Attributes:
        damping: weighs training points by the variance of log y to this power, as for
            `HeteroscedasticGaussian`.
    """

    def log_moments(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        """Mean m and variance v of log y under each member, both [..., K]."""
        (location, square), known = self._located(outputs), self.learned
        if known is None:
            return location, square
        scale = known.scale.to(location)
        return known.location.to(location) + scale * location, scale.square() * square

    def mean(self, outputs: Tensor) -> Tensor:
        """exp(m + v / 2) [..., K]."""
        return self._log_mean(self._precise(outputs)).exp()

    def variance(self, outputs: Tensor) -> Tensor:
        """(exp v - 1) exp(2 m + v) [..., K]."""
        outputs = self._precise(outputs)
        v = self.log_moments(outputs)[1]
        return (2 * self._log_mean(outputs) + log_rate(v + (-torch.expm1(-v)).log())).exp()

    def _log_mean(self, outputs: Tensor) -> Tensor:
        """m + v / 2; far above the training targets it grows slowly, so that the mean is finite."""
        (m, v), known = self.log_moments(outputs), self.learned
        middle = 0.0 if known is None else known.location.to(m)
        return middle + log_rate(m + v / 2 - middle)

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        location, square = self._located(outputs)
        return -0.5 * ((z - location).square() / square + (2 * math.pi * square).log())

    def _in_unit(self, each: Tensor, z: Tensor) -> Tensor:
        """Log density of y: that of log y, minus log y; no density at 0 and below."""
        known = self.learned
        logs = z if known is None else known.location.to(z) + known.scale.to(z) * z
        value = super()._in_unit(each, z)
        return torch.where(logs.isfinite().all(-1), value - logs.sum(-1), -math.inf)

    def _standard_cdf(self, outputs: Tensor, z: Tensor) -> Tensor:
        location, square = self._located(outputs)
        return torch.special.ndtr((z - location) / square.sqrt())

    def _standardised(self, y: Tensor, outputs: Tensor) -> Tensor:
        positive = as_columns(y, outputs, outputs.shape[-1] // self.width(1)).clamp_min(0)
        return super()._standardised(positive.log(), outputs)

    def distance(self, outputs: Tensor, y: Tensor) -> Tensor:
        """E|Y - y| of each column under each member [..., K]."""
        outputs = outputs.double()
        (m, v), mean = self.log_moments(outputs), self.mean(outputs)
        y = as_columns(y.double(), outputs, outputs.shape[-1] // self.width(1))
        z = (y.clamp_min(0).log() - m) / v.sqrt()
        inside = y * (2 * torch.special.ndtr(z) - 1)
        return mean * (1 - 2 * torch.special.ndtr(z - v.sqrt())) + inside

    def own_distance(self, outputs: Tensor) -> Tensor:
        """E|Y - Y'| of two targets of the same member [..., K]."""
        outputs = outputs.double()
        v = self.log_moments(outputs)[1]
        return 2 * self.mean(outputs) * torch.special.erf(v.sqrt() / 2)

    def distances_to_mixture(self, outputs: Tensor, weights: Tensor | None) -> Tensor:
        """E|Y_i - Y'| of a target of each member and one of the mixture [M, B, *S, K]."""
        if len(outputs) > PAIRED:
            return super().distances_to_mixture(outputs, weights)
        outputs = outputs.double()
        (m, v), mean = self.log_moments(outputs), self.mean(outputs)
        shares, rows = shares_of(m, weights), []
        for mi, vi, each in zip(m, v, mean, strict=True):
            total = (vi + v).sqrt() * math.sqrt(2)
            pair = each * torch.special.erf((mi - m + vi) / total)
            rows.append(weighted(shares, pair + mean * torch.special.erf((m - mi + v) / total)))
        return torch.stack(rows)

    def gaussian_members(self, outputs: Tensor) -> tuple[Tensor, Tensor, bool]:
        """Means and variances of log y under each member, and True."""
        return *self.log_moments(outputs.double()), True

    @property
    def unit(self) -> Tensor | float:
        """Geometric mean of the training targets [K]; 1 before training."""
        return 1.0 if self.learned is None else self.learned.location.exp()

    def affinity(self, outputs: Tensor) -> Tensor:
        """That of log y, mean over the inputs [M, M]."""
        return gaussian_affinity(*self._located(outputs.double()))

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse targets that are not positive."""
        _check_positive(y)
        super().check(y, outputs, sites)

    def in_units(self, scaling: Scaling) -> Self:
        """Not known: logarithms have no other unit than that of training."""
        raise ConfigError("a lognormal likelihood needs targets in their own unit, not scaled ones")

    def initialised_from(self, y: Tensor, sites: int = 0, weight: Tensor | None = None) -> Self:
        """Standardise the logarithms of these targets; numbers learned before stay."""
        _check_positive(y)
        return super().initialised_from(y.double().log(), sites, weight)


def _check_positive(y: Tensor) -> None:
    wrong = ~(y > 0).flatten()
    if wrong.any():
        first = float(y.flatten()[int(wrong.nonzero()[0])])
        raise DataError(
            f"a log-normal target is positive, but y holds {first:g}; shift or drop such targets, "
            f"or type likelihood='heteroscedastic'"
        )


@registry.register("mixture-density", cite=("bishop1994mixture",))
@dataclass(frozen=True, repr=False)
class MixtureDensity(Standardising):
    """Real targets with several peaks: y ~ a + b sum_j pi_j N(mu_j, v_j) in each column.

    The network returns logits, means mu and raw variances s, in this order and each [K, J], for K
    columns and J components. pi = softmax(logits) and v = softplus(s) + 1e-6. a and b are mean and
    standard deviation of the training targets. Bishop (1994), Mixture density networks.

    Attributes:
        components: number of components J.
    """

    components: int = 3
    _PARTS: ClassVar[int] = 3

    def __post_init__(self) -> None:
        if type(self.components) is not int or self.components < 1:
            raise ConfigError(f"components must be a whole number from 1 on, not {self.components}")

    def width(self, targets: int) -> int:
        """A logit, a mean and a raw variance per component and column."""
        return self._PARTS * self.components * targets

    def _components(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Log weights, means and variances of the components, each [..., K, J]."""
        parts = outputs.unflatten(-1, (self._PARTS, -1, self.components)).unbind(-3)
        variances = self._scaled((F.softplus(parts[2]) + LEAST).mT).mT
        return parts[0].log_softmax(-1), parts[1], variances

    def moved_apart(self, outputs: Tensor, factor: float) -> Tensor:
        """Outputs whose components move with the mean of their member."""
        logits, means, raw = outputs.chunk(self._PARTS, -1)
        mean = self._standard(outputs)[0]
        shift = (factor - 1) * (mean - mean.mean(0))
        return torch.cat([logits, means + shift.repeat_interleave(self.components, -1), raw], -1)

    def normal_components(self, outputs: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weights, means and variances in the units of the targets, each [..., K, J]."""
        (logs, means, variances), known = self._components(outputs), self.learned
        if known is None:
            return logs.exp(), means, variances
        location, scale = (t.to(means).unsqueeze(-1) for t in (known.location, known.scale))
        return logs.exp(), location + scale * means, scale.square() * variances

    def _standard(self, outputs: Tensor) -> tuple[Tensor, Tensor]:
        logs, means, variances = self._components(outputs)
        weights = logs.exp()
        mean = (weights * means).sum(-1)
        around = (means - mean.unsqueeze(-1)).square()
        return mean, (weights * (variances + around)).sum(-1)

    def _log_density(self, outputs: Tensor, z: Tensor) -> Tensor:
        logs, means, variances = self._components(outputs)
        square = (z.unsqueeze(-1) - means).square() / variances
        each = logs - 0.5 * (square + variances.log() + math.log(2 * math.pi))
        return each.logsumexp(-1)

    def _standard_cdf(self, outputs: Tensor, z: Tensor) -> Tensor:
        logs, means, variances = self._components(outputs)
        below = torch.special.ndtr((z.unsqueeze(-1) - means) / variances.sqrt())
        return (logs.exp() * below).sum(-1)

    def _standard_distance(self, outputs: Tensor, z: Tensor) -> Tensor:
        logs, means, variances = self._components(outputs)
        return (logs.exp() * gaussian_distance(z.unsqueeze(-1) - means, variances)).sum(-1)

    def _standard_own_distance(self, outputs: Tensor) -> Tensor:
        logs, means, variances = self._components(outputs)
        shift, total = (t.unsqueeze(-1) for t in (means, variances))
        each = gaussian_distance(shift - means.unsqueeze(-2), total + variances.unsqueeze(-2))
        pairs = (logs.unsqueeze(-1) + logs.unsqueeze(-2)).exp() * each
        return pairs.sum((-2, -1))

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The mean of each member, in standardised units and summed over the columns."""
        return self._standard(outputs)[0].sum(-1)

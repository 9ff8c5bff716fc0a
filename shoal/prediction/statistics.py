"""Statistics over seeds: mean, standard error, and intervals of differences between methods."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from shoal.core.errors import ConfigError, DataError

__all__ = [
    "Difference",
    "holm",
    "linear_change",
    "mean_and_error",
    "paired_difference",
    "paired_p_value",
    "standard_error",
    "t_quantile",
]


def standard_error(values: Sequence[float] | np.ndarray) -> float:
    r"""Standard error of the mean, $s / \sqrt n$ with s of n - 1 degrees; NaN for one value.

    >>> standard_error([1.0, 3.0])
    1.0
    """
    numbers = _numbers(values)
    if len(numbers) < 2:
        return math.nan
    return float(numbers.std(ddof=1) / math.sqrt(len(numbers)))


def mean_and_error(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Mean and its standard error.

    >>> mean_and_error([1.0, 3.0])
    (2.0, 1.0)
    """
    return float(_numbers(values).mean()), standard_error(values)


class Difference(NamedTuple):
    """A mean difference and the confidence interval around it."""

    difference: float
    low: float
    high: float


def paired_difference(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, level: float = 0.95
) -> Difference:
    """Mean of a - b with Student's interval; a[i] and b[i] differ only in the method.

    A single pair has an infinite interval.

    >>> paired_difference([2.0, 4.0], [1.0, 1.0], level=0.5)
    Difference(difference=2.0, low=1.0, high=3.0)
    """
    if not 0 < level < 1:
        raise ConfigError(f"the level of an interval must be between 0 and 1, not {level}")
    first, second = _numbers(a), _numbers(b)
    if len(first) != len(second):
        raise DataError(
            f"pairs need equal numbers of values, not {len(first)} and {len(second)}; "
            f"compare the same seeds"
        )
    mean, error = mean_and_error(first - second)
    if math.isnan(error):
        return Difference(mean, -math.inf, math.inf)
    reach = t_quantile(0.5 + level / 2, len(first) - 1) * error
    return Difference(mean, mean - reach, mean + reach)


def paired_p_value(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Two-sided p value of the paired t test of a and b; 1 for a single pair.

    >>> round(paired_p_value([2.0, 4.0], [1.0, 1.0]), 4)
    0.2952
    """
    mean, low, high = paired_difference(a, b)
    if mean == 0 or math.isinf(high):
        return 1.0
    degrees = len(a) - 1
    error = (high - low) / 2 / t_quantile(0.975, degrees)
    if error == 0:
        return 0.0
    theta = math.atan2(abs(mean) / error, math.sqrt(degrees))
    return max(0.0, 1 - _central_probability(theta, degrees, _coefficients(degrees)))


def holm(p_values: Sequence[float]) -> list[float]:
    """P values adjusted for their number: m - k + 1 times the k-th smallest of m, made monotone.

    The chance that any true null hypothesis has an adjusted p value below 0.05 is at most 0.05
    (Holm, 1979, A simple sequentially rejective multiple test procedure).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, index in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[index]))
        adjusted[index] = largest
    return adjusted


def linear_change(values: Sequence[float] | np.ndarray, level: float = 0.95) -> Difference:
    r"""Change of the least-squares line from the first value to the last.

    The interval is Student's with n - 2 degrees of freedom. Neighbouring values are correlated, so
    the standard error is multiplied by $\sqrt{(1 + r) / (1 - r)}$. Here r is the correlation of
    successive residuals, at least 0, as for the mean of an autoregressive series.

    >>> linear_change([1.0, 2.0, 3.0])
    Difference(difference=2.0, low=2.0, high=2.0)
    """
    numbers = _numbers(values)
    if len(numbers) < 3:
        raise DataError(f"a trend needs three values, not {len(numbers)}")
    times = np.arange(len(numbers)) - (len(numbers) - 1) / 2
    slope = float(times @ numbers / (times @ times))
    residuals = numbers - numbers.mean() - slope * times
    power = float(residuals @ residuals)
    error = math.sqrt(power / (len(numbers) - 2) / (times @ times))
    alike = float(residuals[1:] @ residuals[:-1]) / power if power > 0 else 0.0
    error *= math.sqrt((1 + (r := min(max(alike, 0.0), 0.9))) / (1 - r))
    span = len(numbers) - 1
    reach = t_quantile(0.5 + level / 2, len(numbers) - 2) * error * span
    change = slope * span
    return Difference(change, change - reach, change + reach)


def t_quantile(p: float, degrees: int) -> float:
    r"""Quantile of Student's t with a whole number of degrees of freedom.

    With $t = \sqrt\nu \tan\theta$ the distribution function is a finite sum of powers of
    $\cos\theta$ (Abramowitz & Stegun 26.7.3 and 26.7.4), which is bisected for $\theta$.

    >>> round(t_quantile(0.975, 4), 4)
    2.7764
    """
    if not 0 < p < 1 or degrees < 1:
        raise ConfigError(f"there is no t quantile for p = {p} with {degrees} degrees of freedom")
    if p < 0.5:
        return -t_quantile(1 - p, degrees)
    coefficients = _coefficients(degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        inside = _central_probability(middle, degrees, coefficients)
        low, high = (middle, high) if inside < 2 * p - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _coefficients(degrees: int) -> np.ndarray:
    """Coefficients of the powers of the squared cosine."""
    k = np.arange(1, degrees // 2)
    steps = 2 * k / (2 * k + 1) if degrees % 2 else (2 * k - 1) / (2 * k)
    return np.concatenate([[1.0], np.cumprod(steps)])


def _central_probability(theta: float, degrees: int, coefficients: np.ndarray) -> float:
    """P(|T| < sqrt(degrees) tan theta)."""
    cosine, sine = math.cos(theta), math.sin(theta)
    if degrees == 1:
        return 2 * theta / math.pi
    total = float(coefficients @ (cosine**2) ** np.arange(len(coefficients)))
    if degrees % 2:
        return 2 / math.pi * (theta + sine * cosine * total)
    return sine * total


def _numbers(values: Sequence[float] | np.ndarray) -> np.ndarray:
    numbers = np.asarray(values, dtype=np.float64)
    if numbers.ndim != 1 or len(numbers) == 0:
        raise DataError(
            f"a mean needs a list of at least one number, not shape {list(numbers.shape)}"
        )
    return numbers

"""Statistics over seeds: intervals and tests of paired differences, power, and what they decide."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache, lru_cache
from statistics import NormalDist
from typing import NamedTuple, TypeVar

import numpy as np

from shoal.core.errors import ConfigError, DataError

__all__ = [
    "FEWEST",
    "POWER",
    "SIGNIFICANCE",
    "Decision",
    "Difference",
    "Pairs",
    "Verdict",
    "decide",
    "detectable",
    "equivalence_p_value",
    "equivalence_power",
    "holm",
    "linear_change",
    "mean_and_error",
    "non_inferiority_p_value",
    "paired_difference",
    "paired_p_value",
    "pairs_for_equivalence",
    "pairs_needed",
    "power",
    "standard_error",
    "t_quantile",
]

FEWEST = 3
"""Fewer pairs decide nothing."""

SIGNIFICANCE = 0.05
"""An adjusted p value below this decides."""

POWER = 0.8
"""The probability with which a planned number of pairs finds what is there."""

_MOST = 10**9
_NORMAL = NormalDist()

K = TypeVar("K", bound=Hashable)


def standard_error(values: Sequence[float] | np.ndarray, overlap: float = 0.0) -> float:
    r"""Standard error of the mean, $s / \sqrt n$ with s of n - 1 degrees; NaN for one value.

    Random splits of one data set have overlapping training sets, so their results are correlated.
    `overlap`, test points / training points of a split, gives $s \sqrt{1/n + overlap}$ (Nadeau &
    Bengio, 2003, Inference for the generalization error).

    >>> standard_error([1.0, 3.0])
    1.0
    """
    numbers = _numbers(values)
    if len(numbers) < 2:
        return math.nan
    error = numbers.std(ddof=1) / math.sqrt(len(numbers))
    return float(error * math.sqrt(1 + len(numbers) * overlap))


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
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    level: float = 0.95,
    overlap: float = 0.0,
) -> Difference:
    """Mean of a - b with Student's interval; a[i] and b[i] differ only in the method.

    A single pair has an infinite interval. `overlap` is that of `standard_error`.

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
    mean, error = float((first - second).mean()), standard_error(first - second, overlap)
    if math.isnan(error):
        return Difference(mean, -math.inf, math.inf)
    reach = t_quantile(0.5 + level / 2, len(first) - 1) * error
    return Difference(mean, mean - reach, mean + reach)


def paired_p_value(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, overlap: float = 0.0
) -> float:
    """Two-sided p value of the paired t test of a and b; 1 for a single pair.

    `overlap` is that of `standard_error`.

    >>> round(paired_p_value([2.0, 4.0], [1.0, 1.0]), 4)
    0.2952
    """
    mean, error, degrees = _student(a, b, overlap)
    if mean == 0 or math.isnan(error):
        return 1.0
    return min(1.0, 2 * _upper_tail(_ratio(abs(mean), error), degrees))


def non_inferiority_p_value(
    a: Sequence[float] | np.ndarray,
    b: Sequence[float] | np.ndarray,
    margin: float,
    better: str = "lower",
) -> float:
    """One-sided p value of "a is worse than b by the margin or more"; 1 for a single pair.

    `better` is "lower" or "higher". A small value shows that a is not worse by the margin.

    >>> round(non_inferiority_p_value([1.0, 1.2, 0.9], [1.0, 1.1, 1.0], 0.5), 4)
    0.0065
    """
    if better not in ("lower", "higher"):
        raise ConfigError(f"non-inferiority needs better='lower' or 'higher', not {better!r}")
    _check_margin(margin)
    return _above(b, a, -margin) if better == "lower" else _above(a, b, -margin)


def equivalence_p_value(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, margin: float
) -> float:
    r"""P value of "the mean of a - b lies outside ±margin", by two one-sided paired t tests.

    The larger of both p values counts. It is below 0.05 exactly where the 90 % interval of
    `paired_difference` lies inside the margin (Schuirmann, 1987). A single pair gives 1.

    >>> round(equivalence_p_value([1.0, 1.2, 0.9], [1.0, 1.1, 1.0], 0.5), 4)
    0.0065
    """
    _check_margin(margin)
    return max(_above(a, b, -margin), _above(b, a, -margin))


def power(difference: float, stddev: float, pairs: int, alpha: float = SIGNIFICANCE) -> float:
    r"""Probability that the two-sided paired t test finds a true difference.

    The statistic has a noncentral t distribution with $n - 1$ degrees and noncentrality
    $\delta = \sqrt n\, d / \sigma$. `stddev` is $\sigma$, the standard deviation of the paired
    differences.

    >>> round(power(1.0, 1.0, pairs=10), 3)
    0.803
    """
    if pairs < 2:
        return 0.0
    critical, shift = t_quantile(1 - alpha / 2, pairs - 1), _effect(difference, stddev, pairs)

    def found(scale: float) -> float:
        reach = critical * scale
        return _NORMAL.cdf(shift - reach) + _NORMAL.cdf(-shift - reach)

    if math.isinf(shift):
        return 1.0
    return min(1.0, _over_deviations(found, pairs - 1, most=(abs(shift) + 9) / critical))


def equivalence_power(
    margin: float,
    stddev: float,
    pairs: int,
    difference: float = 0.0,
    alpha: float = SIGNIFICANCE,
) -> float:
    """Probability that two one-sided tests show equivalence at this true difference.

    >>> round(equivalence_power(1.0, 1.0, pairs=10), 3)
    0.795
    """
    _check_margin(margin)
    if pairs < 2:
        return 0.0
    if stddev == 0:
        return float(abs(difference) < margin)
    critical = t_quantile(1 - alpha, pairs - 1)
    low, high = (_effect(end - difference, stddev, pairs) for end in (-margin, margin))

    def inside(scale: float) -> float:
        return _NORMAL.cdf(high - critical * scale) - _NORMAL.cdf(low + critical * scale)

    return _over_deviations(inside, pairs - 1, most=_effect(margin, stddev, pairs) / critical)


def detectable(
    stddev: float, pairs: int, power: float = POWER, alpha: float = SIGNIFICANCE
) -> float:
    """The smallest true difference that so many pairs find with this power; infinite for one pair.

    >>> round(detectable(1.0, pairs=5), 2)
    1.68
    """
    if pairs < 2:
        return math.inf
    low, high = 0.0, 1.0
    while _power(high, 1.0, pairs, alpha) < power:
        low, high = high, 2 * high
    for _ in range(40):
        middle = (low + high) / 2
        enough = _power(middle, 1.0, pairs, alpha) >= power
        low, high = (low, middle) if enough else (middle, high)
    return high * stddev


def pairs_needed(
    difference: float, stddev: float, power: float = POWER, alpha: float = SIGNIFICANCE
) -> int | None:
    """The fewest pairs that find a true difference; None where a billion do not.

    >>> pairs_needed(0.5, 1.0)
    34
    """
    return _fewest(lambda pairs: _power(difference, stddev, pairs, alpha) >= power)


def pairs_for_equivalence(
    margin: float,
    stddev: float,
    power: float = POWER,
    difference: float = 0.0,
    alpha: float = SIGNIFICANCE,
) -> int | None:
    """The fewest pairs that show equivalence at this true difference; None where a billion do not.

    >>> pairs_for_equivalence(0.5, 1.0), pairs_for_equivalence(0.5, 1.0, difference=0.5)
    (36, None)
    """
    if abs(difference) >= margin:
        return None
    return _fewest(
        lambda pairs: equivalence_power(margin, stddev, pairs, difference, alpha) >= power
    )


class Verdict(StrEnum):
    """What paired runs decide about a method and its baseline."""

    BETTER = "better"
    WORSE = "worse"
    EQUAL = "equal"
    """Equivalent: the difference lies within the margin, and is not significant."""
    DIFFERENT = "different"
    """The difference is significant, and neither direction is better."""
    UNDECIDED = "not decided"
    """Neither a difference nor equivalence is shown, or there are fewer than three pairs."""


class Pairs(NamedTuple):
    """One comparison: values that are paired, such as by seed.

    Attributes:
        values: of the method.
        baseline: of its baseline.
        better: "lower", "higher" or "neither".
        margin: largest difference that does not matter; None where equality is not tested.
    """

    values: Sequence[float]
    baseline: Sequence[float]
    better: str = "lower"
    margin: float | None = None


@dataclass(frozen=True)
class Decision:
    """What the tests of one comparison decide.

    Attributes:
        verdict: better, worse, equal, different or not decided.
        difference: mean of values - baseline, with its 95 % interval (not adjusted).
        stddev: standard deviation of the paired differences, NaN for a single pair.
        pairs: number of pairs.
        better: "lower", "higher" or "neither".
        margin: margin of equivalence, or None.
        p: p value of no difference, adjusted for the family.
        p_equal: p value of a difference at or beyond the margin, adjusted.
        p_worse: p value of being worse by the margin or more, adjusted.
        family: name of the family of comparisons.
        comparisons: number of comparisons in the family.
    """

    verdict: Verdict
    difference: Difference
    stddev: float
    pairs: int
    better: str
    margin: float | None
    p: float
    p_equal: float
    p_worse: float
    family: str
    comparisons: int

    @property
    def within(self) -> bool:
        """Whether equivalence is shown; a better or worse method can be within the margin too."""
        return self.pairs >= FEWEST and self.p_equal < SIGNIFICANCE

    @property
    def not_worse(self) -> bool:
        """Whether non-inferiority is shown: not worse by the margin or more."""
        return self.pairs >= FEWEST and self.p_worse < SIGNIFICANCE

    @property
    def needed(self) -> int | None:
        """Pairs that would decide, where nothing is decided; None if that cannot be told.

        They find the observed difference, or show equivalence at it, whichever takes fewer. Power
        is 80 %, and the level of each test 0.05 / number of comparisons.
        """
        if self.verdict is not Verdict.UNDECIDED or not math.isfinite(self.stddev):
            return None
        mean, alpha = abs(self.difference.difference), SIGNIFICANCE / self.comparisons
        ways = [pairs_needed(mean, self.stddev, alpha=alpha)]
        if self.margin is not None:
            ways.append(
                pairs_for_equivalence(self.margin, self.stddev, difference=mean, alpha=alpha)
            )
        known = [way for way in ways if way is not None]
        return max(FEWEST, self.pairs + 1, min(known)) if known else None


def decide(family: str, comparisons: Mapping[K, Pairs]) -> dict[K, Decision]:
    """Decide all comparisons of a family together.

    A comparison has three null hypotheses: the difference d is 0, d ≤ -margin and d ≥ margin. At
    most one of them is true. `holm` adjusts all of them so that the probability of any wrong
    rejection in the family is at most 0.05.

    >>> lower = Pairs([0.8, 0.7, 0.9], [0.9, 0.8, 1.001], "lower", margin=0.01)
    >>> decide("one method", {"nll": lower})["nll"].verdict
    <Verdict.BETTER: 'better'>
    """
    tests = [test for pairs in comparisons.values() for test in _tests(pairs)]
    adjusted = holm(tests, [place // 3 for place in range(len(tests))])
    triples = zip(adjusted[::3], adjusted[1::3], adjusted[2::3], strict=True)
    return {
        key: _decision(pairs, triple, family, len(comparisons))
        for (key, pairs), triple in zip(comparisons.items(), triples, strict=True)
    }


def _tests(pairs: Pairs) -> tuple[float, float, float]:
    """P values of d = 0, d ≤ -margin and d ≥ margin."""
    a, b, margin = pairs.values, pairs.baseline, pairs.margin
    if len(a) < FEWEST or not np.isfinite([*a, *b]).all():
        return 1.0, 1.0, 1.0
    if margin is None:
        return paired_p_value(a, b), 1.0, 1.0
    _check_margin(margin)
    return paired_p_value(a, b), _above(a, b, -margin), _above(b, a, -margin)


def _decision(pairs: Pairs, p: tuple[float, float, float], family: str, count: int) -> Decision:
    with np.errstate(invalid="ignore"):  # infinite values have no difference
        difference = paired_difference(pairs.values, pairs.baseline)
        error = _student(pairs.values, pairs.baseline)[1]
    p_zero, p_low, p_high = p
    p_equal = max(p_low, p_high)
    verdict = Verdict.UNDECIDED
    if p_zero < SIGNIFICANCE:
        good = (difference.difference > 0) == (pairs.better == "higher")
        verdict = Verdict.BETTER if good else Verdict.WORSE
        verdict = verdict if pairs.better in ("lower", "higher") else Verdict.DIFFERENT
    elif p_equal < SIGNIFICANCE:
        verdict = Verdict.EQUAL
    return Decision(
        verdict=verdict,
        difference=difference,
        stddev=error * math.sqrt(len(pairs.values)),
        pairs=len(pairs.values),
        better=pairs.better,
        margin=pairs.margin,
        p=p_zero,
        p_equal=p_equal,
        p_worse={"lower": p_high, "higher": p_low}.get(pairs.better, p_equal),
        family=family,
        comparisons=count,
    )


def holm(p_values: Sequence[float], exclusive: Sequence[int] | None = None) -> list[float]:
    """P values adjusted for their number: m - k + 1 times the k-th smallest of m, made monotone.

    The chance that any true null hypothesis has an adjusted p value below 0.05 is at most 0.05
    (Holm, 1979, A simple sequentially rejective multiple test procedure).

    Hypotheses with the same number in `exclusive` cannot be true together. The factor is then the
    number of such groups that are left (Shaffer, 1986, Modified sequentially rejective multiple
    test procedures).

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    groups = range(len(p_values)) if exclusive is None else exclusive
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    left = Counter(groups)
    for index in order:
        largest = max(largest, min(1.0, len(left) * p_values[index]))
        adjusted[index] = largest
        left -= Counter([groups[index]])
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


@lru_cache(4096)  # plans ask for the same ones again and again
def t_quantile(p: float, degrees: int) -> float:
    r"""Quantile of Student's t with a whole number of degrees of freedom.

    With $t = \sqrt\nu \tan\theta$ the distribution function is a finite sum of powers of
    $\cos\theta$ (Abramowitz & Stegun 26.7.3 and 26.7.4), which is bisected for $\theta$. Above
    10,000 degrees the expansion around the normal quantile (26.7.5) is exact to ten digits.

    >>> round(t_quantile(0.975, 4), 4)
    2.7764
    """
    if not 0 < p < 1 or degrees < 1:
        raise ConfigError(f"there is no t quantile for p = {p} with {degrees} degrees of freedom")
    if p < 0.5:
        return -t_quantile(1 - p, degrees)
    if degrees > 10_000:
        z = _NORMAL.inv_cdf(p)
        second = (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees**2)
        return z + (z**3 + z) / (4 * degrees) + second
    coefficients = _coefficients(degrees)
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        middle = (low + high) / 2
        inside = _central_probability(middle, degrees, coefficients)
        low, high = (middle, high) if inside < 2 * p - 1 else (low, middle)
    return math.sqrt(degrees) * math.tan((low + high) / 2)


def _student(
    a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, overlap: float = 0.0
) -> tuple[float, float, int]:
    """Mean of a - b, its standard error, and the degrees of freedom."""
    mean = paired_difference(a, b).difference
    return mean, standard_error(_numbers(a) - _numbers(b), overlap), len(a) - 1


def _above(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray, bound: float) -> float:
    """One-sided p value of "the mean of a - b is at most the bound"; 1 for a single pair."""
    mean, error, degrees = _student(a, b)
    return 1.0 if math.isnan(error) else _upper_tail(_ratio(mean - bound, error), degrees)


def _ratio(value: float, error: float) -> float:
    """Their ratio, infinite where there is no noise."""
    if error > 0:
        return value / error
    return math.copysign(math.inf, value) if value else 0.0


def _upper_tail(t: float, degrees: int) -> float:
    """P(T > t)."""
    theta = math.atan2(abs(t), math.sqrt(degrees))
    inside = _central_probability(theta, degrees, _coefficients(degrees))
    tail = max(0.0, 1 - inside) / 2
    return tail if t > 0 else 1 - tail


def _check_margin(margin: float) -> None:
    if not 0 < margin < math.inf:
        raise ConfigError(f"a margin must be a number above 0, not {margin}")


def _effect(difference: float, stddev: float, pairs: int) -> float:
    return math.sqrt(pairs) * _ratio(difference, stddev)


def _fewest(enough: Callable[[int], bool]) -> int | None:
    """The fewest pairs, at least two, that are enough: by doubling, then by bisection."""
    low, high = 1, 2
    while not enough(high):
        low, high = high, 2 * high
        if high > _MOST:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _over_deviations(of: Callable[[float], float], degrees: int, most: float = math.inf) -> float:
    r"""Mean of a function of $s / \sigma$, the sample's standard deviation over the true one.

    Its density is proportional to $x^{\nu - 1} e^{-\nu x^2 / 2}$. The function counts as 0 above
    `most`. Gauss-Legendre quadrature, 9 standard deviations to both sides.
    """
    reach = 9 / math.sqrt(2 * degrees)
    low, high = max(0.0, 1 - reach), min(1 + reach, most)
    if high <= low:
        return 0.0
    nodes, weights = _quadrature()
    half = degrees / 2
    x = low + (high - low) * (nodes + 1) / 2
    factor = math.log(2) + half * math.log(half) - math.lgamma(half)
    density = np.exp(factor + (degrees - 1) * np.log(x) - half * x**2)
    values = np.array([of(scale) for scale in x.tolist()])
    return float((high - low) / 2 * (weights * density) @ values)


@cache
def _quadrature() -> tuple[np.ndarray, np.ndarray]:
    return np.polynomial.legendre.leggauss(80)


_power = power  # the argument of the same name hides the function


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

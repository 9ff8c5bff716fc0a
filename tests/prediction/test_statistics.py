import math

import numpy as np
import pytest
from scipy import stats

from shoal.core.errors import ConfigError, DataError
from shoal.prediction.statistics import (
    holm,
    linear_change,
    mean_and_error,
    paired_difference,
    paired_p_value,
    standard_error,
    t_quantile,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 10, 29, 100, 1001, 10000])
@pytest.mark.parametrize("p", [0.001, 0.025, 0.3, 0.5, 0.75, 0.95, 0.975, 0.9995])
def test_t_quantile_agrees_with_scipy(degrees, p):
    assert t_quantile(p, degrees) == pytest.approx(stats.t.ppf(p, degrees), rel=1e-9, abs=1e-12)


def test_standard_error_divides_by_the_root_of_the_number():
    values = [0.9, 0.93, 0.91, 0.95, 0.9]
    assert standard_error(values) == pytest.approx(stats.sem(values))
    assert mean_and_error(values) == pytest.approx((np.mean(values), stats.sem(values)))


def test_one_value_has_no_known_error():
    mean, error = mean_and_error([0.5])
    assert mean == 0.5
    assert math.isnan(error)


@pytest.mark.parametrize("level", [0.5, 0.9, 0.95, 0.99])
def test_paired_difference_agrees_with_scipy(level):
    generator = np.random.default_rng(0)
    a, b = generator.normal(size=7), generator.normal(0.5, size=7)
    interval = stats.ttest_rel(a, b).confidence_interval(level)
    found = paired_difference(a, b, level)
    assert found.difference == pytest.approx((a - b).mean())
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))


def test_pairing_removes_what_the_seeds_share():
    """A constant gap on top of a large common noise is found exactly."""
    noise = np.array([0.0, 10.0, -7.0, 3.0])
    found = paired_difference(noise + 0.25, noise)
    assert tuple(found) == pytest.approx((0.25, 0.25, 0.25))


def test_one_pair_says_nothing():
    assert paired_difference([2.0], [1.0]) == (1.0, -math.inf, math.inf)


@pytest.mark.parametrize("values", [[], [[1.0, 2.0]], 3.0])
def test_a_mean_needs_a_list(values):
    with pytest.raises(DataError, match="at least one number"):
        standard_error(values)


def test_differences_need_pairs():
    with pytest.raises(DataError, match="not 2 and 3"):
        paired_difference([1.0, 2.0], [1.0, 2.0, 3.0])


@pytest.mark.parametrize("level", [0.0, 1.0, 95])
def test_levels_are_fractions(level):
    with pytest.raises(ConfigError, match="between 0 and 1"):
        paired_difference([1.0, 2.0], [1.0, 3.0], level)


@pytest.mark.parametrize(("p", "degrees"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_quantiles_outside_the_distribution_are_refused(p, degrees):
    with pytest.raises(ConfigError, match="no t quantile"):
        t_quantile(p, degrees)


def test_a_change_along_a_line_is_that_of_scipy():
    values = [3.0, 2.0, 2.5, 1.0, 1.5, 0.2, 0.6]  # residuals that alternate: nothing is inflated
    line = stats.linregress(range(7), values)
    change, low, high = linear_change(values)
    assert change == pytest.approx(6 * line.slope)
    assert high - change == pytest.approx(6 * stats.t.ppf(0.975, 5) * line.stderr)
    assert change - low == pytest.approx(high - change)


def test_values_that_err_alike_widen_the_interval_of_a_change():
    """Its 95 % interval holds the true change about as often as it should, or nearly."""
    rng = np.random.default_rng(0)
    held = 0
    for _ in range(300):
        noise = rng.normal(size=60)
        for k in range(1, 60):
            noise[k] = 0.5 * noise[k - 1] + math.sqrt(0.75) * noise[k]
        change, low, high = linear_change(0.05 * np.arange(60) + noise)
        held += low <= 0.05 * 59 <= high
    assert held / 300 > 0.88


def test_two_values_have_no_trend():
    with pytest.raises(DataError, match="three values"):
        linear_change([1.0, 2.0])


@pytest.mark.parametrize("pairs", [2, 3, 4, 5, 20])
def test_the_p_value_is_that_of_a_paired_t_test(pairs):
    generator = np.random.default_rng(pairs)
    a, b = generator.normal(size=pairs), generator.normal(0.7, size=pairs)
    assert paired_p_value(a, b) == pytest.approx(stats.ttest_rel(a, b).pvalue, rel=1e-6)
    assert paired_p_value(b, a) == paired_p_value(a, b)


def test_p_values_of_pairs_without_noise():
    assert paired_p_value([1.0], [0.0]) == 1.0  # one pair shows nothing
    assert paired_p_value([1.0, 2.0], [1.0, 2.0]) == 1.0
    assert paired_p_value([1.0, 2.0], [0.5, 1.5]) == 0.0


def test_holm_multiplies_the_smallest_p_value_by_the_number_of_tests():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1.0, 1.0]
    assert holm([]) == []


def test_holm_rejects_what_the_stepwise_procedure_rejects():
    """Holm's own form: reject in order until p > 0.05 / (m - k)."""
    values = np.random.default_rng(0).beta(0.3, 3, size=40)
    rejected = set()
    for k, index in enumerate(np.argsort(values)):
        if values[index] > 0.05 / (len(values) - k):
            break
        rejected.add(int(index))
    assert 0 < len(rejected) < 40
    assert {i for i, p in enumerate(holm(list(values))) if p <= 0.05} == rejected

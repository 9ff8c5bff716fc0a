import math

import numpy as np
import pytest
from scipy import stats

from shoal.core.errors import ConfigError, DataError
from shoal.prediction.statistics import (
    Pairs,
    Verdict,
    decide,
    detectable,
    equivalence_p_value,
    equivalence_power,
    holm,
    linear_change,
    mean_and_error,
    non_inferiority_p_value,
    paired_difference,
    paired_p_value,
    pairs_for_equivalence,
    pairs_needed,
    power,
    standard_error,
    t_quantile,
)


@pytest.mark.parametrize("degrees", [1, 2, 3, 4, 5, 9, 10, 29, 100, 1001, 10000, 10001, 10**6])
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


def around(mean, stddev, pairs, seed=0):
    """Differences with exactly this mean and standard deviation."""
    noise = np.random.default_rng(seed).normal(size=pairs)
    return list(mean + stddev * (noise - noise.mean()) / noise.std(ddof=1))


def compared(differences, better="lower", margin=0.01):
    return Pairs(differences, [0.0] * len(differences), better, margin)


def alone(*arguments, **named):
    return decide("alone", {0: compared(*arguments, **named)})[0]


@pytest.mark.parametrize("mean", [-0.2, 0.0, 0.05, 0.3])
@pytest.mark.parametrize("pairs", [2, 3, 8])
@pytest.mark.parametrize("level", [0.05, 0.01])
def test_equivalence_is_shown_exactly_where_the_interval_lies_within_the_margin(mean, pairs, level):
    differences = around(mean, 0.1, pairs, seed=pairs)
    _, low, high = paired_difference(differences, np.zeros(pairs), 1 - 2 * level)
    for margin in (0.999 * max(-low, high), 1.001 * max(-low, high)):
        inside = -margin < low and high < margin
        assert (equivalence_p_value(differences, np.zeros(pairs), margin) < level) == inside


def test_one_sided_p_values_are_those_of_scipy():
    generator = np.random.default_rng(1)
    a, b = generator.normal(size=6), generator.normal(0.3, size=6)
    lower = stats.ttest_rel(a, b + 0.5, alternative="less").pvalue
    higher = stats.ttest_rel(a, b - 0.5, alternative="greater").pvalue
    assert non_inferiority_p_value(a, b, 0.5) == pytest.approx(lower)
    assert non_inferiority_p_value(a, b, 0.5, "higher") == pytest.approx(higher)
    assert equivalence_p_value(a, b, 0.5) == pytest.approx(max(lower, higher))
    assert equivalence_p_value(b, a, 0.5) == pytest.approx(max(lower, higher))


def test_pairs_without_noise_are_equal_within_every_margin_that_holds_their_difference():
    assert equivalence_p_value([1.0, 2.0], [0.5, 1.5], 0.6) == 0.0
    assert equivalence_p_value([1.0, 2.0], [0.5, 1.5], 0.5) > 0.4
    assert equivalence_p_value([1.0], [1.0], 0.5) == 1.0


@pytest.mark.parametrize("margin", [0.0, -1.0, math.inf, math.nan])
def test_a_margin_is_a_number_above_zero(margin):
    with pytest.raises(ConfigError, match="above 0"):
        equivalence_p_value([1.0, 2.0], [1.0, 2.0], margin)


def test_non_inferiority_needs_a_direction():
    with pytest.raises(ConfigError, match="'neither'"):
        non_inferiority_p_value([1.0, 2.0], [1.0, 2.0], 0.1, "neither")


@pytest.mark.parametrize("pairs", [2, 3, 5, 20, 300])
@pytest.mark.parametrize("effect", [0.0, 0.1, 0.4, -4.0])
@pytest.mark.parametrize("alpha", [0.05, 0.002])
def test_power_is_that_of_the_noncentral_t_distribution(pairs, effect, alpha):
    critical, shift = stats.t.isf(alpha / 2, pairs - 1), effect * math.sqrt(pairs)
    tails = stats.nct.sf(critical, pairs - 1, shift), stats.nct.cdf(-critical, pairs - 1, shift)
    assert power(effect, 1.0, pairs, alpha) == pytest.approx(np.nansum(tails), abs=1e-7)
    assert power(5 * effect, 5.0, pairs, alpha) == power(effect, 1.0, pairs, alpha)


@pytest.mark.parametrize(("pairs", "true"), [(3, 0.0), (8, 0.0), (8, 0.5), (30, -0.6)])
def test_equivalence_power_is_how_often_the_tests_show_it(pairs, true):
    draws = np.random.default_rng(0).normal(true, 1.0, (20000, pairs))
    reach = t_quantile(0.95, pairs - 1) * draws.std(1, ddof=1) / math.sqrt(pairs)
    share = (abs(draws.mean(1)) + reach < 1.0).mean()
    assert equivalence_power(1.0, 1.0, pairs, true) == pytest.approx(share, abs=0.01)


def test_numbers_of_pairs_are_those_of_known_tables():
    """Cohen's table for paired tests, and the smallest number by the definition."""
    assert [pairs_needed(d, 1.0) for d in (0.2, 0.5, 0.8)] == [199, 34, 15]
    assert pairs_needed(0.5, 1.0, power=0.9) == 44
    needed = pairs_for_equivalence(0.7, 1.0, difference=0.2)
    assert equivalence_power(0.7, 1.0, needed, 0.2) >= 0.8
    assert equivalence_power(0.7, 1.0, needed - 1, 0.2) < 0.8


@pytest.mark.parametrize("pairs", [2, 5, 40])
def test_the_detectable_difference_has_the_asked_power(pairs):
    found = detectable(0.3, pairs, 0.9, alpha=0.01)
    assert power(found, 0.3, pairs, alpha=0.01) == pytest.approx(0.9, abs=1e-6)


def test_what_no_number_of_pairs_shows():
    assert pairs_needed(0.0, 1.0) is None
    assert pairs_for_equivalence(0.5, 1.0, difference=-0.5) is None
    assert math.isinf(detectable(1.0, 1)) and power(1.0, 1.0, 1) == 0.0
    assert pairs_needed(1e-3, 1.0) == pytest.approx((1.959964 + 0.841621) ** 2 * 1e6, rel=1e-5)
    assert (pairs_needed(0.1, 0.0), pairs_for_equivalence(0.1, 0.0)) == (2, 2)


@pytest.mark.parametrize(
    ("mean", "stddev", "better", "verdict", "within"),
    [
        (-0.1, 0.01, "lower", Verdict.BETTER, False),
        (-0.1, 0.01, "higher", Verdict.WORSE, False),
        (0.1, 0.01, "higher", Verdict.BETTER, False),
        (0.1, 0.01, "neither", Verdict.DIFFERENT, False),
        (0.002, 0.005, "lower", Verdict.EQUAL, True),
        (-0.002, 0.001, "lower", Verdict.BETTER, True),
        (0.002, 0.001, "lower", Verdict.WORSE, True),
        (0.002, 0.05, "lower", Verdict.UNDECIDED, False),
    ],
)
def test_a_comparison_is_decided_by_difference_and_margin(mean, stddev, better, verdict, within):
    found = alone(around(mean, stddev, 6), better)
    assert (found.verdict, found.within) == (verdict, within)
    assert found.difference.difference == pytest.approx(mean)
    assert (found.needed is None) == (verdict is not Verdict.UNDECIDED)


def test_not_worse_by_the_margin_is_less_than_equal():
    found = alone(around(-0.02, 0.03, 6))
    assert (found.verdict, found.within, found.not_worse) == (Verdict.UNDECIDED, False, True)
    assert not alone(around(-0.02, 0.03, 6), "higher").not_worse


@pytest.mark.parametrize("differences", [[-0.1], [-0.1, -0.1], [0.0, 0.0], [math.inf] * 4])
def test_too_few_pairs_decide_nothing(differences):
    found = alone(differences)
    assert found.verdict is Verdict.UNDECIDED and not found.within and not found.not_worse


def test_without_a_margin_nothing_is_equal():
    assert alone([0.0] * 5, margin=None).verdict is Verdict.UNDECIDED
    assert alone(around(-0.1, 0.01, 5), margin=None).verdict is Verdict.BETTER


def test_the_number_of_pairs_that_would_decide_takes_the_shorter_way():
    """A large difference is found, a small one is shown to be within the margin."""
    assert alone(around(0.2, 0.3, 5)).needed == pairs_needed(0.2, 0.3)
    small = alone(around(0.001, 0.03, 5))
    assert small.needed == pairs_for_equivalence(0.01, 0.03, difference=0.001)
    two = {key: compared(around(0.2, 0.3, 5, key)) for key in range(2)}
    assert decide("two", two)[0].needed == pairs_needed(0.2, 0.3, alpha=0.025)


def test_a_family_adjusts_the_p_values_of_its_comparisons():
    """One comparison among ten needs a tenth of the level; the others show nothing."""
    p = equivalence_p_value(differences := around(0.0, 0.005, 4), np.zeros(4), 0.01)
    noise = {key: compared(around(0.01, 1.0, 4, key)) for key in range(9)}
    family = decide("ten", noise | {"mine": compared(differences)})
    assert family["mine"].p_equal == pytest.approx(10 * p)
    assert (family["mine"].family, family["mine"].comparisons) == ("ten", 10)
    assert alone(differences).verdict is Verdict.EQUAL
    assert family["mine"].verdict is Verdict.UNDECIDED


def test_hypotheses_that_exclude_each_other_count_once():
    assert holm([0.01, 0.02, 0.5], exclusive=[0, 0, 1]) == pytest.approx([0.02, 0.04, 0.5])
    assert holm([0.01, 0.02, 0.04], exclusive=[1, 0, 0]) == pytest.approx([0.02, 0.02, 0.04])


def test_families_seldom_decide_wrongly():
    """Half of the differences are 0, half are at the margin; one family in twenty may err."""
    draws, wrong = np.random.default_rng(0), 0
    for _ in range(400):
        true = [0.0, 0.0, 1.0, -1.0]
        family = {
            k: compared(list(draws.normal(d, 0.7, 5)), margin=1.0) for k, d in enumerate(true)
        }
        found = decide("four", family)
        wrong += any(found[k].p < 0.05 for k in (0, 1)) or any(found[k].within for k in (2, 3))
    assert wrong / 400 < 0.08


def test_overlapping_training_sets_widen_the_interval_of_splits():
    """Of correlated splits the plain interval misses zero too often, the corrected one does not."""
    draw, splits, overlap = np.random.default_rng(0), 20, 1 / 9
    rho = overlap / (1 + overlap)  # the correlation that Nadeau & Bengio assume: test / all points
    shared = draw.normal(size=(800, 1)) * rho**0.5
    values = shared + draw.normal(size=(800, splits)) * (1 - rho) ** 0.5
    zero = np.zeros(splits)
    plain = [paired_p_value(row, zero) < 0.05 for row in values]
    mended = [paired_p_value(row, zero, overlap) < 0.05 for row in values]
    assert np.mean(plain) > 0.2 and 0.02 < np.mean(mended) < 0.07
    low, high = paired_difference(values[0], zero, overlap=overlap)[1:]
    error = values[0].std(ddof=1) * (1 / splits + overlap) ** 0.5
    assert high - low == pytest.approx(2 * t_quantile(0.975, splits - 1) * error)

"""Cross-conformal rules against their literal definitions, and their promises in a simulation."""

import itertools
import math
import pickle

import numpy as np
import pytest
import torch
from small_runs import assert_one_sentence, plain, points, quick, shoal_of
from torch import nn

import shoal
from shoal import decisions
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.orders import Folds
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian, Poisson
from shoal.prediction import Predictive
from shoal.prediction.decisions.conformal import class_scores

C = 4

# points, folds, members; the second has folds of one point, the jackknife+
SIZES = [(38, 3, 6), (23, 23, 23), (24, 4, 7), (41, 5, 5)]


def outputs(members, n, width, seed, ties):
    random = torch.Generator().manual_seed(seed)
    drawn = torch.randn(members, n, width, generator=random, dtype=torch.float64)
    return drawn.round() if ties else drawn


def mixtures(members, count):
    """The members that hold out each fold, one list per fold."""
    return [list(range(fold, members, count)) for fold in range(count)]


def example(n, count, members, likelihood, width, ties=False, new=6):
    """Out-of-fold prediction, folds of points and members, and a new prediction of all members."""
    folds, held = Folds(n, count, seed=3).of_points, mixtures(members, count)
    seen = outputs(members, n, width, 1, ties)
    length = math.lcm(*map(len, held))
    each = torch.tensor([held[k] * (length // len(held[k])) for k in folds.tolist()])
    mixed = seen[each.T, torch.arange(n)]
    pred = Predictive(mixed, likelihood, target_ndim=1)
    return (
        pred,
        folds,
        torch.arange(members) % count,
        Predictive(outputs(members, new, width, 2, ties), likelihood, target_ndim=1),
    )


def real(n, count, members, ties=False):
    pred, folds, held, new = example(n, count, members, HeteroscedasticGaussian(), 2, ties)
    y = outputs(1, n, 1, 4, ties)[0, :, 0] * 2
    return pred, y, folds, held, new


def labels(n, count, members, ties=False):
    pred, folds, held, new = example(n, count, members, Categorical(), C, ties)
    return pred, torch.arange(n) % C, folds, held, new


def parts(pred, score, level):
    """Ends and unit of a prediction, in the words of the definition."""
    if score == "cqr":
        return *pred.interval(level), torch.ones(len(pred), dtype=torch.float64)
    unit = pred.stddev if score == "scaled" else torch.ones(len(pred), dtype=torch.float64)
    return pred.mean, pred.mean, unit


def of_fold(new, held, fold):
    return Predictive(new.members[held == fold], new.likelihood, target_ndim=1)


SCORED = [*itertools.product(["scaled", "absolute"], SIZES), ("cqr", SIZES[0])]


@pytest.mark.parametrize(("score", "sizes"), SCORED)
@pytest.mark.parametrize("ties", [False, True])
def test_intervals_are_the_literal_order_statistics_and_hold_the_literal_set(score, sizes, ties):
    pred, y, folds, held, new = real(*sizes, ties)
    n, level = len(y), 0.8
    low, high, unit = parts(pred, score, level)
    scores = torch.maximum(low - y, y - high) / unit
    rule = decisions.cross_conformal_intervals(pred, y, folds, held, level, score=score)
    found = rule(new)
    rank, folds = math.ceil(level * (n + 1) - 1e-9), folds.tolist()
    each = [torch.stack(parts(of_fold(new, held, k), score, level)).T for k in range(sizes[1])]
    for point, (left, right) in enumerate(zip(*(end.tolist() for end in found), strict=True)):
        own = [each[fold][point].tolist() for fold in folds]
        pairs = list(zip(scores.tolist(), own, strict=True))
        lows = sorted(lo - s * u for s, (lo, _, u) in pairs)
        highs = sorted(hi + s * u for s, (_, hi, u) in pairs)
        assert (left, right) == pytest.approx((lows[n - rank], highs[rank - 1]), abs=1e-12)
        for y in range(-9, 10):
            at_least = sum(s >= max(lo - y, y - hi) / u for s, (lo, hi, u) in pairs)
            if at_least > (1 - level) * (n + 1) - 1 + 1e-9:
                assert left - 1e-9 <= y <= right + 1e-9


@pytest.mark.parametrize(("n", "count", "level"), [(61, 6, 0.9), (40, 40, 0.85)])
def test_intervals_are_those_of_mapie(n, count, level):
    from mapie.regression import CrossConformalRegressor
    from sklearn.linear_model import Ridge
    from sklearn.model_selection import KFold

    random, parted = np.random.default_rng(0), KFold(count)
    (x, y), (new, _) = regression(random, n), regression(random, 9)
    oracle = CrossConformalRegressor(Ridge(), confidence_level=level, cv=parted, method="plus")
    wanted = oracle.fit_conformalize(x, y).predict_interval(new)[1][..., 0]
    folds, fits = np.empty(n, dtype=int), []
    for fold, (train, test) in enumerate(parted.split(x)):
        folds[test] = fold
        fits.append(Ridge().fit(x[train], y[train]))
    seen, fresh = (torch.tensor(np.stack([f.predict(a) for f in fits])) for a in (x, new))
    pred = Predictive(seen[folds, np.arange(n)][None, :, None], Gaussian(1.0))
    rule = decisions.cross_conformal_intervals(
        pred, y, folds, range(count), level, score="absolute"
    )
    found = rule(Predictive(fresh.unsqueeze(-1), Gaussian(1.0)))
    assert torch.cat(found, 1).numpy() == pytest.approx(wanted, abs=1e-12)


def literal_set(pred, y, folds, held, new, score, level, repeated=None):
    times = [1] * len(y) if repeated is None else repeated.tolist()
    mine = class_scores(pred.probs, score)[torch.arange(len(y)), y].tolist()
    theirs = [class_scores(of_fold(new, held, k).probs, score).tolist() for k in held.unique()]
    inside = torch.nn.functional.one_hot(new.probs.argmax(-1), C).bool()
    for point, label in itertools.product(range(len(new)), range(C)):
        pairs = zip(mine, folds.tolist(), times, strict=True)
        at_least = sum(t for s, fold, t in pairs if s >= theirs[fold][point][label])
        inside[point, label] |= at_least > (1 - level) * (sum(times) + 1) - 1 + 1e-9
    return inside


@pytest.mark.parametrize("score", ["lac", "aps"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("ties", [False, True])
def test_sets_are_the_literal_ones(score, sizes, ties):
    pred, y, folds, held, new = labels(*sizes, ties)
    rule = decisions.cross_conformal_sets(pred, y, folds, held, 0.8, score=score)
    for level in (0.3, 0.6, 0.8):
        wanted = literal_set(pred, y, folds, held, new, score, level)
        assert torch.equal(rule.at(level)(new), wanted) and wanted.any()
    assert rule.at(0.3)(new).sum() < rule(new).sum()


def test_a_point_that_counts_three_times_equals_three_points():
    times = torch.arange(38) % 3
    pred, y, folds, held, new = real(38, 3, 6)
    rows = torch.arange(38).repeat_interleave(times)
    once = decisions.cross_conformal_intervals(pred[rows], y[rows], folds[rows], held)
    rule = decisions.cross_conformal_intervals(pred, y, folds, held, repeated=times)
    for mine, theirs in zip(rule(new), once(new), strict=True):
        assert torch.equal(mine, theirs)
    assert rule.scores.points == int(times.sum())
    pred, y, folds, held, new = labels(38, 3, 6)
    rule = decisions.cross_conformal_sets(pred, y, folds, held, 0.7, repeated=times)
    assert torch.equal(rule(new), literal_set(pred, y, folds, held, new, "lac", 0.7, times))


def test_the_interval_of_one_fit_has_any_level():
    pred, y, folds, held, new = real(38, 3, 6)
    rule = decisions.cross_conformal_intervals(pred, y, folds, held, 0.9)
    other = decisions.cross_conformal_intervals(pred, y, folds, held, 0.6)
    copy = pickle.loads(pickle.dumps(rule))
    for mine, theirs in zip(copy.at(0.6)(new), other(new), strict=True):
        assert torch.equal(mine, theirs)
    wide, narrow = rule(new), other(new)
    assert bool((wide[0] < narrow[0]).all()) and bool((wide[1] > narrow[1]).all())
    with pytest.raises(ConfigError, match="score='scaled'"):
        decisions.cross_conformal_intervals(pred, y, folds, held, 0.9, score="cqr").at(0.5)


def test_columns_have_scores_of_their_own_and_counts_stay_whole():
    pred, folds, held, new = example(60, 3, 6, Gaussian(1.0), 2)
    pred, new = (Predictive(each.members, each.likelihood) for each in (pred, new))
    random = torch.Generator().manual_seed(0)
    noise = torch.randn(60, 2, generator=random, dtype=torch.float64)
    y = pred.mean + torch.tensor([0.1, 50.0]) * noise
    low, high = decisions.cross_conformal_intervals(pred, y, folds, held, 0.8)(new)
    for column in (0, 1):
        one, fresh = (Predictive(p.members[..., [column]], p.likelihood) for p in (pred, new))
        alone = decisions.cross_conformal_intervals(one, y[:, column], folds, held, 0.8)(fresh)
        assert torch.equal(alone[0], low[:, [column]]) and torch.equal(alone[1], high[:, [column]])
    counts, folds, held, new = example(60, 3, 6, Poisson(), 1)
    y = torch.poisson(counts.mean, generator=random)
    low, high = decisions.cross_conformal_intervals(counts, y, folds, held, 0.8)(new)
    assert torch.equal(low, low.round()) and torch.equal(high, high.round())


@pytest.mark.parametrize("sizes", SIZES)
def test_the_guarantee_is_that_of_the_theorem(sizes):
    n, count, members = sizes
    pred, y, folds, held, _ = real(n, count, members)
    rule = decisions.cross_conformal_intervals(pred, y, folds, held, 0.9)
    short = 2 * (1 - 1 / count) / (n / count + 1)
    if n % count == 0:
        short = min(short, (1 - count / n) / (count + 1))
    least = max(0.8 - short, 0)
    assert rule.scores.probability(0.9) == pytest.approx(least)
    assert f"{least:.4g} or more" in rule.guarantee or least == 0
    assert "exchangeable" in rule.guarantee and f"{n} training points" in rule.guarantee
    assert "no sure probability" in rule.at(0.5).guarantee
    knew = decisions.cross_conformal_intervals(pred, y, folds, held, knew=["epochs"])
    assert "did learn of them: epochs." in knew.guarantee


# The promise


def ridge(x, y, strength=1.0):
    """Coefficients of a ridge regression, in closed form."""
    return np.linalg.solve(x.T @ x + strength * np.eye(x.shape[1]), x.T @ y)


def regression(random, n, d=6):
    x = random.standard_normal((n, d))
    return x, x[:, 0] - x[:, 1] + (0.5 + np.abs(x[:, 0])) * random.standard_t(4, n)


@pytest.mark.parametrize("score", ["scaled", "absolute"])
def test_the_promise_for_intervals_holds_with_ridge_regressions(score):
    random, n, count, level, shares = np.random.default_rng(0), 60, 6, 0.9, []
    folds = np.arange(n) % count
    for _ in range(40):
        x, y = regression(random, n)
        new, target = regression(random, 40)
        fits = [ridge(x[folds != k], y[folds != k]) for k in range(count)]
        seen, fresh = (torch.from_numpy(np.stack([a @ w for w in fits])) for a in (x, new))
        spread = [0.1 + torch.from_numpy(np.abs(a[:, 0])).expand(count, -1) for a in (x, new)]
        both = [
            torch.stack([m, torch.log(torch.expm1(s**2))], -1)
            for m, s in zip((seen, fresh), spread, strict=True)
        ]
        pred = Predictive(both[0][folds, np.arange(n)].unsqueeze(0), HeteroscedasticGaussian())
        rule = decisions.cross_conformal_intervals(pred, y, folds, range(count), level, score=score)
        low, high = rule(Predictive(both[1], HeteroscedasticGaussian()))
        inside = (low[:, 0] <= torch.from_numpy(target)) & (torch.from_numpy(target) <= high[:, 0])
        shares.append(float(inside.double().mean()))
    assert np.mean(shares) > rule.scores.probability(level)
    assert np.mean(shares) == pytest.approx(level, abs=0.03)


def test_the_promise_for_sets_holds_with_nearest_means():
    random, n, count, level, shares = np.random.default_rng(0), 60, 6, 0.8, []
    folds = np.arange(n) % count

    def classes(n):
        y = random.integers(C, size=n)
        return random.standard_normal((n, 2)) + 1.5 * np.stack([y % 2, y // 2], 1), y

    for _ in range(40):
        (x, y), (new, target) = classes(n), classes(40)
        logits = []
        for k in range(count):
            trained = folds != k
            means = [x[trained & (y == c)].mean(0) for c in range(C)]
            both = np.concatenate([x, new])
            logits.append(-((both[:, None] - np.stack(means)) ** 2).sum(-1) / 2)
        logits = torch.from_numpy(np.stack(logits))
        pred = Predictive(logits[folds, np.arange(n)].unsqueeze(0), Categorical())
        rule = decisions.cross_conformal_sets(pred, y, folds, range(count), level)
        inside = rule(Predictive(logits[:, n:], Categorical()))
        shares.append(float(inside[torch.arange(40), torch.from_numpy(target)].double().mean()))
    assert np.mean(shares) > rule.scores.probability(level)
    assert np.mean(shares) == pytest.approx(level, abs=0.03)


# Runs


def folded(data, build=plain, members=6, **options):
    options = {"epochs": 2, "precision": "float64", "folds": 3, "method": "ensemble"} | options
    return quick(shoal_of(build, members), data, **options)


def test_a_run_with_folds_has_a_rule_that_equals_its_parts(tmp_path):
    x, y = points(38)
    run = folded((x, y), out=tmp_path / "run", keep="last")
    folds, held = Folds(38, 3).of_points, torch.arange(6) % 3
    wanted = decisions.cross_conformal_sets(shoal.out_of_fold(run), y, folds, held, 0.8)
    new = shoal.predict(run, points(20, 1)[0])
    rule = shoal.cross_conformal(run, 0.8)
    assert torch.equal(rule(new), wanted(new)) and "did learn" not in rule.guarantee
    loaded = shoal.cross_conformal(shoal.load(tmp_path / "run", plain), 0.8, data=(x, y))
    assert torch.equal(loaded(new), wanted(new))
    run.ensemble.alive[4] = False  # folds of the others stay
    with pytest.warns(shoal.ShoalWarning, match="diverged"):
        fewer = shoal.predict(run, x)
    rule = shoal.cross_conformal(run, 0.8, score="aps")
    assert rule.scores.member_folds.tolist() == [0, 1, 2, 0, 2] and rule(fewer).any()


def linear():
    return nn.Linear(3, 1)


def test_numbers_have_intervals_and_the_rule_says_what_members_knew():
    x = points(38)[0]
    y, weight = 40 + 5 * x.double().sum(1), torch.arange(38) % 3
    run = folded((x, y), linear, likelihood="homoscedastic", sample_weight=weight, patience=9)
    rule = shoal.cross_conformal(run, 0.8)
    assert rule.scores.points == int(weight.sum())
    low, high = rule(shoal.predict(run, x))
    assert low.shape == y.shape and bool((low < high).all())
    for words in ("best epochs", "ended the run", "unit"):
        assert words in rule.guarantee
    assert "repel" not in rule.guarantee and "calibrated" not in rule.guarantee
    assert "calibrated" in shoal.cross_conformal(shoal.calibrate(run)).guarantee
    repelled = folded((x, y), linear, likelihood="homoscedastic", method="kde", strength=2.0)
    assert "repel" in shoal.cross_conformal(repelled).guarantee


def test_what_a_rule_cannot_do_is_said_in_one_sentence():
    x, y = points(38)
    pred, real_y, folds, held, new = real(38, 3, 6)
    rule = decisions.cross_conformal_intervals(pred, real_y, folds, held)
    gap = real_y.clone()
    gap[7] = math.nan
    heavy = Predictive(new.members, new.likelihood, torch.arange(1.0, 7) / 21, 1)
    broken = Predictive(new.members * math.nan, new.likelihood, None, 1)
    sites = Predictive(torch.zeros(2, 38, 5, 2), Categorical())
    fit = decisions.cross_conformal_intervals
    for wrong, words in [
        (lambda: shoal.cross_conformal(quick()), "folds=8"),
        (lambda: shoal.cross_conformal(shoal.grow(folded((x, y)), 3, progress=False)), "frozen"),
        (lambda: shoal.cross_conformal(folded((x, y), sample_weight=[0.5] * 38)), "repetitions"),
        (lambda: shoal.cross_conformal(folded((x, y)), score="scaled"), "lac"),
        (lambda: rule(pred), "6 members"),
        (lambda: rule(heavy), "equal weight"),
        (lambda: rule(broken), "not finite"),
        (lambda: fit(pred, gap, folds, held), r"y\[7\], nan"),
        (lambda: fit(pred, real_y, folds[:9], held), "9 numbers"),
        (lambda: fit(pred, real_y, folds, held[:2]), "folds of points and of members"),
        (lambda: fit(pred, real_y, folds + 0.5, held), "whole numbers"),
        (lambda: fit(pred, real_y, folds, held, repeated=[-1] * 38), "whole numbers"),
        (lambda: fit(pred, real_y, folds, held, 0.99), "99 training points"),
        (lambda: rule.at(0.99), "99 training points"),
        (lambda: decisions.cross_conformal_sets(sites, y, folds, held), "exchangeable"),
        (lambda: fit(*labels(38, 3, 6)[:4]), "no intervals"),
    ]:
        with pytest.raises((ConfigError, DataError), match=words) as error:
            wrong()
        assert_one_sentence(error.value)

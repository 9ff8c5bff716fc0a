"""Importances and partial dependence of columns: closed forms of linear data, and intervals."""

import math

import numpy as np
import pytest
import torch

from shoal.core.errors import DataError
from shoal.evaluation.columns import dependence_of, permutation_importances
from shoal.inference.likelihoods import Categorical, Gaussian
from shoal.prediction import Predictive

SLOPES, NOISE = np.array([0.0, 0.5, 2.0]), 0.5
TRUE = 2 / math.sqrt(math.pi) * (np.sqrt(NOISE**2 + SLOPES**2) - NOISE)
"""Increase of the expected CRPS of N(f, s²) if the error of f grows from 0 to variance 2 b²."""


def linear(n, seed=0, repeats=1, weight=None, members=(0.0,)):
    """Importances of a model that knows the slopes; members add a multiple of the first column."""
    random = np.random.default_rng(seed)
    X = random.normal(size=(n, 3))
    y = X @ SLOPES + NOISE * random.normal(size=n)
    slopes = np.stack([SLOPES + [more, 0, 0] for more in members])

    def predict(X):
        return Predictive(torch.tensor(slopes @ X.T)[..., None], Gaussian(NOISE), None, 1)

    def permuted(jobs):
        for j, donors in jobs:
            changed = X.copy()
            changed[:, j] = X[donors, j]
            assert not (donors == np.arange(n)).any()
            yield predict(changed)

    y, names = torch.tensor(y), ("none", "weak", "strong")
    more = {"weight": weight, "repeats": repeats, "seed": seed}
    return permutation_importances(names, predict(X), permuted, y, data="test", **more)


def test_importances_of_linear_data_have_a_closed_form():
    found = linear(20_000)
    assert found.mean == pytest.approx(TRUE, rel=0.03)
    assert found.baseline == pytest.approx(NOISE / math.sqrt(math.pi), rel=0.03)
    assert found.mean[0] == found.error[0] == 0 and found.shares.sum() == pytest.approx(1)
    assert found.to_pandas()["column"].tolist() == ["strong", "weak", "none"]
    assert "CRPS in units of y, 20000 test points" in repr(found)


@pytest.mark.parametrize("repeats", [1, 3])
def test_the_standard_error_is_that_of_new_data(repeats):
    runs = [linear(60, seed, repeats) for seed in range(80)]
    means, errors = (np.stack([getattr(run, name) for run in runs]) for name in ("mean", "error"))
    assert means.std(0)[1:] == pytest.approx(errors.mean(0)[1:], rel=0.3)
    inside = (abs(means - TRUE) <= 1.96 * errors)[:, 1:].mean(0)
    assert (inside > 0.85).all()


def test_an_irrelevant_column_is_within_its_interval_though_members_use_it():
    runs = [linear(100, seed, members=(0.3, -0.2)) for seed in range(30)]
    low, high = zip(*(run.interval() for run in runs), strict=True)
    holds = (np.stack(low)[:, 0] <= 0) & (np.stack(high)[:, 0] >= 0)
    assert holds.mean() > 0.8
    assert runs[0].spread[0] >= 0 and runs[0].members.shape == (3, 2)


def test_points_of_weight_zero_do_not_count_as_targets():
    weight = np.repeat([1.0, 0.0], 300)
    found, other = linear(600, weight=weight), linear(600)
    assert found.mean[2] != other.mean[2]
    assert found.mean == pytest.approx(TRUE, rel=0.4)


def test_a_single_point_has_no_importances():
    with pytest.raises(DataError, match="at least 2"):
        linear(1)


def test_partial_dependence_averages_members_and_points():
    outputs = torch.tensor([[0.0, 2.0, 10.0, 12.0], [4.0, 6.0, 10.0, 12.0]])[..., None]
    pred = Predictive(outputs, Gaussian(0.5), None, 1)
    found = dependence_of("age", "numbers", np.array([1.0, 2.0]), pred)
    assert found.members.tolist() == [[1, 11], [5, 11]] and found.mean.tolist() == [3, 11]
    reach = 1.6448536 * math.sqrt(8)
    assert found.low == pytest.approx([3 - reach, 11]) and found.high[1] == 11
    assert found.noise == pytest.approx([0.5, 0.5])
    assert found.to_pandas().columns.tolist() == ["age", "mean", "low", "high", "noise"]


def test_partial_dependence_of_classes_is_a_probability():
    logits = torch.tensor([[[9.0, -9.0], [-9.0, 9.0]], [[-9.0, 9.0], [-9.0, 9.0]]])
    found = dependence_of(
        "a", "categories", np.array(["x", "y"]), Predictive(logits, Categorical())
    )
    assert found.mean == pytest.approx([0.5, 1]) and found.noise is None
    assert found.low[0] == 0 and found.high[0] == 1
    three = Predictive(torch.zeros(2, 4, 3), Categorical())
    several = dependence_of("a", "numbers", np.arange(2.0), three)
    assert several.mean.shape == (2, 3) and len(several.to_pandas().columns) == 10

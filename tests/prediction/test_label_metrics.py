"""Metrics of labels that are yes or no, and of labels in order, by hand."""

import math

import pytest
import torch

from shoal.inference.likelihoods import Bernoulli, Ordinal
from shoal.prediction import Predictive, evaluate
from shoal.prediction.metrics import ece_positive, label_auroc, label_mae, rps, subset_accuracy


def logit(p):
    return torch.tensor(p, dtype=torch.float64).logit()


def several(probabilities):
    return Predictive(logit(probabilities)[None], Bernoulli())


def ordered(probabilities):
    """Thresholds of the given class probabilities [N, C]."""
    below = torch.tensor(probabilities, dtype=torch.float64).cumsum(-1)[:, :-1].logit()
    steps = below.diff(dim=-1).expm1().log()  # the inverse of softplus
    return Predictive(torch.cat([below[:, :1], steps], -1)[None], Ordinal())


def test_all_labels_of_a_point_must_be_right():
    pred = several([[0.9, 0.2], [0.8, 0.6], [0.3, 0.4]])
    y = torch.tensor([[1, 0], [1, 0], [0, 0]])
    found = evaluate(pred, y)
    assert found["accuracy"] == pytest.approx(5 / 6)
    assert found["subset_accuracy"] == subset_accuracy(pred, y) == pytest.approx(2 / 3)
    square = [0.1, 0.2, 0.2, 0.6, 0.3, 0.4]
    assert found["brier"] == pytest.approx(2 * sum(each**2 for each in square) / 6)
    joint = [0.9 * 0.8, 0.8 * 0.4, 0.7 * 0.6]
    assert found["nll"] == pytest.approx(-sum(map(math.log, joint)) / 3)


def test_the_probability_of_yes_is_binned():
    pred = several([[0.1]] * 10 + [[0.8]] * 10)
    y = [1] * 2 + [0] * 8 + [1] * 7 + [0] * 3
    assert ece_positive(pred, y) == pytest.approx(0.1)


def test_the_ranking_is_the_mean_of_the_columns():
    pred = several([[0.9, 0.5, 0.1], [0.4, 0.6, 0.2], [0.6, 0.7, 0.3]])
    y = torch.tensor([[1, 0, 0], [0, 1, 0], [1, 0, 0]])  # the last column has one value only
    assert label_auroc(pred, y) == pytest.approx((1 + 0.5) / 2)
    assert math.isnan(label_auroc(pred, torch.zeros(3, 3)))


def test_errors_of_ordered_labels():
    pred = ordered([[0.7, 0.2, 0.1], [0.1, 0.3, 0.6], [0.3, 0.3, 0.4]])
    torch.testing.assert_close(pred.probs[2], torch.tensor([0.3, 0.3, 0.4], dtype=torch.float64))
    y = torch.tensor([0, 0, 2])
    assert label_mae(pred, y) == pytest.approx((0 + 2 + 1) / 3)
    expected = (0.3**2 + 0.1**2) + (0.9**2 + 0.6**2) + (0.3**2 + 0.6**2)
    assert rps(pred, y) == pytest.approx(expected / 3)
    assert evaluate(pred, y)["accuracy"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("kind", ["binary", "ordinal"])
def test_a_perfect_prediction_is_better_than_a_vague_one(kind):
    if kind == "binary":
        y = torch.arange(40) % 2
        best, vague = (Predictive(f, Bernoulli()) for f in
                       ((40.0 * (2 * y - 1)).view(1, 40, 1), torch.zeros(1, 40, 1)))  # fmt: skip
    else:
        y = torch.arange(40) % 3
        sharp = torch.stack(
            [torch.where(y == 0, 40.0, -40.0), torch.where(y == 1, 80.0, -40.0)], -1
        )
        best, vague = (Predictive(f, Ordinal()) for f in (sharp[None], torch.zeros(1, 40, 2)))
    perfect, other = evaluate(best, y), evaluate(vague, y)
    for name, better in (("accuracy", 1), ("nll", -1), ("brier", -1), ("label_auroc", 1),
                         ("label_mae", -1), ("rps", -1)):  # fmt: skip
        if name in perfect:
            assert better * (perfect[name] - other[name]) > 0
    assert perfect["accuracy"] == 1

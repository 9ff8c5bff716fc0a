import math
import warnings

import numpy as np
import pytest
import torch
from sklearn.metrics import accuracy_score, log_loss

from shoal.core.errors import ConfigError
from shoal.inference.likelihoods import Categorical
from shoal.prediction import Predictive
from shoal.prediction.metrics import (
    accuracy,
    accuracy_confidence,
    brier,
    ece,
    ece_30,
    ece_adaptive,
    nll,
    nll_legacy,
    reliability,
)

N, C = 1000, 5


@pytest.fixture(scope="module")
def torchmetrics():
    """Imported for the tests that need it, and not while tests are collected: it takes seconds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return pytest.importorskip("torchmetrics.functional.classification")


def stated(probs):
    """A single member that predicts exactly these probabilities."""
    return Predictive(torch.as_tensor(probs, dtype=torch.float64).log().unsqueeze(0), Categorical())


def binary(confidence):
    p = torch.as_tensor(confidence, dtype=torch.float64)
    return stated(torch.stack([p, 1 - p], -1))


def sample(seed=0):
    generator = torch.Generator().manual_seed(seed)
    logits = 2 * torch.randn(3, N, C, generator=generator, dtype=torch.float64)
    y = torch.randint(C, (N,), generator=generator)
    logits[:, torch.arange(N), y] += 1.0
    return Predictive(logits, Categorical()), y


def test_accuracy_nll_and_brier_agree_with_scikit_learn():
    pred, y = sample()
    probs = pred.members.softmax(-1).mean(0).numpy()
    assert accuracy(pred, y) == pytest.approx(accuracy_score(y, probs.argmax(-1)))
    assert nll(pred, y) == pytest.approx(log_loss(y, probs, labels=range(C)), rel=1e-10)
    literal = ((probs - np.eye(C)[y]) ** 2).sum(-1).mean()
    assert brier(pred, y) == pytest.approx(literal, rel=1e-12)


def test_brier_is_zero_to_two():
    assert brier(binary([1.0, 1.0]), [0, 0]) == 0.0
    assert brier(binary([1.0, 1.0]), [1, 1]) == 2.0


def test_legacy_nll_is_the_log_of_the_mean_probability():
    pred = binary([0.9, 0.3])
    assert nll(pred, [0, 0]) == pytest.approx(-(math.log(0.9) + math.log(0.3)) / 2)
    assert nll_legacy(pred, [0, 0]) == pytest.approx(-math.log(0.6))
    pred, y = sample()
    assert nll_legacy(pred, y) < nll(pred, y)


@pytest.mark.parametrize("bins", [1, 10, 15, 30])
def test_ece_agrees_with_torchmetrics(torchmetrics, bins):
    pred, y = sample()
    oracle = torchmetrics.multiclass_calibration_error(pred.probs, y, C, n_bins=bins, norm="l1")
    assert ece(pred, y, bins=bins) == pytest.approx(float(oracle), abs=1e-6)


def test_ece_of_a_constructed_histogram():
    """Four points at 0.9 of which three are right, four at 0.6 of which one is right."""
    pred, y = binary([0.9] * 4 + [0.6] * 4), [0, 0, 0, 1] + [0, 1, 1, 1]
    expected = 0.5 * abs(0.75 - 0.9) + 0.5 * abs(0.25 - 0.6)
    for value in (ece(pred, y), ece_30(pred, y), ece_adaptive(pred, y)):
        assert value == pytest.approx(expected, rel=1e-12)
    assert ece(pred, y, bins=1) == pytest.approx(abs(0.5 - 0.75), rel=1e-12)


def test_reliability_counts_bins_open_below_and_closed_above():
    pred = binary([0.6, 0.8, 0.81, 1.0, 0.75])
    found = reliability(pred, [0, 0, 1, 0, 1], bins=5)
    assert found.count.tolist() == [0, 0, 1, 2, 2]
    assert found.confidence[2:].tolist() == pytest.approx([0.6, 0.775, 0.905])
    assert found.accuracy[2:].tolist() == pytest.approx([1.0, 0.5, 0.5])
    assert found.accuracy[:2].isnan().all()
    assert found.edges.tolist() == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1])


@pytest.mark.parametrize(("points", "bins"), [(60, 15), (61, 15), (7, 3), (2, 15)])
def test_adaptive_bins_hold_equal_mass(points, bins):
    sure = torch.linspace(0.51, 0.99, points)
    found = reliability(binary(sure), [0] * points, bins=bins, adaptive=True)
    filled = found.count[found.count > 0]
    assert found.count.sum() == points
    assert filled.max() - filled.min() <= 1
    assert found.error == pytest.approx(1 - float(sure.double().mean()), abs=1e-6)


def test_adaptive_bins_agree_with_a_literal_split():
    pred, y = sample()
    order = pred.confidence().argsort()
    gaps = [
        abs(float((pred.labels() == y)[part].double().mean() - pred.confidence()[part].mean()))
        for part in order.chunk(20)
    ]
    assert ece(pred, y, bins=20, adaptive=True) == pytest.approx(np.mean(gaps), rel=1e-10)


def test_adaptive_bins_keep_ties_together_in_any_order():
    """Equal confidences: whichever are listed first, the right answers share one bin."""
    pred = binary([0.8] * 10)
    for y in ([0] * 5 + [1] * 5, [1] * 5 + [0] * 5):
        assert ece_adaptive(pred, y) == pytest.approx(0.3)


def test_a_diagram_needs_a_bin():
    with pytest.raises(ConfigError, match="bins must be a whole number from 1"):
        ece(binary([0.6]), [0], bins=0)


def test_accuracy_against_confidence_with_the_retained_fraction():
    pred = binary([0.55, 0.7, 0.9, 0.95])
    found = accuracy_confidence(pred, [0, 1, 0, 0], [0.0, 0.6, 0.9, 0.99])
    assert found.accuracy[:3].tolist() == pytest.approx([0.75, 2 / 3, 1.0])
    assert found.accuracy[3].isnan()
    assert found.retained.tolist() == [1.0, 0.75, 0.5, 0.0]
    assert found.threshold.tolist() == pytest.approx([0.0, 0.6, 0.9, 0.99])


def test_unknown_kinds_count_as_wrong():
    found = accuracy_confidence(binary([0.9, 0.9]), [0, 0], [0.0, 0.8], ood=binary([0.6, 0.85]))
    assert found.accuracy.tolist() == pytest.approx([2 / 4, 2 / 3])
    assert found.retained.tolist() == [1.0, 0.75]

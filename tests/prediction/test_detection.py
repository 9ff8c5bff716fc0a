import math

import pytest
import torch
from sklearn.metrics import average_precision_score, roc_auc_score, roc_curve

from shoal.core.errors import DataError
from shoal.inference.likelihoods import Categorical, Gaussian
from shoal.prediction import Predictive
from shoal.prediction.metrics import (
    aupr,
    auroc,
    disagreement_ratio,
    entropy_ratio,
    fpr95,
    registry,
    scores,
)


def numbers(*values):
    return torch.tensor(values, dtype=torch.float64)


def draws(size, shift, steps, seed):
    generator = torch.Generator().manual_seed(seed)
    values = shift + torch.randn(size, generator=generator, dtype=torch.float64)
    return (values * steps).round() / steps if steps else values


@pytest.mark.parametrize("steps", [None, 1, 4])
@pytest.mark.parametrize("sizes", [(200, 300), (37, 5), (1, 40)])
def test_rank_measures_agree_with_scikit_learn_also_with_ties(steps, sizes):
    test, ood = draws(sizes[0], 0.0, steps, 1), draws(sizes[1], 0.7, steps, 2)
    truth = [0] * sizes[0] + [1] * sizes[1]
    values = torch.cat([test, ood])
    assert auroc(test, ood) == pytest.approx(roc_auc_score(truth, values), abs=1e-12)
    assert aupr(test, ood) == pytest.approx(average_precision_score(truth, values), abs=1e-12)
    false, found, _ = roc_curve(truth, values, drop_intermediate=False)
    assert fpr95(test, ood) == pytest.approx(false[found >= 0.95].min(), abs=1e-12)


@pytest.mark.parametrize(
    ("test", "ood", "expected"),
    [
        (numbers(0, 1), numbers(2, 3), (1.0, 1.0, 0.0)),
        (numbers(2, 3), numbers(0, 1), (0.0, 5 / 12, 1.0)),
        (numbers(1, 1), numbers(1, 1), (0.5, 0.5, 1.0)),
        (numbers(0, 1), numbers(1, 2), (0.875, 5 / 6, 0.5)),
    ],
)
def test_small_cases_by_hand(test, ood, expected):
    assert (auroc(test, ood), aupr(test, ood), fpr95(test, ood)) == pytest.approx(expected)


def test_auroc_of_exchanged_roles_is_the_complement():
    test, ood = draws(50, 0.0, 2, 1), draws(60, 1.0, 2, 2)
    assert auroc(test, ood) + auroc(ood, test) == pytest.approx(1.0, abs=1e-12)


def classes(seed, scale, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    logits = scale * torch.randn(5, 80, 4, generator=generator, dtype=torch.float64)
    return Predictive(logits.to(dtype), Categorical())


def literal(pred, name):
    p = pred.members.softmax(-1)
    mean = p.mean(0)
    total = -(mean * mean.log()).sum(-1)
    return {
        "entropy": total,
        "mutual_information": total + (p * p.log()).sum(-1).mean(0),
        "disagreement": p.std(0).mean(-1),
        "max_prob": 1 - mean.amax(-1),
    }[name]


@pytest.mark.parametrize("name", ["entropy", "mutual_information", "disagreement", "max_prob"])
def test_registered_scores_are_high_for_the_unfamiliar(name):
    test, ood = classes(1, 4.0), classes(2, 1.0)
    torch.testing.assert_close(scores(test)[name], literal(test, name))
    truth = [0] * len(test) + [1] * len(ood)
    values = torch.cat([literal(test, name), literal(ood, name)])
    area = registry[f"auroc_{name}"](test, ood)
    assert area == pytest.approx(roc_auc_score(truth, values), abs=1e-12)
    precision = registry[f"aupr_{name}"](test, ood)
    assert precision == pytest.approx(average_precision_score(truth, values), abs=1e-12)


def test_regression_is_told_by_variance_and_disagreement():
    near, far = (
        Predictive(s * torch.arange(4.0).view(4, 1, 1) + torch.zeros(4, 9, 2), Gaussian())
        for s in (1.0, 2.0)
    )
    assert set(scores(near)) == {"variance", "disagreement"}
    for name in scores(near):
        assert registry[f"auroc_{name}"](near, far) == 1.0
    assert disagreement_ratio(near, far) == pytest.approx(2.0)


def test_single_precision_still_ranks_confidences_that_round_to_one():
    surest, sure = (Predictive(torch.tensor([[[0.0, gap]]]), Categorical()) for gap in (40.0, 30.0))
    assert float(surest.confidence()) == float(sure.confidence()) == 1.0
    assert registry["auroc_max_prob"](surest, sure) == 1.0
    assert registry["auroc_entropy"](surest, sure) == 1.0


def test_ratios_of_uniform_and_certain_predictions():
    uniform = Predictive(torch.zeros(2, 3, 4).double(), Categorical())
    half = Predictive(
        torch.tensor([0.0, 0.0, -999.0, -999.0]).double().expand(2, 3, 4), Categorical()
    )
    certain = Predictive(
        torch.tensor([999.0, 0.0, 0.0, 0.0]).double().expand(2, 3, 4), Categorical()
    )
    assert entropy_ratio(half, uniform) == pytest.approx(math.log(4) / math.log(2))
    assert entropy_ratio(certain, uniform) == math.inf
    assert entropy_ratio(uniform, certain) == 0.0
    assert math.isnan(disagreement_ratio(uniform, certain))


def test_predictions_of_different_ensembles_are_not_compared():
    other = Predictive(torch.zeros(5, 3, 7), Categorical())
    with pytest.raises(DataError, match="same ensemble"):
        entropy_ratio(classes(1, 1.0), other)

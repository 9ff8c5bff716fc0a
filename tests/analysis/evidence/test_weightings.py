"""Stacking finds known optima; distances of weightings agree with closed forms."""

import math

import pytest
import torch
from torch.distributions import Normal

from shoal.analysis.evidence.compute_evidence import compare, total_variation
from shoal.analysis.evidence.members import stacking_weights
from shoal.core.errors import DataError
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian
from shoal.prediction import Predictive


def certain(heads, tails):
    """Two members: one allows the first `heads` points alone, the other the rest."""
    table = torch.full((2, heads + tails), -math.inf)
    table[0, :heads] = 0.0
    table[1, heads:] = 0.0
    return table


def test_members_that_exclude_each_other_are_weighed_by_what_they_explain():
    """max of (h log w + t log (1 - w)) / (h + t) is at w = h / (h + t)."""
    assert stacking_weights(certain(30, 10)).tolist() == pytest.approx([0.75, 0.25], abs=1e-5)


def test_two_coins_in_closed_form():
    """Members believe in p and q, a share s of heads: w p + (1 - w) q = s solves it."""
    p, q, share = 0.8, 0.3, 0.6
    heads = torch.arange(100) < 100 * share
    table = torch.stack(
        [torch.where(heads, b, 1 - b).log() for b in (torch.tensor(p), torch.tensor(q))]
    )
    w = (share - q) / (p - q)
    assert stacking_weights(table).tolist() == pytest.approx([w, 1 - w], abs=1e-5)


def test_a_member_that_is_best_everywhere_gets_everything():
    table = torch.randn(4, 50)
    table[2] = table.amax(0) + 0.5
    assert stacking_weights(table)[2] == pytest.approx(1, abs=1e-6)


def test_no_other_weights_do_better():
    torch.manual_seed(0)
    table = torch.randn(5, 40, dtype=torch.float64)
    best = stacking_weights(table)

    def score(w):
        return float((table + w.log()[:, None]).logsumexp(0).mean())

    top = score(best)
    for w in torch.distributions.Dirichlet(torch.ones(5).double()).sample((300,)):
        assert score(w) <= top + 1e-9
    assert float(best.sum()) == pytest.approx(1) and bool((best >= 0).all())


def test_scores_far_from_one_do_not_underflow():
    table = torch.tensor([[-2000.0, -2001.0], [-2001.0, -2000.0]])
    assert stacking_weights(table).tolist() == pytest.approx([0.5, 0.5], abs=1e-6)


@pytest.mark.parametrize("bad", [torch.zeros(3), torch.zeros(2, 0), torch.full((2, 2), math.nan)])
def test_what_is_no_table_of_scores_is_refused(bad):
    with pytest.raises(DataError, match="stacking needs log probabilities"):
        stacking_weights(bad)


def test_points_that_nobody_allows_say_nothing():
    table = torch.cat([certain(3, 1), torch.full((2, 5), -math.inf)], 1)
    assert stacking_weights(table).tolist() == pytest.approx([0.75, 0.25], abs=1e-5)
    with pytest.raises(DataError, match="not possible"):
        stacking_weights(table[:, 4:])


def sure(*labels):
    """Members that are all but certain of a label each."""
    return torch.nn.functional.one_hot(torch.tensor(labels), 2)[:, None].double() * 80 - 40


def test_distance_of_two_weightings_of_classes():
    """Two members that exclude each other: half the sum of |w - 1/2| is |w - 1/2|."""
    pred = Predictive(sure(0, 1), Categorical())
    found = compare(pred, torch.tensor([0]), torch.tensor([0.9, 0.1]))
    assert found.total_variation == pytest.approx(0.4)
    assert found.nll == pytest.approx(-math.log(0.9))


def test_distance_of_two_gaussians_is_that_of_the_textbook():
    """N(0, 1) and N(d, 1): 2 Phi(d / 2) - 1; as weights 1 against 0 of a mixture of both."""
    for gap in (0.0, 0.5, 2.0, 20.0):
        one, other = (Predictive(torch.full((1, 1, 1), m), Gaussian(1.0)) for m in (0.0, gap))
        expected = 2 * float(Normal(0, 1).cdf(torch.tensor(gap / 2))) - 1
        assert float(total_variation(one, other)) == pytest.approx(expected, abs=1e-3)


def test_distance_of_mixtures_far_apart_is_the_difference_of_weights():
    outputs = torch.tensor([[[-50.0, 0.0]], [[50.0, 1.0]]])
    pred = Predictive(outputs, HeteroscedasticGaussian())
    found = compare(pred, torch.tensor([[-50.0]]), torch.tensor([0.8, 0.2]))
    assert found.total_variation == pytest.approx(0.3, abs=1e-3)

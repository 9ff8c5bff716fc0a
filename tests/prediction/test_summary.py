"""What a notebook shows of a prediction."""

import re

import pytest
import torch
from likelihood_examples import DEFAULTS, drawn, width

from shoal.inference.likelihoods import Categorical, Gaussian
from shoal.inference.likelihoods.custom_loss import Custom
from shoal.prediction import predictive as module
from shoal.prediction.predictive import Predictive, summary


@pytest.mark.parametrize("sites", [(), (4,)], ids=["points", "sites"])
@pytest.mark.parametrize("likelihood", DEFAULTS, ids=lambda each: type(each).__name__)
def test_every_likelihood_has_a_figure(likelihood, sites):
    pred = Predictive(drawn(3, 20, *sites, width(likelihood)), likelihood)
    text = pred._repr_html_()
    assert text.count("<svg") == 1 and len(text.encode()) < 30_000 and "nan" not in text


def test_numbers_of_classes():
    logits = torch.tensor([[[0.0, 0.0], [50.0, 0.0]], [[0.0, 0.0], [0.0, 50.0]]])
    facts, figure = summary(Predictive(logits, Categorical()))
    # Both points have probabilities of one half; the members disagree about the second alone.
    assert facts["mean confidence"] == "50 %"
    assert facts["mean predictive entropy"] == "0.6931 nats, 50 % epistemic"
    heights = [float(found) for found in re.findall(r'<rect [^>]*height="([\d.]+)"', figure)]
    assert [index for index, height in enumerate(heights) if height > 0] == [5]


def test_numbers_of_a_regression():
    outputs = torch.tensor([[[3.0], [1.0]], [[-3.0], [1.0]]])
    facts, figure = summary(Predictive(outputs, Gaussian(4.0)))
    # Variance 16 of the noise, and 9 or 0 of the members' means.
    assert facts["mean standard deviation"] == "4.5" and facts["its epistemic part"] == "1.5"
    assert figure.count("<polygon") == 2


def test_many_points_are_looked_at_in_part(monkeypatch):
    pred = Predictive(drawn(2, 5000, 3), Categorical())
    facts, _ = summary(pred)
    assert "mean confidence (of 500 points)" in facts
    monkeypatch.setattr(module, "NUMBERS", 60)
    facts, _ = summary(pred)
    assert "mean confidence (of 10 points)" in facts


def test_a_loss_of_ones_own_has_facts_alone():
    pred = Predictive(drawn(2, 5, 3), Custom(lambda outputs, y: outputs.sum(-1)))
    assert summary(pred) == ({}, "") and "<svg" not in pred._repr_html_()


def test_outputs_that_are_not_finite_have_no_figure():
    for likelihood in (Categorical(), Gaussian(1.0)):
        pred = Predictive(torch.full((2, 3, 1), float("nan")), likelihood)
        assert "<svg" not in pred._repr_html_()

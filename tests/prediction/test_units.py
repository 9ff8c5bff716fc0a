"""Predictions in the units of the targets: the closed forms of a change of variables."""

import math

import pytest
import torch

from shoal.data.dataset import Scaling
from shoal.inference.likelihoods import Gaussian, HeteroscedasticGaussian
from shoal.prediction import Predictive, evaluate
from shoal.prediction.metrics.regression import in_units

SCALING = Scaling(mean=20.0, std=4.0)


def prediction(likelihood, columns):
    random = torch.Generator().manual_seed(0)
    width = likelihood.width(columns)
    return Predictive(torch.randn(5, 30, width, generator=random).double(), likelihood)


def targets(columns):
    shape = (30,) if columns == 1 else (30, columns)
    return torch.randn(shape, generator=torch.Generator().manual_seed(1)).double()


@pytest.mark.parametrize("likelihood", [Gaussian(0.3), HeteroscedasticGaussian()])
def test_scores_change_as_lengths_and_densities_do(likelihood):
    pred, z = prediction(likelihood, 1), targets(1)
    told, wanted = evaluate(in_units(pred, SCALING), SCALING.original(z)), evaluate(pred, z)
    wanted |= {name: 4 * wanted[name] for name in ("rmse", "crps", "sharpness", "disagreement")}
    assert told == pytest.approx(wanted | {"nll": wanted["nll"] + math.log(4.0)})


@pytest.mark.parametrize("columns", [1, 3])
def test_the_density_integrates_the_change_of_variables(columns):
    pred, z = prediction(Gaussian(0.3), columns), targets(columns)
    told = in_units(pred, SCALING).log_prob(SCALING.original(z))
    torch.testing.assert_close(told, pred.log_prob(z) - columns * math.log(4.0))


def test_without_a_scaling_nothing_changes():
    pred = prediction(Gaussian(), 1)
    assert in_units(pred, None) is pred

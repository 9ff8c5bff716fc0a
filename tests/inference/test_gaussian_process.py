"""The Gaussian process prior: closed forms, and the points that it sees."""

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.inference.posterior import functional_score
from shoal.inference.priors import GaussianProcess

pytestmark = pytest.mark.usefixtures("double")


def noise(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def test_the_score_of_given_draws():
    """-S^-1 f with S the mean over draws and columns, and a ridge on its diagonal."""
    f, F = noise(2, 3, 2), noise(40, 3, 2, seed=1)
    S = sum(F[p, :, c : c + 1] @ F[p, :, c : c + 1].mT for p in range(40) for c in range(2)) / 80
    S = S + 0.1 * S.diagonal().mean() * torch.eye(3)
    found = GaussianProcess(ridge=0.1).score_outputs(f, F)
    for m in range(2):
        torch.testing.assert_close(found[m], -torch.linalg.solve(S, f[m]))


@pytest.mark.parametrize("points", [3, 12])
def test_a_linear_model_has_its_weight_prior(points):
    """J^T S^-1 f = w / std², on as many points as there are weights, whichever they are."""
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(3, 1, bias=False), members=2, seed=0)
    prior = GaussianProcess(shoal.priors.Gaussian(0.7), draws=20000, ridge=1e-9)
    posterior = shoal.Posterior(shoal.likelihoods.Gaussian(), prior, n=1)
    x = noise(points, 3)
    w = ensemble.weights["weight"].detach()[:, 0]
    score = functional_score(ensemble, posterior, ensemble(x).detach(), x, seed=0, step=0)
    assert ((score != 0).any(0).sum() == 3).all()
    pulled = score[:, :, 0] @ x
    torch.testing.assert_close(pulled, -w / 0.49, rtol=0.1, atol=0.05)


def test_senseless_settings_are_refused():
    with pytest.raises(ConfigError, match="ridge of a covariance must be positive"):
        GaussianProcess(ridge=0.0)
    with pytest.raises(ConfigError, match="a flat prior has none"):
        GaussianProcess(shoal.priors.Flat())
    with pytest.raises(ConfigError, match="at least two draws"):
        GaussianProcess(draws=1)

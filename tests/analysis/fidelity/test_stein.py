"""Kernel Stein discrepancy against its definition and against exact draws."""

import math

import pytest
import torch
from torch import nn

import shoal
from shoal.analysis.fidelity.distances import ksd2, ksd2_of_ensemble, stein_kernel
from shoal.core.errors import DataError

pytestmark = pytest.mark.usefixtures("double")


def cloud(members, dimensions, seed=0):
    return torch.randn(members, dimensions, generator=torch.Generator().manual_seed(seed))


def literal(x, y, sx, sy, h2):
    """u(x, y) by automatic differentiation of the kernel."""

    def k(a, b):
        return (1 + (a - b).square().sum() / h2).rsqrt()

    dx, dy = torch.func.grad(k, 0)(x, y), torch.func.grad(k, 1)(x, y)
    trace = torch.func.jacrev(torch.func.grad(k, 1), 0)(x, y).trace()
    return sx @ sy * k(x, y) + sx @ dy + sy @ dx + trace


def test_the_stein_kernel_as_written_in_the_paper():
    x, s = cloud(4, 3), cloud(4, 3, seed=1)
    target = torch.stack(
        [torch.stack([literal(x[i], x[j], s[i], s[j], 0.7) for j in range(4)]) for i in range(4)]
    )
    torch.testing.assert_close(stein_kernel(x, s, 0.7), target, rtol=1e-11, atol=1e-11)


def test_exact_draws_have_no_discrepancy_on_average():
    """The unbiased square has mean 0; its standard error over 60 clouds is about 0.01."""
    values = torch.tensor([ksd2(x, -x, h2=2.0) for x in (cloud(40, 2, seed) for seed in range(60))])
    assert abs(values.mean()) < 4 * values.std() / math.sqrt(60)
    assert values.std() / math.sqrt(60) < 0.02


@pytest.mark.parametrize("wrong", [lambda x: x + 1, lambda x: 2 * x, lambda x: 0.4 * x])
def test_wrong_laws_are_told_from_the_right_one(wrong):
    x = cloud(400, 2)
    right = ksd2(x, -x, h2=2.0)
    moved = wrong(x)
    assert ksd2(moved, -moved, h2=2.0) > 10 * abs(right)


def test_exact_draws_rank_before_a_shifted_and_a_collapsed_cloud():
    """The biased mean ranks the collapsed cloud first: its scores are almost 0."""
    clouds = {"exact": [], "shifted": [], "collapsed": []}
    for seed in range(40):
        x = cloud(20, 20, seed)
        for name, moved in zip(clouds, (x, x + 0.5, 0.05 * x), strict=True):
            clouds[name].append(
                (ksd2(moved, -moved, 40.0), stein_kernel(moved, -moved, 40.0).mean())
            )
    found = {name: torch.tensor(values).mean(0) for name, values in clouds.items()}
    assert found["exact"][0] < min(found["shifted"][0], found["collapsed"][0]) - 0.1
    assert found["collapsed"][1] < found["exact"][1]


def test_of_a_trained_ensemble():
    """The scores that `forces` gives are those of the log posterior."""
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(2, 1), members=5, seed=0)
    x, y = cloud(6, 2), cloud(6, 1, seed=2)
    posterior = shoal.Posterior(shoal.likelihoods.Gaussian(0.5), shoal.priors.Gaussian(2.0), 6)
    W, b = (ensemble.weights[name].detach() for name in ("weight", "bias"))
    flat = torch.cat([W.reshape(5, 2), b], 1).requires_grad_()
    residual = y.T - flat[:, :2] @ x.T - flat[:, 2:]
    log_density = -residual.square().sum() / 0.5 - flat.square().sum() / 8
    (scores,) = torch.autograd.grad(log_density, flat)
    found = ksd2_of_ensemble(ensemble, posterior, (x, y))
    assert math.isclose(found, ksd2(flat.detach(), scores), rel_tol=1e-9)


def test_one_particle_says_nothing():
    with pytest.raises(DataError, match="at least two particles"):
        ksd2(torch.zeros(1, 2), torch.zeros(1, 2))

"""An ensemble in real BoTorch: its posterior, and an acquisition function on it."""

import warnings

import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("botorch", reason="botorch is not installed")
    from botorch.acquisition import qLogExpectedImprovement
    from botorch.optim import optimize_acqf

    from shoal.integrations.botorch import EnsembleSurrogate

M = 5


def build(outputs=1):
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, outputs))


@pytest.fixture(scope="module")
def ensemble():
    return shoal.Ensemble.init(build, members=M, seed=0)


@pytest.mark.parametrize("shape", [(7, 2), (3, 1, 2), (4, 2, 6, 2)])
def test_the_posterior_is_that_of_the_members(ensemble, shape):
    x = torch.rand(*shape, dtype=torch.float64)
    posterior = EnsembleSurrogate(ensemble, likelihood=Gaussian(0.1)).posterior(x)
    each = torch.stack([ensemble.member(i)(x.float()).double() for i in range(M)], -3)
    assert posterior.values.shape == (*shape[:-2], M, *shape[-2:-1], 1)
    assert posterior.mean.dtype == torch.float64
    assert torch.allclose(posterior.values, each, atol=1e-6)
    assert torch.allclose(posterior.mean, each.mean(-3), atol=1e-6)
    assert torch.allclose(posterior.variance, each.var(-3), atol=1e-6)


def test_weights_and_units_are_those_of_the_run():
    """A heteroscedastic member gives its mean in the units of the targets."""
    x = torch.rand(60, 2)
    y = 1000 + 50 * x.sum(1)
    two = shoal.Ensemble.init(lambda: build(2), members=2, seed=0)
    run = shoal.fit(
        two,
        (x, y),
        likelihood=HeteroscedasticGaussian(),
        steps=3,
        method="ensemble",
        progress=False,
    )
    weights = torch.tensor([0.25, 0.75])
    mean = EnsembleSurrogate(run, weights=weights).posterior(x).mean
    pred = shoal.predict(run, x, weights=[0.25, 0.75])
    assert torch.allclose(mean[:, 0], pred.mean, rtol=1e-5)


def test_an_acquisition_function_has_gradients_and_is_optimised(ensemble):
    model = EnsembleSurrogate(ensemble, likelihood=Gaussian(0.1))
    x = torch.rand(3, 2, 2, dtype=torch.float64, requires_grad=True)
    improvement = qLogExpectedImprovement(model, best_f=-10.0)
    value = improvement(x)
    assert value.shape == (3,)
    (gradient,) = torch.autograd.grad(value.sum(), x)
    assert bool(gradient.isfinite().all()) and float(gradient.abs().max()) > 0
    bounds = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    found, best = optimize_acqf(
        improvement, bounds, q=1, num_restarts=2, raw_samples=16, options={"maxiter": 20}
    )
    with torch.no_grad():
        others = improvement(torch.rand(50, 1, 2, dtype=torch.float64))
    assert found.shape == (1, 2) and float(best) >= float(others.max()) - 0.05


def test_a_stepper_is_a_surrogate_that_later_steps_leave_alone():
    x = torch.rand(12, 2)
    stepper = shoal.Stepper(
        shoal.Ensemble.init(build, members=M, seed=0), n=12, likelihood=Gaussian(0.1), lr=0.01
    )
    with pytest.raises(ConfigError, match="likelihood="):
        EnsembleSurrogate(stepper)
    stepper((x, x.sum(1)))
    model = EnsembleSurrogate(stepper)
    wanted = shoal.predict(stepper.ensemble, x, likelihood=Gaussian(0.1)).mean
    stepper((x, x.sum(1)))
    assert torch.allclose(model.posterior(x).mean, wanted, atol=1e-6)
    moved = shoal.predict(stepper.ensemble, x, likelihood=Gaussian(0.1)).mean
    assert not torch.allclose(moved, wanted, atol=1e-6)


def test_uniform_points_raise_the_disagreement_between_the_data():
    """What optimisation needs: members agree on the data and differ elsewhere."""
    x = torch.rand(10, 2, generator=torch.Generator().manual_seed(0))
    y = (6 * x).sin().sum(1)
    points = {"name": "f-kde", "points": {"name": "uniform", "margin": 0.0, "count": 16}}
    elsewhere = torch.rand(200, 2, generator=torch.Generator().manual_seed(1))

    def deviations(**chosen):
        members = shoal.Ensemble.init(build, members=M, seed=0)
        stepper = shoal.Stepper(members, n=10, likelihood=Gaussian(0.05), lr=0.02, **chosen)
        for _ in range(150):
            stepper((x, y))
        model = EnsembleSurrogate(stepper)
        both = model.posterior(elsewhere), model.posterior(x)
        return [float(each.variance.sqrt().mean().detach()) for each in both]

    plain = deviations(method="ensemble")
    repelled = deviations(method=points, strength=30.0, inputs=torch.tensor([[0.0, 0], [1, 1]]))
    assert repelled[0] > 2 * plain[0]
    assert repelled[0] > 2 * repelled[1]


def test_what_cannot_be_optimised_is_refused(ensemble):
    with pytest.raises(ConfigError, match="likelihood="):
        EnsembleSurrogate(ensemble)
    with pytest.raises(ConfigError, match="numbers"):
        EnsembleSurrogate(ensemble, likelihood=Categorical())

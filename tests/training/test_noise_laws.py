"""Langevin noise on Gaussian posteriors: the moments of every step are known in closed form."""

import math

import pytest
import torch
from torch import nn

import shoal
from shoal.interaction.bandwidths import Fixed
from shoal.training.noise import noise_std
from shoal.training.optim import make_optimizer

pytestmark = pytest.mark.usefixtures("double")

SGD = {"name": "sgd"}
MOMENTUM = {"name": "sgd", "momentum": 0.7}
NESTEROV = {"name": "sgd", "momentum": 0.7, "nesterov": True}
DAMPED = {"name": "sgd", "momentum": 0.7, "dampening": 0.4}
OPTIMISERS = [SGD, MOMENTUM, NESTEROV, DAMPED]

N, STD, SIGMA = 20, 0.5, 0.8
CURVATURE = torch.tensor([1.0, 0.4], dtype=torch.float64)  # per data point, prior included
MEAN = torch.tensor([0.6, -0.3], dtype=torch.float64)
Z = 4.0
"""Allowed deviation in standard errors; the seeds are fixed."""


def matrices(optimizer, lr, a, s):
    """One step of SGD on v = -a θ as (θ, buffer) = F (θ, buffer) + G ξ."""
    mu, nesterov = optimizer.get("momentum", 0.0), optimizer.get("nesterov", False)
    damp = 1 - optimizer.get("dampening", 0.0) if mu else 1.0
    buffer = torch.tensor([-damp * a, mu]), s * damp  # of θ, of the buffer; of ξ
    by_gradient, by_buffer = (lr, lr * mu) if nesterov else (0.0, lr)
    theta = torch.tensor([1 - by_gradient * a, 0.0]) + by_buffer * buffer[0]
    kick = torch.tensor([by_gradient * s + by_buffer * buffer[1], buffer[1]])
    return torch.stack([theta, buffer[0]]), kick


def stationary(F, G):
    """The covariance with S = F S F' + G G'."""
    step = torch.eye(4) - torch.kron(F, F)
    return torch.linalg.solve(step, torch.outer(G, G).flatten()).reshape(2, 2)


def noise_of(optimizer, lr, heat):
    return noise_std(make_optimizer(optimizer, {"": torch.zeros(1, requires_grad=True)}, lr), heat)


def error_of_variance(F, S, chains, steps):
    """Relative standard error of a variance from the mean over chains and consecutive steps."""
    lags, power = [], torch.eye(2)
    for _ in range(steps):
        lags.append(((power @ S)[0, 0] / S[0, 0]).item())
        power = F @ power
    sums = sum(2 * (1 - k / steps) * r * r for k, r in enumerate(lags[1:], 1))
    return math.sqrt(2 / (chains * steps) * (1 + sums))


# The theory by itself.


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, DAMPED], ids=str)
@pytest.mark.parametrize(("lr", "a"), [(0.3, 1.0), (1.2, 0.7)])
def test_the_closed_form_is_the_stationary_variance_of_the_recursion(optimizer, lr, a):
    heat = 0.05
    F, G = matrices(optimizer, lr, a, noise_of(optimizer, lr, heat))
    mu = optimizer.get("momentum", 0.0)
    rate = lr * (1 - optimizer.get("dampening", 0.0))
    closed = heat / a / (1 - rate * a / (2 * (1 + mu)))
    assert stationary(F, G)[0, 0].item() == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("optimizer", OPTIMISERS, ids=str)
def test_the_error_of_the_variance_is_of_first_order_in_the_learning_rate(optimizer):
    errors = []
    for lr in (1e-2, 1e-3):
        F, G = matrices(optimizer, lr, 1.0, noise_of(optimizer, lr, 0.05))
        errors.append(abs(stationary(F, G)[0, 0].item() / 0.05 - 1))
    assert errors[0] < 0.05 and errors[1] == pytest.approx(errors[0] / 10, rel=0.1)


# Conjugate linear regression, through the training step.


def regression():
    """Data whose posterior is N(MEAN, 1 / (N CURVATURE)), with the prior N(0, STD²)."""
    q, _ = torch.linalg.qr(torch.randn(N, 2, generator=torch.manual_seed(0)))
    prior = 1 / (N * STD**2)
    data = CURVATURE - prior  # per data point
    x = q * (data * N).sqrt() * SIGMA
    return x, x @ (MEAN * CURVATURE / data)


START = torch.tensor([2.0, 2.0], dtype=torch.float64)


def chains(optimizer, lr, steps, members, temperature=1.0, **options):
    """The weights of all members after every step [steps, M, 2]."""
    build = lambda: nn.Linear(2, 1, bias=False)  # noqa: E731
    ensemble = shoal.Ensemble.init(build, members=members)
    for weight in ensemble.weights.values():
        weight.data[:] = START
    settings = {"method": "ensemble", "noise": 1.0, "lr": lr, "temperature": temperature}
    stepper = shoal.Stepper(
        ensemble, n=N, optimizer=optimizer, prior=shoal.priors.Gaussian(STD),
        likelihood=shoal.likelihoods.Gaussian(SIGMA), **(settings | options),
    )  # fmt: skip
    seen = []
    for _ in range(steps):
        stepper(regression())
        seen.append(next(iter(ensemble.weights.values())).detach()[:, 0].clone())
    return torch.stack(seen)


@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM, NESTEROV], ids=str)
def test_mean_and_variance_after_every_step(optimizer):
    """From a common start, the mean is F^t and the covariance a sum over the kicks so far."""
    lr, members, steps = 0.5, 400, 25
    seen = chains(optimizer, lr, steps, members)
    for weight, (a, centre) in enumerate(zip(CURVATURE, MEAN, strict=True)):
        F, G = matrices(optimizer, lr, a.item(), noise_of(optimizer, lr, 1 / N))
        mean = torch.stack([START[weight] - centre, torch.tensor(0.0)])
        covariance = torch.zeros(2, 2)
        for step in range(steps):
            mean, covariance = F @ mean, F @ covariance @ F.T + torch.outer(G, G)
            found, variance = seen[step, :, weight] - centre, covariance[0, 0]
            assert abs(found.mean() - mean[0]) < Z * (variance / members).sqrt()
            assert abs(found.var() / variance - 1) < Z * math.sqrt(2 / members)


@pytest.mark.parametrize("temperature", [1.0, 0.25])
@pytest.mark.parametrize("optimizer", OPTIMISERS, ids=str)
def test_the_stationary_law_over_time(optimizer, temperature):
    """The variance with its discretisation error, which is large here, to a few percent."""
    lr, members, burn, steps = 0.9, 150, 60, 140
    seen = chains(optimizer, lr, burn + steps, members, temperature)[burn:]
    for weight, (a, centre) in enumerate(zip(CURVATURE, MEAN, strict=True)):
        s = noise_of(optimizer, lr, temperature / N)
        F, G = matrices(optimizer, lr, a.item(), s)
        S = stationary(F, G)
        error = error_of_variance(F, S, members, steps)
        found = (seen[:, :, weight] - centre).square().mean()
        assert error < 0.05 and abs(found / S[0, 0] - 1) < Z * error
        if optimizer == SGD:
            exact = temperature / (N * a)
            assert S[0, 0].item() == pytest.approx((exact / (1 - lr * a / 2)).item())


def test_noise_is_a_factor_of_the_variance():
    """The same kicks, longer by the square root: deviations from the noiseless path scale."""
    still = chains(SGD, 0.5, 6, 3, noise=None)
    one, four = (chains(SGD, 0.5, 6, 3, noise=noise) - still for noise in (1.0, 4.0))
    assert one.abs().min() > 0
    torch.testing.assert_close(four, 2 * one)


def test_an_annealed_drive_samples_the_hotter_posterior():
    """A factor gamma of the drive divides the curvature, as in the whole library."""
    lr, members, steps, gamma = 0.9, 200, 100, 0.5
    build = lambda: nn.Linear(2, 1, bias=False)  # noqa: E731
    ensemble = shoal.Ensemble.init(build, members=members)
    stepper = shoal.Stepper(
        ensemble, n=N, method="ensemble", noise=1.0, optimizer="sgd", lr=lr, prior="flat",
        likelihood=shoal.likelihoods.Gaussian(SIGMA),
    )  # fmt: skip
    for _ in range(60):
        stepper(regression(), annealing=gamma)
    squares = torch.zeros(2)
    weight = next(iter(ensemble.weights.values()))
    data = CURVATURE - 1 / (N * STD**2)
    for _ in range(steps):
        stepper(regression(), annealing=gamma)
        squares += (weight.detach()[:, 0] - MEAN * CURVATURE / data).square().mean(0) / steps
    for a, found in zip(gamma * data, squares, strict=True):
        F, G = matrices(SGD, lr, a.item(), noise_of(SGD, lr, 1 / N))
        S = stationary(F, G)
        assert abs(found / S[0, 0] - 1) < Z * error_of_variance(F, S, members, steps)


def test_members_are_independent():
    """Correlations between members, and between weights, are those of as many random numbers."""
    seen = chains(SGD, 0.9, 460, 12)[60:]
    series = seen.permute(1, 2, 0).flatten(0, 1)
    rate = 0.9 * CURVATURE.repeat(12)
    kicks = series[:, 1:] - (1 - rate)[:, None] * series[:, :-1]
    correlation = torch.corrcoef(kicks) - torch.eye(24)
    assert correlation.abs().max() < 4.5 / math.sqrt(kicks.shape[1])
    shifted = torch.corrcoef(torch.cat([kicks[:, 1:], kicks[:, :-1]]))[:24, 24:]
    assert shifted.abs().max() < 4.5 / math.sqrt(kicks.shape[1])

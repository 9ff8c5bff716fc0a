"""Langevin noise on Gaussian posteriors: the moments of every step are known in closed form."""

import math
import re
from pathlib import Path

import pytest
import reference
import torch
from torch import nn

import shoal
from shoal.core.random import hashed, key, normal_stream
from shoal.interaction.bandwidths import Fixed
from shoal.training.options.noise import noise_std
from shoal.training.options.optim import make_optimizer

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


def regression(mean=MEAN):
    """Data whose posterior is N(mean, 1 / (N CURVATURE)), with the prior N(0, STD²)."""
    q, _ = torch.linalg.qr(torch.randn(N, 2, generator=torch.manual_seed(0)))
    prior = 1 / (N * STD**2)
    data = CURVATURE - prior  # per data point
    x = q * (data * N).sqrt() * SIGMA
    return x, x @ (mean * CURVATURE / data)


START = torch.tensor([2.0, 2.0], dtype=torch.float64)


def chains(optimizer, lr, steps, members, temperature=1.0, mean=MEAN, **options):
    """The weights of all members after every step [steps, M, 2]."""
    build = lambda: nn.Linear(2, 1, bias=False)  # noqa: E731
    ensemble = shoal.Ensemble.init(build, members=members)
    for weight in ensemble.weights.values():
        weight.data[:] = START if mean is MEAN else mean
    settings = {"method": "ensemble", "noise": 1.0, "lr": lr, "temperature": temperature}
    stepper = shoal.Stepper(
        ensemble, n=N, optimizer=optimizer, prior=shoal.priors.Gaussian(STD),
        likelihood=shoal.likelihoods.Gaussian(SIGMA), **(settings | options),
    )  # fmt: skip
    seen = []
    for _ in range(steps):
        stepper(regression(mean))
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


# With repulsion: members of a Gaussian cloud feel a force that is linear in their place.


def cloud_variance(factor, kick, steps):
    """V after every step of θ = factor(V) θ + kick ξ, from members in one place."""
    V, seen = 0.0, []
    for _ in range(steps):
        V = factor(V) ** 2 * V + kick**2
        seen.append(V)
    return torch.tensor(seen)


def error_of_cloud(factor, kick, V, members, steps):
    """Relative standard error of V, from the mean over members and consecutive steps.

    The variance of M members has the map V -> factor(V)² V + kick² and, each step, a random part
    of variance (4 V factor² kick² + 2 kick⁴) / M. The slope of the map forgets it.
    """
    after = lambda V: factor(V) ** 2 * V + kick**2  # noqa: E731
    slope = (after(V * 1.001) - after(V * 0.999)) / (0.002 * V)
    random = (4 * V * factor(V) ** 2 * kick**2 + 2 * kick**4) / members
    return math.sqrt(random / steps) / (1 - slope) / V


@pytest.mark.parametrize(("strength", "noise"), [(1.0, 1.0), (0.5, 0.5), (0.8, 0.1)])
def test_repulsive_langevin_has_the_moments_of_the_cloud(strength, noise):
    """KDE adds h² to the variance it sees: the force is (T / N) strength (θ - mean) / (V + h²)."""
    lr, members, h2, burn, steps = 0.6, 300, 0.05, 40, 80
    method = shoal.Repulsion(
        shoal.spaces.Weights(), shoal.kernels.RBF(), Fixed(h2),
        shoal.flows.Wasserstein(shoal.estimators.KDE()), strength,
    )  # fmt: skip
    seen = chains(SGD, lr, burn + steps, members, method=method, noise=noise)
    kick = math.sqrt(2 * lr * noise / N)
    factors = [lambda V, a=a: 1 - lr * (a - strength / N / (V + h2)) for a in CURVATURE.tolist()]
    wanted = torch.stack([cloud_variance(each, kick, burn + steps) for each in factors], 1)
    # A member counts itself among its neighbours, of which there are about this many.
    itself = 1 / (members * (h2 / (h2 + wanted[-1])).sqrt().prod())
    for weight, factor in enumerate(factors):
        found, V = seen[:, :, weight].var(1), wanted[-1, weight].item()
        early = found[:burn] / wanted[:burn, weight] - 1
        assert early.abs().max() < Z * math.sqrt(2 / members)
        error = error_of_cloud(factor, kick, V, members, steps)
        assert abs(found[burn:].mean() / V - 1) < Z * error + itself and error < 0.02
        mean = seen[burn:, :, weight].mean() - MEAN[weight]
        assert abs(mean) < Z * kick / (lr * CURVATURE[weight]) / math.sqrt(members * steps)


def test_stein_with_a_linear_kernel_and_noise():
    """k = 1 + xy on N(0, 1 / (N a)): the velocity is θ (T / N - a V), for any number of members.

    Noise adds to it: a V² - V / N = 1 / N for small steps, which is not the posterior.
    """
    lr, members, burn, steps = 0.5, 300, 60, 120
    method = shoal.Repulsion(
        shoal.spaces.Weights(), shoal.kernels.LinearKernel(), Fixed(1.0), shoal.flows.Stein()
    )
    seen = chains(SGD, lr, burn + steps, members, mean=torch.zeros(2), method=method)
    kick = math.sqrt(2 * lr / N)
    for weight, a in enumerate(CURVATURE.tolist()):
        factor = lambda V, a=a: 1 + lr * (1 / N - a * V)  # noqa: E731
        wanted = cloud_variance(factor, kick, burn + steps)
        error = error_of_cloud(factor, kick, wanted[-1].item(), members, steps)
        found = seen[:, :, weight].square().mean(1)
        early = found[:burn] / wanted[:burn] - 1
        assert early.abs().max() < Z * math.sqrt(2 / members)
        assert abs(found[burn:].mean() / wanted[-1] - 1) < Z * error and error < 0.02
        small_steps = (1 + math.sqrt(1 + 4 * a * N)) / (2 * a * N)
        assert wanted[-1].item() == pytest.approx(small_steps, rel=0.06)


@pytest.mark.parametrize("name", ["ensemble", "kde", "svgd"])
@pytest.mark.parametrize("optimizer", [SGD, MOMENTUM], ids=str)
def test_every_step_is_the_textbook_step(optimizer, name):
    """Members and the loop of the papers, with the numbers of each member's own stream."""
    M, lr, steps, mu = 4, 0.05, 5, optimizer.get("momentum", 0.0)
    start = torch.randn(M, 3, generator=torch.manual_seed(1))
    found = shoal.sample(
        lambda x: (1.5 * x - x.exp()).sum(), start, method=name, optimizer=optimizer, lr=lr,
        steps=steps, noise=0.5, seed=9,
    )  # fmt: skip
    x, speed = start.clone(), torch.zeros(M, 3)
    for step in range(steps):
        score = 1.5 - x.exp()
        if name != "ensemble":
            K, push = reference.interaction(name, False, x)
            score = (K @ score / M if name == "svgd" else score) - push
        keys = torch.stack([hashed(key(9, "noise", step) + member) for member in range(M)])
        xi = torch.cat([normal_stream(each[None], 0, 2)[:, :3] for each in keys])
        friction = 1 - mu
        speed = speed - friction * speed + lr * score
        speed = speed + math.sqrt(2 * friction * lr * 0.5) * xi
        x = x + speed
    torch.testing.assert_close(found, x, rtol=1e-6, atol=1e-6)  # the noise is in single precision


def test_the_example_of_the_page_has_the_covariance_of_the_posterior():
    torch.set_default_dtype(torch.float32)
    page = Path(__file__).parents[2] / "docs" / "noise.md"
    code = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)[0]
    names = {}
    exec(compile(code, str(page), "exec"), names)
    found, exact = names["found"].diagonal(), names["exact"].diagonal()
    shown = [[float(n) for n in re.findall(r"0\.\d+", line)] for line in code.split("# [[")[1:]]
    assert found.tolist() == pytest.approx(shown[0][:2], abs=6e-5)
    assert exact.tolist() == pytest.approx(shown[1][:2], abs=6e-5)
    assert ((found / exact - 1).abs() < Z * math.sqrt(2 / 1000) + 0.042).all()

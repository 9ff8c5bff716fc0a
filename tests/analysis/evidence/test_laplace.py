"""Laplace's method where it is exact, and where theorems bound it."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.distributions import MultivariateNormal

from shoal.analysis.evidence.curvature import diagonal, features_of, last_layer, last_linear
from shoal.analysis.evidence.laplace import Laplace, fit_laplace, log_evidences
from shoal.analysis.evidence.prior_comparison import MAXIMUM, PriorComparison, at_maximum
from shoal.core.errors import ConfigError
from shoal.data.dataset import Split
from shoal.inference.likelihoods import Categorical, Gaussian, HeteroscedasticGaussian

pytestmark = pytest.mark.usefixtures("double")

NOISE, SCALE = 0.5, 0.8


def line(points=12, inputs=3, outputs=1, bias=True, seed=0):
    torch.manual_seed(seed)
    x, y = torch.randn(points, inputs), torch.randn(points, outputs)
    return nn.Linear(inputs, outputs, bias=bias), Split(x, y)


def expanded(build, module, likelihood, data):
    outputs = module(data.x).detach()
    return build(module, likelihood, data, float(likelihood.log_prob(outputs, data.y).sum()))


def marginal(data, scale, noise, mean=None, bias=True):
    """log N(y; Φ μ, noise² + scale² Φ Φ^T), column by column."""
    ones = torch.ones(len(data.x), 1)
    Φ = torch.cat([data.x, ones], 1) if bias else data.x
    covariance = noise**2 * torch.eye(len(Φ)) + scale**2 * Φ @ Φ.T
    centre = torch.zeros_like(data.y) if mean is None else Φ @ mean
    return sum(
        float(MultivariateNormal(centre[:, c], covariance).log_prob(data.y[:, c]))
        for c in range(data.y.shape[1])
    )


def to_maximum(module, data):
    """The weights where likelihood times prior is largest: where a diagonal expansion is made."""
    inverse = NOISE**2 / SCALE**2 * torch.eye(data.x.shape[1])
    solution = torch.linalg.solve(data.x.T @ data.x + inverse, data.x.T @ data.y)
    with torch.no_grad():
        module.weight.copy_(solution.T)


@pytest.mark.parametrize("outputs", [1, 2])
@pytest.mark.parametrize("bias", [True, False])
def test_evidence_of_a_linear_model_is_its_marginal_likelihood(outputs, bias):
    """Wherever the expansion is made: these weights are nowhere near the maximum."""
    module, data = line(outputs=outputs, bias=bias)
    expansion = expanded(last_layer, module, Gaussian(NOISE), data)
    scales = torch.tensor([math.log(SCALE)])
    found = log_evidences([expansion], scales, "zero")
    assert float(found) == pytest.approx(marginal(data, SCALE, NOISE, bias=bias), abs=1e-9)
    weights = module.weight.T if not bias else torch.cat([module.weight.T, module.bias[None]])
    found = log_evidences([expansion], scales, "members")
    expected = marginal(data, SCALE, NOISE, weights.detach(), bias)
    assert float(found) == pytest.approx(expected, abs=1e-9)


def regression_at_maximum(points, inputs, seed):
    """A linear regression with the member at the maximum of its likelihood."""
    module, data = line(points, inputs, bias=False, seed=seed)
    truth = torch.randn(inputs, 1)
    y = data.x @ truth + NOISE * torch.randn(points, 1)
    with torch.no_grad():
        module.weight.copy_(torch.linalg.lstsq(data.x, y).solution.T)
    return module, Split(data.x, y)


@pytest.mark.parametrize("seed", range(8))
def test_the_evidence_with_the_curvature_of_a_subset_is_nearly_that_of_all_points(seed):
    """The gradient of a subset is no gradient of the data: its Newton step gains d (N/n - 1) / 2.

    With the gradient of all data, the curvature of n points raises the log evidence by
    d (d + 1) / 4n = 0.09 nats, with a standard deviation of sqrt(d / 2n) = 0.14, both by the
    moments of a Wishart matrix.
    """
    N, n, d = 1000, 200, 8
    module, data = regression_at_maximum(N, d, seed)
    likelihood, scales = Gaussian(NOISE), torch.tensor([math.log(SCALE)])
    rows = torch.randperm(N)[:n]
    own = float(likelihood.log_prob(module(data.x).detach(), data.y).sum())
    some = last_layer(module, likelihood, data, own, rows)
    exact = marginal(data, SCALE, NOISE, module.weight.detach().T, bias=False)
    found = float(log_evidences([some], scales, "members"))
    assert found == pytest.approx(exact, abs=0.09 + 4 * 0.14)
    alone = last_layer(module, likelihood, Split(data.x[rows], data.y[rows]), own)
    assert alone.basis is not None and some.basis is not None
    noise = N / n * (alone.basis @ alone.gradient)
    gained = log_evidences([replace(some, gradient=noise @ some.basis)], scales, "members")
    assert float(gained) > exact + d * (N / n - 1) / 8


def test_by_default_the_curvature_of_the_last_layer_is_that_of_all_points():
    """The number of points grows with the weights, so that the evidence off the maximum is exact.

    Off the maximum, the gain of the Newton step has the relative error of a subset's curvature.
    """
    module, data = regression_at_maximum(700, 80, 0)
    with torch.no_grad():
        module.weight += 0.1 * torch.randn(1, 80)
    own = Gaussian(NOISE).log_prob(module(data.x).detach(), data.y).sum().reshape(1)
    given = [module], Gaussian(NOISE), data, None, own
    usual, whole, few = (
        {each.centre: each.log_evidence for each in PriorComparison(*given, points).last_layer()}
        for points in (None, 700, 500)
    )
    assert usual == whole
    assert abs(few["members"] - whole["members"]) > 1


def test_a_subset_gives_the_gradient_of_all_points_and_a_scaled_curvature():
    module, data = line(points=40, outputs=3)
    data = Split(data.x, torch.randint(3, (40,)))
    rows = torch.arange(10)
    for build in (last_layer, diagonal):
        whole = expanded(build, module, Categorical(), data)
        part = expanded(build, module, Categorical(), Split(data.x[rows], data.y[rows]))
        found = build(module, Categorical(), data, whole.log_likelihood, rows)
        torch.testing.assert_close(in_weights(found), in_weights(whole))
        torch.testing.assert_close(found.curvature, 4 * part.curvature)


def in_weights(expansion):
    """The gradient in the coordinates of the weights."""
    gradient = expansion.gradient
    return gradient if expansion.basis is None else expansion.basis @ gradient


def test_the_diagonal_is_exact_where_inputs_do_not_overlap():
    module, data = line(points=3, inputs=3, bias=False)
    data = Split(torch.diag(torch.tensor([1.0, 2.0, 3.0])), data.y)
    to_maximum(module, data)
    expansion = expanded(diagonal, module, Gaussian(NOISE), data)
    found = log_evidences([expansion], torch.tensor([math.log(SCALE)]), "zero")
    assert float(found) == pytest.approx(marginal(data, SCALE, NOISE, bias=False), abs=1e-9)


def test_the_diagonal_is_that_of_the_whole_curvature():
    module, data = line(points=9, outputs=3)
    data = Split(data.x, torch.randint(3, (9,)))
    whole = expanded(last_layer, module, Categorical(), data)
    assert whole.basis is not None
    H = whole.basis @ torch.diag(whole.curvature) @ whole.basis.T
    alone = expanded(diagonal, module, Categorical(), data)
    torch.testing.assert_close(alone.curvature, H.diagonal())
    assert alone.at_mode and not alone.gradient.any()
    torch.testing.assert_close(alone.theta, whole.basis @ whole.theta)


@pytest.mark.parametrize("likelihood", [Categorical(), Gaussian(0.3)])
def test_the_curvature_of_a_linear_model_is_the_hessian(likelihood):
    """Gauss-Newton leaves out the curvature of the network, of which a linear one has none."""
    module, data = line(points=7, outputs=2)
    y = torch.randint(2, (7,)) if likelihood.task == "classification" else module(data.x).detach()
    expansion = expanded(last_layer, module, likelihood, Split(data.x, y))
    size = module.weight.numel()

    def log_likelihood(flat):
        f = data.x @ flat[:size].view(2, 3).T + flat[size:]
        return likelihood.log_prob(f, y).sum()

    flat = torch.cat([p.detach().flatten() for p in module.parameters()])
    H = -torch.autograd.functional.hessian(log_likelihood, flat)
    assert expansion.basis is not None
    found = expansion.basis @ torch.diag(expansion.curvature) @ expansion.basis.T
    torch.testing.assert_close(found, H)


def test_directions_in_which_the_likelihood_bends_upwards_count_as_flat():
    """At no residual a learned noise wants to shrink without end: no Gaussian has that shape."""
    module, data = line(points=7, outputs=2)
    y = module(data.x).detach()[:, :1]
    expansion = expanded(last_layer, module, HeteroscedasticGaussian(), Split(data.x, y))
    assert bool((expansion.curvature >= 0).all()) and float(expansion.curvature[0]) < 1e-12
    assert float(expansion.curvature[-1]) > 0.1


def test_scales_maximise_the_evidence():
    module, data = line(points=30, inputs=2)
    data = Split(data.x, data.x @ torch.tensor([[0.7], [-1.1]]) + NOISE * data.y)
    expansion = expanded(last_layer, module, Gaussian(NOISE), data)
    fitted = fit_laplace([expansion], "zero")
    best = marginal(data, float(fitted.log_scales.exp()), NOISE)
    for factor in (0.8, 0.95, 1.05, 1.25):
        assert marginal(data, factor * float(fitted.log_scales.exp()), NOISE) < best
    assert fitted.scales.keys() == {"outputs"}


def test_at_a_maximum_no_width_beats_the_point_mass():
    """T1: the evidence of a Gaussian at a maximiser falls with its width, from the likelihood."""
    module, data = line(points=20)
    Φ = torch.cat([data.x, torch.ones(20, 1)], 1)
    solution = torch.linalg.lstsq(Φ, data.y).solution
    with torch.no_grad():
        module.weight.copy_(solution[:3].T)
        module.bias.copy_(solution[3:].flatten())
    expansion = expanded(last_layer, module, Gaussian(NOISE), data)
    scales = torch.linspace(-12, 2, 30)
    found = torch.stack([log_evidences([expansion], s[None], "members")[0] for s in scales])
    assert bool((found.diff() < 0).all())
    assert float(found[0]) == pytest.approx(expansion.log_likelihood, abs=1e-5)
    fitted = fit_laplace([expansion], "members")
    assert float(fitted.log_evidences) == pytest.approx(expansion.log_likelihood, abs=1e-4)


@pytest.mark.parametrize("build", [diagonal, last_layer])
def test_draws_have_the_mean_and_covariance_of_the_posterior(build):
    """On a linear model: m = S Φ^T y / noise² with S = (Φ^T Φ / noise² + 1 / s²)^-1."""
    module, data = line(points=4, inputs=2, bias=False)
    x = torch.diag(torch.tensor([1.0, 2.0])).repeat(2, 1)
    data = Split(x, data.y)
    to_maximum(module, data)
    expansion = expanded(build, module, Gaussian(NOISE), data)
    laplace = Laplace([expansion], torch.tensor([math.log(SCALE)]), "zero")
    draws = laplace.draws(torch.eye(2), 10_000, torch.Generator().manual_seed(0))[..., 0]
    S = torch.linalg.inv(x.T @ x / NOISE**2 + torch.eye(2) / SCALE**2)
    mean = (S @ x.T @ data.y / NOISE**2).flatten()
    torch.testing.assert_close(draws.mean(0), mean, atol=0.02, rtol=0)
    torch.testing.assert_close(draws.T.cov(), S, atol=0.01, rtol=0.05)


def test_draws_of_a_deep_network_are_linearised():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    data = Split(torch.randn(6, 2), torch.randint(3, (6,)))
    x, small = torch.randn(4, 2), 1e-5
    whole = expanded(diagonal, module, Categorical(), data)
    step = torch.randn(1, len(whole.theta))
    moved = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3)).double()
    nn.utils.vector_to_parameters(whole.theta + small * step[0], moved.parameters())
    torch.testing.assert_close(whole.outputs(x, small * step)[0], moved(x).detach())
    last = expanded(last_layer, module, Categorical(), data)
    assert last.basis is not None
    nn.utils.vector_to_parameters(whole.theta, moved.parameters())
    big = torch.randn(1, len(last.theta))
    nn.utils.vector_to_parameters(last.basis @ (last.theta + big[0]), moved[2].parameters())
    torch.testing.assert_close(last.outputs(x, big)[0], moved(x).detach())


def test_the_last_layer_is_found_by_what_it_makes():
    module = nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 3))
    x = torch.randn(5, 2)
    name, layer = last_linear(module, x)
    assert name == "2" and layer is module[2]
    phi, outputs = features_of(module, x, batch_size=2)
    torch.testing.assert_close(layer(phi), outputs)


def test_a_network_without_a_linear_end_is_refused():
    with pytest.raises(ConfigError, match="ends with a linear layer"):
        last_linear(nn.Sequential(nn.Linear(2, 2), nn.Tanh()), torch.randn(1, 2))


@pytest.mark.parametrize("bias", [True, False])
def test_the_maximum_of_a_linear_model_is_least_squares(bias):
    module, data = line(points=30, outputs=2, bias=bias)
    data.x[:, 2] = data.x[:, 1]  # features may depend on each other
    before = module.weight.detach().clone()
    polished, value = at_maximum(module, Gaussian(NOISE), data)
    Φ = torch.cat([data.x, torch.ones(30, 1)], 1) if bias else data.x
    best = Φ @ torch.linalg.lstsq(Φ, data.y, driver="gelsd").solution
    torch.testing.assert_close(polished(data.x).detach(), best, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(module.weight.detach(), before)  # the member stays
    assert value == pytest.approx(float(Gaussian(NOISE).log_prob(best, data.y).sum()), abs=1e-6)


def test_the_maximum_of_classes_has_no_gradient_and_separable_ones_approach_1():
    module, data = line(points=60, outputs=3)
    labels = data.y.argmax(-1)
    polished, value = at_maximum(module, Categorical(), Split(data.x, labels))
    loss = nn.functional.cross_entropy(polished(data.x), labels, reduction="sum")
    assert value == pytest.approx(-loss.item(), rel=1e-9)
    assert torch.autograd.grad(loss, polished.weight)[0].abs().max() < 0.05
    apart = (data.x[:, 0] > 0).long()
    assert -0.01 < at_maximum(module, Categorical(), Split(data.x, apart))[1] <= 0


@pytest.mark.parametrize("width", [0.01, 0.3, 1.0, 10.0])
@pytest.mark.parametrize("centre", ["zero", "member", "maximum"])
def test_no_gaussian_prior_has_more_evidence_than_the_maximum(width, centre):
    """log ∫ L dπ ≤ max log L, by the closed form of a linear model with normal noise."""
    module, data = line(points=20)
    polished, most = at_maximum(module, Gaussian(NOISE), data)
    there = {"member": module, "maximum": polished}.get(centre)
    mean = None if there is None else torch.cat([there.weight, there.bias[:, None]], 1).mT.detach()
    assert marginal(data, width, NOISE, mean) < most
    narrow = torch.cat([polished.weight, polished.bias[:, None]], 1).mT.detach()
    assert marginal(data, 1e-6, NOISE, narrow) == pytest.approx(most, abs=1e-6)


def test_a_comparison_has_point_masses_at_the_maximum_first():
    data = line(points=40, outputs=3)[1]
    data = Split(data.x, data.y.argmax(-1))
    modules = [line(outputs=3, seed=seed)[0] for seed in range(3)]
    each = torch.stack([Categorical().log_prob(m(data.x), data.y).sum().detach() for m in modules])
    found = PriorComparison(modules, Categorical(), data, data, each)
    (polished,), (trained,) = found.maximum(), found.point_masses()
    assert polished.name == MAXIMUM and polished.nll < trained.nll
    assert all(r.log_evidence < polished.log_evidence for r in (trained, *found.last_layer()))

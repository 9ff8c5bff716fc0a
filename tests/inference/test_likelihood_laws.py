"""Laws of every registered likelihood; a new one is examined the moment it is registered."""

import re
from pathlib import Path

import pytest
import torch
from likelihood_examples import (
    CLASSES,
    DEFAULTS,
    drawn,
    every_target,
    kind,
    masses,
    targets,
    width,
)
from torch.autograd import gradcheck, gradgradcheck

from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.core.errors import DataError
from shoal.inference import likelihoods
from shoal.inference.likelihoods import Categorical, Gaussian, MixtureDensity, StudentT
from shoal.prediction import Predictive, metrics

pytestmark = pytest.mark.usefixtures("double")

SETTINGS = [
    Categorical(smoothing=0.2, class_weights=(1.0, 2.0, 0.5, 3.0), ignore_index=1),
    Gaussian(0.3),
    StudentT(df=7.0),
    MixtureDensity(components=2),
]
EVERY = [*DEFAULTS, *SETTINGS]
every = pytest.mark.parametrize("likelihood", EVERY, ids=repr)
INTERVALS = [each for each in EVERY if "intervals" in each.about.kinds]


@every
def test_probabilities_sum_to_one_with_the_mean_and_the_variance(likelihood):
    if getattr(likelihood, "ignore_index", None) is not None:
        likelihood = Categorical()
    for seed in range(3):
        outputs = drawn(width(likelihood), seed=seed)
        y, mass = masses(likelihood, outputs)
        torch.testing.assert_close(mass.sum(), torch.tensor(1.0), rtol=0, atol=2e-6)
        mean, variance = (moment[0] for moment in likelihood.moments(outputs[None]))
        if kind(likelihood) == "classes":
            torch.testing.assert_close(mean, mass)
            torch.testing.assert_close(variance, mass * (1 - mass))
            continue
        torch.testing.assert_close((mass @ y.double())[None], mean, rtol=1e-5, atol=1e-6)
        spread = (y - mean).square()
        torch.testing.assert_close((mass @ spread)[None], variance, rtol=1e-5, atol=1e-8)


@every
@pytest.mark.parametrize("term", ["log_prob", "objective"])
def test_gradient_and_hessian_are_finite_differences(likelihood, term):
    outputs = drawn(3, width(likelihood, 2)).requires_grad_()
    y = targets(likelihood, 3, columns=2)
    assert gradcheck(lambda f: getattr(likelihood, term)(f, y), outputs)
    assert gradgradcheck(lambda f: getattr(likelihood, term)(f, y), outputs, atol=1e-4)


@pytest.mark.parametrize("likelihood", INTERVALS, ids=repr)
def test_the_distribution_function_grows_by_the_density(likelihood):
    outputs = drawn(width(likelihood), seed=3)
    y, mass = every_target(likelihood, outputs)
    rows = outputs.expand(len(y), -1)
    below = likelihood.cdf(rows, y).squeeze(-1)
    assert bool((below.diff() >= -1e-12).all())
    torch.testing.assert_close(below[-1], torch.tensor(1.0))
    if likelihood.discrete:
        before = likelihood.cdf(rows, y.double() - 1).squeeze(-1)
        assert before[0] == 0
        torch.testing.assert_close(below - before, likelihood.log_prob(rows, y).exp())
        return
    step = 1e-5
    rise = likelihood.cdf(rows, y + step) - likelihood.cdf(rows, y - step)
    density = likelihood.log_prob(rows, y).exp()
    torch.testing.assert_close(rise.squeeze(-1) / (2 * step), density, atol=1e-6, rtol=1e-5)


RANKED = [each for each in EVERY if {"ranked", "gaussian"} & {*each.about.kinds}]


@pytest.mark.parametrize("likelihood", RANKED, ids=repr)
def test_the_ranked_score_is_the_integral_of_squared_differences(likelihood):
    """Of one member in closed form, and of a mixture with weights."""
    members = drawn(3, 1, width(likelihood), seed=4)
    weights, target = torch.tensor([0.5, 0.3, 0.2]), targets(likelihood, 1)
    y, measure = every_target(likelihood, members[0, 0])
    each = likelihood.cdf(members.expand(3, len(y), -1), y).squeeze(-1)
    mixed = weights @ each
    for below, score in (
        (each[0], likelihood.ranked_score(members[:1], target)),
        (mixed, metrics.crps(Predictive(members, likelihood, weights), target)),
    ):
        wanted = float(((below - (y >= float(target)).double()).square() * measure).sum())
        assert float(score) == pytest.approx(wanted, rel=2e-3, abs=5e-3)


@every
def test_sites_are_points(likelihood):
    M, B, S = 3, 4, (2, 5)
    outputs, y = drawn(M, B, *S, width(likelihood, 2)), targets(likelihood, B, *S, columns=2)
    flat, points = outputs.flatten(1, 3), y.flatten(0, 2)
    for term in ("log_prob", "objective", "score"):
        value = getattr(likelihood, term)(outputs, y)
        assert value.shape == (M, B, *S)
        torch.testing.assert_close(value.flatten(1), getattr(likelihood, term)(flat, points))
    for term in ("mean", "variance", "probs"):
        if term == "probs" and not likelihood.about.has_classes:
            continue
        value = getattr(likelihood, term)(outputs)
        torch.testing.assert_close(value.flatten(1, 3), getattr(likelihood, term)(flat))
    torch.testing.assert_close(likelihood.affinity(outputs), likelihood.affinity(flat))
    weight = likelihood.weight(y)
    if weight is not None:
        assert weight.shape == (B, *S)
        torch.testing.assert_close(weight.flatten(), likelihood.weight(points))


@every
def test_one_column_may_come_without_its_axis(likelihood):
    if kind(likelihood) == "classes":
        return
    outputs, y = drawn(3, 4, 6, width(likelihood)), targets(likelihood, 4, 6)
    torch.testing.assert_close(
        likelihood.log_prob(outputs, y.squeeze(-1)), likelihood.log_prob(outputs, y)
    )


@every
def test_leading_axes_broadcast(likelihood):
    outputs, y = drawn(2, 4, 6, width(likelihood, 2)), targets(likelihood, 6, columns=2)
    for term in ("log_prob", "objective", "score"):
        together = getattr(likelihood, term)(outputs, y)
        for i in range(2):
            for j in range(4):
                alone = getattr(likelihood, term)(outputs[i, j], y)
                torch.testing.assert_close(together[i, j], alone)


@every
def test_vmap_and_compilation_give_the_same(likelihood):
    """Compiled as one graph: no value decides a shape, and nothing waits for the host."""
    outputs, y = drawn(3, 5, width(likelihood, 2)), targets(likelihood, 5, columns=2)
    for term in ("log_prob", "objective"):
        function = getattr(likelihood, term)
        mapped = torch.vmap(function, in_dims=(0, None))(outputs, y)
        torch.testing.assert_close(mapped, function(outputs, y))
    torch._dynamo.reset()
    everything = torch.compile(_everything, backend="eager", fullgraph=True)
    for found, value in zip(everything(likelihood, outputs, y), _everything(likelihood, outputs, y),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(found, value)


def _everything(likelihood, outputs, y):
    weight = likelihood.weight(y)
    moments = likelihood.mean(outputs), likelihood.variance(outputs)
    found = likelihood.log_prob(outputs, y), likelihood.objective(outputs, y), *moments
    return found if weight is None else (*found, weight)


@every
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_outputs_stay_finite(likelihood, dtype):
    C = width(likelihood, 2)
    signs = torch.cartesian_prod(*[torch.tensor([-1e4, 0.0, 1e4])] * min(C, 4))
    outputs = signs.repeat(1, -(-C // signs.shape[1]))[:, :C].to(dtype).requires_grad_()
    y = targets(likelihood, len(outputs), columns=2)
    value = likelihood.objective(outputs, y)
    (gradient,) = torch.autograd.grad(value.sum(), outputs)
    for found in (likelihood.log_prob(outputs, y), value, gradient, *likelihood.moments(outputs)):
        assert found.dtype == dtype and bool(found.isfinite().all())


@every
def test_single_precision_has_its_digits(likelihood):
    outputs, y = drawn(50, width(likelihood, 2)), targets(likelihood, 50, columns=2)
    exact = likelihood.log_prob(outputs.float().double(), y.float() if y.is_floating_point() else y)
    single = likelihood.log_prob(outputs.float(), y.float() if y.is_floating_point() else y)
    torch.testing.assert_close(single.double(), exact, rtol=1e-4, atol=1e-5)


@every
def test_a_target_without_weight_has_no_gradient(likelihood):
    outputs = drawn(20, width(likelihood)).requires_grad_()
    y = targets(likelihood, 20)
    weight = likelihood.weight(y)
    if weight is None:
        assert likelihood.counted(y) is None
        return
    assert bool((weight >= 0).all()) and bool((weight == 0).any())
    value = likelihood.objective(outputs, y)
    (gradient,) = torch.autograd.grad(value.sum(), outputs)
    assert bool(value.isfinite().all())
    assert bool((gradient[weight == 0] == 0).all()) and bool((gradient[weight > 0] != 0).any())


@every
def test_a_mixture_of_equal_members_is_one_member(likelihood):
    outputs, y = drawn(1, 6, width(likelihood, 2)), targets(likelihood, 6, columns=2)
    for weights in (None, torch.tensor([0.2, 0.3, 0.5])):
        mixed = likelihood.mixture_log_prob(outputs.expand(3, -1, -1), y, weights)
        torch.testing.assert_close(mixed, likelihood.log_prob(outputs, y)[0])


@every
def test_the_affinity_is_a_similarity(likelihood):
    outputs = drawn(4, 7, width(likelihood, 2))
    S = likelihood.affinity(outputs)
    torch.testing.assert_close(S.diagonal(), torch.ones(4))
    torch.testing.assert_close(S, S.T)
    assert bool((S >= 0).all()) and bool((torch.linalg.eigvalsh(S) > -1e-12).all())


@every
def test_targets_are_checked(likelihood):
    y = targets(likelihood, 6, columns=2)
    likelihood.check(y, width(likelihood, 2))
    likelihood.check(targets(likelihood, 6, 3, 3, columns=2), width(likelihood, 2), 2)
    with pytest.raises(DataError):
        likelihood.check(torch.full((6, 2), -0.5), width(likelihood, 3))
    if kind(likelihood) != "classes":
        with pytest.raises(DataError, match="2 columns"):
            likelihood.check(y, width(likelihood, 3))
        assert likelihood.width_for(y, CLASSES) == width(likelihood, 2)


@every
def test_a_folder_can_store_it(likelihood):
    spec = likelihoods.registry.spec(likelihood)
    assert likelihoods.registry.make(spec) == likelihood
    assert all(key in BIBLIOGRAPHY for key in likelihoods.registry.cite(spec["name"]))


@every
def test_its_measures_are_metrics_that_apply(likelihood):
    about = likelihood.about
    pred = Predictive(drawn(2, 9, width(likelihood, 2)), likelihood)
    found = metrics.evaluate(pred, targets(likelihood, 9, columns=2), ood=pred)
    assert {*about.measures, *about.under_shift, f"auroc_{about.uncertainty}"} <= found.keys()
    assert likelihoods.task_of(about.plain) == about


@pytest.mark.parametrize("likelihood", INTERVALS, ids=repr)
@pytest.mark.parametrize("level", [0.05, 0.5, 0.95])
def test_quantiles_invert_the_distribution_function(likelihood, level):
    pred = Predictive(drawn(3, 8, width(likelihood, 2)), likelihood)
    y = pred.quantile(level)
    if likelihood.discrete:
        before = likelihood.cdf(pred.members, y - 1).mean(0)
        assert bool((pred.cdf(y) >= level).all()) and bool((before < level).all())
    else:
        torch.testing.assert_close(pred.cdf(y), torch.full_like(y, level))


@pytest.mark.parametrize("likelihood", INTERVALS, ids=repr)
def test_intervals_of_the_mixture_contain_their_share(likelihood):
    """All targets, each counted by its probability."""
    outputs = drawn(width(likelihood), seed=1)
    y, mass = masses(likelihood, outputs)
    keep = mass > 1e-9
    y, mass = y[keep].double(), mass[keep]
    pred = Predictive(outputs.expand(1, 1, -1), likelihood)
    low, high = (end.squeeze() for end in pred.interval(0.9))
    inside = mass[(y >= low) & (y <= high)].sum()
    if not likelihood.discrete:
        assert float(inside) == pytest.approx(0.9, abs=2e-3)
        return
    assert inside >= 0.9
    each = torch.tensor([metrics.coverage(pred, [count], 0.9) for count in y.tolist()])
    assert float(mass @ each) == pytest.approx(0.9, abs=1e-6)


@pytest.fixture
def documented():
    """The likelihood that the documentation writes as an example."""
    page = Path(__file__).parents[2] / "docs" / "likelihoods.md"
    (code,) = re.findall(r"```python\n(import math.*?)```", page.read_text(), re.S)
    names = {"__name__": "documentation"}
    exec(code, names)
    yield names["Laplace"](0.7)
    del likelihoods.registry._entries["laplace"], likelihoods.registry._citations["laplace"]


def test_the_example_of_the_documentation_keeps_the_laws(documented):
    test_probabilities_sum_to_one_with_the_mean_and_the_variance(documented)
    test_the_distribution_function_grows_by_the_density(documented)
    test_sites_are_points(documented)
    test_leading_axes_broadcast(documented)
    test_targets_are_checked(documented)
    test_a_folder_can_store_it(documented)
    test_its_measures_are_metrics_that_apply(documented)

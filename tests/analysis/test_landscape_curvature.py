"""Hessians that are never formed against those that are; effective numbers in every space."""

import pytest
import torch
from small_runs import assert_one_sentence, normed, plain, points, shoal_of
from torch import nn
from torch.func import functional_call, jacrev

from shoal.analysis.landscape.analyses.along import effective_numbers, gradient_similarity
from shoal.analysis.landscape.analyses.curvature import hessian_product, top_eigenvalues, trace
from shoal.analysis.landscape.points import chosen, with_weights
from shoal.analysis.landscape.survey import outputs
from shoal.core.errors import DataError
from shoal.data.dataset import Split
from shoal.inference.likelihoods import Categorical, Gaussian
from shoal.models import Blueprint, SmallCNN
from shoal.prediction.predictive import Predictive

X, Y = points(40)


def weights_of(ensemble):
    return {name: tensor.detach() for name, tensor in ensemble.weights.items()}


def test_linear_regression_has_the_hessian_of_its_inputs(double):
    ensemble = shoal_of(lambda: nn.Linear(3, 1, bias=False), members=2)
    x = X.double()
    product = hessian_product(ensemble, Split(x, x[:, 0]), Gaussian(0.5), batch_size=7)
    exact = torch.linalg.eigvalsh(x.T @ x / len(x) / 0.25).flip(0)
    found = top_eigenvalues(product, weights_of(ensemble), count=3)
    torch.testing.assert_close(found, exact.expand(2, 3))


def full_hessians(ensemble, x, y):
    for index in range(ensemble.members):
        module = ensemble.member(index)
        names = [name for name, _ in module.named_parameters()]
        shapes = [p.shape for p in module.parameters()]

        def loss(flat, module=module, names=names, shapes=shapes):
            parts = flat.split([shape.numel() for shape in shapes])
            tree = {n: p.reshape(s) for n, p, s in zip(names, parts, shapes, strict=True)}
            return nn.functional.cross_entropy(functional_call(module, tree, (x,)), y)

        flat = torch.cat([p.detach().flatten() for p in module.parameters()])
        yield jacrev(jacrev(loss))(flat)


@pytest.mark.parametrize("build", [plain, normed])
def test_eigenvalues_and_trace_are_those_of_the_full_hessian(double, build):
    ensemble = shoal_of(build, members=2)
    x = X.double()
    product = hessian_product(ensemble, Split(x, Y), Categorical())
    full = list(full_hessians(ensemble, x, Y))
    exact = torch.stack([torch.linalg.eigvalsh(h).flip(0)[:4] for h in full])
    found = top_eigenvalues(product, weights_of(ensemble), count=4, steps=60)
    torch.testing.assert_close(found, exact, rtol=1e-6, atol=1e-9)
    estimate = trace(product, weights_of(ensemble), probes=100)
    traces = torch.stack([h.trace() for h in full])
    assert bool(((estimate.mean - traces).abs() < 4 * estimate.error).all())
    assert bool((estimate.error > 0).all())


def test_a_few_steps_are_enough_for_the_largest():
    ensemble = shoal_of(Blueprint(SmallCNN((3, 4)), (1, 8, 8), 4), members=2)
    x = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    product = hessian_product(ensemble, Split(x, torch.arange(30) % 4), Categorical())
    few, many = (top_eigenvalues(product, weights_of(ensemble), 1, s) for s in (12, 60))
    torch.testing.assert_close(few, many, rtol=0.01, atol=0)


def test_random_signs_are_exact_for_a_diagonal_hessian():
    like = {"a": torch.zeros(2, 3), "b": torch.zeros(2, 2, 2)}
    diagonal = {"a": torch.rand(2, 3), "b": torch.rand(2, 2, 2)}
    found = trace(lambda v: {n: diagonal[n] * t for n, t in v.items()}, like, probes=4)
    exact = diagonal["a"].sum(1) + diagonal["b"].flatten(1).sum(1)
    torch.testing.assert_close(found.mean, exact.double(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found.error, torch.zeros(2).double(), rtol=0, atol=1e-6)


def test_curvature_needs_targets():
    with pytest.raises(DataError) as caught:
        hessian_product(shoal_of(plain), Split(X))
    assert_one_sentence(caught.value, "targets")


def numbers(ensemble):
    pred = Predictive(outputs(ensemble, X), Categorical())
    return effective_numbers(ensemble, pred, Split(X, Y))


def test_copies_of_one_member_count_once_in_every_space():
    found = numbers(chosen(shoal_of(plain), [1, 1, 1]))
    assert set(found) == {"weights", "outputs", "labels", "input gradients"}
    assert all(value == pytest.approx(1, abs=1e-3) for value in found.values())


def test_permuted_members_count_twice_by_weights_and_once_by_anything_else():
    ensemble = shoal_of(plain, members=1)
    one = {name: tensor[0] for name, tensor in weights_of(ensemble).items()}
    order = torch.arange(8).flip(0)
    two = one | {"0.weight": one["0.weight"][order], "0.bias": one["0.bias"][order]}
    two |= {"2.weight": one["2.weight"][:, order]}
    found = numbers(
        with_weights(ensemble, {name: torch.stack([one[name], two[name]]) for name in one})
    )
    assert found.pop("weights") > 1.7
    assert all(value == pytest.approx(1, abs=1e-3) for value in found.values())


def test_gradients_at_right_angles_count_fully():
    ensemble = shoal_of(lambda: nn.Linear(2, 1, bias=False), members=1)
    both = with_weights(ensemble, {"weight": torch.tensor([[[1.0, 0.0]], [[0.0, 1.0]]])})
    split = Split(torch.ones(5, 2), torch.zeros(5))
    torch.testing.assert_close(gradient_similarity(both, split, Gaussian()), torch.eye(2).double())
    pred = Predictive(outputs(both, split.x), Gaussian())
    found = effective_numbers(both, pred, split)
    assert found["input gradients"] == pytest.approx(2)
    assert "labels" not in found
    with pytest.raises(DataError):
        gradient_similarity(both, Split(split.x), Gaussian())

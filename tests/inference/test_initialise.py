"""Members are drawn from seeds of their own, whatever the factory does."""

import random

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError, ShoalWarning


class Constants(nn.Module):
    """Bare parameters that no initialiser draws."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.zeros(2))

    def forward(self, x):
        return x @ self.a + self.b


class ByNumpy(nn.Module):
    """Weights drawn by numpy and by Python's own generator."""

    def __init__(self):
        super().__init__()
        self.a = nn.Parameter(torch.tensor(np.random.randn(3, 2)).float())
        self.b = nn.Parameter(torch.tensor([random.gauss(0, 1) for _ in range(2)]))

    def forward(self, x):
        return x @ self.a + self.b


def seeded():
    torch.manual_seed(0)
    return nn.Linear(3, 2)


def rows(ensemble):
    return torch.cat([t.detach().flatten(1) for t in ensemble.weights.values()], 1)


def distinct(ensemble):
    W = rows(ensemble)
    return all(not torch.equal(W[i], W[j]) for i in range(len(W)) for j in range(i))


FACTORIES = {
    "linear": lambda: nn.Linear(3, 2),
    "numpy": ByNumpy,
    "half constant": lambda: nn.Sequential(Constants(), nn.Linear(2, 2)),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)),
}
EQUAL = {"constants": Constants, "seeded": seeded}


def init(factory, members, seed):
    if factory in FACTORIES:
        return shoal.Ensemble.init(FACTORIES[factory], members, seed)
    with pytest.warns(ShoalWarning, match="made equal members"):
        return shoal.Ensemble.init(EQUAL[factory], members, seed)


@pytest.mark.parametrize("factory", [*FACTORIES, *EQUAL])
def test_members_differ(factory):
    assert distinct(init(factory, 5, seed=0))


@pytest.mark.parametrize("factory", [*FACTORIES, *EQUAL])
def test_the_same_seed_makes_the_same_members_whatever_their_number(factory):
    small, large = rows(init(factory, 2, seed=4)), rows(init(factory, 6, seed=4))
    assert torch.equal(small, large[:2])


@pytest.mark.parametrize("factory", [*FACTORIES, *EQUAL])
def test_another_seed_makes_other_members(factory):
    one, two = rows(init(factory, 3, seed=0)), rows(init(factory, 3, seed=1))
    same = [i for i in range(3) if torch.equal(one[i], two[i])]
    assert same == ([0] if factory in EQUAL else [])  # the first of equal members is left as it is


@pytest.mark.parametrize("factory", [*FACTORIES, *EQUAL])
def test_the_generators_of_the_world_are_left_alone(factory):
    torch.manual_seed(7), random.seed(7), np.random.seed(7)
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    init(factory, 3, seed=0)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))


def test_the_state_of_the_world_does_not_matter():
    torch.manual_seed(1)
    one = rows(init("linear", 2, seed=0))
    torch.manual_seed(2)
    assert torch.equal(one, rows(init("linear", 2, seed=0)))


def test_a_failing_factory_leaves_the_generators_alone():
    def fail():
        torch.rand(3), np.random.rand(3), random.random()
        raise RuntimeError("no network")

    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    with pytest.raises(RuntimeError, match="no network"):
        shoal.Ensemble.init(fail, 2)
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[2], strict=True))


def test_members_are_uncorrelated_draws():
    """Correlations of independent rows of d numbers have a standard error of 1 / sqrt(d)."""
    W = rows(shoal.Ensemble.init(lambda: nn.Linear(60, 60), 6))
    correlation = torch.corrcoef(W) - torch.eye(6)
    assert correlation.abs().max() < 5 / W.shape[1] ** 0.5


def test_groups_of_mixed_architectures_do_not_repeat_each_other():
    build = lambda: nn.Linear(3, 2)  # noqa: E731
    ensemble = shoal.Ensemble.init([(build, 2), (build, 3)])
    weights = torch.cat([ensemble.weights[f"group{g}.weight"].flatten(1) for g in (0, 1)])
    assert torch.equal(weights, shoal.Ensemble.init(build, 5).weights["weight"].flatten(1))


def test_equal_members_are_perturbed_by_a_tenth_of_their_size():
    with pytest.warns(ShoalWarning, match=r"members \[1, 2\] were perturbed"):
        ensemble = shoal.Ensemble.init(lambda: _filled(4.0, 50, 50), 3)
    weight = ensemble.weights["weight"].detach()
    assert (weight[0] == 4.0).all()
    for i in (1, 2):
        assert abs((weight[i] - 4.0).std() - 0.4) < 0.02


def test_frozen_weights_of_equal_members_are_not_perturbed():
    """What is frozen was given, by pre-training say: only what is trained may be changed."""

    def build():
        module = nn.Sequential(_filled(1.0, 3, 4), _filled(1.0, 4, 2))
        module[0].requires_grad_(False)
        return module

    with pytest.warns(ShoalWarning, match="made equal members"):
        ensemble = shoal.Ensemble.init(build, 3)
    assert (ensemble.shared["0.weight"] == 1.0).all()
    assert distinct(ensemble)


def _filled(value, inputs, outputs):
    module = nn.Linear(inputs, outputs)
    nn.init.constant_(module.weight, value)
    nn.init.constant_(module.bias, value)
    return module


SHARED = nn.Linear(3, 2)
SIZES = iter(range(3, 100))


@pytest.mark.parametrize(
    ("build", "members", "sentence"),
    [
        (lambda: nn.Linear(3, 2), 0, "at least one member, not 0"),
        (lambda: nn.Linear(3, 2), -3, "at least one member, not -3"),
        (lambda: nn.Linear(3, 2), None, "at least one member, not None"),
        (lambda: nn.Linear(3, 2), 2.0, "at least one member, not 2.0"),
        (lambda: torch.zeros(3), 2, "must return an nn.Module, not Tensor"),
        (lambda: None, 2, "must return an nn.Module, not NoneType"),
        (nn.Linear(3, 2), 2, "build"),  # a network where a factory of networks is wanted
        (lambda: SHARED, 2, "same module twice"),
        (lambda: nn.Linear(next(SIZES), 2), 2, "different shapes.*list of"),
        (lambda: nn.ReLU(), 2, "without parameters"),
        (lambda: nn.Linear(3, 2).requires_grad_(False), 2, "every parameter.*frozen"),
        ([], None, "at least one member"),
        ([(lambda: nn.Linear(3, 2), 0)], None, "at least one member, not 0"),
        ([(lambda: nn.Linear(3, 2), 2)], 2, "already has the counts"),
    ],
)
def test_what_cannot_be_an_ensemble_is_refused_in_a_sentence(build, members, sentence):
    with pytest.raises(ConfigError, match=sentence):
        shoal.Ensemble.init(build, members)

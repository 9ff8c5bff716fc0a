"""A NaN in one member does not change the others."""

import math
from functools import cache

import pytest
import torch
from ready import ready
from torch import nn

import shoal
from shoal.engine.members.member_runner import MemberRunner
from shoal.interaction.bandwidths import Median

MEMBERS, BATCH, N, DEAD = 5, 6, 20, 2
METHODS = [
    pytest.param(name, legacy, id=f"{name} {'published' if legacy else 'corrected'}")
    for name in shoal.methods.METHODS
    for legacy in (False, True)
]


class Network(nn.Module):
    """A net with a scale on its inputs, batch statistics, and a table that is only partly read."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(4))
        self.first, self.norm = nn.Linear(4, 5), nn.BatchNorm1d(5)
        self.last = nn.Linear(5, 3)
        self.table = nn.Parameter(torch.randn(7, 3))

    def forward(self, x):
        h = torch.relu(self.norm(self.first(x * self.scale)))
        return self.last(h) + self.table[:2].mean(0)


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 4, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def posterior(functional=False):
    prior = shoal.priors.Gaussian(0.9)
    if functional:
        prior = shoal.priors.FunctionSpace(
            weights=prior,
            estimator=shoal.estimators.SSGE(share=1.0, eta=0.01),
            bandwidth=Median(legacy=True),
            legacy=True,
        )
    return shoal.Posterior(shoal.likelihoods.Categorical(), prior, N)


def forces(name, legacy, harm, build=Network, **options):
    """Velocity, info and the ensemble after `harm` was done to it."""
    ensemble = shoal.Ensemble.init(build, MEMBERS, seed=3).train()
    with torch.no_grad():
        harm(ensemble)
    method = shoal.methods.get(name, legacy=legacy)
    target = posterior(method.functional_prior)
    velocity, info = shoal.forces(
        ensemble, target, ready(method.repulsion, batch()[0]), batch(), **options
    )
    return velocity, info, ensemble


def mask(ensemble):
    ensemble.alive[DEAD] = False


def poison(tensor, value, where=...):
    def harm(ensemble):
        ensemble.weights[tensor][DEAD][where] = value

    return harm


POISONS = {
    "nan weight": poison("first.weight", math.nan, (1, 2)),
    "all nan": poison("last.bias", math.nan),
    "infinite weight": poison("last.weight", math.inf, (0, 0)),
    "infinite scale of inputs": poison("scale", math.inf, 0),
    "overflow": poison("last.weight", 3e38),
}
LIVING = [i for i in range(MEMBERS) if i != DEAD]


def others_are_equal(found, clean):
    velocity, info, ensemble = found
    expected, expected_info, untouched = clean
    assert info.alive.tolist() == [i != DEAD for i in range(MEMBERS)]
    for key, tensor in velocity.items():
        assert torch.equal(tensor[LIVING], expected[key][LIVING]), key
        assert tensor[LIVING].isfinite().all(), key
    for key, tensor in ensemble.buffers.items():
        assert torch.equal(tensor[LIVING], untouched.buffers[key][LIVING]), key
    assert torch.equal(info.loss[LIVING], expected_info.loss[LIVING])
    assert info.effective.isfinite() and info.push.isfinite() and info.h2.isfinite()


@cache
def masked(name, legacy):
    return forces(name, legacy, mask)


@pytest.mark.parametrize("harm", POISONS)
@pytest.mark.parametrize(("name", "legacy"), METHODS)
def test_a_poisoned_member_is_a_masked_member(name, legacy, harm):
    others_are_equal(forces(name, legacy, POISONS[harm]), masked(name, legacy))


@pytest.mark.parametrize("mapping", [MemberRunner("loop"), MemberRunner(chunk=2)], ids=repr)
@pytest.mark.parametrize("name", ["svgd", "f-kde"])
def test_however_the_members_run(name, mapping):
    harm = POISONS["nan weight"]
    found = forces(name, False, harm, mapping=mapping)
    others_are_equal(found, forces(name, False, mask, mapping=mapping))


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("name", ["ensemble", "kde", "svgd", "f-kde", "f-svgd"])
def test_adversarial_neighbours_of_the_others(name, shared):
    adversarial = shoal.Adversarial(0.1, shared)
    harm = POISONS["nan weight"]
    found = forces(name, False, harm, adversarial=adversarial)
    others_are_equal(found, forces(name, False, mask, adversarial=adversarial))


@pytest.mark.parametrize(("name", "legacy"), METHODS)
def test_a_masked_member_is_as_if_absent(name, legacy):
    """The living move as an ensemble of their own would."""
    method = shoal.methods.get(name, legacy=legacy)
    build = lambda: nn.Linear(4, 3)  # noqa: E731
    whole = shoal.Ensemble.init(build, MEMBERS).to(dtype=torch.float64)
    rest = shoal.Ensemble.init(build, MEMBERS - 1).to(dtype=torch.float64)
    mask(whole)
    with torch.no_grad():
        for key, tensor in rest.weights.items():
            tensor.copy_(whole.weights[key][LIVING])
    x, y = batch()
    data = x.double(), y
    prior = posterior()
    velocity, info = shoal.forces(whole, prior, ready(method.repulsion, data[0]), data)
    expected, expected_info = shoal.forces(rest, prior, ready(method.repulsion, data[0]), data)
    for key in expected:
        torch.testing.assert_close(velocity[key][LIVING], expected[key], rtol=1e-9, atol=1e-10)
    torch.testing.assert_close(info.effective, expected_info.effective)
    torch.testing.assert_close(info.drive, expected_info.drive)
    torch.testing.assert_close(info.push, expected_info.push)
    torch.testing.assert_close(info.h2, expected_info.h2)


UNSEEN = {
    # The outputs, and so the loss, are finite; the weights are not.
    "nan in a row that no input reads": poison("table", math.nan, 5),
    "minus infinity before a relu": poison("norm.bias", -math.inf, 0),
}


@pytest.mark.parametrize("harm", UNSEEN)
@pytest.mark.parametrize("name", ["kde", "sge", "ssge", "svgd"])
def test_weights_that_are_not_finite_behind_a_finite_loss(name, harm):
    velocity, _, _ = forces(name, False, UNSEEN[harm])
    for key, tensor in velocity.items():
        assert tensor[LIVING].isfinite().all(), key


class Root(nn.Module):
    """The square root of a bias of zero: a finite loss with an infinite gradient."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.offset = nn.Parameter(torch.rand(3) + 0.5)

    def forward(self, x):
        return self.layer(x) + self.offset.sqrt()


class RootOfInputs(nn.Module):
    """A norm of zero: a finite loss whose gradient at the inputs is not."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        h = self.layer(x)
        return h + h.square().sum(-1, keepdim=True).sqrt()


@pytest.mark.parametrize("name", ["kde", "svgd", "f-kde", "f-svgd"])
def test_a_gradient_that_is_not_finite_behind_a_finite_loss(name):
    velocity, _, _ = forces(name, False, poison("offset", 0.0), build=Root)
    for key, tensor in velocity.items():
        assert tensor[LIVING].isfinite().all(), key


def zero_layer(ensemble):
    ensemble.weights["layer.weight"][DEAD] = 0.0
    ensemble.weights["layer.bias"][DEAD] = 0.0


def test_a_gradient_at_the_inputs_that_is_not_finite():
    """The neighbour that all share comes from the members that can say where it lies."""
    options = {"build": RootOfInputs, "adversarial": shoal.Adversarial(0.1, shared=True)}
    velocity, _, _ = forces("ensemble", False, zero_layer, **options)
    expected, _, _ = forces("ensemble", False, mask, **options)
    for key, tensor in velocity.items():
        assert torch.equal(tensor[LIVING], expected[key][LIVING]), key


@pytest.mark.parametrize(("name", "legacy"), METHODS)
def test_one_member_alone_is_not_pushed(name, legacy):
    ensemble = shoal.Ensemble.init(Network, 1)
    method = shoal.methods.get(name, legacy=legacy)
    velocity, info = shoal.forces(
        ensemble, posterior(), ready(method.repulsion, batch()[0]), batch()
    )
    plain, _ = shoal.forces(ensemble, posterior(), None, batch())
    assert info.push == 0
    for key, tensor in velocity.items():
        if name == "f-svgd":  # its weight prior has a factor of its own, one: rounded otherwise
            torch.testing.assert_close(tensor, plain[key], rtol=1e-6, atol=1e-9)
        else:
            assert torch.equal(tensor, plain[key])


@pytest.mark.parametrize("members", [2, 5])
@pytest.mark.parametrize(("name", "legacy"), METHODS)
def test_identical_members_do_not_push_each_other(name, legacy, members):
    ensemble = shoal.Ensemble.init(Network, members).to(dtype=torch.float64)
    with torch.no_grad():
        for tensor in ensemble.weights.values():
            tensor.copy_(tensor[:1].expand_as(tensor).clone())
    method = shoal.methods.get(name, legacy=legacy)
    x, y = batch()
    data = x.double(), y
    velocity, info = shoal.forces(ensemble, posterior(), ready(method.repulsion, data[0]), data)
    plain, _ = shoal.forces(ensemble, posterior(), None, data)
    assert info.push < 1e-9
    if name != "ensemble":
        torch.testing.assert_close(info.effective, torch.tensor(1.0))
    for key, tensor in velocity.items():
        torch.testing.assert_close(tensor, plain[key], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize(("name", "legacy"), METHODS)
def test_two_identical_members_among_others_move_alike(name, legacy):
    ensemble = shoal.Ensemble.init(Network, MEMBERS).to(dtype=torch.float64)
    with torch.no_grad():
        for tensor in ensemble.weights.values():
            tensor[3] = tensor[1]
    method = shoal.methods.get(name, legacy=legacy)
    x, y = batch()
    velocity, _ = shoal.forces(
        ensemble, posterior(), ready(method.repulsion, x.double()), (x.double(), y)
    )
    for tensor in velocity.values():
        assert tensor.isfinite().all()
        torch.testing.assert_close(tensor[1], tensor[3], rtol=1e-7, atol=1e-9)


def test_the_first_member_is_like_any_other():
    """Its statistics are spoilt after the first step; a functional prior must not read them."""
    ensemble = shoal.Ensemble.init(Network, MEMBERS).train()
    with torch.no_grad():
        ensemble.weights["first.weight"][0, 0, 0] = math.nan
    repulsion = shoal.methods.get("f-kde", legacy=True).repulsion
    for step in range(2):
        velocity, info = shoal.forces(ensemble, posterior(True), repulsion, batch(), step=step)
        assert info.alive.tolist() == [False] + [True] * (MEMBERS - 1)
        assert all(tensor[1:].isfinite().all() for tensor in velocity.values())


def test_when_all_are_dead_nothing_breaks():
    def all_of_them(ensemble):
        ensemble.weights["last.bias"].fill_(math.nan)

    for name in shoal.methods.METHODS:
        _, info, _ = forces(name, False, all_of_them)
        assert not info.alive.any()

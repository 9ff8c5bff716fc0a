"""The published form of function space, as the released code has it, written out.

D'Angelo & Fortuin's code offers softmax probabilities instead of logits. All forces then act there.
Adversarial neighbours of a re-implementation of it join the batch, so that members repel there too.
"""

import pytest
import reference
import torch
from published_priors import drawn_outputs, published_prior
from torch import nn

import shoal
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, BATCH, N = 4, 6, 9
GAMMA, T, STRENGTH, PRIOR_STD = 0.7, 1.3, 0.6, 0.8
TOLERANCE = {"rtol": 1e-9, "atol": 1e-10}
NAMES = ["f-kde", "f-sge", "f-ssge", "f-svgd"]
SEED, STEP = 11, 5


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 4, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def ensemble_and_members():
    ensemble = shoal.Ensemble.init(network, MEMBERS, seed=3)
    return ensemble, [ensemble.member(i) for i in range(MEMBERS)]


def posterior(prior):
    return shoal.Posterior(shoal.likelihoods.Categorical(), prior, N, temperature=T)


def released(modules, x, y, flow, draws, probabilities):
    """phi [M, d]: f is pred[0], the softmax, or pred[1], the logits; every force acts on f.

    The loss by probabilities is mean_b max_c (-t log(p + 1e-15)); the sum is pulled back by one
    vector-Jacobian product of f.
    """
    f, scores, onehot = [], [], nn.functional.one_hot(y, 3).to(x)
    for module in modules:
        logits = module(x)
        value = logits.softmax(-1) if probabilities else logits
        at = value.detach().requires_grad_()
        if probabilities:
            loss = (-(onehot * torch.log(at + 1e-15))).max(1)[0].sum() / len(x)
        else:
            loss = nn.functional.nll_loss(at.log_softmax(-1), y)
        scores.append(torch.autograd.grad(-N * loss, at)[0].reshape(-1))
        f.append(value.reshape(-1))
    at = torch.stack(f).detach()
    draws = draws.softmax(-1) if probabilities else draws
    drive = torch.stack(scores) + reference.functional_prior(at, draws.flatten(1))
    K, push = reference.interaction(flow, True, at)
    drive = K @ drive / MEMBERS if flow == "svgd" else drive
    f_phi = GAMMA * drive - T * STRENGTH * push
    rows = [
        reference._flat_grad(f[i], module, grad_outputs=f_phi[i])
        for i, module in enumerate(modules)
    ]
    return torch.stack(rows)


def published(name, **settings):
    return shoal.methods.get(name, legacy=True, **settings).with_strength(STRENGTH).repulsion


def velocity_of(ensemble, repulsion, data, **options):
    how = {"annealing": GAMMA, "seed": SEED, "step": STEP}
    return shoal.forces(
        ensemble, posterior(published_prior(PRIOR_STD)), repulsion, data, **how, **options
    )


@pytest.mark.parametrize("probabilities", [False, True], ids=["logits", "softmax"])
@pytest.mark.parametrize("name", NAMES)
def test_every_force_acts_on_the_compared_outputs(name, probabilities):
    ensemble, modules = ensemble_and_members()
    x, y = batch()
    velocity, info = velocity_of(ensemble, published(name, probabilities=probabilities), (x, y))
    draws = drawn_outputs(ensemble.member(0), x, MEMBERS, PRIOR_STD, SEED, STEP)
    target = released(modules, x, y, name.removeprefix("f-"), draws, probabilities) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)
    losses = [nn.functional.cross_entropy(module(x), y) for module in modules]
    torch.testing.assert_close(info.loss, torch.stack(losses).detach())


@pytest.mark.parametrize("name", NAMES)
def test_the_softmax_form_differs_by_its_prior_and_its_mixing(name):
    """The corrected form compares probabilities and keeps its drives at the outputs."""
    ensemble, modules = ensemble_and_members()
    own = shoal.Repulsion(
        shoal.spaces.Outputs(probabilities=True), bandwidth=published(name).bandwidth,
        flow=published(name).flow, strength=STRENGTH,
    )  # fmt: skip
    flat = [
        reference.flat_velocity(velocity_of(ensemble, each, batch())[0], modules)
        for each in (published(name, probabilities=True), own)
    ]
    assert (flat[0] - flat[1]).norm() > 1e-6 * flat[0].norm()


@pytest.mark.parametrize("probabilities", [False, True], ids=["logits", "softmax"])
@pytest.mark.parametrize("name", NAMES)
def test_neighbours_that_join_the_batch_repel(name, probabilities):
    """Released: vstack([x, x + eps sgn(grad of all losses)]), then the step of 2 B points."""
    ensemble, modules = ensemble_and_members()
    x, y = batch()
    velocity, _ = velocity_of(
        ensemble, published(name, probabilities=probabilities), (x, y),
        adversarial=shoal.Adversarial(0.07, shared=True, joined=True),
    )  # fmt: skip
    losses = [lambda f: nn.functional.cross_entropy(f, y)] * MEMBERS
    worst = reference.worst_inputs(modules, x, losses, 0.07, True)[0]
    x, y = torch.vstack([x, worst]).detach(), torch.cat([y, y])
    draws = drawn_outputs(ensemble.member(0), x, MEMBERS, PRIOR_STD, SEED, STEP)
    target = released(modules, x, y, name.removeprefix("f-"), draws, probabilities) / N
    torch.testing.assert_close(reference.flat_velocity(velocity, modules), target, **TOLERANCE)


@pytest.mark.parametrize("probabilities", [False, True], ids=["logits", "softmax"])
def test_neighbours_outside_the_batch_are_mixed_where_the_drives_are(probabilities):
    """In the limit of no perturbation, half of the likelihood twice is the likelihood."""
    ensemble, _ = ensemble_and_members()
    repulsion = published("f-svgd", probabilities=probabilities)
    plain, _ = velocity_of(ensemble, repulsion, batch())
    tiny, _ = velocity_of(ensemble, repulsion, batch(), adversarial=shoal.Adversarial(1e-13))
    for name in plain:
        torch.testing.assert_close(tiny[name], plain[name], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("name", ["f-kde", "f-svgd"])
def test_frozen_members_are_compared_by_their_probabilities(name):
    """Equal members, of which the first two are frozen: the others feel the same."""
    ensemble, _ = ensemble_and_members()
    repulsion = published(name, probabilities=True)
    flat = posterior(shoal.priors.Flat())
    whole, _ = shoal.forces(ensemble, flat, repulsion, batch())
    frozen, moving = ensemble.slice_members(0, 2).eval(), ensemble.slice_members(2, MEMBERS)
    part, _ = shoal.forces(moving, flat, repulsion, batch(), frozen=frozen)
    for tensor, value in part.items():
        torch.testing.assert_close(value, whole[tensor][2:], rtol=1e-10, atol=1e-12)


def test_neighbours_that_join_are_shared():
    with pytest.raises(ConfigError, match="shared=true"):
        shoal.Adversarial(0.1, joined=True)


@pytest.mark.parametrize("name", ["f-kde", "kde"])
@pytest.mark.parametrize("legacy", [False, True])
def test_neighbours_join_the_batch_of_published_function_space(tmp_path, name, legacy):
    ensemble = shoal.Ensemble.init(network, 3)
    out = tmp_path / "run"
    shoal.fit(
        ensemble, batch(), method=name, legacy=legacy, adversarial=0.05, steps=2, batch_size=4,
        out=out, progress=False,
    )  # fmt: skip
    joins = "joined = true" in (out / "config.toml").read_text()
    assert joins == (legacy and name == "f-kde")

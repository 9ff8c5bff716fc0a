"""Fast gradient sign neighbours, exactly, where the sign is known in closed form."""

import pytest
import reference
import torch
from torch import nn

import shoal
from shoal.core.errors import ConfigError, DataError

pytestmark = pytest.mark.usefixtures("double")

MEMBERS, BATCH, N = 4, 6, 9
GAMMA, T, STRENGTH, PRIOR_STD = 0.7, 1.3, 0.6, 0.8


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch():
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(BATCH, 4, generator=generator)
    return x, torch.randint(3, (BATCH,), generator=generator)


def posterior(likelihood=None, prior=None, n=N):
    likelihood = likelihood or shoal.likelihoods.Categorical()
    return shoal.Posterior(likelihood, prior or shoal.priors.Gaussian(PRIOR_STD), n, T)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
@pytest.mark.parametrize("name", [n for n in shoal.methods.METHODS if not n.startswith("forde")])
def test_every_method_is_its_literal_update(name, shared):
    """Half of the likelihood from the inputs, half from their neighbours."""
    ensemble = shoal.Ensemble.init(network, MEMBERS, seed=3)
    modules = [ensemble.member(i) for i in range(MEMBERS)]
    method = shoal.methods.get(name).with_strength(STRENGTH)
    velocity, _ = shoal.forces(
        ensemble, posterior(), method.repulsion, batch(),
        annealing=GAMMA, adversarial=shoal.Adversarial(0.07, shared),
    )  # fmt: skip
    book = reference.Textbook(
        modules, batch(), N, prior_std=PRIOR_STD, annealing=GAMMA, temperature=T,
        strength=STRENGTH, adversarial=(0.07, shared),
    )  # fmt: skip
    space = book.function_space if name.startswith("f-") else book.weight_space
    target = space(name.removeprefix("f-"), False) / N
    flat = reference.flat_velocity(velocity, modules)
    torch.testing.assert_close(flat, target, rtol=1e-10, atol=1e-10)


def test_own_and_shared_neighbours_differ():
    ensemble = shoal.Ensemble.init(network, MEMBERS, seed=3)
    own, shared, none = (
        shoal.forces(ensemble, posterior(), None, batch(), adversarial=adversarial)[0]["0.weight"]
        for adversarial in (shoal.Adversarial(0.3), shoal.Adversarial(0.3, shared=True), None)
    )
    assert not torch.allclose(own, shared) and not torch.allclose(own, none)


class Logistic(nn.Module):
    """Two classes with the logit w·x between them."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x):
        return torch.stack([torch.zeros(len(x)), x @ self.w], 1)


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_logistic_regression(shared):
    """x' = x + eps sign((sigma(w·x) - y) w): the sum of the members' gradients when shared."""
    epsilon, members = 0.1, 3
    ensemble = shoal.Ensemble.init(Logistic, members, seed=1)
    x = batch()[0]
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    velocity, _ = shoal.forces(
        ensemble, posterior(prior=shoal.priors.Flat()), None, (x, y),
        adversarial=shoal.Adversarial(epsilon, shared),
    )  # fmt: skip
    w = ensemble.weights["w"].detach()
    slope = torch.sigmoid(w @ x.mT) - y  # [M, B]
    gradient = slope[..., None] * w[:, None]
    worst = x + epsilon * (gradient.sum(0) if shared else gradient).sign()
    worst = worst.expand(members, BATCH, 4)
    clean = torch.einsum("mb,bd->md", -slope, x) / BATCH
    moved = y - torch.sigmoid(torch.einsum("mbd,md->mb", worst, w))
    attacked = torch.einsum("mb,mbd->md", moved, worst) / BATCH
    torch.testing.assert_close(velocity["w"], (clean + attacked) / 2, rtol=1e-11, atol=1e-12)


def test_the_logit_of_a_linear_model_falls_by_epsilon_times_the_one_norm():
    """The worst neighbour lowers the margin by exactly eps |w|_1, as no other in the cube does."""
    epsilon = 0.1
    ensemble = shoal.Ensemble.init(Logistic, 1, seed=1)
    x = batch()[0]
    y = torch.tensor([0, 1, 1, 0, 1, 0])
    w = ensemble.weights["w"].detach()[0]
    adversarial = shoal.Adversarial(epsilon)
    shown = adversarial.watch(x, 1)
    outputs = ensemble(shown, own_inputs=True)
    log_likelihood = shoal.likelihoods.Categorical().log_prob(outputs, y).sum()
    (at_inputs,) = torch.autograd.grad(log_likelihood, shown)
    worst = adversarial.neighbours(shown, at_inputs, torch.tensor([True]))[0]
    side = 2 * y - 1
    fall = side * (x @ w) - side * (worst @ w)
    torch.testing.assert_close(fall, (epsilon * w.abs().sum()).expand(BATCH))


def test_regression_moves_inputs_away_from_the_target():
    """For y = w·x the neighbour is x + eps sign((w·x - y) w), and the error grows by eps |w|_1."""
    ensemble = shoal.Ensemble.init(lambda: nn.Linear(4, 1, bias=False), 2, seed=1)
    x, y = batch()[0], torch.zeros(BATCH)
    velocity, _ = shoal.forces(
        ensemble, posterior(shoal.likelihoods.Gaussian(0.5), shoal.priors.Flat()), None, (x, y),
        adversarial=shoal.Adversarial(0.2),
    )  # fmt: skip
    for i, w in enumerate(ensemble.weights["weight"].detach().squeeze(1)):
        error = x @ w
        worst = x + 0.2 * torch.outer(error.sign(), w.sign())
        torch.testing.assert_close((worst @ w).abs(), error.abs() + 0.2 * w.abs().sum())
        total = -(error @ x) / BATCH / 0.25 - ((worst @ w) @ worst) / BATCH / 0.25
        torch.testing.assert_close(velocity["weight"][i, 0], total / 2)


def test_the_data_still_count_once():
    """In the limit of no perturbation, adversarial training is training."""
    ensemble = shoal.Ensemble.init(network, MEMBERS, seed=3)
    repulsion = shoal.methods.get("f-svgd").repulsion
    plain, _ = shoal.forces(ensemble, posterior(), repulsion, batch())
    tiny, _ = shoal.forces(
        ensemble, posterior(), repulsion, batch(), adversarial=shoal.Adversarial(1e-13)
    )
    for key in plain:
        torch.testing.assert_close(tiny[key], plain[key], rtol=1e-9, atol=1e-10)


def test_functional_prior_is_taken_at_the_inputs_alone():
    """The prior enters once: what it adds does not depend on the perturbation."""
    ensemble = shoal.Ensemble.init(network, MEMBERS, seed=3)
    functional, flat = shoal.priors.FunctionSpace(), shoal.priors.Flat()
    added = []
    for adversarial in (None, shoal.Adversarial(0.3)):
        with_prior, without = (
            shoal.forces(ensemble, posterior(prior=prior), None, batch(), adversarial=adversarial)
            for prior in (functional, flat)
        )
        added.append(with_prior[0]["0.weight"] - without[0]["0.weight"])
    assert added[0].abs().max() > 1e-6
    torch.testing.assert_close(added[0], added[1], rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("epsilon", [0.0, -0.1, float("nan")])
def test_the_size_must_be_positive(epsilon):
    with pytest.raises(ConfigError, match="epsilon must be (positive|a number)"):
        shoal.Adversarial(epsilon)


def test_integers_have_no_neighbours():
    ensemble = shoal.Ensemble.init(lambda: nn.Sequential(nn.Embedding(5, 3), nn.Flatten()), 2)
    data = torch.zeros(4, 1, dtype=torch.long), torch.zeros(4, dtype=torch.long)
    with pytest.raises(DataError, match="needs real inputs, not integers"):
        shoal.forces(ensemble, posterior(), None, data, adversarial=shoal.Adversarial())


class TestRelative:
    """x' = x + eps r sign(grad loss), r the range of each coordinate in the training data."""

    def test_every_coordinate_has_a_size_of_its_own(self):
        x = torch.tensor([[0.0, -1.0, 7.0], [4.0, 1.0, 7.0], [2.0, 0.0, 7.0]])
        adversarial = shoal.Adversarial(0.5, relative=True).fitted(x)
        at_inputs = torch.tensor([[[1.0, -2.0, 3.0]]])
        worst = adversarial.neighbours(torch.zeros(1, 1, 3), at_inputs, torch.tensor([True]))
        torch.testing.assert_close(worst, torch.tensor([[[-2.0, 1.0, 0.0]]]))

    def test_fit_takes_the_range_of_all_training_inputs(self):
        """One step of a linear member on one batch: the closed form with the ranges of x."""
        x = torch.tensor([[0.0, 2.0], [3.0, -2.0], [1.0, 0.0]])
        y = torch.tensor([1.0, -1.0, 0.5])
        start = shoal.Ensemble.init(lambda: nn.Linear(2, 1, bias=False), 2, seed=1)
        before = start.weights["weight"].detach().clone()[:, 0]
        run = shoal.fit(
            start, (x, y), method="ensemble", likelihood={"name": "gaussian", "noise_std": 0.5},
            prior="flat", adversarial={"epsilon": 0.1, "relative": True}, optimizer="sgd",
            lr=0.01, steps=1, batch_size=3, progress=False,
        )  # fmt: skip
        for w, moved in zip(before, run.ensemble.weights["weight"][:, 0], strict=True):
            error = x @ w - y
            worst = x + 0.1 * torch.tensor([3.0, 4.0]) * torch.outer(error.sign(), w.sign())
            drive = -(error @ x + (worst @ w - y) @ worst) / 2 / len(x) / 0.25
            torch.testing.assert_close(moved.detach(), w + 0.01 * drive)

    def test_forces_need_the_ranges(self):
        ensemble = shoal.Ensemble.init(network, MEMBERS, seed=3)
        adversarial = shoal.Adversarial(relative=True)
        with pytest.raises(ConfigError, match=r"fitted\(x\)"):
            shoal.forces(ensemble, posterior(), None, batch(), adversarial=adversarial)

    def test_a_loader_does_not_tell_the_range(self):
        loader = [batch()]
        with pytest.raises(ConfigError, match="give arrays"):
            shoal.fit(
                shoal.Ensemble.init(network, 2), loader, adversarial={"relative": True}, steps=1
            )

"""The prior by weight decay is the prior by the velocity."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.training.mover.prepare import prior_as_weight_decay
from shoal.training.options.optim import make_optimizer
from shoal.training.options.options import Options

pytestmark = pytest.mark.usefixtures("double")

N, STEPS, STD = 24, 4, 0.3
HANDED = ["sgd", {"name": "sgd", "momentum": 0.9, "nesterov": True}, "adam"]
KEPT = ["adamw", "rmsprop", {"name": "adam", "weight_decay": 0.1, "decoupled_weight_decay": True}]


def network():
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4, generator=generator)
    return x, torch.randint(3, (N,), generator=generator)


def by_velocity(optimizer, method):
    """All the data at every step, with the whole posterior in the velocity."""
    ensemble = shoal.Ensemble.init(network, 3, seed=0)
    ensemble.train()
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(STD), N)
    moves, repulsion = make_optimizer(optimizer, ensemble.weights, 0.05), method.repulsion
    for _ in range(STEPS):
        velocity, _ = shoal.forces(ensemble, posterior, repulsion, data())
        for name, weight in ensemble.weights.items():
            weight.grad = velocity[name]
        moves.step()
    return ensemble.weights


@pytest.mark.parametrize("options", [{}, {"clip": 1e6}], ids=["free", "clipped"])
@pytest.mark.parametrize("method", ["ensemble", "f-kde", "f-svgd", "kde"])
@pytest.mark.parametrize("optimizer", HANDED + KEPT, ids=str)
def test_a_run_is_what_the_velocities_say(optimizer, method, options):
    ensemble = shoal.Ensemble.init(network, 3, seed=0)
    run = shoal.fit(
        ensemble, data(), method=method, prior=shoal.priors.Gaussian(STD), optimizer=optimizer,
        lr=0.05, steps=STEPS, batch_size=N, precision="float64", progress=False, **options,
    )  # fmt: skip
    wanted = by_velocity(optimizer, shoal.methods.get(method))
    for name, weight in run.ensemble.weights.items():
        torch.testing.assert_close(weight, wanted[name], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimizer", HANDED + KEPT, ids=str)
def test_only_optimisers_that_decay_the_gradient_take_the_prior(optimizer):
    ensemble = shoal.Ensemble.init(network, 3, seed=0)
    moves = make_optimizer(optimizer, ensemble.weights, 0.05)
    before = moves.param_groups[0]["weight_decay"]
    posterior = shoal.Posterior(shoal.likelihoods.Categorical(), shoal.priors.Gaussian(STD), N)
    free = SimpleNamespace(annealing=None, options=Options(clip=None))
    left = prior_as_weight_decay(posterior, None, free, moves)
    taken = moves.param_groups[0]["weight_decay"] - before
    if optimizer in HANDED:
        assert taken == pytest.approx(1 / (N * STD**2)) and left.prior == shoal.priors.Flat()
    else:
        assert taken == 0 and left == posterior

"""Perceptrons by formulas have the outputs and gradients of the member runner."""

import pytest
import torch
from torch import nn

import shoal
from shoal.core.differentiate import pull_back
from shoal.engine.members.perceptron import Perceptrons
from shoal.models.mlp import MLP

ACTIVATIONS = ["relu", "tanh", "gelu", "silu", "elu", "softplus"]


def chosen(build, x):
    """The ensemble, and its perceptrons if there are formulas for these inputs."""
    ensemble = shoal.Ensemble.init(build, 3).to(torch.float64)
    formulas = Perceptrons.of(ensemble.groups[0])
    return ensemble, formulas if formulas is not None and formulas.takes(x) else None


def shared_layers():
    layer = nn.Tanh()
    return nn.Sequential(nn.Tanh(), nn.Linear(4, 5), layer, nn.ReLU(), nn.Linear(5, 6), layer)


@pytest.mark.parametrize(
    "build",
    [
        *(lambda a=a: MLP((6, 5), activation=a, dropout=0.2).build((4,), 2) for a in ACTIVATIONS),
        lambda: nn.Linear(4, 2),
        lambda: nn.Sequential(nn.Linear(4, 3, bias=False), nn.Sigmoid(), nn.Linear(3, 2)),
        shared_layers,
    ],
    ids=[*ACTIVATIONS, "linear", "without bias", "one activation twice"],
)
def test_outputs_and_gradients_are_those_of_the_member_runner(build):
    x = torch.randn(7, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    ensemble, formulas = chosen(build, x)
    assert formulas is not None
    exact = ensemble(x)
    cotangent = torch.randn(exact.shape, dtype=torch.float64)
    wanted = pull_back(exact, cotangent, ensemble.weights)
    with torch.no_grad():
        weights = {name: tensor.detach() for name, tensor in ensemble.weights.items()}
        passed = formulas.forward(weights, x)
        into = {name: torch.empty_like(tensor) for name, tensor in weights.items()}
        torch.testing.assert_close(passed.outputs, exact.detach())
        formulas.backward(weights, passed, cotangent, into)
    for name, tensor in wanted.items():
        torch.testing.assert_close(into[name], tensor)


@pytest.mark.parametrize(
    ("build", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2)), (7, 4)),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.SiLU(inplace=True), nn.Linear(3, 2)), (7, 4)),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2)), (7, 5, 4)),
        (lambda: nn.Sequential(nn.Linear(4, 3), nn.Flatten(), nn.Linear(3, 2)), (7, 4)),
        (lambda: nn.Sequential(*[nn.Linear(4, 4)] * 2), (7, 4)),
        (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 2)), (7, 4)),
    ],
    ids=["norm", "in place", "tokens", "flattens late", "one layer twice", "parametrised"],
)
def test_other_networks_have_no_formulas(build, shape):
    assert chosen(build, torch.zeros(shape))[1] is None

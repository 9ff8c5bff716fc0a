"""Which networks replicas may run on some rows of a batch."""

import mesh_cases
import pytest
import torch
from torch import nn

from shoal.engine.resources.divisible import treats_rows_alone
from shoal.inference.ensemble import Ensemble


def answer(build, x, dtype=torch.float64):
    ensemble = Ensemble.init(build, members=2, seed=0).to(dtype)
    ensemble.train()
    for group in ensemble.groups:  # as `fit` does
        group.keep_written(x)
    return treats_rows_alone(ensemble.groups, x)


class Stack(nn.Sequential):
    """Six numbers to three."""

    def __init__(self, *layers):
        super().__init__(nn.Linear(6, 5), *layers, nn.Linear(5, 3))


class OwnNorm(nn.BatchNorm1d):
    """Batch normalisation that computes its statistics in its own way."""

    def forward(self, input):
        return super().forward(input) + input.mean(0)


@pytest.mark.parametrize(
    "layer",
    [
        nn.Tanh,
        lambda: nn.Dropout(0.5),
        lambda: nn.BatchNorm1d(5),
        lambda: nn.BatchNorm1d(5, track_running_stats=False),
        lambda: nn.LayerNorm(5),
    ],
)
def test_rows_of_these_layers_run_apart(layer):
    x, _ = mesh_cases.vectors(8)
    assert answer(lambda: Stack(layer()), x)


@pytest.mark.parametrize(
    "build",
    [
        mesh_cases.Mixing,
        mesh_cases.Counting,
        mesh_cases.SequenceFirst,
        lambda: Stack(OwnNorm(5)),
        lambda: Stack(nn.utils.parametrizations.spectral_norm(nn.Linear(5, 5))),
    ],
)
def test_rows_of_these_networks_need_the_whole_batch(build):
    x, _ = mesh_cases.vectors(8)
    assert not answer(build, x)


def test_dropout_may_meet_several_entries_per_row():
    class Folded(mesh_cases.SequenceFirst):
        def forward(self, x):
            steps = self.drop(self.first(x.view(-1, 2)))
            return self.head(steps.view(len(x), 3, 5).sum(1))

    assert answer(Folded, mesh_cases.vectors(8)[0])


def test_a_network_that_fails_and_a_tiny_batch_are_not_divided():
    x, _ = mesh_cases.vectors(8)
    assert not answer(Stack, x[:, :5])
    assert not answer(Stack, x[:2])


def test_the_question_changes_neither_generator_nor_buffers():
    x, _ = mesh_cases.vectors(8)
    ensemble = Ensemble.init(lambda: Stack(nn.BatchNorm1d(5), nn.Dropout()), members=2, seed=0)
    ensemble.to(torch.float64).train()
    state = {name: tensor.clone() for name, tensor in ensemble.state.items()}
    generator = torch.get_rng_state()
    assert treats_rows_alone(ensemble.groups, x)
    assert torch.equal(generator, torch.get_rng_state()) and ensemble.training
    assert all(torch.equal(state[name], tensor) for name, tensor in ensemble.state.items())

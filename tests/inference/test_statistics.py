"""A block in which batch normalisation works as at prediction."""

import pytest
import torch
from torch import nn

import shoal
from shoal.inference.statistics import running_statistics


class Layers(nn.Module):
    """One layer that keeps statistics, one that keeps none, and one that drops."""

    def __init__(self):
        super().__init__()
        self.kept, self.unkept = nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False)
        self.drop, self.last = nn.Dropout(0.5), nn.Linear(6, 2)

    def forward(self, x):
        return self.last(self.drop(torch.cat([self.kept(x), self.unkept(x)], 1)))


def test_only_running_statistics_take_part_and_stay():
    ensemble = shoal.Ensemble.init(Layers, 2, seed=0).train()
    x = torch.randn(8, 3) + 2
    ensemble(x)
    before = {name: tensor.clone() for name, tensor in ensemble.buffers.items()}
    layers = dict(ensemble.groups[0].skeleton.named_modules())
    with running_statistics(ensemble):
        assert not layers["kept"].training
        assert layers["unkept"].training and layers["drop"].training
        alone, together = ensemble(x[:2]), ensemble(x)
    assert not torch.allclose(alone, together[:, :2])  # by the layer that keeps nothing
    assert all(torch.equal(before[name], tensor) for name, tensor in ensemble.buffers.items())
    assert all(layer.training for layer in layers.values())


def test_the_mode_comes_back_after_an_error_and_evaluation_stays():
    ensemble = shoal.Ensemble.init(Layers, 2, seed=0).train()
    layer = ensemble.groups[0].skeleton.get_submodule("kept")
    with pytest.raises(ZeroDivisionError), running_statistics(ensemble):
        raise ZeroDivisionError
    assert layer.training
    ensemble.train(False)
    with running_statistics(ensemble):
        assert not layer.training
    assert not layer.training

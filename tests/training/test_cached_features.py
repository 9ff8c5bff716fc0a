"""`fit(cache=True)`: features are computed once, and the run is the same."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import ConfigError
from shoal.core.random import generator


class Patches(nn.Module):
    """A small transformer trunk with a class token."""

    runs = 0

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(1, 8, 2, 2)
        self.place = nn.Parameter(torch.randn(1, 10, 8))
        self.token = nn.Parameter(torch.randn(1, 1, 8))
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x):
        Patches.runs += 1
        cut = self.cut(x).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(cut), -1, -1), cut], 1)
        return self.block(tokens + self.place)


class Headed(nn.Module):
    """Private layers, with dropout and batch normalisation, behind a frozen trunk."""

    def __init__(self, trunk: nn.Module) -> None:
        super().__init__()
        self.trunk = trunk
        self.hidden, self.norm, self.drop = nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.head = nn.Linear(6, 3)

    def forward(self, x):
        features = self.trunk(x)
        both = self.hidden(features[:, 0]) + self.hidden(features.mean(1))
        return self.head(self.drop(self.norm(both).relu()))


with torch.random.fork_rng():  # a trunk of chance may leave a member without active units
    torch.manual_seed(0)
    TRUNK = Patches().eval().requires_grad_(False)


def build() -> Headed:
    return Headed(copy.deepcopy(TRUNK)).double()


def data(points: int = 52):
    x = torch.randn(points, 1, 6, 6, generator=generator(0, "x"))
    return x, torch.arange(points) % 3


def states(**given):
    found = []
    for cache in (False, True):
        ensemble = shoal.Ensemble.init(build, 3)
        run = shoal.fit(
            ensemble, data(), epochs=3, batch_size=16, progress=False, cache=cache, **given
        )
        found.append((run, run.ensemble.state))
    return found


@pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde"])
def test_the_run_is_the_same(method):
    (plain, wanted), (cached, found) = states(method=method)
    for name, tensor in wanted.items():
        torch.testing.assert_close(found[name], tensor, rtol=1e-8, atol=1e-10)
    assert cached.history[-1]["loss"] == pytest.approx(plain.history[-1]["loss"], rel=1e-8)
    x = data()[0].double()
    torch.testing.assert_close(cached.ensemble(x), plain.ensemble(x), rtol=1e-8, atol=1e-10)


def test_the_trunk_runs_once_for_every_data_point():
    ensemble = shoal.Ensemble.init(build, 3)
    Patches.runs = 0
    shoal.fit(ensemble, data(), epochs=40, batch_size=16, progress=False, cache=True)
    assert Patches.runs < 12, "checks and the recording, but no step"


def test_a_cached_run_resumes_without_cache(tmp_path):
    given = {"epochs": 4, "batch_size": 16, "progress": False, "out": tmp_path / "run"}

    def stop(event):
        if event.epoch == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        shoal.fit(
            shoal.Ensemble.init(build, 3),
            data(),
            cache=True,
            save_every=0,
            callbacks=[stop],
            **given,
        )
    resumed = shoal.fit(shoal.Ensemble.init(build, 3), data(), resume=True, **given)
    whole = shoal.fit(
        shoal.Ensemble.init(build, 3), data(), epochs=4, batch_size=16, progress=False
    )
    for name, tensor in whole.ensemble.state.items():
        torch.testing.assert_close(resumed.ensemble.state[name], tensor, rtol=1e-8, atol=1e-10)


def test_a_loader_is_read_once():
    class Read(TensorDataset):
        reads = 0

        def __getitem__(self, index):
            Read.reads += 1
            return super().__getitem__(index)

    loader = DataLoader(Read(*data()), 16)
    run = shoal.fit(shoal.Ensemble.init(build, 3), loader, epochs=10, progress=False, cache=True)
    assert Read.reads <= 3 * 52
    assert len(run.history) == 10


@pytest.mark.parametrize(
    ("given", "word"),
    [
        ({"augment": "crop-flip"}, "augment"),
        ({"adversarial": 0.1}, "adversarial"),
        ({"method": "forde"}, "gradients"),
    ],
)
def test_settings_that_need_the_inputs_are_refused(given, word):
    ensemble = shoal.Ensemble.init(build, 2)
    with pytest.raises(ConfigError, match=word):
        shoal.fit(ensemble, data(), epochs=1, progress=False, cache=True, **given)


def test_a_network_without_a_trunk_is_refused():
    ensemble = shoal.Ensemble.init(lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 3)), 2)
    with pytest.raises(ConfigError, match="leave cache out"):
        shoal.fit(ensemble, data(), epochs=1, progress=False, cache=True)


def test_trained_shared_tensors_are_not_cached():
    ensemble = shoal.Ensemble.init(
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(36, 5), nn.Tanh(), nn.Linear(5, 3)),
        2,
        shared=("1.*",),
    )
    with pytest.raises(ConfigError, match="trained tensors"):
        shoal.fit(ensemble, data(), epochs=1, progress=False, cache=True)

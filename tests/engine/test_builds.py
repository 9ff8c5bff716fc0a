"""Kernels that are built side by side, on a GPU."""

import threading

import pytest
import torch
from triton_ready import needs_gpu

import shoal
from shoal.engine.kernels import builds
from shoal.engine.kernels.builds import only_building
from shoal.engine.resources.graph import CapturedSteps
from shoal.models.cnn import SmallCNN
from shoal.training.mover.mover import Mover
from shoal.training.mover.step_memory import StepMemory

triton = pytest.importorskip("triton")
tl = triton.language
pytestmark = needs_gpu


ADAM = {"name": "adam", "eps": 1.0}
"""The step is in proportion to the gradient, so rounding stays small."""


SMOOTH = SmallCNN((4, 6), "softplus", norm="batch")
"""Input gradients of a rectifier jump, so rounding would become large."""


@triton.jit
def add(x, y, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    tl.store(y + place, tl.load(y + place) + tl.load(x + place))


@pytest.fixture
def cold(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    add.device_caches.clear()


def ones():
    return torch.ones(64, device="cuda"), torch.zeros(64, device="cuda")


def test_kernels_are_built_and_not_launched(cold, monkeypatch):
    x, y = ones()
    monkeypatch.setattr(add.fn, "__module__", "shoal.made_up")
    with only_building(x.device) as builders:
        for size in (16, 32, 64, 64):
            add[(1,)](x, y, SIZE=size)
    assert builders.built == builders.asked == 3 and y.sum() == 0
    with only_building(x.device) as builders:
        add[(1,)](x, y, SIZE=64)
    assert builders.built == builders.asked == 0 and y.sum() == 0
    add[(1,)](x, y, SIZE=64)
    assert torch.equal(x, y)


def test_other_kernels_and_other_threads_launch(cold, monkeypatch):
    x, y = ones()
    with only_building(x.device):
        add[(1,)](x, y, SIZE=64)
        assert torch.equal(x, y)  # a kernel of a network
    monkeypatch.setattr(add.fn, "__module__", "shoal.made_up")
    with only_building(x.device):
        thread = threading.Thread(target=lambda: add[(1,)](x, y, SIZE=64))
        thread.start()
        thread.join()
    assert torch.equal(2 * x, y)


def test_an_error_leaves_kernels_as_they_were(cold):
    x, y = ones()
    with pytest.raises(ValueError, match="of the block"), only_building(x.device):
        raise ValueError("of the block")
    with only_building(x.device), only_building(x.device) as inner:
        assert inner is None
    add[(1,)](x, y, SIZE=64)
    assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("method", "optimizer"),
    [("ensemble", "sgd"), ("kde", "sgd"), ("kde", ADAM), ("f-kde", ADAM), ("forde", "sgd")],
)
def test_training_is_the_same_with_kernels_built_before(method, optimizer, monkeypatch):
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(64, 3, 8, 8, generator=generator)
    y = torch.arange(64).remainder(5)
    kept, plain = [], Mover.launch

    def launch(self, *given):
        weights = [w.detach().clone() for w in self.moving.weights.values()]
        info = plain(self, *given)  # an error ends here
        kept.append(all(map(torch.equal, weights, self.moving.weights.values())))
        return info

    monkeypatch.setattr(Mover, "launch", launch)
    monkeypatch.setattr(StepMemory, "_activations", {})
    monkeypatch.setattr(CapturedSteps, "_known", set())

    def trained():
        ensemble = shoal.Ensemble.init(lambda: SMOOTH.build((3, 8, 8), 5), 3, seed=0)
        options = {"batch_size": 16, "steps": 6, "optimizer": optimizer, "method": method}
        run = shoal.fit(ensemble, (x, y), device="cuda", lr=0.1, progress=False, **options)
        return run.ensemble.weights, run.ensemble.buffers

    with monkeypatch.context() as patch:
        patch.setattr(builds, "_SLOW", -1.0)  # as if no kernel were on the disk
        found = trained()
    assert kept == [True]
    monkeypatch.setattr(builds, "AsyncCompileMode", None)
    CapturedSteps._known.clear()
    for trees in zip(found, trained(), strict=True):
        for name, tensor in trees[0].items():  # libraries may choose other algorithms
            torch.testing.assert_close(tensor, trees[1][name], rtol=1e-3, atol=1e-4)
    assert kept == [True]

"""Chains on a GPU: captured steps draw the same as steps one kernel after another."""

import math

import pytest
import torch
from small_runs import assert_equal_trees, frozen
from torch import nn
from triton_ready import needs_gpu, runs_kernels

import shoal
from shoal.core.random import derive, hashed, key, normal_stream
from shoal.engine.kernels import fused
from shoal.inference.samplers import Clock
from shoal.training import draw as drawing
from shoal.training.draws import moves
from shoal.training.draws.store import DrawStore

CASES = {
    "mclmc": ("mclmc", None),
    "hmc": ({"name": "hmc", "leaps": 3}, None),
    "sghmc": ({"name": "sghmc", "lr": 0.001, "schedule": "cyclical"}, 16),
    "preconditioned": ({"name": "sgld", "lr": 0.001, "precondition": True}, 16),
}
LENGTHS = {"draws": 20, "warmup": 60, "thin": 2}  # mclmc records steps 42 to 53


def trained(likelihood="heteroscedastic", outputs=2, dtype=torch.float32, device="cuda"):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(50, 3, generator=generator, dtype=dtype)
    total = x.sum(1)
    y = total if likelihood == "heteroscedastic" else (total > -0.5).long() + (total > 0.5).long()

    def build():
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).to(dtype)

    ensemble = shoal.Ensemble.init(build, 4).to(device)
    return shoal.fit(ensemble, (x, y), likelihood=likelihood, steps=30, lr=0.01, progress=False)


def drawn(run, sampler, batch_size, **options):
    return shoal.draw(
        run, sampler=sampler, batch_size=batch_size, progress=False, **LENGTHS, **options
    )


@needs_gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("kind", ["real", "classes", "double"])
def test_captured_steps_draw_the_same_bit_for_bit(name, kind, monkeypatch):
    classes = {"likelihood": "categorical", "outputs": 3}
    given = {"real": {}, "classes": classes, "double": {"dtype": torch.float64}}
    run = trained(**given[kind])
    replays = []
    genuine = torch.cuda.CUDAGraph.replay
    monkeypatch.setattr(
        torch.cuda.CUDAGraph, "replay", lambda graph: (replays.append(1), genuine(graph))
    )
    captured = drawn(run, *CASES[name])
    assert bool(replays) == (name != "hmc")
    monkeypatch.setattr(moves._OnGPU, "capture", False)
    again = drawn(run, *CASES[name])
    assert_equal_trees(frozen(captured.ensemble), frozen(again.ensemble))
    flat = next(iter(captured.ensemble.weights.values())).detach()
    assert flat.device.type == "cuda" and flat.isfinite().all()
    # Every chain moves; hmc refuses some trajectories after so short a warm-up.
    for chain in flat.flatten(1).unflatten(0, (-1, 4)).unbind(1):
        assert len(chain.unique(dim=0)) > 5


class Killed(Exception):
    """The process ended here."""


@needs_gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("last", [50, 71])
def test_a_killed_sampling_goes_on_bit_for_bit(name, last, tmp_path, monkeypatch):
    run, case = trained(), CASES[name]
    whole = drawn(run, *case)
    genuine = DrawStore.save

    def dying(self, step, *rest):
        genuine(self, step, *rest)
        if step == last:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        patch.setattr(DrawStore, "save", dying)
        drawn(run, *case, out=tmp_path / "run", save_every=0)
    again = drawn(run, *case, out=tmp_path / "run", resume=True)
    assert_equal_trees(frozen(again.ensemble), frozen(whole.ensemble))


@needs_gpu
def test_draws_of_a_density_on_a_gpu_have_its_moments():
    x = shoal.sample(
        lambda x: -0.5 * x.square().sum(), torch.zeros(500, 4, device="cuda"),
        sampler={"name": "mclmc", "energy_error": 1e-3, "length": 1.0}, warmup=300, draws=100,
    )  # fmt: skip
    assert abs(float(x.mean())) < 0.02 and abs(float(x.var()) - 1) < 0.05


@needs_gpu
def test_a_density_that_waits_for_numbers_runs_one_kernel_after_another():
    def density(x):
        return -0.5 * x.square().sum() * (1.0 if float(torch.ones(1, device="cuda")) > 0 else 2.0)

    start = torch.zeros(20, 4, device="cuda")
    x = shoal.sample(density, start, sampler="mclmc", warmup=30, draws=10)
    assert x.isfinite().all()


@runs_kernels(fused.noise_kernels)
@pytest.mark.parametrize("shape", [(3, 7), (2, 5001)])
def test_the_kernel_of_noise_has_the_numbers_of_its_formula(shape):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    x = torch.randn(shape, device=device)
    scale = torch.rand(shape[0], 1, device=device)
    now, seed = torch.tensor(17, device=device), derive(5, "noise")
    found = fused.noise_kernels.plus_normal(x, scale, now, seed)
    keys = hashed(key(5, "noise", now) + torch.arange(shape[0], device=device))
    noise = normal_stream(keys, 0, math.ceil(shape[1] / 2))[:, : shape[1]]
    torch.testing.assert_close(found, x + scale * noise, rtol=1e-5, atol=1e-5)
    same = Clock(17, 0, 20, seed=5).plus_normal(x, scale, "noise")
    if device == "cuda":
        assert torch.equal(same, found)


@pytest.mark.parametrize("name", ["mclmc", "sghmc", "preconditioned"])
def test_steps_whose_numbers_are_on_the_device_draw_the_same(name, monkeypatch):
    run, case = trained(device="cpu", dtype=torch.float64), CASES[name]
    wanted = drawn(run, *case)

    class Eager:
        def __init__(self, state, device):
            self.state = state

        def __call__(self, case, call):
            call()

    monkeypatch.setattr(moves, "CapturedCases", Eager)
    monkeypatch.setattr(drawing, "moves", moves._OnGPU)
    found = drawn(run, *case)
    for key_, tensor in frozen(wanted.ensemble).items():
        torch.testing.assert_close(frozen(found.ensemble)[key_], tensor, rtol=1e-6, atol=1e-6)

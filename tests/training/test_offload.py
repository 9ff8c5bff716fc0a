"""Members on the host or on disk that visit the device in blocks: the same run as without."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_runs import (
    assert_one_sentence,
    dropped,
    plain,
    points,
    quick,
    shoal_of,
    story,
)
from torch import nn

import shoal
from shoal.core.errors import ConfigError
from shoal.inference.ensemble import Ensemble
from shoal.interaction import methods

MEMBERS, RESIDENT, STEPS = 7, 3, 3


def both() -> nn.Module:
    """Running statistics and random masks; a bias before them would move by rounding alone."""
    first = nn.Linear(3, 8, bias=False)
    return nn.Sequential(first, nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 4))


def trained(build=plain, members=MEMBERS, **options):
    ensemble = build if isinstance(build, Ensemble) else shoal_of(build, members)
    options = options if "epochs" in options else {"steps": STEPS, **options}
    return quick(ensemble.to("cpu", torch.float64), **options)


def assert_close_runs(one, other, tolerance=1e-12):
    """Equal members, optimisers' effects and history up to rounding."""
    mine, theirs = one.ensemble.state, other.ensemble.state
    assert mine.keys() == theirs.keys()
    for name, tensor in mine.items():
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(tensor, theirs[name], **close, msg=name)
    for row, same in zip(story(one.history), story(other.history), strict=True):
        assert row.keys() == same.keys()
        for key, value in row.items():
            expected = same[key] if same[key] is None else pytest.approx(same[key], rel=1e-6)
            assert value == expected, key


def compared(build=plain, members=MEMBERS, resident=RESIDENT, **options):
    """A run in blocks, checked against the run with all members on the device."""
    whole = trained(build, members, **options)
    blocks = trained(build, members, resident=resident, **options)
    assert blocks.ensemble.offload is not None and whole.ensemble.offload is None
    assert_close_runs(whole, blocks)
    return blocks


@pytest.mark.parametrize("method", methods.METHODS)
def test_every_method_has_the_same_trajectory(method):
    compared(method=method, lr=0.01)


@pytest.mark.parametrize("method", ["ensemble", "kde", "svgd", "f-kde", "f-svgd", "forde"])
@pytest.mark.parametrize("build", [both, dropped])
def test_running_statistics_and_dropout(method, build):
    blocks = compared(build, method=method, lr=0.01)
    buffers = blocks.ensemble.buffers
    assert all(
        bool((t == STEPS).all()) for n, t in buffers.items() if n.endswith("batches_tracked")
    )


@pytest.mark.parametrize(
    "options",
    [
        {"clip": 0.1, "annealing": "linear", "schedule": "cosine"},
        {"optimizer": "sgd", "noise": 1.0, "lr": 0.01},
        {"optimizer": {"name": "sgd", "momentum": 0.9}},
        {"optimizer": "adagrad"},
        {"optimizer": "nadam"},
        {"optimizer": "rprop"},
        {"optimizer": "asgd"},
        {"optimizer": {"name": "rmsprop", "momentum": 0.5, "centered": True}},
        {"prior": "flat"},
        {"prior": "fan-in", "annealing": "linear"},
        {"adversarial": 0.1},
        {"frozen": 2},
        {"frozen": 5},
        {"temperature": 0.0},
        {"size": 1},
        {"size": 6},
        {"offload": "disk"},
        {"engine": "loop"},
    ],
    ids=str,
)
@pytest.mark.parametrize("method", ["kde", "svgd", "f-kde"])
def test_every_option(method, options):
    options = dict(options)
    if method == "svgd" and "adversarial" in options:
        pytest.skip("a Stein flow needs all members at once")
    resident = options.pop("size", RESIDENT)
    compared(both, resident=resident, method=method, **options)


@pytest.mark.parametrize("method", ["f-svgd", "sge", "f-ssge"])
def test_frozen_members_of_other_flows(method):
    compared(both, method=method, frozen=3, lr=0.01)


@pytest.mark.parametrize("prior", ["function-space", "gaussian-process"])
def test_priors_on_functions(prior):
    compared(method="f-kde", prior=prior)


@pytest.mark.parametrize("space", ["last-layer", "layerwise"])
@pytest.mark.parametrize("options", [{}, {"frozen": 2}], ids=str)
def test_spaces_of_some_weights(space, options):
    compared(method={"name": "repulsion", "space": space}, **options)


@pytest.mark.parametrize("space", [{"name": "input-gradients", "fraction": 0.5}])
def test_a_batch_fraction(space):
    compared(both, method={"space": space})


def test_points_other_than_the_batch():
    compared(both, method={"name": "f-kde", "points": "noise"})


def images(n=20):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(n, 1, 6, 6, generator=generator), torch.arange(n) % 4


def seeing():
    return nn.Sequential(
        nn.Conv2d(1, 3, 3, bias=False), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(48, 4)
    )


@pytest.mark.parametrize("per_member", [False, True])
@pytest.mark.parametrize("method", ["kde", "f-kde"])
def test_augmentation(method, per_member):
    if per_member and method == "f-kde":
        method = "ensemble"
    augment = {"name": "crop-flip", "padding": 1, "per_member": per_member}
    compared(seeing, data=images(), method=method, augment=augment)


def test_a_learned_noise():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 3, generator=generator)
    data = x, x.sum(1, keepdim=True) + 0.1
    blocks = compared(lambda: nn.Linear(3, 1), data=data, method="f-kde")
    whole = trained(lambda: nn.Linear(3, 1), data=data, method="f-kde")
    for name, tensor in whole.likelihood.state.items():
        torch.testing.assert_close(tensor, blocks.likelihood.state[name], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("method", ["ensemble", "f-kde", "f-svgd", "forde"])
def test_several_architectures(method):
    def mixed():
        return Ensemble.init([(both, 4), (plain, 3)], seed=0).to("cpu", torch.float64)

    whole, blocks = (
        quick(mixed(), steps=STEPS, method=method, resident=r) for r in (None, RESIDENT)
    )
    assert_close_runs(whole, blocks)


@pytest.mark.parametrize("method", ["ensemble", "kde", "svgd", "f-kde", "f-svgd"])
@pytest.mark.parametrize("options", [{}, {"clip": 0.1}, {"optimizer": "sgd", "noise": 1.0}])
def test_tensors_that_all_members_train(method, options):
    def ensemble():
        return Ensemble.init(plain, MEMBERS, 0, shared=("0.*",)).to("cpu", torch.float64)

    whole, blocks = (
        quick(ensemble(), steps=STEPS, method=method, resident=r, **options)
        for r in (None, RESIDENT)
    )
    assert_close_runs(whole, blocks)


@pytest.mark.parametrize("method", ["kde", "svgd", "f-kde"])
def test_a_diverged_member_is_left_out(method):
    def ensemble():
        whole = shoal_of(plain, MEMBERS).to("cpu", torch.float64)
        with torch.no_grad():
            whole.weights["0.weight"][4] = torch.nan
        return whole

    with pytest.warns(shoal.ShoalWarning, match="Member 4 diverged"):
        whole, blocks = (
            quick(ensemble(), steps=STEPS, method=method, resident=r) for r in (None, RESIDENT)
        )
    assert blocks.ensemble.alive.tolist() == [True] * 4 + [False] + [True] * 2
    alive = blocks.ensemble.alive
    for name, tensor in whole.ensemble.weights.items():
        mine = blocks.ensemble.weights[name]
        torch.testing.assert_close(tensor[alive], mine[alive], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("offload", ["host", "disk"])
@pytest.mark.parametrize("method", ["kde", "f-kde"])
def test_a_resumed_run_is_the_same_to_the_bit(tmp_path, method, offload):
    options = {"method": method, "resident": RESIDENT, "offload": offload, "epochs": 2}
    once = trained(both, out=tmp_path / "once", **options)

    class Stop(Exception):
        pass

    def stop(event):
        raise Stop

    with pytest.raises(Stop):
        trained(both, out=tmp_path / "twice", save_every=0, callbacks=[stop], **options)
    twice = trained(both, out=tmp_path / "twice", resume=True, **options)
    for name, tensor in once.ensemble.state.items():
        assert torch.equal(tensor, twice.ensemble.state[name]), name
    assert story(once.history) == story(twice.history)


def test_runs_change_between_blocks_and_the_device(tmp_path):
    whole = trained(both, out=tmp_path / "whole", steps=6)
    for number, (first, then) in enumerate([(None, RESIDENT), (RESIDENT, None)]):
        folder, options = tmp_path / str(number), {"steps": 6, "save_every": 0}

        def stop(event):
            raise KeyError

        with pytest.raises(KeyError):
            trained(both, out=folder, resident=first, callbacks=[stop], **options)
        assert_close_runs(whole, trained(both, out=folder, resident=then, resume=True, **options))
    loaded = shoal.load(tmp_path / "0", build=both)
    assert loaded.ensemble.offload is None
    x = points()[0].double()
    torch.testing.assert_close(shoal.predict(loaded, x).members, shoal.predict(whole, x).members)


def test_the_result_predicts_and_trains_on():
    run, x = trained(both, resident=RESIDENT), points()[0].double()
    whole = trained(both)
    expected = shoal.predict(whole, x).members
    torch.testing.assert_close(shoal.predict(run, x, batch_size=16).members, expected)
    torch.testing.assert_close(run.ensemble(x).detach(), expected)
    assert run.ensemble(x).requires_grad, "gradients flow to the tensors of the host"
    assert_close_runs(trained(whole.ensemble), trained(run.ensemble, resident=2))
    run.ensemble.to("cpu")
    assert run.ensemble.offload is None
    again = trained(run.ensemble)
    assert again.ensemble.offload is None


def test_a_run_in_blocks_grows():
    grown = []
    for resident in (None, RESIDENT):
        run = trained(both, 4, resident=resident)
        grown.append(shoal.grow(run, more=3, data=points(), resident=resident, progress=False))
    assert grown[1].ensemble.offload is not None and grown[1].ensemble.members == MEMBERS
    assert_close_runs(*grown)


@pytest.mark.parametrize("method", ["f-kde", "kde"])
def test_a_limit_of_memory_chooses_how_many_members_are_resident(method, tmp_path):
    def wide():
        return nn.Sequential(nn.Linear(3, 2000), nn.Tanh(), nn.Linear(2000, 4))

    whole = trained(wide, 20, method=method, steps=2)
    weights = sum(t.numel() * 8 for t in whole.ensemble.weights.values())
    options = {"method": method, "steps": 2, "offload": "disk"}
    kept = trained(wide, 20, memory=6 * weights, **options)
    assert kept.ensemble.offload is None, "weights, states and gradients fit"
    some = trained(wide, 20, memory=2 * weights, **options)
    assert some.ensemble.offload is not None
    assert 1 < some.ensemble.offload.resident < 20
    assert any("members are on the device at a time" in note for note in some.notes)
    assert some.provenance["memory"]["resident"] == some.ensemble.offload.resident
    assert_close_runs(whole, some)
    with pytest.raises(ConfigError, match="too small for a block of one member") as caught:
        trained(wide, 20, memory=weights // 20, **options)
    assert_one_sentence(caught.value)


_GROWTH = """
import os, sys
import torch
from torch import nn
import shoal

def status(key):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(key + ":"))

def build():
    return nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 512), nn.Linear(512, 4))

def measure_from_now(event):
    if event.epoch == 1:
        open("/proc/self/clear_refs", "w").write("5")  # forget the peak so far

torch.set_num_threads(1)
before = status("VmRSS")
ensemble = shoal.Ensemble.init(build, 160)
data = torch.randn(32, 64), torch.arange(32) % 4
options = {"method": sys.argv[1], "batch_size": 16, "epochs": 2, "out": sys.argv[2]}
options |= {"resident": 2, "offload": "disk", "save_every": float("inf"), "keep_every": None}
weights = sum(t.numel() * 4 for t in ensemble.weights.values())

class Done(Exception):
    pass

def end(event):
    measure_from_now(event)
    if event.epoch == 2:
        print(weights, status("VmHWM") - before)
        raise Done  # before the checkpoint, which reads everything

try:
    shoal.fit(ensemble, data, callbacks=[end], progress=False, **options)
except Done:
    pass
"""


@pytest.mark.nightly
@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize("method", ["f-kde", "kde"])
def test_memory_of_members_on_disk_is_that_of_the_resident_ones(method, tmp_path):
    command = [sys.executable, "-c", _GROWTH, method, str(tmp_path / "run")]
    found = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    weights, grown = map(int, found.stdout.split())
    assert weights > 180e6, "with gradients and two moments, all members take four times as much"
    assert grown < weights, f"grew by {grown / 2**20:.0f} MiB for {weights / 2**20:.0f} MiB weights"
    assert sorted(path.name for path in (tmp_path / "run").iterdir() if path.is_dir()) == []


def test_refusals():
    for options in ({"resident": 0}, {"resident": 2, "offload": "tape"}):
        with pytest.raises(ConfigError) as caught:
            trained(**options)
        assert_one_sentence(caught.value)
    adversarial = {"epsilon": 0.1, "shared": True}
    with pytest.raises(ConfigError, match="leave resident out"):
        trained(resident=2, adversarial=adversarial, method="kde")

"""When a step is captured; on a GPU, that captured steps equal eager ones."""

import gc
import weakref

import pytest
import torch
from small_runs import assert_equal_trees, both, frozen, points, quick
from torch import nn
from triton_ready import needs_gpu

import shoal
from shoal.data.batches.sources import batches_of
from shoal.engine.resources.graph import CapturedSteps
from shoal.training.loop.trainer import Trainer
from shoal.training.options.options import Options
from shoal.training.options.settings import Settings

DATA = points(100)


@pytest.fixture
def known(monkeypatch):
    """No kinds of steps have been captured."""
    kinds = set()
    monkeypatch.setattr(CapturedSteps, "_known", kinds)
    return kinds


def steps_of(kind, changes=True, **graphs):
    steps = CapturedSteps.__new__(CapturedSteps)
    steps.kind, steps.changes, steps.graphs, steps.warm = kind, changes, graphs, {}
    return steps


def eager_steps(steps, size=20):
    """Number of eager steps before a capture."""
    while not steps._ready(size):
        steps.warm[size] = steps.warm.get(size, 0) + 1
    return steps.warm[size]


def test_the_second_step_finds_states_that_the_first_has_made(known):
    assert eager_steps(steps_of("a")) == 2
    assert eager_steps(steps_of("a", changes=False)) == 1  # it launches the same kernels


def test_a_step_whose_kernels_exist_runs_once(known):
    known.add("a")
    assert eager_steps(steps_of("a")) == 1
    assert eager_steps(steps_of("b")) == 2
    assert eager_steps(steps_of("b", size=object())) == 1  # the last batch of an epoch


def kind_of(build=both, seed=0, **changes):
    options = {"method": "kde", "likelihood": "categorical", "epochs": 2, "batch_size": 20}
    settings = Settings.resolve(Options.of({**options, "seed": seed, **changes}))
    device, kind = torch.device("cpu"), torch.float32
    batches = batches_of(DATA, settings.options.batch_size, seed, device, kind)
    ensemble = shoal.Ensemble.init(build, 3, seed=seed).train()
    return Trainer(ensemble, settings, batches).mover.memory.kind(batches.x)


def test_a_kind_is_what_kernels_depend_on():
    usual = kind_of()
    assert kind_of(seed=1) == kind_of(epochs=3) == kind_of(epochs=None, steps=7) == usual
    wider = kind_of(lambda: nn.Sequential(nn.Linear(2, 9), nn.Tanh(), nn.Linear(9, 3)))
    others = [kind_of(method="ensemble"), kind_of(optimizer="sgd"), kind_of(batch_size=10), wider]
    assert len({usual, *others}) == 5


@needs_gpu
@pytest.mark.parametrize("optimizer", ["adam", {"name": "sgd", "momentum": 0.9}, "adamw"])
@pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde"])
def test_a_second_run_equals_the_first_and_an_eager_one(optimizer, method, known, monkeypatch):
    waits = []
    plain = CapturedSteps._captured
    monkeypatch.setattr(
        CapturedSteps,
        "_captured",
        lambda self, size: waits.append(dict(self.warm)) or plain(self, size),
    )
    asked = {"device": "cuda", "epochs": 3, "optimizer": optimizer, "method": method}
    first, second = (quick(both, DATA, **asked) for _ in range(2))
    assert next(iter(waits[0].values())) == (2 if method == "kde" else 1)
    assert any(list(warm.values()) == [1] for warm in waits)
    assert_equal_trees(frozen(first.ensemble), frozen(second.ensemble))
    eager = quick(both, DATA, engine="auto+eager", **asked)
    for name, tensor in frozen(eager.ensemble).items():
        torch.testing.assert_close(frozen(first.ensemble)[name], tensor, rtol=1e-4, atol=1e-5)


@needs_gpu
def test_captured_steps_end_with_their_run(monkeypatch):
    """Nobody collects garbage before the next capture, so no cycle may keep their memory."""
    made, begin = [], CapturedSteps.__init__

    def noted(self, *given):
        made.append(weakref.ref(self))
        begin(self, *given)

    monkeypatch.setattr(CapturedSteps, "__init__", noted)
    gc.disable()
    try:
        quick(both, DATA, device="cuda")
        assert [steps() for steps in made] == [None]
    finally:
        gc.enable()

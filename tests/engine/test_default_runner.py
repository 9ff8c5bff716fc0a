"""What runs where: mappings that suit a device, and precisions that do not outlast their block."""

import importlib

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.members.member_runner import STREAMS, MemberRunner
from shoal.engine.members.precision import calculating_in
from shoal.engine.resources import plan
from shoal.engine.resources.plan import CACHE, default_runner, fitted_to_cache
from shoal.inference.ensemble import Ensemble

predictions = importlib.import_module("shoal.prediction.predict")
CONVOLVES = lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 3))  # noqa: E731
PRODUCTS = lambda: nn.Linear(4, 3)  # noqa: E731


@pytest.mark.parametrize(
    "build, device, wanted",
    [
        (CONVOLVES, "cuda", MemberRunner("loop", streams=STREAMS)),
        (CONVOLVES, "cpu", MemberRunner()),
        (PRODUCTS, "cuda", MemberRunner()),
    ],
)
def test_convolutions_take_turns_on_a_gpu(build, device, wanted):
    groups = Ensemble.init(build, 2).groups
    assert default_runner(groups, torch.device(device)) == wanted


def test_large_convolutions_take_turns_on_a_cpu():
    groups = Ensemble.init(CONVOLVES, 2).groups
    points = CACHE // (2 * 4 * 2 * 2)  # each gives 2 x 2 places of 2 channels
    plain = MemberRunner()
    assert fitted_to_cache(plain, groups, lambda: torch.zeros(points // 2, 1, 4, 4)) == plain
    large = fitted_to_cache(plain, groups, lambda: torch.zeros(points + 1, 1, 4, 4))
    assert large == MemberRunner("loop")
    wrong = fitted_to_cache(plain, groups, lambda: torch.zeros(points + 1, 7))
    assert wrong == plain  # the first step reports the error
    products = Ensemble.init(PRODUCTS, 2).groups
    assert fitted_to_cache(plain, products, lambda: pytest.fail("inputs were read")) == plain


@pytest.mark.parametrize("engine, wanted", [("auto", "loop"), ("vmap", "vmap")])
def test_training_follows_the_size_of_a_batch(monkeypatch, engine, wanted):
    monkeypatch.setattr(plan, "CACHE", 0)
    stepper = shoal.Stepper(Ensemble.init(CONVOLVES, 2), n=8, engine=engine)
    stepper((torch.randn(8, 1, 4, 4), torch.arange(8) % 3))
    assert stepper._mover.memory.mapping.kind == wanted


def test_a_precision_within_another_gives_it_back():
    ensemble = Ensemble.init(PRODUCTS, 2)
    x, kinds = torch.ones(1, 4), []
    ensemble.groups[0].skeleton.register_forward_pre_hook(
        lambda _, inputs: kinds.append(inputs[0].dtype)
    )
    with calculating_in("bfloat16", ensemble):
        ensemble(x, MemberRunner("loop"))
        with calculating_in(None, ensemble):
            ensemble(x, MemberRunner("loop"))
        ensemble(x, MemberRunner("loop"))
    ensemble(x, MemberRunner("loop"))
    low, single = torch.bfloat16, torch.float32
    assert kinds == [low] * 2 + [single] * 2 + [low] * 2 + [single] * 2


def test_a_run_is_predicted_in_its_precision_where_that_is_fast(monkeypatch):
    data = (torch.randn(8, 4), torch.arange(8) % 3)
    run = shoal.fit(
        Ensemble.init(PRODUCTS, 2), data, epochs=1, precision="bfloat16", progress=False
    )
    asked = []

    def noted(precision, ensemble):
        asked.append(precision)
        return calculating_in(precision, ensemble)

    monkeypatch.setattr(predictions, "calculating_in", noted)
    shoal.predict(run, data[0])
    assert asked == []
    monkeypatch.setattr(predictions, "_on_gpu", lambda ensemble, device: True)
    shoal.predict(run, data[0])
    shoal.predict(run.ensemble, data[0])
    assert asked == ["bfloat16", None]

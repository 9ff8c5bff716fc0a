"""Schedulers of torch give torch's own learning rates; warm-up; plateaus of validation."""

import functools
import math
import warnings

import pytest
import torch
from small_runs import (
    STEPS_PER_EPOCH,
    Fuse,
    assert_one_sentence,
    assert_same_folder,
    assert_same_run,
    both,
    points,
    quick,
)
from torch.optim import lr_scheduler

import shoal
from shoal.core.errors import ConfigError
from shoal.training.options.schedules import Constant, Cosine, LinearDecay, Stairs, schedules
from shoal.training.options.torch_schedules import (
    Plateau,
    TorchScheduler,
    as_schedule,
    torch_schedulers,
)

LR, STEPS = 0.02, 37
SETTINGS = {
    "StepLR": {"step_size": 5, "gamma": 0.5},
    "MultiStepLR": {"milestones": [3, 20], "gamma": 0.3},
    "ConstantLR": {"factor": 0.25, "total_iters": 7},
    "LinearLR": {"start_factor": 0.1, "total_iters": 11},
    "ExponentialLR": {"gamma": 0.93},
    "PolynomialLR": {"total_iters": 30, "power": 2.0},
    "CosineAnnealingLR": {"T_max": 13, "eta_min": 1e-4},
    "CosineAnnealingWarmRestarts": {"T_0": 6, "T_mult": 2, "eta_min": 1e-5},
    "OneCycleLR": {"max_lr": 0.3, "total_steps": 40, "cycle_momentum": False},
    "CyclicLR": {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 4, "cycle_momentum": False},
    "LambdaLR": {"lr_lambda": lambda step: 1 / (1 + step)},
    "MultiplicativeLR": {"lr_lambda": lambda step: 0.9},
}


def optimizer(lr=LR):
    return torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=lr)


def rates(scheduler, steps=STEPS):
    """Learning rates as a loop of one's own would have them."""
    own, found = scheduler.optimizer, []
    for _ in range(steps):
        found.append(own.param_groups[0]["lr"])
        own.step()
        scheduler.step()
    return found


def test_every_scheduler_of_torch_that_depends_on_steps_alone_is_tested():
    assert SETTINGS.keys() == set(torch_schedulers())


@pytest.mark.parametrize("kind", SETTINGS)
@pytest.mark.parametrize("form", ["partial", "object"])
def test_the_learning_rates_are_those_of_torch(kind, form):
    make = functools.partial(getattr(lr_scheduler, kind), **SETTINGS[kind])
    schedule = as_schedule(make if form == "partial" else make(optimizer()), LR)
    found = [LR * schedule(step, STEPS) for step in range(STEPS)]
    assert found == pytest.approx(rates(make(optimizer())), rel=1e-12)
    assert len({round(rate, 12) for rate in found}) > 1


def test_schedulers_made_of_schedulers():
    def sequence(own):
        parts = lr_scheduler.LinearLR(own, 0.1, total_iters=5), lr_scheduler.StepLR(own, 9)
        return lr_scheduler.SequentialLR(own, list(parts), milestones=[5])

    def chain(own):
        return lr_scheduler.ChainedScheduler(
            [lr_scheduler.ConstantLR(own, 0.5, 4), lr_scheduler.ExponentialLR(own, 0.9)]
        )

    for make in (sequence, chain):
        given = make(optimizer())
        schedule = as_schedule(given, LR)
        found = [LR * schedule(step, STEPS) for step in range(STEPS)]
        assert found == pytest.approx(rates(make(optimizer())), rel=1e-12)
        assert (
            given.optimizer.param_groups[0]["lr"]
            == make(optimizer()).optimizer.param_groups[0]["lr"]
        )


def test_the_number_of_steps_is_filled_in():
    cosine = as_schedule(lr_scheduler.CosineAnnealingLR, LR)
    assert cosine(STEPS - 1, STEPS) == pytest.approx(Cosine()(STEPS - 1, STEPS), rel=1e-9)
    assert cosine(5, 10) == pytest.approx(0.5)
    cycle = as_schedule(functools.partial(lr_scheduler.OneCycleLR, max_lr=1.0), LR)
    assert max(LR * cycle(step, 50) for step in range(50)) == pytest.approx(1.0)


@pytest.mark.parametrize("kind", SETTINGS)
def test_a_run_has_them_in_its_history(kind):
    make = functools.partial(getattr(lr_scheduler, kind), **SETTINGS[kind])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run = quick(schedule=make, lr=LR, epochs=2)
    expected = rates(make(optimizer()), 2 * STEPS_PER_EPOCH)
    found = [row["lr"] for row in run.history]
    assert found == pytest.approx([expected[3], expected[7]], rel=1e-6)
    own = callable(next(iter(SETTINGS[kind].values())))
    assert run.config["schedule"] == (
        {"custom": kind}
        if own
        else {"name": "torch", "scheduler": kind, "settings": SETTINGS[kind]}
    )


def test_a_stored_scheduler_repeats_the_run(tmp_path):
    make = functools.partial(lr_scheduler.MultiStepLR, milestones=(2, 5), gamma=0.5)
    run = quick(both, schedule=make, out=tmp_path / "one")
    stored = shoal.load(tmp_path / "one", both).config["schedule"]
    assert stored["scheduler"] == "MultiStepLR"
    assert_same_run(quick(both, schedule=stored), run)
    assert_same_run(quick(both, schedule=stored, out=tmp_path / "one", resume=True), run)


def test_a_scheduler_that_cannot_be_stored_is_given_again_to_resume(tmp_path):
    def make():
        return lr_scheduler.LambdaLR(optimizer(), lambda step: 0.5**step)

    options = {"lr": LR, "epochs": 3, "save_every": 0}
    whole = quick(both, schedule=make(), **options)

    def stop(event):
        raise Fuse.Blown

    with pytest.raises(Fuse.Blown):
        quick(both, schedule=make(), out=tmp_path, callbacks=[stop], **options)
    assert_same_run(quick(both, schedule=make(), out=tmp_path, resume=True, **options), whole)


# Schedules that follow the validation NLL


def plateau(**settings):
    return functools.partial(lr_scheduler.ReduceLROnPlateau, factor=0.5, patience=1, **settings)


HELD = points(24, seed=9)


@pytest.mark.parametrize("form", ["partial", "object", "table"])
def test_a_plateau_follows_the_validation_nll_as_torch_does(form):
    given = {
        "partial": plateau(),
        "object": plateau()(optimizer(0.1)),
        "table": {"name": "plateau", "factor": 0.5, "patience": 1},
    }[form]
    run = quick(both, epochs=9, lr=0.1, validation=HELD, schedule=given)
    reference = plateau()(optimizer(0.1))
    for row in run.history:
        assert row["lr"] == pytest.approx(reference.optimizer.param_groups[0]["lr"], rel=1e-6)
        reference.step(row["validation"]["nll"])
    assert run.history[-1]["lr"] < 0.1
    assert run.config["schedule"]["name"] == "plateau"


def test_a_plateau_resumes_to_the_bit(tmp_path):
    def stop(event):
        if event.epoch == 6:
            raise Fuse.Blown

    options = {"epochs": 9, "lr": 0.1, "validation": HELD, "schedule": plateau(), "save_every": 0}
    whole = quick(both, out=tmp_path / "whole", **options)
    with pytest.raises(Fuse.Blown):
        quick(both, out=tmp_path / "cut", callbacks=[stop], **options)
    assert_same_run(quick(both, out=tmp_path / "cut", resume=True, **options), whole)
    assert_same_folder(tmp_path / "whole", tmp_path / "cut")


# Warm-up


@pytest.mark.parametrize("name", sorted(set(schedules.names()) - {"plateau"}))
@pytest.mark.parametrize(("warmup", "rise"), [(4, 4), (0.1, 4)])
def test_every_schedule_may_begin_with_a_warm_up(name, warmup, rise):
    schedule = schedules.make({"name": name, "warmup": warmup})
    found = [schedule(step, 40) for step in range(40)]
    assert found[:rise] == pytest.approx([(step + 1) / (rise + 1) for step in range(rise)])
    rest = schedules.make(name)
    assert found[rise:] == pytest.approx([rest(step, 40 - rise) for step in range(40 - rise)])


def test_old_tables_of_schedules_stay_as_they_are():
    assert schedules.spec(LinearDecay()) == {"name": "linear", "floor": 0.0}
    assert schedules.spec(Stairs()) == {"name": "stairs", "flights": 10, "factor": 0.8}
    assert schedules.spec(Constant(warmup=5)) == {"name": "constant", "warmup": 5}
    assert schedules.spec(TorchScheduler("StepLR", {"step_size": 3})) == {
        "name": "torch",
        "scheduler": "StepLR",
        "settings": {"step_size": 3},
    }


def test_a_warm_up_longer_than_the_run_never_ends():
    assert LinearDecay(warmup=100)(9, 10) == pytest.approx(10 / 11)
    assert Cosine(warmup=100)(9, 10) == pytest.approx(10 / 11)


# What is refused


@pytest.mark.parametrize(
    "schedule, word",
    [
        (lr_scheduler.ReduceLROnPlateau, "validation"),
        ("plateau", "validation"),
        (lr_scheduler.SequentialLR, "object"),
        (lr_scheduler.StepLR, "step_size"),
        (functools.partial(lr_scheduler.StepLR, 5), "by name"),
        (functools.partial(lr_scheduler.OneCycleLR, max_lr=1.0, cycle_momentum=True), "momentum"),
        (functools.partial(lr_scheduler.ExponentialLR, gama=0.9), "gama"),
        (functools.partial(lr_scheduler.OneCycleLR, max_lr=1.0, total_steps=5), "OneCycleLR"),
        (lr_scheduler.StepLR(optimizer(0.5), 3), "lr=0.5"),
        ({"name": "torch", "scheduler": "StepLr"}, "StepLR"),
        ({"name": "cosine", "warmup": -1}, "warmup"),
        ({"name": "linear", "warmup": -0.5}, "warmup"),
        (lambda step, steps: -1.0, "negative"),
        (lambda step, steps: math.nan, "finite"),
    ],
)
def test_what_cannot_work_is_refused(schedule, word):
    with pytest.raises(ConfigError) as error:
        quick(schedule=schedule, lr=LR)
    assert_one_sentence(error.value, word)


@pytest.mark.parametrize("settings", [{"mode": "max"}, {"foo": 1}, {"factor": 2.0}])
def test_a_plateau_that_cannot_work_is_refused(settings):
    with pytest.raises(ConfigError) as error:
        quick(
            schedule=functools.partial(lr_scheduler.ReduceLROnPlateau, **settings), validation=0.2
        )
    assert_one_sentence(error.value)


def test_two_learning_rates_are_refused():
    weights = [torch.zeros(1, requires_grad=True) for _ in range(2)]
    groups = [{"params": [weights[0]], "lr": 0.1}, {"params": [weights[1]]}]
    scheduler = lr_scheduler.StepLR(torch.optim.SGD(groups, lr=LR), 3)
    with pytest.raises(ConfigError, match="several learning rates"):
        quick(schedule=scheduler, lr=LR)


def test_a_plateau_is_a_value():
    assert Plateau(lr=0.1) == Plateau(lr=0.2) and Plateau(patience=2) != Plateau()

"""Langevin noise in runs: who gets it, on what it depends, and what is refused."""

import math

import pytest
import torch
from small_runs import (
    POINTS,
    Fuse,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_folder,
    assert_same_run,
    both,
    differ,
    frozen,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.data.batches.sources import ArrayBatches
from shoal.experiment.config import make_config
from shoal.training.options import noise as noises
from shoal.training.options.noise import add_noise, add_shared_noise, noise_std
from shoal.training.options.optim import make_optimizer

MOMENTUM = {"name": "sgd", "momentum": 0.9}
NOISY = {"noise": 1.0, "optimizer": MOMENTUM, "lr": 0.01}


def wide():
    return nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 4))


def drawn(ensemble, step=3, seed=0, alive=None):
    """The noise itself: what is added to velocities of zero, at a standard deviation of 1."""
    weights = ensemble.weights
    for weight in weights.values():
        weight.grad = torch.zeros_like(weight)
    alive = torch.ones(ensemble.members, dtype=torch.bool) if alive is None else alive
    add_noise(ensemble, make_optimizer("sgd", weights, 1.0), 0.5, seed, step, alive)
    return {name: weight.grad for name, weight in weights.items()}


# On what the noise depends.


@pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde"])
@pytest.mark.parametrize("engine", ["loop", "chunk:2"])
def test_engines_agree(engine, method):
    options = {"method": method, "precision": "float64", **NOISY}
    one, other = quick(both, **options), quick(both, engine=engine, **options)
    for name, weight in one.ensemble.weights.items():
        torch.testing.assert_close(other.ensemble.weights[name], weight, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["sgd", MOMENTUM], ids=str)
@pytest.mark.parametrize("at", [3, 6])
def test_a_resumed_run_has_the_same_bits(at, optimizer, tmp_path):
    options = {**NOISY, "optimizer": optimizer, "epochs": 3}
    one = quick(both, out=tmp_path / "one", schedule=Fuse(), **options)
    with pytest.raises(Fuse.Blown):
        quick(both, out=tmp_path / "two", schedule=Fuse(at), save_every=0.0, **options)
    again = shoal_of(both, seed=7)
    two = quick(again, out=tmp_path / "two", schedule=Fuse(), resume=True, **options)
    assert_same_run(one, two)
    assert_same_folder(tmp_path / "one", tmp_path / "two")
    assert one.config["noise"] == 1.0


def test_a_stepper_has_the_trajectory_of_fit():
    x, y = points()
    run = quick(plain, method="f-kde", seed=5, **NOISY)
    ensemble = shoal_of(plain)
    stepper = shoal.Stepper(ensemble, n=POINTS, method="f-kde", seed=5, **NOISY)
    for epoch in range(2):
        for batch in ArrayBatches(x, y, 10, seed=5).batches(epoch):
            stepper(batch)
    assert_equal_trees(frozen(ensemble), frozen(run.ensemble))


def test_a_stepper_continues_from_its_state():
    batch = points()
    one, two = shoal_of(plain), shoal_of(plain, seed=8)
    first = shoal.Stepper(one, n=POINTS, **NOISY)
    first(batch)
    state = first.state_dict()
    kept = {name: tensor.clone() for name, tensor in state["tensors"]["ensemble"].items()}
    optimizer = {name: t.clone() for name, t in state["tensors"]["optimizer"].items()}
    state["tensors"] |= {"ensemble": kept, "optimizer": optimizer}
    first(batch)
    second = shoal.Stepper(two, n=POINTS, **NOISY)
    second.load_state_dict(state)
    second(batch)
    assert_equal_trees(frozen(one), frozen(two))


def test_a_member_has_its_noise_alone_and_among_others():
    ensemble = shoal_of(wide, members=5)
    whole, part = drawn(ensemble), drawn(ensemble.slice_members(2, 4))
    assert_equal_trees({name: noise[2:4] for name, noise in whole.items()}, part)


def test_members_are_numbered_through_all_architectures():
    whole = drawn(shoal_of(plain, members=5))
    mixed = drawn(shoal.Ensemble.init([(wide, 2), (plain, 3)]))
    assert_equal_trees(
        {name: noise[2:] for name, noise in whole.items()},
        {name.removeprefix("group1."): n for name, n in mixed.items() if name.startswith("group1")},
    )


def test_the_amount_that_is_drawn_at_a_time_does_not_matter(monkeypatch):
    ensemble = shoal_of(wide, members=3)
    whole = {name: noise.clone() for name, noise in drawn(ensemble).items()}
    monkeypatch.setattr(noises, "AT_ONCE", 60)
    assert_equal_trees(whole, drawn(ensemble))


def test_seed_step_member_and_place_all_matter():
    ensemble = shoal_of(wide, members=3)
    one = {name: noise.clone() for name, noise in drawn(ensemble).items()}
    assert_equal_trees(one, drawn(ensemble, step=torch.tensor(3)))
    numbers = torch.cat([noise.flatten() for noise in one.values()])
    assert len(numbers.unique()) == len(numbers)
    for other in (drawn(ensemble, step=4), drawn(ensemble, seed=1)):
        assert all((noise != one[name]).all() for name, noise in other.items())


def test_the_layout_of_a_weight_in_memory_does_not_matter():
    """Element by element, also for weights that torch stores with the channels last."""
    ensemble = shoal.Ensemble.init(lambda: nn.Conv2d(3, 4, 2), members=2)
    plain_noise = {name: noise.clone() for name, noise in drawn(ensemble).items()}
    for group in ensemble.groups:
        stored = group.weights["weight"].detach().permute(0, 1, 3, 4, 2).contiguous()
        group.weights["weight"] = stored.permute(0, 1, 4, 2, 3).requires_grad_()
    assert_equal_trees(plain_noise, drawn(ensemble))


def test_nothing_waits_for_the_device():
    """Tensors without values: whatever asks the device for a number fails, as in a capture."""
    nowhere = torch.device("meta")
    ensemble = shoal_of(wide).to(nowhere)
    for weight in ensemble.weights.values():
        weight.grad = torch.zeros_like(weight)
    optimizer = torch.optim.SGD(ensemble.weights.values(), 0.1)
    optimizer.param_groups[0]["lr"] = torch.ones((), device=nowhere)
    step = torch.zeros((), dtype=torch.int64, device=nowhere)
    add_noise(ensemble, optimizer, 0.5, 0, step, ensemble.alive)
    add_shared_noise(list(ensemble.weights.values()), 3, optimizer, 0.5, 0, step)
    assert all(weight.grad.device == nowhere for weight in ensemble.weights.values())
    with pytest.raises(RuntimeError):
        float(noise_std(optimizer, 0.5))


@needs_gpu
class TestOnAGPU:
    @pytest.mark.parametrize("optimizer", ["sgd", MOMENTUM], ids=str)
    def test_captured_steps_are_those_of_the_cpu(self, optimizer):
        options = {"precision": "float64", "method": "kde", "schedule": "cosine", "epochs": 4}
        options |= NOISY | {"optimizer": optimizer}
        one, other = quick(plain, **options), quick(plain, device="cuda", **options)
        for name, weight in one.ensemble.weights.items():
            found = other.ensemble.weights[name].cpu()
            torch.testing.assert_close(found, weight, rtol=1e-4, atol=1e-5)

    def test_a_captured_stepper_draws_anew_at_every_step(self):
        ensemble = shoal_of(plain).to("cuda")
        options = {"method": "ensemble", "optimizer": "sgd", "lr": 0.1, "prior": "flat"}
        stepper = shoal.Stepper(ensemble, n=POINTS, noise=1.0, **options)
        zero = lambda outputs, _: 0.0 * outputs.sum(-1)  # noqa: E731
        for step in range(8):
            before = {name: weight.detach().clone() for name, weight in ensemble.weights.items()}
            stepper(points(), loss=zero)
            noise = drawn(shoal_of(plain), step=step)
            for name, weight in ensemble.weights.items():
                moved = (weight.detach() - before[name]).cpu()
                wanted = noise[name] * math.sqrt(0.2 / POINTS)
                torch.testing.assert_close(moved, wanted, rtol=1e-4, atol=1e-5)

    def test_a_learning_rate_of_zero_stops_the_noise(self):
        schedule = {"name": "flat-then-linear", "floor": 0.0}
        run = quick(plain, device="cuda", steps=20, schedule=schedule, **NOISY)
        assert all(weight.isfinite().all() for weight in run.ensemble.weights.values())


# Who gets it.


def test_frozen_members_get_none_and_new_ones_keep_their_numbers():
    old = quick(plain, method="ensemble", **NOISY)
    grown = shoal.grow(old, 2, data=points(), progress=False)
    whole = quick(shoal_of(plain, members=5), method="ensemble", **NOISY)
    assert grown.config["noise"] == 1.0
    for name, weight in grown.ensemble.weights.items():
        assert torch.equal(weight[:3], old.ensemble.weights[name])
        torch.testing.assert_close(weight[3:], whole.ensemble.weights[name][3:])


def test_growth_without_noise():
    old = quick(plain, method="ensemble", **NOISY)
    grown = shoal.grow(old, 1, data=points(), noise=0, progress=False)
    still = quick(shoal_of(plain, members=4), method="ensemble", **(NOISY | {"noise": None}))
    for name, weight in grown.ensemble.weights.items():
        torch.testing.assert_close(weight[3:], still.ensemble.weights[name][3:])


def test_diverged_members_get_none():
    alive = torch.tensor([True, False, True])
    noise = drawn(shoal_of(plain), alive=alive)
    assert all(not tensor[1].any() and tensor[[0, 2]].all() for tensor in noise.values())


def test_a_diverged_member_stays_left_out():
    ensemble = shoal_of(plain)
    with torch.no_grad():
        next(iter(ensemble.weights.values()))[1] = math.nan
    with pytest.warns(ShoalWarning, match="Member 1 diverged"):
        run = quick(ensemble, method="f-kde", **NOISY)
    assert run.ensemble.alive.tolist() == [True, False, True]
    assert all(weight[[0, 2]].isfinite().all() for weight in run.ensemble.weights.values())


@pytest.mark.parametrize("members", [4, torch.tensor(4)], ids=["number", "tensor"])
def test_tensors_that_members_share_get_the_noise_of_their_mean(members):
    """Variance s² / M, and nothing in common with the noise of any member."""
    shared = [torch.zeros(150, 200, requires_grad=True), torch.zeros(3, requires_grad=True)]
    for tensor in shared:
        tensor.grad = torch.zeros_like(tensor)
    optimizer = make_optimizer(MOMENTUM, dict(enumerate(shared)), 0.01)
    add_shared_noise(shared, members, optimizer, 0.2, 0, 3)
    noise = shared[0].grad
    s = noise_std(optimizer, 0.2)
    assert abs(noise.square().mean() * 4 / s**2 - 1) < 4 * math.sqrt(2 / noise.numel())
    assert shared[1].grad.all()
    private = drawn(shoal.Ensemble.init(lambda: nn.Linear(200, 150, bias=False), members=2))
    for other in private["weight"]:
        correlation = torch.corrcoef(torch.stack([other.flatten(), noise.flatten()]))[0, 1]
        assert abs(correlation) < 4 / math.sqrt(noise.numel())


# Beside other settings.


@pytest.mark.parametrize("nothing", [None, 0, 0.0])
def test_no_noise_is_the_run_without_the_setting(nothing, tmp_path):
    one, other = quick(plain, out=tmp_path / "a"), quick(plain, noise=nothing, out=tmp_path / "b")
    assert_same_run(one, other)
    assert_same_folder(tmp_path / "a", tmp_path / "b")


def test_clipping_shortens_the_velocity_and_not_the_noise():
    options = {"method": "ensemble", "optimizer": "sgd", "lr": 1.0, "steps": 1, "prior": "flat"}
    before, clipped = shoal_of(plain), quick(plain, noise=1.0, clip=1e-9, **options).ensemble
    step = {n: w - before.weights[n] for n, w in clipped.weights.items()}
    noise = drawn(before, step=0)
    for name, tensor in step.items():
        torch.testing.assert_close(
            tensor, noise[name] * math.sqrt(2 / POINTS), rtol=1e-4, atol=1e-6
        )


@pytest.mark.parametrize("optimizer", ["sgd", MOMENTUM], ids=str)
def test_a_learning_rate_that_falls_to_zero_stops_the_noise(optimizer):
    schedule = {"name": "flat-then-linear", "floor": 0.0}
    options = {"noise": 1.0, "optimizer": optimizer, "schedule": schedule, "lr": 0.01}
    end, last = (quick(plain, steps=20, **options) for _ in range(2))
    assert all(weight.isfinite().all() for weight in end.ensemble.weights.values())
    assert_same_run(end, last)


def test_the_noise_follows_the_learning_rate_of_the_step():
    ensemble = shoal_of(plain)
    optimizer = make_optimizer(MOMENTUM, ensemble.weights, 0.01)
    assert noise_std(optimizer, 0.3) ** 2 == pytest.approx(2 * 0.1 * 0.3 / 0.01)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(0.04)
    assert float(noise_std(optimizer, 0.3)) ** 2 == pytest.approx(2 * 0.1 * 0.3 / 0.04)
    optimizer.param_groups[0]["lr"].zero_()
    assert float(noise_std(optimizer, 0.3)) == 0.0


@pytest.mark.parametrize("method", ["ensemble", "f-kde"])
def test_a_prior_that_is_weight_decay_leaves_the_noise_alone(method):
    """With a clip that is never reached, the prior is part of the velocity instead."""
    options = {"method": method, "precision": "float64", "prior": shoal.priors.Gaussian(0.3)}
    handed, kept = quick(plain, **options, **NOISY), quick(plain, clip=1e6, **options, **NOISY)
    for name, weight in handed.ensemble.weights.items():
        torch.testing.assert_close(kept.ensemble.weights[name], weight, rtol=1e-9, atol=1e-9)


def test_another_loss_of_a_step_keeps_the_noise():
    ensemble, still = shoal_of(plain), shoal_of(plain)
    zero = lambda outputs, _: 0.0 * outputs.sum(-1)  # noqa: E731
    options = {"method": "ensemble", "optimizer": "sgd", "lr": 0.1, "prior": "flat"}
    shoal.Stepper(ensemble, n=POINTS, noise=1.0, **options)(points(), loss=zero)
    noise = drawn(still, step=0)
    for name, weight in ensemble.weights.items():
        moved = weight - still.weights[name]
        torch.testing.assert_close(moved, noise[name] * math.sqrt(0.2 / POINTS))


# Settings and errors.


REFUSED = {
    "adam": ({"optimizer": "adam"}, "optimizer='sgd'", "'adam'"),
    "rmsprop": ({"optimizer": {"name": "RMSprop"}}, "optimizer='sgd'", "'rmsprop'"),
    "no temperature": ({"temperature": 0.0}, "temperature=0", "leave noise out"),
    "no friction": ({"optimizer": {"name": "sgd", "momentum": 1.0}}, "momentum", "not 1.0"),
    "all damped": (
        {"optimizer": {"name": "sgd", "momentum": 0.5, "dampening": 1.0}},
        "dampening",
        "not 1.0",
    ),
    "negative": ({"noise": -1.0}, "noise must be zero or positive, not -1"),
    "words": ({"noise": "yes"}, "noise must be a finite number", "'yes'"),
    "truth": ({"noise": True}, "noise must be a finite number"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_not_sample_the_posterior_is_refused(case, tmp_path):
    options, *words = REFUSED[case]
    ensemble = shoal_of(plain)
    before = frozen(ensemble)
    with pytest.raises(ConfigError) as caught:
        quick(ensemble, out=tmp_path / "run", **({"noise": 1.0, "optimizer": "sgd"} | options))
    assert_one_sentence(caught.value, *words)
    assert_equal_trees(frozen(ensemble), before)
    assert not (tmp_path / "run").exists()


def test_the_default_optimiser_is_told_from_sgd():
    with pytest.raises(ConfigError, match="optimizer='sgd'"):
        shoal.fit(shoal_of(plain), points(), noise=1.0)
    with pytest.raises(ConfigError, match="optimizer='sgd'"):
        shoal.sample(lambda x: -x.square().sum(), torch.zeros(2, 1), noise=1.0, optimizer="adam")
    with pytest.raises(ConfigError, match="noise must be zero or positive"):
        shoal.sample(lambda x: -x.square().sum(), torch.zeros(2, 1), noise=-1.0)


def test_a_config_file_has_it():
    config = make_config({"data": "digits", "noise": 0.5, "optimizer": "sgd"})
    assert config.noise == 0.5
    with pytest.raises(ConfigError, match="noise must be zero or positive, not -1"):
        make_config({"data": "digits", "noise": -1, "optimizer": "sgd"})


def test_sampling_is_fixed_by_its_seed():
    start = torch.zeros(3, 2)
    one, again, other = (
        shoal.sample(lambda x: -x.square().sum(), start, noise=1.0, seed=seed, steps=5)
        for seed in (0, 0, 1)
    )
    assert torch.equal(one, again) and differ({"": one}, {"": other})


def test_tensors_that_members_train_together_get_the_mean_of_their_noises():
    """Without drive, one step moves a shared tensor with the variance of a member's over M."""
    build = lambda: nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 1))  # noqa: E731
    ensemble = shoal.Ensemble.init(build, 9, shared=("0.*",))
    before = {name: tensor.detach().clone() for name, tensor in ensemble.named_parameters()}
    stepper = shoal.Stepper(
        ensemble, n=10, method="ensemble", prior="flat", optimizer="sgd", lr=0.1, noise=1.0,
        likelihood=shoal.likelihoods.Custom(lambda outputs, y: 0 * (outputs - y).square().sum(-1)),
    )  # fmt: skip
    stepper((torch.zeros(4, 200), torch.zeros(4, 1)))
    moved = {name: t.detach() - before[name] for name, t in ensemble.named_parameters()}
    wanted = 2 * 0.1 / 10
    shared, own = moved["0.weight"], moved["1.weight"]
    assert shared.square().mean() == pytest.approx(wanted / 9, rel=4 * (2 / shared.numel()) ** 0.5)
    assert own.square().mean() == pytest.approx(wanted, rel=4 * (2 / own.numel()) ** 0.5)

"""Optimisers see every member alone; schedules end where they say."""

import math

import pytest
import torch
from small_runs import assert_one_sentence

import shoal
from shoal.core.errors import ConfigError
from shoal.training.options.optim import (
    clip_members,
    make_optimizer,
    optimizer_table,
    optimizers,
    set_learning_rate,
)
from shoal.training.options.schedules import (
    Cosine,
    Exponential,
    FlatThenLinear,
    LinearDecay,
    Stairs,
    Steps,
    schedules,
)

pytestmark = pytest.mark.usefixtures("double")

EVERY = [schedules[name]() for name in schedules if name not in ("constant", "torch", "plateau")]
EVERY += [Cosine(floor=0.1, warmup=0.2), LinearDecay(floor=0.3), Steps(at=(0.2,), factor=0.5)]
SHAPES = {"weight": (3, 4, 2), "bias": (3, 4), "scale": (3,)}


def tensors(seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    return {name: scale * torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


@pytest.mark.parametrize("name", optimizers())
def test_every_optimiser_acts_on_every_member_alone(name):
    stacked = {key: tensor.requires_grad_() for key, tensor in tensors(0).items()}
    alone = [
        {key: t[i : i + 1].detach().clone().requires_grad_() for key, t in stacked.items()}
        for i in range(3)
    ]
    together = make_optimizer(name, stacked, 0.01)
    separate = [make_optimizer(name, member, 0.01) for member in alone]
    for step in range(1, 6):
        # Members of very different gradients: a shared norm or mean would show.
        gradients = tensors(step)
        for key, tensor in stacked.items():
            scale = torch.tensor([1e-3, 1.0, 1e3]).reshape(-1, *(1,) * (tensor.ndim - 1))
            tensor.grad = gradients[key] * scale
            for i, member in enumerate(alone):
                member[key].grad = tensor.grad[i : i + 1].clone()
        together.step()
        for optimizer in separate:
            optimizer.step()
    for i, member in enumerate(alone):
        for key, tensor in member.items():
            torch.testing.assert_close(stacked[key][i : i + 1], tensor, rtol=1e-12, atol=1e-12)


def test_settings_reach_the_optimiser():
    spec = {"name": "SGD", "momentum": 0.9, "nesterov": True}
    optimizer = make_optimizer(spec, {"a": torch.zeros(2, requires_grad=True)}, 0.3)
    group = optimizer.param_groups[0]
    assert (group["lr"], group["momentum"], group["nesterov"]) == (0.3, 0.9, True)
    assert spec["name"] == "SGD"


@pytest.mark.parametrize(
    ("spec", "sentence"),
    [
        ("lbfgs", "'lbfgs' cannot be used: it mixes members"),
        ("Muon", "'Muon' cannot be used: it mixes members"),
        ("adm", "torch has no such optimizer; did you mean 'adam'"),
        ({"momentum": 0.9}, "cannot be used"),
        ({"name": "adam", "momentum": 0.9}, "does not take these settings"),
        ({"name": "sgd", "momentum": -1.0}, "does not take these settings"),
    ],
)
def test_what_cannot_be_used_is_refused_in_a_sentence(spec, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make_optimizer(spec, {"a": torch.zeros(2, requires_grad=True)}, 0.1)


@pytest.mark.parametrize("lr", [0.0, -1.0, math.nan])
def test_the_learning_rate_must_be_positive(lr):
    with pytest.raises(ConfigError, match="learning rate must be positive"):
        make_optimizer("sgd", {"a": torch.zeros(2, requires_grad=True)}, lr)


def test_set_learning_rate():
    optimizer = make_optimizer("adam", {"a": torch.zeros(2, requires_grad=True)}, 0.3)
    set_learning_rate(optimizer, 0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.1]
    capturable = torch.optim.Adam([torch.zeros(2, requires_grad=True)], lr=torch.tensor(0.3))
    set_learning_rate(capturable, 0.1)
    assert math.isclose(capturable.param_groups[0]["lr"].item(), 0.1)


# Clipping.


def lengths(tree):
    flat = torch.cat([t.reshape(3, -1) for t in tree.values()], 1)
    return flat.square().sum(1).sqrt()


def test_each_member_is_shortened_to_the_limit():
    velocity = tensors(0)
    before = lengths(velocity)
    limit = before.sort().values[1].item()
    clipped = clip_members(velocity, limit)
    torch.testing.assert_close(lengths(clipped), before.clamp(max=limit))
    for key, tensor in clipped.items():
        for i in range(3):
            scale = min(1.0, limit / before[i].item())
            torch.testing.assert_close(tensor[i], scale * velocity[key][i])


def test_no_limit_and_no_velocity():
    velocity = tensors(0)
    assert clip_members(velocity, None) is velocity
    still = {key: torch.zeros_like(tensor) for key, tensor in velocity.items()}
    assert all((tensor == 0).all() for tensor in clip_members(still, 1.0).values())


def test_a_member_that_is_not_finite_does_not_clip_the_others():
    velocity = tensors(0)
    clean = clip_members(velocity, 0.5)
    velocity["weight"][1, 0, 0] = math.nan
    found = clip_members(velocity, 0.5)
    for key, tensor in found.items():
        assert torch.equal(tensor[[0, 2]], clean[key][[0, 2]])


# Schedules.


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
@pytest.mark.parametrize("steps", [1, 2, 10, 1000])
def test_factors_lie_between_nothing_and_one(schedule, steps):
    for step in range(steps):
        assert 0 < schedule(step, steps) <= 1


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_a_schedule_begins_at_one_or_warms_up_to_it(schedule):
    warmup = getattr(schedule, "warmup", 0.0)
    factors = [schedule(step, 1000) for step in range(1000)]
    rise = int(warmup * 1000)
    assert all(b > a for a, b in zip(factors[:rise], factors[1:rise], strict=False))
    assert math.isclose(factors[rise], 1.0)
    assert all(b <= a + 1e-15 for a, b in zip(factors[rise:], factors[rise + 1 :], strict=False))


@pytest.mark.parametrize("schedule", EVERY, ids=repr)
def test_a_schedule_ends_at_its_floor(schedule):
    floor = getattr(schedule, "floor", None)
    if isinstance(schedule, Steps):
        floor = schedule.factor ** len(schedule.at)
    if isinstance(schedule, Stairs):
        floor = schedule.factor**schedule.flights
    assert math.isclose(schedule(1000, 1000), floor, abs_tol=1e-12)


def test_cosine():
    schedule = Cosine(floor=0.2)
    for step in (0, 13, 50, 99):
        target = 0.2 + 0.4 * (1 + math.cos(math.pi * step / 100))
        assert math.isclose(schedule(step, 100), target)
    warm = Cosine(warmup=0.1)
    assert [warm(step, 100) for step in range(3)] == [1 / 11, 2 / 11, 3 / 11]
    assert warm(10, 100) == 1.0
    assert math.isclose(warm(55, 100), 0.5)


def test_linear():
    assert [LinearDecay(0.5)(step, 4) for step in range(5)] == [1.0, 0.875, 0.75, 0.625, 0.5]


def test_steps():
    factors = [Steps()(step, 8) for step in range(8)]
    assert factors == [1.0] * 4 + [0.1] * 2 + [0.1**2] * 2


def test_stairs_are_what_torch_calls_an_exponential_rate_by_epochs():
    """A factor each epoch, 15 epochs of 7 steps."""
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.8)
    schedule = Stairs(flights=15, factor=0.8)
    for epoch in range(15):
        for step in range(7):
            found = schedule(7 * epoch + step, 15 * 7)
            assert math.isclose(found, optimizer.param_groups[0]["lr"])
        optimizer.step()
        scheduler.step()


@pytest.mark.parametrize("settings", [{"flights": 0}, {"factor": 0.0}, {"factor": -1.0}])
def test_stairs_need_flights_and_a_factor(settings):
    with pytest.raises(ConfigError) as error:
        Stairs(**settings)
    assert_one_sentence(error.value, "at least 1 flight and a positive factor")


def test_exponential():
    schedule = Exponential(0.01)
    ratios = [schedule(step + 1, 10) / schedule(step, 10) for step in range(10)]
    assert all(math.isclose(ratio, 0.01**0.1) for ratio in ratios)


def test_flat_then_linear():
    """1 until half of training, a line until nine tenths, then the floor."""
    schedule = FlatThenLinear(0.01)
    assert schedule(500, 1000) == 1.0
    assert math.isclose(schedule(700, 1000), 1 - 0.99 / 2)
    assert math.isclose(schedule(900, 1000), 0.01)
    assert math.isclose(schedule(999, 1000), 0.01)


def test_registered_schedules_can_be_made_by_name():
    made = schedules.make({"name": "cosine", "warmup": 0.1})
    assert made == Cosine(warmup=0.1)
    assert schedules.spec(made) == {"name": "cosine", "floor": 0.0, "warmup": 0.1}
    with pytest.raises(shoal.ConfigError, match="did you mean 'cosine'"):
        schedules.make("cosin")


def test_a_class_of_torch_is_taken_like_its_name():
    x, y = torch.zeros(8, 2), torch.arange(8) % 2
    runs = [
        shoal.fit(
            shoal.Ensemble.init(lambda: torch.nn.Linear(2, 2), 2),
            (x, y),
            optimizer=optimizer,
            epochs=1,
            progress=False,
        )
        for optimizer in ("adamw", torch.optim.AdamW)
    ]
    assert runs[0].config == runs[1].config
    assert torch.equal(*(run.ensemble(x + 1) for run in runs))


@pytest.mark.parametrize("name", ["LBFGS", "Own"])
def test_a_class_that_looks_across_members_or_is_not_of_torch_is_refused(name):
    own = type("Own", (torch.optim.SGD,), {})
    chosen = own if name == "Own" else getattr(torch.optim, name)
    with pytest.raises(ConfigError, match=name if name == "Own" else name.lower()) as error:
        make_optimizer(optimizer_table(chosen), {"a": torch.zeros(2, requires_grad=True)}, 0.1)
    assert_one_sentence(error.value)

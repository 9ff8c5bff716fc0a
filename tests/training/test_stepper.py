"""Steps in a loop of one's own: those of `fit`, with batches, losses and rates of one's own."""

import importlib
import math
from dataclasses import replace
from itertools import product

import pytest
import torch
from small_runs import assert_equal_trees
from torch import nn
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.sources import ArrayBatches
from shoal.engine.resources.graph import _waits_for_host, put_together, taken_apart
from shoal.training.step.results import StepInfo

module = importlib.import_module("shoal.training.stepper")

N, M, B = 24, 3, 8


def build():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.2), nn.Linear(6, 2))


def ensemble(seed=4, make=build):
    return shoal.Ensemble.init(lambda: make().double(), members=M, seed=seed)


def points(kind="classes"):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(N, 3, generator=generator, dtype=torch.float64)
    if kind == "classes":
        return x, torch.randint(0, 2, (N,), generator=generator)
    return x, 5 + 3 * x[:, 0] + torch.randn(N, generator=generator, dtype=torch.float64)


def weights(ensemble):
    return {name: tensor.detach().clone() for name, tensor in ensemble.weights.items()}


METHODS = ["ensemble", "kde", "svgd", "f-kde", "f-svgd", "forde"]


@pytest.mark.parametrize("kind", ["classes", "regression"])
@pytest.mark.parametrize("method", METHODS)
def test_the_trajectory_is_that_of_fit(method, kind):
    x, y = points(kind)
    options = {"method": method, "lr": 0.01, "seed": 7, "clip": 50.0}
    fitted = ensemble()
    # one batch an epoch, so that both standardise the targets of a regression alike
    size = N if kind == "regression" else B
    shoal.fit(fitted, (x, y), epochs=3, batch_size=size, progress=False, **options)
    stepped = ensemble()
    stepper = shoal.Stepper(stepped, n=N, inputs=x if method == "forde" else None, **options)
    batches = ArrayBatches(x, y, size, seed=7)
    for epoch in range(3):
        for batch in batches.batches(epoch):
            info = stepper(batch)
    assert_equal_trees(weights(stepped), weights(fitted))
    assert info.loss.shape == (M,) and stepper.step == 3 * N // size


def test_rates_and_annealing_are_those_of_the_call():
    x, y = points()
    before, still = ensemble(), ensemble()
    stepper = shoal.Stepper(still, n=N, method="ensemble", optimizer="sgd", prior="flat")
    stepper((x, y), annealing=0.0)
    assert_equal_trees(weights(still), weights(before))
    slow, fast = ensemble(), ensemble()
    shoal.Stepper(slow, n=N, method="ensemble", optimizer="sgd", lr=0.1)((x, y))
    shoal.Stepper(fast, n=N, method="ensemble", optimizer="sgd", lr=0.001)((x, y), lr=0.1)
    assert_equal_trees(weights(slow), weights(fast))


@pytest.mark.parametrize("method", ["kde", "f-kde", "svgd", "forde"])
def test_the_strength_of_a_call_is_that_of_its_step_alone(method):
    x, y = points()
    options = {"n": N, "method": method, "inputs": x if method == "forde" else None, "lr": 0.01}
    given, called = ensemble(), ensemble()
    strong = shoal.Stepper(given, strength=50.0, **options)((x, y))
    stepper = shoal.Stepper(called, strength=2.0, **options)
    info = stepper((x, y), strength=50.0)
    assert_equal_trees(weights(called), weights(given))
    assert info.ratio == strong.ratio
    # the push is proportional to the strength, the drive does not depend on it
    shares = [shoal.Stepper(ensemble(), **options)((x, y), strength=s) for s in (1.0, 8.0)]
    torch.testing.assert_close(shares[1].push, 8 * shares[0].push)
    torch.testing.assert_close(shares[1].drive, shares[0].drive)
    later, other = ensemble(), ensemble()
    for each, strengths in ((later, (None, None)), (other, (2.0, None))):
        stepper = shoal.Stepper(each, strength=2.0, **options)
        for strength in strengths:
            stepper((x, y), strength=strength)
    assert_equal_trees(weights(later), weights(other))


def test_a_plain_ensemble_has_no_strength():
    stepper = shoal.Stepper(ensemble(), n=N, method="ensemble")
    with pytest.raises(shoal.ConfigError, match="no repulsion"):
        stepper(points(), strength=3.0)


def own_batches(kind="classes"):
    x, y = points(kind)
    rows = torch.stack([torch.randperm(N, generator=torch.manual_seed(i))[:B] for i in range(M)])
    return x[rows], y[rows], rows


@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_members_may_have_batches_of_their_own(kind):
    x, y, _ = own_batches(kind)
    likelihood = None if kind == "classes" else shoal.likelihoods.Gaussian(2.0)
    make = build if kind == "classes" else lambda: nn.Linear(3, 1)
    options = {"n": N, "method": "ensemble", "optimizer": "sgd", "likelihood": likelihood}
    together = ensemble(make=make)
    info = shoal.Stepper(together, **options)((x, y), own=True)
    for member in range(M):
        alone = ensemble(make=make)
        alone_info = shoal.Stepper(alone, **options)((x[member], y[member]))
        for name, tensor in together.weights.items():
            torch.testing.assert_close(tensor[member], alone.weights[name][member])
        torch.testing.assert_close(info.loss[member], alone_info.loss[member])


@pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde", "svgd"])
def test_weights_of_each_member_choose_its_points(method):
    """Bootstrap weights [M, B] over a common batch; zero is absence."""
    x, y = points()
    weight = (torch.rand(M, N, generator=torch.manual_seed(3)) < 0.6).double()
    together = shoal.Stepper(ensemble(make=quiet), n=N, method=method, optimizer="sgd")
    losses = together((x, y, weight)).loss
    for member, kept in enumerate(weight > 0):
        alone = shoal.Stepper(ensemble(make=quiet), n=N, method="ensemble", optimizer="sgd")
        torch.testing.assert_close(losses[member], alone((x[kept], y[kept])).loss[member])


def quiet():
    return nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2))


@pytest.mark.parametrize("engine", ["loop", "chunk:1", "chunk:2"])
@pytest.mark.parametrize(
    "what, method",
    [
        *product(("own batches", "own losses"), ("ensemble", "kde", "svgd")),
        *product(("own weights",), ("ensemble", "kde", "svgd", "f-kde", "f-svgd", "forde")),
    ],
)
def test_members_apart_step_as_all_together(what, method, engine):
    """What belongs to a member goes with it into its chunk."""

    def stepped(how):
        made = ensemble(make=quiet)
        given = points()[0] if method == "forde" else None
        options = {"n": N, "method": method, "optimizer": "sgd", "inputs": given}
        stepper = shoal.Stepper(made, engine=how, **options)
        x, y, _ = own_batches()
        if what == "own batches":
            return made, [stepper((x, y), own=True) for _ in range(2)]
        if what == "own losses":
            loss = torch.nn.functional.cross_entropy
            return made, [stepper((x, y), own=True, loss=loss) for _ in range(2)]
        weight = torch.rand(M, N, generator=torch.manual_seed(3), dtype=torch.float64)
        return made, [stepper((*points(), weight)) for _ in range(2)]

    (together, whole), (apart, parts) = stepped("vmap"), stepped(engine)
    for one, other in zip(whole, parts, strict=True):
        torch.testing.assert_close(one.loss, other.loss)
        torch.testing.assert_close(one.drive, other.drive)
    for name, tensor in together.weights.items():
        torch.testing.assert_close(tensor, apart.weights[name])


@pytest.mark.parametrize("method", ["kde", "f-kde", "f-svgd", "forde"])
def test_weights_of_one_change_nothing_beside_frozen_members(method):
    x, y = points()
    weight = torch.ones(M - 1, N, dtype=torch.float64)
    found = []
    for batch in ((x, y), (x, y, weight)):
        made = ensemble(make=quiet)
        given = x if method == "forde" else None
        stepper = shoal.Stepper(made, n=N, method=method, optimizer="sgd", inputs=given, frozen=1)
        stepper(batch)
        found.append(weights(made))
    assert_equal_trees(*found)


def test_a_loss_of_the_call_replaces_the_likelihood():
    x, y = points()

    def hinge(outputs, labels):
        sign = 2.0 * labels - 1
        return (1 - sign * (outputs[:, 1] - outputs[:, 0])).clamp(min=0)

    mine = ensemble(make=quiet)
    info = shoal.Stepper(mine, n=N, method="ensemble", optimizer="sgd", lr=0.1, prior="flat")(
        (x, y), loss=hinge
    )
    for index in range(M):
        member = ensemble(make=quiet).member(index)
        for parameter in member.parameters():
            parameter.requires_grad_()
        value = hinge(member(x), y).mean()
        value.backward()
        torch.testing.assert_close(info.loss[index], value)
        for name, parameter in member.named_parameters():
            wanted = parameter.detach() - 0.1 * parameter.grad
            torch.testing.assert_close(mine.weights[name][index], wanted)


def test_several_losses_and_targets_of_each_member():
    x, y, _ = own_batches("regression")
    stepper = shoal.Stepper(ensemble(make=lambda: nn.Linear(3, 1)), n=N, method="kde")
    info = stepper((x, y), loss=lambda f, t: (f - t).abs().mean(), own=True)
    outputs = ensemble(make=lambda: nn.Linear(3, 1))
    each = [(outputs.member(i)(x[i]) - y[i][:, None]).abs().mean() for i in range(M)]
    torch.testing.assert_close(info.loss, torch.stack(each))
    stepper((x[0], y[0]), loss=lambda f, t: (f[:, 0] - t).square())
    assert stepper.step == 2


@pytest.mark.parametrize("kind", ["classes", "regression"])
def test_a_state_continues_bit_for_bit(kind):
    x, y = points(kind)
    whole, first, second = ensemble(), ensemble(), ensemble(seed=9)
    options = {"n": N, "method": "f-kde", "seed": 3}
    stepper = shoal.Stepper(whole, **options)
    for _ in range(6):
        stepper((x, y))
    begun = shoal.Stepper(first, **options)
    for _ in range(3):
        begun((x, y))
    resumed = shoal.Stepper(second, **options)
    resumed.load_state_dict(begun.state_dict())
    for _ in range(3):
        resumed((x, y))
    assert resumed.step == 6
    assert_equal_trees(weights(second), weights(whole))


def test_dicts_and_tokens_step_too():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(3, 4), nn.Embedding(5, 4)

        def forward(self, x, tokens):
            return {"logits": self.a(x).tanh() + self.b(tokens)}

    x, y = points()
    batch = {"x": x, "tokens": torch.arange(N) % 5, "labels": y}
    stepper = shoal.Stepper(ensemble(make=Two), n=N)
    losses = [float(stepper(batch, lr=0.05).loss.mean()) for _ in range(20)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize(
    ("options", "call", "sentence"),
    [
        ({"n": 0.5}, {}, "n must be the number of data points"),
        ({"method": "forde"}, {}, "Stepper\\(..., inputs=x\\)"),
        ({"method": "f-kde"}, {"own": True}, r"one batch per member"),
        ({"lr": -1}, {}, "lr must be positive"),
    ],
)
def test_what_cannot_be_stepped_is_one_sentence(options, call, sentence):
    with pytest.raises(shoal.ShoalError, match=sentence):
        shoal.Stepper(ensemble(), **{"n": N, **options})(points(), **call)


def test_outputs_of_different_inputs_are_not_compared():
    x, y, _ = own_batches()
    with pytest.raises(shoal.ConfigError, match="weights \\[M, B\\]"):
        shoal.Stepper(ensemble(), n=N, method="f-kde")((x, y), own=True)


@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_dicts_train_in_another_precision(precision):
    x, y = points()
    ensemble = shoal.Ensemble.init(lambda: Named(), members=M)
    run = shoal.fit(ensemble, ({"x": x.numpy()}, y), precision=precision, steps=2, progress=False)
    assert run.ensemble.dtype == getattr(torch, precision)
    assert shoal.predict(run, {"x": x}).members.shape == (M, N, 2)


class Named(nn.Linear):
    def __init__(self):
        super().__init__(3, 2)

    def forward(self, x):
        return super().forward(x)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("class_weights", [None, (0.5, 3.0)])
def test_a_step_minimises_the_cross_entropy_of_torch(smoothing, class_weights):
    x, y = points()
    y = y.masked_fill(torch.arange(N) % 5 == 0, -1)
    likelihood = shoal.likelihoods.Categorical(smoothing, class_weights, ignore_index=-1)
    mine = ensemble(make=quiet)
    stepper = shoal.Stepper(
        mine, n=N, method="ensemble", optimizer="sgd", lr=0.1, prior="flat", likelihood=likelihood
    )
    info = stepper((x, y))
    weight = None if class_weights is None else torch.tensor(class_weights, dtype=torch.float64)
    for index in range(M):
        member = ensemble(make=quiet).member(index).requires_grad_()
        value = nn.functional.cross_entropy(
            member(x), y, weight=weight, label_smoothing=smoothing, ignore_index=-1
        )
        value.backward()
        torch.testing.assert_close(info.loss[index], value, atol=1e-10, rtol=1e-10)
        for name, parameter in member.named_parameters():
            wanted = parameter.detach() - 0.1 * parameter.grad
            torch.testing.assert_close(mine.weights[name][index], wanted, atol=1e-10, rtol=1e-10)


def test_a_mask_counts_in_n_as_in_fit():
    class Sequence(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(1, 1)

        def forward(self, x):
            return self.layer(x.unsqueeze(-1))

    x, _ = points()
    mask = torch.rand(N, 3, generator=torch.manual_seed(2)) < 0.5
    fitted, stepped = ensemble(make=Sequence), ensemble(make=Sequence)
    options = {"method": "kde", "lr": 0.01}
    shoal.fit(fitted, (x, x.sin(), mask), steps=3, batch_size=N, progress=False, **options)
    stepper = shoal.Stepper(stepped, n=N, **options)
    batches = ArrayBatches(torch.arange(N), torch.arange(N), N)
    for epoch in range(3):
        rows = batches.orders(epoch)
        stepper((x[rows], x[rows].sin(), mask[rows]))
    torch.testing.assert_close(weights(stepped), weights(fitted), atol=1e-12, rtol=1e-12)
    assert stepper.state_dict()["n"] == float(mask.sum())


@pytest.mark.parametrize("n", [math.inf, math.nan, 1e-320, 0, 0.5, True, "a"])
def test_the_number_of_points_is_a_count(n):
    with pytest.raises(ConfigError, match="^n must be"):
        shoal.Stepper(ensemble(make=quiet), n=n)


@pytest.mark.parametrize("name", ["annealing", "strength", "lr"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -1.0])
def test_a_step_with_a_wrong_factor_is_refused_and_changes_nothing(name, value):
    mine = ensemble(make=quiet)
    stepper = shoal.Stepper(mine, n=N, method="kde")
    stepper(points())
    before = weights(mine)
    with pytest.raises(ConfigError, match=name):
        stepper(points(), **{name: value})
    assert stepper.step == 1
    torch.testing.assert_close(weights(mine), before, atol=0, rtol=0)


@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("own", [False, True])
def test_labels_are_checked_in_every_step_as_by_fit(own, steps):
    x, y = points()
    stepper = shoal.Stepper(ensemble(make=quiet), n=N, method="ensemble")

    def taken(labels):
        batch = (x.expand(M, *x.shape), labels.expand(M, *labels.shape)) if own else (x, labels)
        return stepper(batch, own=own)

    for _ in range(steps):
        taken(y)
    for wrong in (y + 1, y - 1):
        with pytest.raises(DataError, match=r"^(y\[|labels must be)"):
            taken(wrong)
    assert stepper.step == steps


def test_a_step_names_its_measures_when_printed():
    info = shoal.Stepper(ensemble(make=quiet), n=N, method="kde")(points())
    text = repr(info)
    for name in ("loss=[", "drive=", "push=", "ratio=", "h2=", "effective=", "finite_members=3 of"):
        assert name in text
    assert f"ratio={float(info.push / info.drive):.4g}" in text


class Replays:
    """Takes steps as a captured move does, without a GPU."""

    def __init__(self, move, x, y, room):
        self.move, self.graph, self.replays = move, None, 0

    def __call__(self, x, y, step):
        self.graph = "captured"
        return self.move(x, y, torch.tensor(step))

    def replayed(self, x, y, step):
        self.replays += 1
        return self.move(x, y, torch.tensor(step))


@pytest.fixture
def replaying(monkeypatch):
    """Steppers that believe to be on a GPU, and capture their first step."""

    def begin(stepper, batch):
        stepper(batch)
        mover = stepper._mover
        mover.plan = replace(mover.plan, graph=True)
        for group in mover.optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return stepper

    monkeypatch.setattr(shoal.Stepper, "_on_gpu", True)
    monkeypatch.setattr(module, "CapturedMove", Replays)
    return begin


def test_checked_shapes_are_replayed_without_another_check(replaying, monkeypatch):
    x, y = points()
    options = {"n": N, "lr": 0.01, "seed": 7, "method": "kde"}
    plain, stepped = ensemble(), ensemble()
    stepper = replaying(shoal.Stepper(stepped, **options), (x[:B], y[:B]))
    other = shoal.Stepper(plain, **options)
    other((x[:B], y[:B]))
    batches = [(x[i : i + B], y[i : i + B]) for i in (0, 8, 16, 0)]
    stepper(batches[0])
    with monkeypatch.context() as fast:
        fast.setattr(module, "raw_batch", lambda batch: pytest.fail("a batch was read again"))
        for batch in batches[1:]:
            stepper(batch, lr=0.02)
    for batch, rate in zip(batches, (0.01, 0.02, 0.02, 0.02), strict=True):
        other(batch, lr=rate)
    torch.testing.assert_close(weights(stepped), weights(plain), rtol=1e-6, atol=1e-7)
    assert stepper.step == 5 and [each.replays for each in stepper._captured.values()] == [3]


def test_other_batches_are_read_and_checked(replaying):
    x, y = points()
    stepper = replaying(shoal.Stepper(ensemble(), n=N), (x[:B], y[:B]))
    stepper((x[:B], y[:B]))
    with pytest.raises(DataError, match="not finite"):
        stepper((x[:4] * torch.nan, y[:4]))
    with pytest.raises(DataError):
        stepper((x[:B], y[:4]))
    stepper((x[:B].float(), y[:B]))  # another type is converted, so it is read at each step
    stepper((x[:B].numpy(), y[:B].numpy()))
    stepper((x[:B], y[:B], torch.ones(B)))
    assert len(stepper._checked) == 1
    stepper.load_state_dict(stepper.state_dict())
    assert not stepper._checked


def test_measures_leave_a_captured_step_as_one_copy_per_type():
    info = StepInfo(
        torch.rand(3), torch.tensor([True, False, True]), torch.rand(4), torch.rand(2, 2)
    )
    together = put_together(info)
    assert [each.dtype for each in together] == [torch.float32, torch.bool]
    found = taken_apart(info, [each.clone() for each in together])
    for name in ("loss", "alive", "measures", "statistics"):
        assert torch.equal(getattr(found, name), getattr(info, name))
    assert found.count is None


@needs_gpu
@pytest.mark.parametrize("method", ["ensemble", "kde", "f-kde"])
def test_captured_steps_take_other_rates_and_batches(method):
    x, y = (each.cuda() for each in points())
    start, options = ensemble().to("cuda"), {"n": N, "method": method, "lr": 0.01}
    eager = ensemble().to("cuda")
    captured, plain = (
        shoal.Stepper(start, **options),
        shoal.Stepper(eager, engine="vmap+eager", **options),
    )
    kept = []
    for step in range(12):
        rows = torch.arange(step, step + B, device="cuda") % N
        batch, rate = (x[rows], y[rows]), 0.01 / (1 + step)
        kept.append(captured(batch, lr=rate).loss)
        torch.testing.assert_close(kept[-1], plain(batch, lr=rate).loss, rtol=1e-9, atol=1e-12)
    assert [each.graph is not None for each in captured._captured.values()] == [True]
    assert not torch.equal(kept[-1], kept[-2])  # later steps do not change earlier measures
    torch.testing.assert_close(weights(start), weights(eager), rtol=1e-9, atol=1e-12)


@needs_gpu
def test_a_replay_waits_for_nothing():
    x, y = (each.cuda() for each in points())
    stepper = shoal.Stepper(ensemble().to("cuda"), n=N)
    for _ in range(6):
        stepper((x[:B], y[:B]))
    assert _waits_for_host(lambda batch: stepper(batch), (x[8:16], y[8:16])) is False

"""Whole runs through `fit`: what goes in, what comes out, and what does not matter."""

import dataclasses
import inspect
import math
import random

import numpy as np
import pytest
import torch
from small_runs import (
    BATCH,
    STEPS_PER_EPOCH,
    Noisy,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    both,
    copied,
    differ,
    dropped,
    frozen,
    plain,
    points,
    quick,
    shoal_of,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.augment import CropFlip
from shoal.data.sets.builtin import toy_classification, toy_regression, true_curve
from shoal.experiment.config import load_config
from shoal.inference.likelihoods import (
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    HomoscedasticGaussian,
)
from shoal.inference.priors import Flat
from shoal.integrations.sklearn import EnsembleClassifier, EnsembleRegressor
from shoal.models import MLP, Blueprint, SmallCNN
from shoal.training.options.optim import optimizers
from shoal.training.options.schedules import schedules

WASSERSTEIN = ["kde", "sge", "ssge", "f-kde", "f-sge", "f-ssge"]


class Sines(nn.Module):
    """A module of the user's own."""

    def __init__(self):
        super().__init__()
        self.inner, self.outer = nn.Linear(2, 32), nn.Linear(32, 5)

    def forward(self, x):
        return self.outer(self.inner(x).sin())


def nothing_random():
    return torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()


def test_the_first_five_lines(tmp_path):
    data = toy_classification()
    ensemble = shoal.Ensemble.init(Sines, members=10, seed=0)
    run = shoal.fit(
        ensemble, data, method="f-kde", epochs=20, lr=1e-2, out=tmp_path / "first", progress=False
    )
    pred = shoal.predict(run, data.test.x)
    scores = shoal.evaluate(pred, data.test.y)
    assert scores["accuracy"] > 0.95
    assert run.ensemble is ensemble and not ensemble.training
    assert [row["epoch"] for row in run.history] == list(range(1, 21))
    assert shoal.predict(shoal.load(tmp_path / "first", Sines), data.test.x).members.equal(
        pred.members
    )


def test_digits_with_nothing_but_defaults_are_known_and_photographs_are_not():
    pytest.importorskip("sklearn")
    data = shoal.data.registry["digits"]()
    ensemble = shoal.Ensemble.init(Blueprint(MLP(), data.input_shape, data.outputs), members=5)
    run = shoal.fit(ensemble, data, epochs=60, progress=False)
    seen = shoal.predict(run, data.test.x)
    alien = shoal.predict(run, data.ood["photographs"].x)
    assert shoal.evaluate(seen, data.test.y)["accuracy"] >= 0.965
    assert alien.entropy().mean() >= 5 * seen.entropy().mean()


def test_regression_is_right_on_the_data_and_unsure_away_from_them():
    data = toy_regression()
    ensemble = shoal_of(Blueprint(MLP((50,)), (1,), 1), members=8)
    x = data.train.x
    noise = {"name": "gaussian", "noise_std": 0.25}
    options = {"steps": 200, "lr": 0.05, "schedule": "cosine", "batch_size": 90}
    run = quick(ensemble, ((x - 3.75) / 1.5, data.train.y), likelihood=noise, **options)
    seen = shoal.predict(run, (x - 3.75) / 1.5)
    assert (seen.mean.squeeze() - true_curve(x.squeeze())).square().mean().sqrt() < 0.15
    away = torch.tensor([[-1.0], [-0.5], [7.5], [8.0]])
    doubt = shoal.predict(run, (away - 3.75) / 1.5).members.std(0).mean()
    assert doubt > 5 * seen.members.std(0).mean()


class TestData:
    x, y = points()

    @pytest.mark.parametrize(
        "data",
        [
            pytest.param((x.numpy(), y.numpy()), id="arrays"),
            pytest.param((x.double().numpy(), y.int().numpy()), id="doubles"),
            pytest.param((x.tolist(), y.tolist()), id="lists"),
            pytest.param([x, y], id="pair-in-a-list"),
            pytest.param(shoal.Split(x, y), id="split"),
            pytest.param(shoal.Dataset("mine", shoal.Split(x, y)), id="dataset"),
            pytest.param(TensorDataset(x, y), id="tensor-dataset"),
        ],
    )
    def test_every_container_of_the_same_numbers_gives_the_same_run(self, data):
        assert_same_run(quick(data=data), quick(data=(self.x, self.y)))

    @pytest.mark.parametrize("kind", ["tensors", "loader", "batches"])
    def test_loaders_train_as_well_as_tensors(self, kind):
        data = toy_classification()
        x, y = data.train.x, data.train.y
        loader = DataLoader(TensorDataset(x, y), batch_size=20, shuffle=True)
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0)).split(20)
        batches = [(x[rows].numpy(), y[rows].numpy()) for rows in order]
        given = {"tensors": (x, y), "loader": loader, "batches": batches}[kind]
        run = quick(shoal_of(Sines), given, epochs=25, batch_size=20, lr=1e-2)
        assert len(run.history) == 25 and run.history[-1]["step"] == 250
        scores = shoal.evaluate(shoal.predict(run, data.test.x), data.test.y)
        assert scores["accuracy"] > 0.95

    def test_a_loader_counts_its_points_for_the_prior(self):
        x, y = points()
        loader = DataLoader(TensorDataset(x, y), batch_size=len(x))
        one = quick(data=loader, steps=3)
        other = quick(data=(x, y), steps=3, batch_size=len(x))
        for name, tensor in one.ensemble.weights.items():
            torch.testing.assert_close(tensor, other.ensemble.weights[name])

    @pytest.mark.parametrize("form", [tuple, lambda pair: [pair]], ids=["arrays", "batches"])
    def test_several_labels_a_point_are_regressed_on_only_when_asked(self, form):
        x, _ = points()
        data = form((x, (x > 0).float()))
        build = lambda: nn.Linear(3, 3)  # noqa: E731
        with pytest.raises(DataError, match="3 columns of 0 and 1.*'gaussian'"):
            quick(build, data)
        run = quick(build, data, likelihood="gaussian")
        assert run.likelihood.task == "regression"

    @pytest.mark.parametrize(
        "outputs, columns, expected",
        [(1, None, HomoscedasticGaussian), (2, None, HeteroscedasticGaussian)]
        + [(2, 2, HomoscedasticGaussian), (4, 2, HeteroscedasticGaussian)],
    )
    def test_real_targets_choose_the_likelihood_by_the_outputs(self, outputs, columns, expected):
        x, _ = points()
        y = x.sum(1) if columns is None else x[:, :columns]
        run = quick(shoal_of(lambda: nn.Linear(3, outputs)), (x, y))
        assert isinstance(run.likelihood, expected)

    def test_whole_numbers_are_classes_and_a_name_overrules(self):
        x, y = points()
        assert isinstance(quick(data=(x, y)).likelihood, Categorical)
        run = quick(shoal_of(lambda: nn.Linear(3, 1)), (x, y.float()), likelihood="gaussian")
        assert isinstance(run.likelihood, Gaussian)

    def test_epochs_and_steps_count_the_same_batches(self):
        by_epochs, by_steps = quick(epochs=3), quick(steps=3 * STEPS_PER_EPOCH)
        assert_same_run(by_epochs, by_steps)
        part = quick(steps=STEPS_PER_EPOCH + 1)
        assert [row["step"] for row in part.history] == [STEPS_PER_EPOCH, STEPS_PER_EPOCH + 1]


class TestTheUpdate:
    def test_one_step_of_sgd_is_the_mean_gradient_by_hand(self, double):
        x, _ = points()
        x = x.double()
        y = x.sum(1)
        ensemble = shoal_of(lambda: nn.Linear(3, 1))
        before = copied(ensemble.weights)
        quick(ensemble, (x, y), method="ensemble", prior=Flat(), optimizer="sgd", lr=0.1, steps=1,
              batch_size=len(x), likelihood="gaussian")  # fmt: skip
        for i in range(3):
            residual = y - (x @ before["weight"][i].T).squeeze() - before["bias"][i]
            weight = before["weight"][i] + 0.1 * (residual @ x) / len(x)
            torch.testing.assert_close(ensemble.weights["weight"][i].detach(), weight)
            bias = before["bias"][i] + 0.1 * residual.mean()
            torch.testing.assert_close(ensemble.weights["bias"][i].detach(), bias)

    @pytest.mark.parametrize("name", optimizers())
    def test_every_optimiser_moves_every_member_alone(self, name, double):
        x, y = points()
        options = {"method": "ensemble", "optimizer": name, "lr": 1e-2, "steps": 3}
        before = copied(shoal_of(members=3).weights)
        three = quick(shoal_of(members=3), (x, y), **options).ensemble.weights
        two = quick(shoal_of(members=2), (x, y), **options).ensemble.weights
        for key, tensor in three.items():
            assert tensor.isfinite().all() and (tensor != before[key]).flatten(1).any(1).all()
            torch.testing.assert_close(tensor[:2], two[key], rtol=1e-10, atol=1e-12)

    @pytest.mark.parametrize(
        "schedule, factor",
        [
            ("cosine", lambda t: 0.5 * (1 + math.cos(math.pi * t))),
            ("linear", lambda t: 1 - t),
            ({"name": "exponential", "floor": 0.1}, lambda t: 0.1**t),
            (lambda step, steps: 2.0 + step / steps, lambda t: 2.0 + t),
            (None, lambda t: 1.0),
        ],
    )
    def test_history_tells_the_learning_rate_of_the_last_step_of_each_epoch(self, schedule, factor):
        rows = quick(schedule=schedule, lr=0.01, epochs=3).history
        total = 3 * STEPS_PER_EPOCH
        for row in rows:
            assert row["lr"] == pytest.approx(0.01 * factor((row["step"] - 1) / total))

    def test_every_schedule_can_be_typed(self):
        for name in schedules.names():
            run = quick(schedule=name, epochs=1, validation=0.2)
            assert run.config["schedule"]["name"] == name

    def test_a_schedule_of_zero_stands_still(self):
        ensemble = shoal_of()
        before = frozen(ensemble)
        quick(ensemble, schedule=lambda step, steps: 0.0, optimizer="sgd")
        assert_equal_trees(frozen(ensemble), before)

    def test_clipping_shortens_only_the_member_that_is_too_fast(self, double):
        def moved(scale, clip):
            ensemble = shoal_of()
            with torch.no_grad():
                ensemble.weights["2.weight"][0] *= scale
            before = copied(ensemble.weights)
            quick(ensemble, steps=1, method="ensemble", optimizer="sgd", lr=1.0, clip=clip)
            return {name: t.detach() - before[name] for name, t in ensemble.weights.items()}

        def lengths(change):
            return torch.stack([t.flatten(1).square().sum(1) for t in change.values()]).sum(0)

        calm, wild, clipped = moved(1, None), moved(1e5, None), moved(1e5, 1.0)
        assert lengths(calm).sqrt().max() < 1.0 < lengths(wild).sqrt()[0]
        assert lengths(clipped).sqrt()[0] == pytest.approx(1.0)
        for name, change in clipped.items():
            torch.testing.assert_close(change[1:], calm[name][1:], rtol=1e-12, atol=1e-12)

    def test_annealing_multiplies_the_drive_from_the_first_step(self):
        still = shoal_of()
        before = frozen(still)
        only_first = {"schedule": lambda step, steps: float(step == 0), "optimizer": "sgd"}
        quick(still, method="ensemble", annealing="linear", lr=1.0, **only_first)
        assert_equal_trees(frozen(still), before)
        full = quick(annealing={"name": "constant", "gamma": 1.0})
        assert_same_run(full, quick())
        assert differ(frozen(quick(annealing="hyperbolic").ensemble), frozen(full.ensemble))

    @pytest.mark.parametrize("method", ["ensemble", "kde"])
    def test_half_a_drive_at_twice_the_rate_is_the_same_ensemble(self, method, double):
        options = {"optimizer": "sgd", "method": method, "temperature": 0.0, "steps": 5}
        one = quick(lr=0.1, **options).ensemble.weights
        other = quick(lr=0.2, annealing={"name": "constant", "gamma": 0.5}, **options)
        for name, tensor in other.ensemble.weights.items():
            torch.testing.assert_close(tensor, one[name], rtol=1e-12, atol=1e-14)


class TestInputs:
    def test_augmentation_is_what_the_members_see(self):
        x, y = points()
        one = quick(data=(x, y), augment=lambda inputs, _: 2 * inputs)
        assert_same_run(one, quick(data=(2 * x, y)))

    @pytest.mark.parametrize("seed, same", [(0, True), (1, False)])
    def test_crops_come_from_the_seed(self, seed, same):
        images, y = torch.rand(20, 1, 8, 8), torch.arange(20) % 4
        build = Blueprint(SmallCNN((4,)), (1, 8, 8), 4)
        options = {"data": (images, y), "augment": "crop-flip", "epochs": 1, "method": "ensemble"}
        options["optimizer"] = "sgd"  # Adam would divide gradients of rounding by their size
        one = quick(shoal_of(build, 2), **options)
        two = quick(shoal_of(build, 2), **options, seed=seed)
        assert differ(frozen(one.ensemble), frozen(two.ensemble)) != same
        calm = CropFlip(padding=0, flip=False)
        still = quick(shoal_of(build, 2), **(options | {"augment": calm}))
        never = quick(shoal_of(build, 2), **(options | {"augment": None}))
        for name, tensor in still.ensemble.weights.items():
            torch.testing.assert_close(tensor, never.ensemble.weights[name])
        assert differ(frozen(one.ensemble), frozen(never.ensemble))

    @pytest.mark.parametrize("shared", [False, True])
    @pytest.mark.parametrize("method", ["ensemble", "f-kde", "svgd"])
    def test_adversaries_without_reach_change_nothing(self, shared, method, double):
        x, y = points()
        data = x.double(), y
        near = shoal.Adversarial(epsilon=1e-13, shared=shared)
        one = quick(data=data, method=method, adversarial=near, optimizer="sgd", lr=0.1)
        other = quick(data=data, method=method, optimizer="sgd", lr=0.1)
        for name, tensor in one.ensemble.weights.items():
            torch.testing.assert_close(tensor, other.ensemble.weights[name], rtol=0, atol=1e-10)

    def test_adversaries_with_reach_are_shared_or_not(self, double):
        x, y = points()
        data = x.double(), y

        def trained(members, **settings):
            adversary = {"epsilon": 0.3} | settings
            ensemble = shoal_of(members=members)
            return frozen(quick(ensemble, data, adversarial=adversary).ensemble)

        assert differ(trained(3, shared=True), trained(3, shared=False))
        together, apart = trained(1, shared=True), trained(1, shared=False)
        for name, tensor in together.items():
            torch.testing.assert_close(tensor, apart[name], rtol=1e-10, atol=1e-12)
        assert differ(trained(3), frozen(quick(data=data).ensemble))
        by_number = quick(data=data, adversarial=0.3)
        assert not differ(frozen(by_number.ensemble), trained(3))


class TestMethods:
    @pytest.mark.parametrize("method", WASSERSTEIN)
    def test_without_temperature_or_strength_it_is_the_plain_ensemble(self, method):
        plain_run = quick(method="ensemble")
        cold, weak = quick(method=method, temperature=0.0), quick(method=method, strength=0.0)
        for run in (cold, weak):
            if method.startswith("f-"):  # another program; processors may round it differently
                expected = frozen(plain_run.ensemble)
                torch.testing.assert_close(frozen(run.ensemble), expected, rtol=1e-6, atol=1e-7)
            else:
                assert_equal_trees(frozen(run.ensemble), frozen(plain_run.ensemble))
        assert differ(frozen(quick(method=method).ensemble), frozen(plain_run.ensemble))

    @pytest.mark.parametrize("method", [*WASSERSTEIN, "svgd", "f-svgd"])
    def test_name_method_and_repulsion_are_three_ways_to_say_the_same(self, method):
        named = quick(method=method, strength=3.0)
        entry = shoal.methods.get(method).with_strength(3.0)
        assert_same_run(named, quick(method=entry))
        assert_same_run(named, quick(method=entry.repulsion))
        table = quick(method=entry.repulsion).config["method"]
        assert_same_run(named, quick(method=table))

    def test_the_default_is_the_plain_ensemble_everywhere(self):
        options = {"epochs": 2, "batch_size": BATCH, "progress": False}
        run = shoal.fit(shoal_of(plain), points(), **options)
        assert_same_run(run, quick(method="ensemble"))
        assert run.config["method"] == load_config("digits").method == "ensemble"
        for call in (shoal.Stepper, EnsembleClassifier, EnsembleRegressor):
            assert inspect.signature(call).parameters["method"].default == "ensemble"

    def test_a_plain_ensemble_has_no_strength(self):
        with pytest.raises(ConfigError, match="f-kde") as error:
            quick(method="ensemble", strength=3.0)
        assert_one_sentence(error.value)
        assert quick(method="ensemble", strength=0.0).config["strength"] is None

    def test_mixed_architectures_train_together(self):
        ensemble = shoal.Ensemble.init([(plain, 2), (both, 2)])
        before = frozen(ensemble)
        run = quick(ensemble, epochs=5)
        assert len(run.history[0]["member_loss"]) == 4
        assert all(differ({n: t}, before) for n, t in frozen(ensemble).items() if n != "alive")

    def test_repulsion_makes_the_members_differ_more(self):
        def spread(strength):
            run = quick(method="f-kde", strength=strength, epochs=40, lr=1e-2)
            return run.ensemble(points()[0]).std(0).mean()

        assert spread(100.0) > 1.5 * spread(0.0)


class TestSameness:
    def test_the_same_seed_gives_the_same_bits_and_another_does_not(self):
        one, two = quick(both), quick(both)
        assert_same_run(one, two)
        other = quick(shoal_of(both, seed=0), seed=1)
        assert differ(frozen(one.ensemble), frozen(other.ensemble))

    @pytest.mark.parametrize("method", ["f-kde", "kde"])
    def test_the_number_of_threads_does_not_matter(self, method):
        x, y = torch.randn(200, 64), torch.arange(200) % 10

        def trained(threads):
            torch.set_num_threads(threads)
            try:
                build = Blueprint(MLP((100, 100), dropout=0.1), (64,), 10)
                return quick(shoal_of(build, 4), (x, y), method=method, batch_size=128, steps=3)
            finally:
                torch.set_num_threads(1)

        assert_same_run(trained(1), trained(2))

    @pytest.mark.parametrize("engine", ["vmap", "chunk:1", "chunk:2", "loop"])
    @pytest.mark.parametrize("method", ["f-kde", "svgd"])
    def test_engines_decide_how_members_run_and_not_what_they_do(self, engine, method, double):
        x, y = points()
        options = {"data": (x.double(), y), "method": method, "optimizer": "sgd", "lr": 0.1}
        one, other = quick(both, **options), quick(both, engine=engine, **options)
        for name, tensor in one.ensemble.state.items():
            torch.testing.assert_close(tensor, other.ensemble.state[name], rtol=1e-10, atol=1e-12)
        assert other.history[-1]["loss"] == pytest.approx(one.history[-1]["loss"], rel=1e-10)

    @pytest.mark.parametrize("method", ["f-kde", "kde", "svgd", "f-ssge"])
    def test_the_order_of_the_members_does_not_matter(self, method, double):
        order = torch.tensor([2, 0, 1])
        one, other = shoal_of(), shoal_of()
        with torch.no_grad():
            for tensor in other.weights.values():
                tensor.copy_(tensor[order])
        quick(one, method=method, optimizer="sgd", lr=0.1)
        quick(other, method=method, optimizer="sgd", lr=0.1)
        for name, tensor in one.weights.items():
            torch.testing.assert_close(tensor[order], other.weights[name], rtol=1e-9, atol=1e-11)

    @pytest.mark.parametrize("build", [dropped, Noisy])
    def test_what_others_draw_at_random_is_neither_used_nor_disturbed(self, build, tmp_path):
        x, y = points()
        data = DataLoader(TensorDataset(x, y), batch_size=BATCH, shuffle=True)
        ensemble = shoal_of(build)
        torch.manual_seed(1)
        before = nothing_random()
        one = quick(ensemble, data, out=tmp_path / "run", augment=lambda inputs, _: inputs)
        assert all(
            np.array_equal(now, then)
            for now, then in zip(nothing_random()[:2], before[:2], strict=True)
        )
        assert random.getstate() == before[2]
        torch.manual_seed(99)
        np.random.seed(99)
        other = quick(shoal_of(build), data, augment=lambda inputs, _: inputs)
        assert_same_run(one, other)

    def test_precision(self):
        single, double = quick(epochs=1), quick(epochs=1, precision="float64")
        assert single.ensemble.dtype == torch.float32 and double.ensemble.dtype == torch.float64
        assert double.config["precision"] == "float64"
        for name, tensor in double.ensemble.weights.items():
            torch.testing.assert_close(
                tensor.float(), single.ensemble.weights[name], rtol=1e-4, atol=1e-5
            )
        assert differ(frozen(single.ensemble), frozen(shoal_of()))


class TestCallbacks:
    def test_they_see_the_run_after_every_epoch(self):
        seen = []
        run = quick(epochs=3, callbacks=[lambda event: seen.append(len(event.run.history))])
        assert seen == [1, 2, 3]
        assert run.history[-1]["epoch"] == 3

    def test_looking_does_not_change_the_run(self):
        def look(event):
            shoal.predict(event.run, points()[0])
            torch.rand(5)

        assert_equal_trees(
            frozen(quick(dropped, callbacks=[look]).ensemble), frozen(quick(dropped).ensemble)
        )

    def test_what_they_raise_comes_out_and_the_members_are_left_in_evaluation_mode(self):
        def stop(event):
            raise RuntimeError("enough")

        ensemble = shoal_of(both)
        with pytest.raises(RuntimeError, match="enough"):
            quick(ensemble, callbacks=[stop])
        assert not ensemble.training


class TestHistory:
    def test_loss_is_the_mean_over_batches_and_members_before_each_step(self):
        x, y = points()
        ensemble = shoal_of()
        expected = Categorical().log_prob(ensemble(x).detach(), y).mean(-1).neg()
        row = quick(ensemble, (x, y), steps=1, batch_size=len(x)).history[0]
        torch.testing.assert_close(torch.tensor(row["member_loss"]), expected)
        assert row["loss"] == pytest.approx(float(expected.mean()))

    def test_ratio_is_push_over_drive_and_strength_scales_it(self):
        weak = quick(steps=1, strength=1.0).history[0]
        strong = quick(steps=1, strength=50.0).history[0]
        assert weak["ratio"] == pytest.approx(weak["push"] / weak["drive"])
        assert strong["push"] == pytest.approx(50 * weak["push"])
        assert strong["drive"] == pytest.approx(weak["drive"])
        assert 1 <= weak["effective"] <= 3 and weak["h2"] > 0

    def test_runs_are_frozen_records(self):
        run = quick(epochs=1)
        with pytest.raises(dataclasses.FrozenInstanceError):
            run.history = []
        assert run.folder is None

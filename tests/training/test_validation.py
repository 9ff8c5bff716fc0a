"""Validation data, early stopping, and the members of the best epoch."""

import json
import math
import os
import signal
import subprocess
import sys

import numpy as np
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
    make_old,
    plain,
    points,
    quick,
    shoal_of,
    story,
)
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Dataset, Split, held_out
from shoal.training.folder.history import best_epoch
from shoal.training.folder.run import RunFolder
from shoal.training.loop.validation import has_waited

pytestmark = pytest.mark.usefixtures("warm")

HELD = points(24, seed=9)
LATE = {"lr": 0.1, "epochs": 14, "validation": HELD, "patience": 2}
"""A run that ends early: its learning rate is large."""


def measured(run, data=HELD, weight=None):
    """The metrics that a history row has, from the whole prediction at once."""
    found = shoal.evaluate(shoal.predict(run, data[0]), data[1], sample_weight=weight)
    return {name: found[name] for name in ("nll", "accuracy", "rmse") if name in found}


# What is measured


@pytest.mark.parametrize("method", ["ensemble", "f-kde", "svgd", "forde"])
def test_the_numbers_are_those_of_evaluate_and_training_is_not_changed(method):
    run = quick(plain if method == "forde" else both, validation=HELD, method=method)
    assert run.history[-1]["validation"] == pytest.approx(measured(run), rel=1e-6)
    assert run.history[0]["validation"] != run.history[1]["validation"]
    without = quick(plain if method == "forde" else both, method=method)
    assert_equal_trees(frozen(run.ensemble), frozen(without.ensemble))
    rows = [{k: v for k, v in row.items() if k != "validation"} for row in run.history]
    assert story(rows) == story(without.history)
    assert "validation" not in without.history[0] and without.best_epoch is None


def regression():
    x, _ = points(40)
    return x, (2 * x[:, :1] + x[:, 1:2] + 5).float()


def test_regression_has_the_root_mean_square_error_in_the_units_of_the_targets():
    x, y = regression()
    held = x[:16] + 1, y[:16] + 2
    run = quick(lambda: nn.Linear(3, 1), (x, y), validation=held)
    assert run.history[-1]["validation"] == pytest.approx(measured(run, held), rel=1e-6)
    assert run.history[-1]["validation"].keys() == {"nll", "rmse"}


@pytest.mark.parametrize("weight", [[1.0, 2.0, 3.0], [0.5, 1.5, 0.25]])
def test_validation_data_may_be_weighted(weight):
    weights = torch.tensor(weight).repeat(8)
    run = quick(validation=(*HELD, weights), batch_size=10)
    assert run.history[-1]["validation"] == pytest.approx(measured(run, HELD, weights), rel=1e-6)


def loader(n=24):
    x, y = points(n, seed=9)
    return DataLoader(TensorDataset(x, y), batch_size=7)


GIVEN = {
    "arrays": lambda: tuple(map(np.asarray, HELD)),
    "split": lambda: Split(*HELD),
    "dataset": lambda: Dataset("mine", Split(*points()), validation=Split(*HELD)),
    "torch dataset": lambda: TensorDataset(*HELD),
    "loader": loader,
    "batches": lambda: [(HELD[0][:10], HELD[1][:10]), (HELD[0][10:], HELD[1][10:])],
}


@pytest.mark.parametrize("given", GIVEN)
def test_every_kind_of_data_gives_the_same_numbers(given):
    run = quick(both, validation=GIVEN[given]())
    reference = quick(both, validation=HELD)
    for row, expected in zip(run.history, reference.history, strict=True):
        assert row["validation"] == pytest.approx(expected["validation"], rel=1e-6)


class Masked(nn.Module):
    """Tokens, with an attention mask, to labels per token."""

    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 6), nn.Linear(6, 3)

    def forward(self, input_ids, attention_mask):
        return self.out(self.embed(input_ids) * attention_mask[..., None])


def tokens(n, seed=0):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 11, (n, 5), generator=generator)
    mask = (torch.arange(5) < torch.randint(1, 6, (n, 1), generator=generator)).long()
    return {"input_ids": ids, "attention_mask": mask}, (ids % 3).where(mask.bool(), -100)


def test_dicts_with_masks_and_ignored_targets():
    x, y = tokens(12, seed=1)
    run = quick(Masked, tokens(30), validation=(x, y), batch_size=5)
    assert run.history[-1]["validation"] == pytest.approx(measured(run, (x, y)), rel=1e-6)


def test_a_share_of_dicts_is_held_out():
    run = quick(Masked, tokens(30), validation=0.2, batch_size=6)
    assert run.provenance["data"]["points"] == 24 and run.history[-1]["step"] == 2 * 4


def test_a_loss_of_the_users_own_is_measured():
    own = shoal.likelihoods.Custom(lambda outputs, y: nn.functional.cross_entropy(outputs, y))
    run = quick(validation=HELD, likelihood=own, method="ensemble", patience=5)
    assert run.history[-1]["validation"].keys() == {"loss"} and run.best_epoch is not None


@pytest.mark.parametrize(
    "options",
    [{"resident": 2, "offload": "host"}, {"resident": 2, "offload": "disk"}, {"memory": "64MB"}],
)
def test_members_that_do_not_fit(options, tmp_path):
    given = LATE | {"method": "kde"}
    run = quick(both, out=tmp_path / "one", **given, **options)
    reference = quick(both, **given)
    assert run.best_epoch == reference.best_epoch < len(run.history) == len(reference.history)
    for row, expected in zip(run.history, reference.history, strict=True):
        assert row["validation"] == pytest.approx(expected["validation"], rel=1e-4)
    assert measured(run) == pytest.approx(run.history[run.best_epoch - 1]["validation"], rel=1e-5)


class Trunk(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.head = nn.Linear(3, 8), nn.Linear(8, 4)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.trunk.reset_parameters()
        self.trunk.requires_grad_(False)

    def forward(self, x):
        return self.head(self.trunk(x).relu())


def test_cached_features():
    given = LATE | {"method": "f-kde"}
    run, reference = (quick(Trunk, cache=cache, **given) for cache in (True, False))
    assert run.history[-1]["validation"] == pytest.approx(
        reference.history[-1]["validation"], rel=1e-3
    )
    assert measured(run) == pytest.approx(run.history[run.best_epoch - 1]["validation"], rel=1e-5)


def test_frozen_members_are_part_of_the_prediction(tmp_path):
    quick(both, out=tmp_path / "one")
    run = shoal.grow(shoal.load(tmp_path / "one", both), 2, data=points(), progress=False, **LATE)
    assert run.ensemble.members == 5
    assert measured(run) == pytest.approx(run.history[run.best_epoch - 1]["validation"], rel=1e-6)


def test_a_diverged_member_is_left_out():
    def poison(event):
        if event.epoch == 1:
            for weight in event.run.ensemble.weights.values():
                weight.data[1] = math.nan

    with pytest.warns(shoal.ShoalWarning):
        run = quick(epochs=3, validation=HELD, callbacks=[poison])
    with pytest.warns(shoal.ShoalWarning):
        assert run.history[-1]["validation"] == pytest.approx(measured(run), rel=1e-6)


# A share of the training data


def test_held_out_points_are_drawn_by_the_seed_and_never_train():
    trains, held = held_out(POINTS, 0.25, seed=3)
    assert len(held) == 10 and sorted([*trains.tolist(), *held.tolist()]) == list(range(POINTS))
    assert not torch.equal(held, held_out(POINTS, 0.25, seed=4)[1])
    x, y = points()
    run = quick(both, validation=0.25, seed=3)
    reference = quick(both, (x[trains], y[trains]), validation=(x[held], y[held]), seed=3)
    assert_same_run(run, reference)
    assert run.provenance["data"]["points"] == 30  # N of the posterior
    assert run.config["validation"] == 0.25


def test_the_held_out_points_have_their_weights():
    x, y = points()
    weight = torch.rand(POINTS, generator=torch.Generator().manual_seed(1)) + 0.5
    trains, held = held_out(POINTS, 0.25, seed=0)
    run = quick(validation=0.25, sample_weight=weight)
    assert run.history[-1]["validation"] == pytest.approx(
        measured(run, (x[held], y[held]), weight[held]), rel=1e-6
    )


def test_a_run_loads_the_training_part_of_its_data_set(tmp_path):
    from shoal.training.folder.own_data import own_data

    data = shoal.data.load("toy-classification")
    run = quick(lambda: nn.Linear(2, 5), data, validation=0.5, out=tmp_path)
    again = own_data(run, "the run", "")
    assert len(again.train) == run.provenance["data"]["points"] == len(data.train) // 2
    trains, held = held_out(len(data.train), 0.5, seed=0)
    assert torch.equal(again.train.x, data.train.x[trains])
    assert torch.equal(again.validation.x, data.train.x[held])
    more = shoal.grow(run, 1, progress=False)
    assert more.provenance["data"] == run.provenance["data"]


# Early stopping and the best epoch


def test_patience_counts_epochs_after_the_best():
    rows = [
        {"epoch": epoch, "validation": {"nll": value}}
        for epoch, value in enumerate([3.0, 1.0, 2.0, None, 1.0], 1)
    ]
    assert best_epoch(rows) == 2
    assert [has_waited(rows[:n], 3) for n in range(6)] == [False] * 5 + [True]
    assert not has_waited(rows, None)


def test_a_run_ends_early_with_its_best_members(tmp_path):
    run = quick(both, out=tmp_path, **LATE)
    last = quick(both, **LATE, keep="last")
    assert run.best_epoch + 2 == len(run.history) < 14
    assert story(run.history) == story(last.history) and last.best_epoch == run.best_epoch
    best = run.history[run.best_epoch - 1]["validation"]
    assert min(row["validation"]["nll"] for row in run.history) == best["nll"]
    assert measured(run) == pytest.approx(best, rel=1e-6)
    assert measured(last) == pytest.approx(last.history[-1]["validation"], rel=1e-6)
    assert measured(last)["nll"] > measured(run)["nll"]
    assert any(f"epoch {run.best_epoch}," in note for note in run.notes)
    assert any("did not fall for 2 epochs" in note for note in run.notes)
    short = quick(both, lr=0.1, epochs=run.best_epoch)
    assert_equal_trees(frozen(run.ensemble), frozen(short.ensemble))


def test_the_folder_has_the_best_members_and_says_of_which_epoch(tmp_path):
    run = quick(both, out=tmp_path, **LATE)
    loaded = shoal.load(tmp_path, both)
    assert_same_run(loaded, run)
    assert loaded.best_epoch == run.best_epoch and loaded.notes == run.notes
    checkpoint = RunFolder(tmp_path).checkpoint()
    assert checkpoint.state["best"] == {"epoch": run.best_epoch}
    assert checkpoint.step == run.history[-1]["step"]
    assert differ(checkpoint.parts["ensemble"], checkpoint.parts["best"])
    assert measured(loaded) == measured(run)


def test_the_learned_likelihood_is_that_of_the_best_epoch(tmp_path):
    data, held = regression(), (regression()[0][:9], torch.zeros(9, 1))
    options = {"epochs": 5, "validation": held, "keep": "best", "lr": 0.05}
    run = quick(lambda: nn.Linear(3, 1), data, out=tmp_path, **options)
    assert run.best_epoch < 5
    best = run.history[run.best_epoch - 1]["validation"]
    assert measured(run, held) == pytest.approx(best, rel=1e-6)
    loaded = shoal.load(tmp_path, lambda: nn.Linear(3, 1))
    assert measured(loaded, held) == pytest.approx(best, rel=1e-6)


def test_keep_best_without_patience_trains_to_the_end():
    run = quick(both, **(LATE | {"patience": None}), keep="best")
    assert len(run.history) == 14 and run.best_epoch < 14
    assert measured(run) == pytest.approx(run.history[run.best_epoch - 1]["validation"], rel=1e-6)


# Stopped and resumed


@pytest.mark.parametrize("at", [6, 13, 21])
def test_a_stopped_run_resumes_to_the_bit(tmp_path, at):
    options = LATE | {"save_every": 0}
    whole = quick(both, out=tmp_path / "whole", schedule=Fuse(10**6), **options)
    with pytest.raises(Fuse.Blown):
        quick(both, out=tmp_path / "cut", schedule=Fuse(at), **options)
    resumed = quick(both, out=tmp_path / "cut", schedule=Fuse(10**6), resume=True, **options)
    assert_same_run(resumed, whole)
    assert_same_folder(tmp_path / "whole", tmp_path / "cut")
    assert resumed.notes == whole.notes
    # A run that has ended early is finished.
    again = quick(both, out=tmp_path / "cut", schedule=Fuse(0), resume=True, **options)
    assert_same_run(again, whole)


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from small_runs import both, points, quick
from test_validation import LATE

def die(event):
    if event.epoch == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

quick(both, out=sys.argv[2], save_every=0, callbacks=[die], **LATE)
"""


def test_a_killed_run_keeps_its_best_members_and_resumes_to_the_bit(tmp_path):
    whole = quick(both, out=tmp_path / "whole", **LATE)
    where = os.path.dirname(os.path.dirname(__file__))
    paths = os.pathsep.join([os.path.dirname(__file__), os.path.dirname(where)])
    command = [sys.executable, "-c", KILLED, where, str(tmp_path / "cut")]
    done = subprocess.run(
        [*command, str(whole.best_epoch + 1)],
        env=os.environ | {"PYTHONPATH": paths},
        capture_output=True,
        text=True,
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    left = shoal.load(tmp_path / "cut", both)
    assert_equal_trees(frozen(left.ensemble), frozen(whole.ensemble))
    resumed = quick(both, out=tmp_path / "cut", resume=True, **LATE)
    assert_same_run(resumed, whole)
    assert_same_folder(tmp_path / "whole", tmp_path / "cut")


def test_other_validation_data_are_refused(tmp_path):
    quick(out=tmp_path, validation=HELD)
    with pytest.raises(ConfigError) as error:
        quick(out=tmp_path, validation=points(24, seed=8), resume=True)
    assert_one_sentence(error.value, "validation data")
    with pytest.raises(ConfigError) as error:
        quick(out=tmp_path, validation=0.1, resume=True)
    assert_one_sentence(error.value, "validation")


def test_an_older_folder_goes_on_without_validation(tmp_path):
    quick(both, out=tmp_path)
    make_old(tmp_path)
    run = quick(both, out=tmp_path, resume=True)
    assert run.best_epoch is None and shoal.load(tmp_path, both).best_epoch is None


# More epochs


@pytest.mark.parametrize("options", [{"epochs": 3}, {"steps": 10}])
def test_a_finished_run_goes_on_as_if_it_had_been_longer(tmp_path, options):
    quick(both, out=tmp_path / "run", **options)
    with pytest.raises(Fuse.Blown):  # a kill after the config has changed
        quick(both, out=tmp_path / "run", epochs=6, resume=True, save_every=0, callbacks=[blow])
    assert shoal.load(tmp_path / "run", both).config["epochs"] == 6
    longer = quick(both, out=tmp_path / "run", epochs=6, resume=True)
    whole = quick(both, out=tmp_path / "whole", epochs=6)
    assert_equal_trees(frozen(longer.ensemble), frozen(whole.ensemble))
    if "epochs" in options:
        assert_same_run(longer, whole)
    assert_same_run(shoal.load(tmp_path / "run", both), longer)


def blow(event):
    raise Fuse.Blown


def test_a_kill_between_the_two_configs_leaves_a_run(tmp_path, monkeypatch):
    quick(both, out=tmp_path, epochs=2)

    def fail(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr("shoal.training.folder.run_folder.write_text", fail)
    with pytest.raises(KeyboardInterrupt):
        quick(both, out=tmp_path, epochs=4, resume=True)
    monkeypatch.undo()
    assert shoal.load(tmp_path, both).config["epochs"] == 2
    assert_same_run(quick(both, out=tmp_path, epochs=4, resume=True), quick(both, epochs=4))


def test_a_changed_config_is_found_after_a_run_went_on(tmp_path):
    quick(both, out=tmp_path, epochs=1)
    quick(both, out=tmp_path, epochs=2, resume=True)
    path = tmp_path / "config.toml"
    path.write_text(path.read_text().replace("batch_size = 10", "batch_size = 11"))
    with pytest.raises(shoal.StorageError) as error:
        shoal.load(tmp_path, both)
    assert_one_sentence(error.value, "batch_size")


@pytest.mark.parametrize("fewer", [{"epochs": 2}, {"steps": 11}])
def test_fewer_epochs_than_done_are_refused(tmp_path, fewer):
    quick(out=tmp_path, epochs=3)
    before = (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ConfigError) as error:
        quick(out=tmp_path, resume=True, **fewer)
    assert_one_sentence(error.value, next(iter(fewer)))
    assert (tmp_path / "config.toml").read_bytes() == before
    quick(out=tmp_path, epochs=3, resume=True)


def test_a_schedule_uses_the_new_total(tmp_path):
    quick(out=tmp_path, epochs=2, schedule="linear")
    run = quick(out=tmp_path, epochs=4, schedule="linear", resume=True)
    assert run.history[2]["lr"] == pytest.approx(1e-3 * (1 - 11 / 16), rel=1e-5)


def test_a_run_that_ended_early_goes_on_with_more_patience(tmp_path):
    run = quick(both, out=tmp_path, **LATE)
    longer = quick(both, out=tmp_path, resume=True, **(LATE | {"patience": 4}))
    whole = quick(both, **(LATE | {"patience": 4}))
    assert len(longer.history) > len(run.history)
    assert_same_run(longer, whole)
    assert len([note for note in longer.notes if "did not fall" in note]) <= 1


# What is refused


@pytest.mark.parametrize(
    "options, word",
    [
        ({"patience": 3}, "patience"),
        ({"keep": "best"}, "keep"),
        ({"validation": 0.1, "keep": "all"}, "keep"),
        ({"validation": 0.1, "patience": 0}, "patience"),
        ({"validation": 1.0}, "validation"),
        ({"validation": 0}, "validation"),
        ({"validation": 7}, "validation"),
        ({"validation": True}, "validation"),
        ({"validation": "half"}, "validation"),
        ({"validation": {"custom": "own data"}}, "validation"),
        ({"validation": math.nan}, "validation"),
        ({"validation": 0.1, "data": loader()}, "validation"),
        ({"validation": Dataset("mine", Split(*points()))}, "validation"),
        ({"validation": (HELD[0], HELD[1] + 3)}, ""),
        ({"validation": (HELD[0][:, :2], HELD[1])}, ""),
        ({"validation": HELD[0]}, "targets"),
        ({"validation": 0.5, "data": (torch.randn(1, 3), torch.tensor([1]))}, ""),
    ],
)
def test_what_cannot_work_is_refused_before_training(options, word, tmp_path):
    with pytest.raises((ConfigError, DataError)) as error:
        quick(shoal_of(), out=tmp_path / "run", **options)
    assert_one_sentence(error.value, word)
    assert not (tmp_path / "run").exists()


def test_progress_shows_the_validation_measures(capsys):
    run = quick(validation=HELD, progress=True)
    nll = run.history[-1]["validation"]["nll"]
    assert f"validation nll {nll:.4f}" in capsys.readouterr().err


def test_the_history_file_has_the_measures(tmp_path):
    run = quick(validation=HELD, out=tmp_path)
    rows = [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]
    assert [row["validation"] for row in rows] == [row["validation"] for row in run.history]

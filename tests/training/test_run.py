"""The folder of a run: what is in it, and what comes out of it again."""

import json
import tomllib
from dataclasses import replace

import numpy as np
import pytest
import torch
from small_runs import (
    CLASSES,
    assert_equal_trees,
    assert_one_sentence,
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

import shoal
from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError, StorageError
from shoal.interaction.bandwidths import Fixed
from shoal.models import MLP, Blueprint, SmallCNN
from shoal.training.options.options import NAMES

BLUEPRINT = Blueprint(MLP((8,), "tanh", norm="batch", dropout=0.2), (3,), CLASSES)
IMAGES = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 4
NOT_SETTINGS = {"device", "save_every", "cache", "memory", "mesh", "offload", "resident", "trunk"}
FULL = {
    "method": "f-sge",
    "legacy": True,
    "strength": 3.5,
    "likelihood": "categorical",
    "prior": {"name": "fan-in", "scale": 0.7},
    "optimizer": {"name": "sgd", "momentum": 0.8, "weight_decay": 0.02},
    "lr": 3e-3,
    "schedule": {"name": "steps", "at": (0.3, 0.6), "factor": 0.5},
    "steps": 7,
    "batch_size": 6,
    "validation": 0.25,
    "patience": 4,
    "keep": "last",
    "outputs": 0,
    "temperature": 0.3,
    "noise": 0.5,
    "annealing": {"name": "cyclic", "cycles": 2},
    "adversarial": {"epsilon": 0.05, "shared": True},
    "augment": {"name": "crop-flip", "padding": 1},
    "clip": 0.5,
    "seed": 12,
    "precision": "float64",
    "engine": "chunk:2",
    "keep_every": 2,
    "frozen": 1,
}
"""Every setting away from its default, but for those that exclude another."""

CALIBRATED = {"calibrated": True, "epochs": 2, "batches": "own", "folds": 2}


def settings_in(folder):
    return tomllib.loads((folder / "config.toml").read_text())


class TestLoading:
    @pytest.mark.parametrize("precision", [None, "float64"])
    @pytest.mark.parametrize(
        "build", [BLUEPRINT, [(BLUEPRINT, 2), (Blueprint(MLP((4,)), (3,), CLASSES), 1)]]
    )
    def test_a_registered_model_needs_nothing_but_the_folder(self, build, precision, tmp_path):
        members = 3 if callable(build) else None
        run = quick(shoal.Ensemble.init(build, members), out=tmp_path, precision=precision)
        loaded = shoal.load(tmp_path)
        assert_same_run(loaded, run)
        assert loaded.history == run.history and loaded.notes == run.notes
        assert loaded.likelihood == run.likelihood and loaded.folder == tmp_path == run.folder
        x, _ = points(seed=5)
        mine, theirs = shoal.predict(run, x), shoal.predict(loaded, x)
        assert mine.members.equal(theirs.members)
        assert shoal.predict(tmp_path, x).members.equal(mine.members)
        assert shoal.predict(str(tmp_path), x).probs.equal(mine.probs)

    @pytest.mark.parametrize("precision", [None, "float64"])
    def test_a_network_of_ones_own_comes_with_its_factory(self, precision, tmp_path):
        run = quick(both, out=tmp_path, precision=precision)
        loaded = shoal.load(tmp_path, build=both)
        assert_same_run(loaded, run)
        with pytest.raises(ConfigError) as caught:
            shoal.load(tmp_path)
        call = f"shoal.load('{tmp_path}', build=both)"
        assert_one_sentence(caught.value, "your own 'both'", call)

    def test_networks_that_were_double_from_the_start_stay_double(self, tmp_path):
        def build():
            return plain().double()

        run = quick(shoal_of(build), out=tmp_path)
        assert run.ensemble.dtype == torch.float64
        assert_same_run(shoal.load(tmp_path, build=build), run)

    def test_another_factory_is_refused(self, tmp_path):
        quick(plain, out=tmp_path)
        for build in (both, lambda: nn.Linear(3, CLASSES)):
            with pytest.raises(ConfigError) as caught:
                shoal.load(tmp_path, build=build)
            assert_one_sentence(caught.value)

    def test_loading_neither_draws_nor_trains(self, tmp_path):
        quick(BLUEPRINT, out=tmp_path)
        state = torch.get_rng_state()
        one, two = shoal.load(tmp_path), shoal.load(tmp_path)
        assert torch.get_rng_state().equal(state)
        assert_equal_trees(frozen(one.ensemble), frozen(two.ensemble))
        assert not one.ensemble.training

    def test_a_loaded_ensemble_can_be_trained_on(self, tmp_path):
        quick(plain, out=tmp_path)
        loaded = shoal.load(tmp_path, plain).ensemble
        before = frozen(loaded)
        quick(loaded)
        assert differ(frozen(loaded), before)


class TestTheFolder:
    def test_it_holds_these_files_and_no_others(self, tmp_path):
        quick(out=tmp_path / "a" / "run", save_every=0)
        names = {path.name for path in (tmp_path / "a" / "run").iterdir()}
        assert names == {"config.toml", "provenance.json", "history.jsonl", "checkpoints"}

    def test_history_is_one_line_of_json_an_epoch(self, tmp_path):
        run = quick(out=tmp_path, epochs=3)
        lines = (tmp_path / "history.jsonl").read_text().splitlines()
        assert [json.loads(line) for line in lines] == run.history

    def test_an_empty_folder_is_a_place_to_start(self, tmp_path):
        assert_same_run(quick(out=tmp_path), quick())

    def test_the_working_folder_does_not_matter(self, tmp_path, monkeypatch):
        monkeypatch.chdir(tmp_path)
        run = quick(out="runs/first")
        assert (tmp_path / "runs" / "first" / "config.toml").exists()
        assert_same_run(shoal.load("runs/first", plain), run)


class TestTheConfig:
    def test_it_has_every_setting_that_decides_the_result(self, tmp_path):
        decisive = set(NAMES) - NOT_SETTINGS
        run = quick(Blueprint(SmallCNN((4,)), (1, 8, 8), 4), IMAGES, out=tmp_path, **FULL)
        assert decisive <= run.config.keys()
        assert decisive - {"epochs", "folds"} <= settings_in(tmp_path).keys()
        assert {*FULL, *CALIBRATED} == decisive, "the examples must cover every setting"

    @pytest.mark.parametrize(
        "options",
        [FULL, CALIBRATED, {"epochs": 2}],
        ids=["everything", "calibrated", "defaults"],
    )
    def test_the_run_can_be_repeated_from_it(self, options, tmp_path):
        build = Blueprint(SmallCNN((4,)), (1, 8, 8), 4)
        run = shoal.fit(shoal_of(build), IMAGES, out=tmp_path / "one", progress=False, **options)
        config = settings_in(tmp_path / "one")
        again = {key: config.get(key) for key in NAMES if key not in NOT_SETTINGS}
        model = dict(config["model"][0])
        members = model.pop("members")
        ensemble = shoal_of(Blueprint.from_spec(model), members)
        repeated = shoal.fit(ensemble, IMAGES, out=tmp_path / "two", progress=False, **again)
        assert_same_run(repeated, run)
        one, two = ((tmp_path / name / "config.toml").read_bytes() for name in ("one", "two"))
        assert one == two

    def test_a_composition_of_ones_own_is_written_out(self, tmp_path):
        mine = shoal.Repulsion(
            shoal.spaces.Outputs(),
            shoal.kernels.Laplace(),
            Fixed(2.0),
            shoal.flows.Wasserstein(shoal.estimators.SGE(0.3)),
            strength=4.0,
        )
        run = quick(method=mine, out=tmp_path)
        assert_same_run(quick(method=settings_in(tmp_path)["method"]), run)

    def test_a_changed_method_does_not_go_by_the_name_of_the_old_one(self, tmp_path):
        known = shoal.methods.get("kde")
        mine = replace(known, repulsion=replace(known.repulsion, bandwidth=Fixed(2.0)))
        run = quick(method=mine, out=tmp_path)
        assert_same_run(quick(method=settings_in(tmp_path)["method"]), run)

    def test_a_kernel_that_is_not_registered_can_still_be_tried(self):
        class Mine(shoal.kernels.RBF):
            pass

        repulsion = shoal.Repulsion(kernel=Mine())
        assert_equal_trees(
            frozen(quick(method=repulsion).ensemble), frozen(quick(method="f-kde").ensemble)
        )

    @pytest.mark.filterwarnings("ignore:Training diverged:shoal.ShoalWarning")
    @pytest.mark.parametrize("key", ["lr", "temperature", "strength", "clip"])
    @pytest.mark.parametrize("kind", ["float64", "float32", "tensor", "int"])
    def test_numbers_of_any_library_are_written_as_numbers(self, key, kind, tmp_path):
        kinds = {"float64": np.float64, "float32": np.float32, "tensor": torch.tensor, "int": int}
        value = kinds[kind](2)
        quick(out=tmp_path, epochs=1, **{key: value})
        assert settings_in(tmp_path)[key] == 2.0
        shoal.load(tmp_path, plain)
        quick(out=tmp_path, epochs=1, resume=True, **{key: 2.0})

    @pytest.mark.parametrize(
        "options",
        [
            {"optimizer": {"name": "sgd", "momentum": np.float64(0.9)}},
            {"optimizer": {"name": "adamw", "betas": (0.8, 0.9), "weight_decay": 0.02}},
            {"prior": {"name": "gaussian", "std": np.float64(2.0)}},
            {"schedule": {"name": "steps", "at": np.array([0.5, 0.7])}},
            {"adversarial": np.float32(0.1)},
        ],
        ids=lambda options: next(iter(options)),
    )
    def test_so_are_those_within_tables(self, options, tmp_path):
        run = quick(out=tmp_path, **options)
        assert_same_run(shoal.load(tmp_path, plain), run)
        ((key, _),) = options.items()
        assert_same_run(quick(out=tmp_path, resume=True, **{key: settings_in(tmp_path)[key]}), run)

    def test_functions_of_ones_own_are_named(self, tmp_path):
        def brighter(x, _):
            return 2 * x

        quick(out=tmp_path, augment=brighter)
        assert "brighter" in settings_in(tmp_path)["augment"]["custom"]

    def test_a_likelihood_of_ones_own_is_given_again_to_load(self, tmp_path):
        class Mine(shoal.likelihoods.Categorical):
            pass

        run = quick(likelihood=Mine(), out=tmp_path)
        assert_equal_trees(frozen(run.ensemble), frozen(quick().ensemble))
        with pytest.raises(ConfigError) as caught:
            shoal.load(tmp_path, plain)
        assert_one_sentence(caught.value, "Mine", "likelihood=")
        loaded = shoal.load(tmp_path, plain, likelihood=Mine())
        assert loaded.likelihood == Mine()
        assert_equal_trees(frozen(loaded.ensemble), frozen(run.ensemble))


class TestWhatIsNotARun:
    def test_an_empty_folder(self, tmp_path):
        self.refuse(tmp_path, "is not a run", "config.toml")

    def test_no_folder(self, tmp_path):
        self.refuse(tmp_path / "nowhere", "is not a run", "no such folder")

    def test_a_file(self, tmp_path):
        path = tmp_path / "file"
        path.write_text("lr = 1")
        self.refuse(path, "is not a run", "is a file")
        with pytest.raises(StorageError) as caught:
            quick(out=path)
        assert_one_sentence(caught.value, "file", str(path))
        assert path.read_text() == "lr = 1"

    def test_a_folder_of_something_else(self, tmp_path):
        (tmp_path / "holiday.txt").write_text("sun")
        self.refuse(tmp_path, "is not a run", "config.toml")

    def test_a_config_without_weights(self, tmp_path):
        (tmp_path / "config.toml").write_text("lr = 1")
        self.refuse(tmp_path, "no checkpoint")

    @pytest.mark.parametrize("text", ["lr = ", "\x00", "a = [" * 10_000])
    def test_a_config_that_is_not_toml(self, text, tmp_path):
        (tmp_path / "config.toml").write_text(text)
        self.refuse(tmp_path, "config.toml")

    def test_a_config_that_is_not_text(self, tmp_path):
        (tmp_path / "config.toml").write_bytes(b"\xff\xfe\xfa")
        self.refuse(tmp_path, "config.toml")

    @pytest.mark.parametrize("key", ["name", "members", "input_shape", "outputs"])
    def test_a_config_that_lost_a_key_of_the_model(self, key, tmp_path):
        quick(BLUEPRINT, out=tmp_path)
        config = settings_in(tmp_path)
        del config["model"][0][key]
        (tmp_path / "config.toml").write_text(shoal.core.storage.formats.to_toml(config))
        with pytest.raises((ConfigError, StorageError)) as caught:
            shoal.load(tmp_path)
        assert_one_sentence(caught.value)

    def test_a_config_of_a_smaller_model(self, tmp_path):
        quick(BLUEPRINT, out=tmp_path)
        config = settings_in(tmp_path)
        config["model"][0]["hidden"] = [7]
        (tmp_path / "config.toml").write_text(shoal.core.storage.formats.to_toml(config))
        with pytest.raises(CheckpointCorrupt) as caught:
            shoal.load(tmp_path)
        assert_one_sentence(caught.value, "config.toml was changed")
        make_old(tmp_path)
        with pytest.raises(ConfigError) as caught:
            shoal.load(tmp_path)
        assert_one_sentence(caught.value, "numbers")

    def refuse(self, path, *words):
        with pytest.raises(StorageError) as caught:
            shoal.load(path)
        assert_one_sentence(caught.value, *words)
        assert caught.value.exit_status == 74
        with pytest.raises(StorageError):
            shoal.predict(path, points()[0])


def test_nothing_to_predict_is_data_and_not_storage(tmp_path):
    quick(BLUEPRINT, out=tmp_path)
    with pytest.raises(DataError):
        shoal.predict(tmp_path, torch.zeros(0, 3))


def test_saved_history_is_the_run_s_own(tmp_path):
    run = quick(BLUEPRINT, out=tmp_path, epochs=3, annealing="linear")
    assert story(shoal.load(tmp_path).history) == story(run.history)

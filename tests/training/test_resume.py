"""A run that was stopped and taken up again is the run that was never stopped."""

import random
import shutil
import threading

import numpy as np
import pytest
import torch
from small_runs import (
    BATCH,
    POINTS,
    STEPS_PER_EPOCH,
    Fuse,
    Noisy,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_folder,
    assert_same_run,
    both,
    differ,
    dropped,
    frozen,
    make_old,
    normed,
    plain,
    points,
    quick,
    shoal_of,
    story,
)
from torch.utils.data import DataLoader, Dataset
from triton_ready import needs_gpu

import shoal
from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalWarning, StorageError
from shoal.core.storage.checkpoints import steps
from shoal.engine.members.member_runner import MemberRunner
from shoal.interaction.methods import METHODS
from shoal.models import Blueprint, SmallCNN
from shoal.training.options.optim import optimizers

EPOCHS = 3
MOMENTUM = {"name": "sgd", "momentum": 0.9, "nesterov": True}


def whole(folder, build=plain, **options):
    return quick(build, out=folder, schedule=Fuse(), epochs=EPOCHS, **options)


def stopped(folder, at, build=plain, save_every=0.0, **options):
    """A run that breaks in the middle of step `at`."""
    with pytest.raises(Fuse.Blown):
        quick(build, out=folder, schedule=Fuse(at), epochs=EPOCHS, save_every=save_every, **options)


def resumed(folder, build=plain, **options):
    """Continued with members that were drawn from another seed, which must not matter."""
    ensemble = shoal_of(build, seed=7)
    return quick(ensemble, out=folder, schedule=Fuse(), epochs=EPOCHS, resume=True, **options)


class TestBitForBit:
    @pytest.mark.parametrize("build", [normed, dropped], ids=["batchnorm", "dropout"])
    @pytest.mark.parametrize("optimizer", [MOMENTUM, "adamw"], ids=["momentum", "adamw"])
    @pytest.mark.parametrize("method", ["ensemble", "kde", "svgd", "f-kde"])
    def test_in_the_middle_of_an_epoch(self, method, optimizer, build, tmp_path):
        options = {"build": build, "method": method, "optimizer": optimizer}
        one = whole(tmp_path / "one", **options)
        stopped(tmp_path / "two", at=STEPS_PER_EPOCH + 2, **options)
        two = resumed(tmp_path / "two", **options)
        assert_same_run(one, two)
        assert_same_folder(tmp_path / "one", tmp_path / "two")

    @pytest.mark.parametrize("legacy", [False, True])
    @pytest.mark.parametrize("method", list(METHODS))
    def test_every_method(self, method, legacy, tmp_path):
        options = {"build": both, "method": method, "legacy": legacy, "optimizer": "adamw"}
        one = whole(None, **options)
        stopped(tmp_path, at=5, **options)
        assert_same_run(one, resumed(tmp_path, **options))

    @pytest.mark.parametrize("precision", ["float32", "float64"])
    @pytest.mark.parametrize("optimizer", optimizers())
    def test_every_optimiser(self, optimizer, precision, tmp_path):
        options = {"optimizer": optimizer, "precision": precision, "method": "ensemble"}
        one = whole(None, **options)
        stopped(tmp_path, at=5, **options)
        assert_same_run(one, resumed(tmp_path, **options))

    @pytest.mark.parametrize(
        "at",
        [
            at if at in (1, 4, 5, 11) else pytest.param(at, marks=pytest.mark.nightly)
            for at in range(1, EPOCHS * STEPS_PER_EPOCH)
        ],
    )
    def test_at_every_step(self, at, tmp_path):
        one = whole(None, both)
        stopped(tmp_path, at, both)
        assert steps(tmp_path / "checkpoints")[-1] == at
        assert_same_run(one, resumed(tmp_path, both))

    @pytest.mark.parametrize(
        "options",
        [
            {"annealing": "linear"},
            {"adversarial": 0.1},
            {"adversarial": {"epsilon": 0.1, "shared": True}},
            {"adversarial": {"epsilon": 0.1, "relative": True}},
            {"clip": 0.1},
            {"noise": 1.0, "optimizer": MOMENTUM},
            {"engine": "loop"},
            {"engine": "chunk:2"},
            {"prior": {"name": "function-space", "draws": 5}},
            {"augment": lambda x, _: 2 * x},
        ],
    )
    def test_whatever_else_a_run_does(self, options, tmp_path):
        one = whole(tmp_path / "one", both, **options)
        stopped(tmp_path / "two", 6, both, **options)
        assert_same_run(one, resumed(tmp_path / "two", both, **options))
        assert_same_folder(tmp_path / "one", tmp_path / "two")

    def test_stopped_again_and_again(self, tmp_path):
        one = whole(None, both)
        stopped(tmp_path, 2, both)
        for at in (3, 7, 8):
            stopped(tmp_path, at, both, resume=True)
        assert_same_run(one, resumed(tmp_path, both))

    def test_members_of_several_architectures(self, tmp_path):
        def run(folder, at=None, **options):
            ensemble = shoal.Ensemble.init([(plain, 2), (both, 2)])
            return quick(ensemble, out=folder, schedule=Fuse(at), epochs=EPOCHS, **options)

        with pytest.raises(Fuse.Blown):
            run(tmp_path, at=6, save_every=0)
        assert_same_run(run(None), run(tmp_path, resume=True))

    @pytest.mark.parametrize("engine", ["vmap", "loop"])
    def test_a_network_with_a_will_of_its_own(self, engine, tmp_path):
        one = whole(None, Noisy, engine=engine)
        stopped(tmp_path, 6, Noisy, engine=engine)
        torch.manual_seed(99)
        assert_same_run(one, resumed(tmp_path, Noisy, engine=engine))

    def test_an_exception_of_a_callback_is_a_stop_like_any_other(self, tmp_path):
        def enough(event):
            raise Fuse.Blown

        with pytest.raises(Fuse.Blown):
            quick(both, out=tmp_path, epochs=EPOCHS, save_every=0, callbacks=[enough])
        calls = []
        again = quick(
            both, out=tmp_path, epochs=EPOCHS, resume=True, callbacks=[lambda r: calls.append(r)]
        )
        assert_same_run(again, quick(both, epochs=EPOCHS))
        assert len(calls) == EPOCHS


@pytest.mark.parametrize("first, then", [("loop", "vmap"), ("vmap", "loop")])
def test_a_run_goes_on_as_it_was_begun_whatever_a_trial_says_now(
    first, then, tmp_path, monkeypatch
):
    images = torch.rand(20, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    build = Blueprint(SmallCNN((4, 4)), (1, 8, 8), 4)
    options = {"data": (images, torch.arange(20) % 4), "batch_size": 5}
    monkeypatch.setattr("shoal.training.loop.trainer.WORTH_A_TRIAL", 0)

    used = []  # the kind of runner of each run; the two kinds may agree to the bit
    monkeypatch.setattr(
        "shoal.training.loop.trainer.faster_threads",
        lambda _, runner: used.append(runner.kind) or 1,
    )

    def found_faster(kind):
        monkeypatch.setattr(
            "shoal.training.loop.trainer.faster_runner", lambda *_: MemberRunner(kind)
        )

    found_faster(first)
    one = whole(None, build, **options)
    stopped(tmp_path, 5, build, **options)
    found_faster(then)
    assert_same_run(resumed(tmp_path, build, **options), one)
    whole(None, build, **options)
    assert used == [first, first, first, then]


@needs_gpu
@pytest.mark.parametrize("build", [normed, dropped, Noisy], ids=["batchnorm", "dropout", "noise"])
@pytest.mark.parametrize("method", ["ensemble", "kde", "svgd", "f-kde", "f-ssge"])
def test_on_a_gpu(method, build, tmp_path):
    def enough(event):
        if event.epoch == 2:
            raise Fuse.Blown

    options = {"method": method, "epochs": EPOCHS, "device": "cuda", "optimizer": "adamw"}
    one = quick(build, **options)
    with pytest.raises(Fuse.Blown):
        quick(build, out=tmp_path, save_every=0, callbacks=[enough], **options)
    assert steps(tmp_path / "checkpoints")[-1] == 2 * STEPS_PER_EPOCH - 1
    assert_same_run(quick(shoal_of(build, seed=7), out=tmp_path, resume=True, **options), one)


class TestLoaders:
    class Shaken(Dataset):
        """Draws noise at every reading, from three generators."""

        x, y = points()

        def __len__(self):
            return POINTS

        def __getitem__(self, i):
            noise = torch.randn(3) + float(np.random.randn()) + random.random()
            return self.x[i] + 0.1 * noise, self.y[i]

    def test_a_shuffled_and_augmented_loader(self, tmp_path):
        def loader():
            return DataLoader(self.Shaken(), batch_size=BATCH, shuffle=True)

        one = whole(None, both, data=loader())
        stopped(tmp_path, 6, both, data=loader())
        assert_same_run(one, resumed(tmp_path, both, data=loader()))


class TestBeginnings:
    def test_resume_without_a_run_begins_one(self, tmp_path):
        begun = quick(out=tmp_path / "new", resume=True)
        assert_same_run(begun, quick())

    def test_a_run_stopped_before_its_first_checkpoint_begins_again(self, tmp_path):
        stopped(tmp_path, at=2, save_every=1e9)
        with pytest.raises(StorageError) as caught:
            shoal.load(tmp_path, plain)
        assert_one_sentence(caught.value, "no checkpoint yet")
        again = quick(out=tmp_path, schedule=Fuse(), epochs=EPOCHS, resume=True)
        assert_same_run(again, whole(None))

    def test_a_run_stopped_in_its_first_step_has_not_begun(self, tmp_path):
        stopped(tmp_path / "run", at=0)
        assert not (tmp_path / "run").exists()
        stopped(tmp_path, at=0)
        assert list(tmp_path.iterdir()) == []

    def test_temporary_folders_of_killed_writers_are_swept_away(self, tmp_path):
        stopped(tmp_path, at=5)
        for place in (tmp_path, tmp_path / "checkpoints"):
            (place / f".tmp-{2**22 + 1}-abcdef01-abcdef01-{shoal.core.storage.disk.HOST}").mkdir()
        resumed(tmp_path)
        assert not list(tmp_path.rglob(".tmp-*"))

    def test_seconds_add_up(self, tmp_path):
        stopped(tmp_path, at=2 * STEPS_PER_EPOCH + 1)
        before = shoal.load(tmp_path, plain).provenance["seconds"]
        after = resumed(tmp_path).provenance["seconds"]
        assert 0 < before < after


class TestEndings:
    def test_a_finished_run_is_returned_without_a_step(self, tmp_path):
        one = whole(tmp_path)
        again = quick(shoal_of(seed=7), out=tmp_path, schedule=Fuse(0), epochs=EPOCHS, resume=True)
        assert_same_run(one, again)
        assert again.history == one.history and again.notes == one.notes

    def test_what_was_noted_stays_noted(self, tmp_path):
        options = {"method": "kde", "strength": 1e-9, "out": tmp_path}
        one = quick(**options)
        assert len(one.notes) == 1
        assert quick(**options, resume=True).notes == one.notes
        assert shoal.load(tmp_path, plain).notes == one.notes

    def test_an_existing_run_is_not_written_over(self, tmp_path):
        whole(tmp_path)
        before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        ensemble = shoal_of()
        untouched = frozen(ensemble)
        with pytest.raises(ConfigError) as caught:
            quick(ensemble, out=tmp_path)
        assert_one_sentence(caught.value, "already holds a run", "resume=True")
        assert_equal_trees(frozen(ensemble), untouched)
        after = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
        assert after == before


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    quick(out=path)
    return path


class TestRefusals:
    OTHERS = {
        "method": "kde",
        "legacy": True,
        "strength": 2.0,
        "prior": {"name": "gaussian", "std": 2.0},
        "optimizer": "adamw",
        "lr": 0.5,
        "schedule": "cosine",
        "validation": 0.2,
        "batch_size": 5,
        "temperature": 0.5,
        "annealing": "linear",
        "adversarial": 0.1,
        "augment": "crop-flip",
        "clip": 1.0,
        "seed": 3,
        "precision": "float64",
        "engine": "loop",
    }

    @pytest.mark.parametrize("key", OTHERS)
    def test_other_settings_are_named(self, key, folder):
        with pytest.raises(ConfigError) as caught:
            quick(out=folder, resume=True, **{key: self.OTHERS[key]})
        assert_one_sentence(caught.value, f"has {key} = " if key != "legacy" else "has ")
        assert not (folder / "lock").exists()

    @pytest.mark.parametrize("key", ["frozen", "calibrated", "legacy"])
    def test_a_run_older_than_a_setting_has_its_default(self, key, folder, tmp_path):
        folder = shutil.copytree(folder, tmp_path / "older")
        make_old(folder)
        path = folder / "config.toml"
        lines = path.read_text().splitlines()
        older = [line for line in lines if not line.startswith(f"{key} =")]
        assert len(older) == len(lines) - 1
        path.write_text("\n".join(older))
        quick(out=folder, resume=True)
        if key == "legacy":
            with pytest.raises(ConfigError, match="has legacy = False, this call has True"):
                quick(out=folder, resume=True, legacy=True)

    @pytest.mark.parametrize("members, build", [(4, plain), (3, both)])
    def test_another_ensemble_is_refused(self, members, build, folder):
        with pytest.raises(ConfigError) as caught:
            quick(shoal_of(build, members), out=folder, resume=True)
        assert_one_sentence(caught.value)

    def test_the_same_name_with_other_layers_is_refused(self, folder):
        def build():
            return both()

        build.__qualname__ = plain.__qualname__
        ensemble = shoal_of(build)
        with pytest.raises(ConfigError) as caught:
            quick(ensemble, out=folder, resume=True)
        assert_one_sentence(caught.value, "weight")

    @pytest.mark.parametrize("what", ["x", "y", "n"])
    def test_other_data_are_refused(self, what, folder):
        x, y = (tensor.clone() for tensor in points())
        if what == "x":
            x[3, 1] += 1e-6
        elif what == "y":
            y[5] = (y[5] + 1) % 4
        else:
            x, y = x[:-1], y[:-1]
        with pytest.raises(ConfigError) as caught:
            quick(data=(x, y), out=folder, resume=True)
        assert_one_sentence(caught.value, "other data")

    def test_none_of_it_touched_the_run(self, folder):
        assert_same_run(shoal.load(folder, plain), quick())

    def test_a_run_under_way_in_a_thread_keeps_others_out(self, tmp_path):
        refused = []

        def second():
            try:
                quick(out=tmp_path, resume=True)
            except StorageError as error:
                refused.append(error)

        def look(event):
            thread = threading.Thread(target=second)
            thread.start()
            thread.join()

        quick(out=tmp_path, epochs=1, callbacks=[look])
        assert_one_sentence(refused[0], "is being written by process", "choose another folder")


def flip(path, place=-3):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


class TestDamage:
    @pytest.mark.parametrize("name", ["ensemble.safetensors", "optimizer.safetensors"])
    @pytest.mark.parametrize("how", ["flip", "truncate", "delete"])
    def test_the_checkpoint_before_is_used_and_the_end_is_the_same(self, name, how, tmp_path):
        stopped(tmp_path, 6, both, optimizer="adamw")
        kept = steps(tmp_path / "checkpoints")
        assert kept[-1] == 6 and len(kept) >= 2
        broken = tmp_path / "checkpoints" / f"step-{6:09d}" / name
        if how == "flip":
            flip(broken)
        elif how == "truncate":
            broken.write_bytes(broken.read_bytes()[:-7])
        else:
            broken.unlink()
        with pytest.warns(ShoalWarning, match=f"step {kept[-2]} is used instead"):
            loaded = shoal.load(tmp_path, both)
        assert loaded.ensemble.members == 3
        with pytest.warns(ShoalWarning, match=f"step {kept[-2]} is used instead"):
            two = resumed(tmp_path, both, optimizer="adamw")
        assert_same_run(two, whole(None, both, optimizer="adamw"))

    def test_when_all_are_damaged_it_says_so(self, tmp_path):
        stopped(tmp_path, 6)
        for path in (tmp_path / "checkpoints").glob("*/ensemble.safetensors"):
            flip(path)
        for attempt in (lambda: resumed(tmp_path), lambda: shoal.load(tmp_path, plain)):
            with pytest.raises(CheckpointCorrupt) as caught:
                attempt()
            assert_one_sentence(caught.value, "every checkpoint", "is damaged")

    def test_a_lost_history_file_is_written_again(self, tmp_path):
        stopped(tmp_path, 6)
        (tmp_path / "history.jsonl").unlink()
        with pytest.warns(ShoalWarning, match=r"history\.jsonl is damaged"):
            run = resumed(tmp_path)
        assert [row["epoch"] for row in run.history] == [*range(1, EPOCHS + 1)]
        assert run.history[0]["loss"] is None and run.history[-1]["loss"] is not None
        assert shoal.load(tmp_path, plain).history == run.history
        assert_equal_trees(frozen(run.ensemble), frozen(whole(None).ensemble))

    def test_a_copied_folder_is_the_same_run(self, tmp_path):
        stopped(tmp_path / "here", 6, both)
        shutil.copytree(tmp_path / "here", tmp_path / "there")
        assert_same_run(resumed(tmp_path / "here", both), resumed(tmp_path / "there", both))
        assert story(shoal.load(tmp_path / "there", both).history) == story(
            whole(None, both).history
        )
        assert differ(frozen(shoal_of(both)), frozen(shoal.load(tmp_path / "there", both).ensemble))

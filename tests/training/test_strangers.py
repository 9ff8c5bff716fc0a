"""Run folders from strangers: what they hold is refused in one sentence, or it is harmless."""

import json
import os
import platform
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from small_runs import (
    BATCH,
    CLASSES,
    STEPS_PER_EPOCH,
    Fuse,
    assert_equal_trees,
    assert_one_sentence,
    assert_same_run,
    frozen,
    make_old,
    points,
    quick,
    shoal_of,
    story,
)

import shoal
from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalError, ShoalWarning, StorageError
from shoal.core.storage.checkpoints import load_checkpoint, save_checkpoint, steps
from shoal.core.storage.files import sealed, sha256
from shoal.core.storage.formats import parse_toml, to_toml
from shoal.experiment.config import load_config
from shoal.models import MLP, Blueprint
from shoal.page.report_data import load_report_data
from shoal.training.folder.history import HistoryFile
from shoal.training.folder.run import RunFolder
from shoal.training.loop.saving import RunState

pytestmark = pytest.mark.timeout(60)

BUILD = Blueprint(MLP((4,), "tanh"), (3,), CLASSES)
OLD = Path(__file__).with_name("old_run")
OF_0_2 = Path(__file__).with_name("run_of_0_2")
EPOCHS = 3


def run_in(folder, **options):
    return quick(shoal_of(BUILD, 2), out=folder, **{"epochs": EPOCHS, "method": "kde"} | options)


def stopped(folder, at, **options):
    """A run that saved every step before this one."""
    with pytest.raises(Fuse.Blown):
        run_in(folder, schedule=Fuse(at), save_every=0, **options)


def resumed(folder, **options):
    return run_in(folder, schedule=Fuse(), resume=True, **options)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trained") / "run"
    run_in(folder)
    return folder


@pytest.fixture
def folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "theirs")


def refuse(folder, *words, kind=ShoalError):
    with pytest.raises(kind) as caught:
        shoal.predict(folder, points()[0])
    assert_one_sentence(caught.value, *words)


def change(folder, **changes):
    """Other settings in config.toml; None takes one out."""
    path = folder / "config.toml"
    path.write_text(to_toml(parse_toml(path.read_text(), "config") | changes))


def model(**changes):
    spec = {"name": "mlp", "hidden": [4], "activation": "tanh", "dropout": 0.0}
    return [spec | {"input_shape": [3], "outputs": CLASSES, "members": 2} | changes]


class TestLinks:
    @pytest.mark.parametrize("plant", [os.symlink, os.link], ids=["symbolic", "hard"])
    def test_a_planted_lock_does_not_reach_another_file(self, plant, folder, tmp_path):
        mine = tmp_path / "thesis.txt"
        mine.write_text("years of work")
        plant(mine, folder / "lock")
        with pytest.raises(StorageError) as caught:
            run_in(folder, resume=True)
        assert_one_sentence(caught.value, "lock")
        assert mine.read_text() == "years of work"

    def test_a_history_that_is_a_link_is_not_written_through(self, tmp_path):
        folder, mine = tmp_path / "theirs", tmp_path / "mine.txt"
        stopped(folder, 2 * STEPS_PER_EPOCH)
        (folder / "history.jsonl").rename(mine)
        before = mine.read_bytes()
        os.symlink(mine, folder / "history.jsonl")
        with pytest.raises(StorageError) as caught:
            resumed(folder)
        assert_one_sentence(caught.value, "history.jsonl", "link")
        assert mine.read_bytes() == before

    @pytest.mark.parametrize("name", ["checkpoints", "trajectory"])
    def test_no_folder_leads_out_of_the_run(self, name, folder, tmp_path):
        shutil.rmtree(folder / name, ignore_errors=True)
        (tmp_path / "elsewhere").mkdir()
        os.symlink(tmp_path / "elsewhere", folder / name)
        with pytest.raises(StorageError) as caught:
            run_in(folder, resume=True)
        assert_one_sentence(caught.value, name, "link")


class TestWhatBelongsTogether:
    @pytest.mark.parametrize(
        "changes",
        [
            {"model": model(activation="relu")},
            {"likelihood": {"name": "gaussian", "noise_std": 1.0}},
            {"lr": 0.002},
        ],
        ids=lambda changes: next(iter(changes)),
    )
    def test_a_changed_config_is_found(self, changes, folder):
        change(folder, **changes)
        refuse(folder, "config.toml", "put the file back", kind=CheckpointCorrupt)

    def test_a_checkpoint_of_another_run_is_not_taken(self, folder, tmp_path):
        right = shoal.predict(folder, points()[0]).members
        other = tmp_path / "other"
        run_in(other, data=points(seed=1))  # the same settings, word for word
        assert (other / "config.toml").read_bytes() == (folder / "config.toml").read_bytes()
        theirs = other / "checkpoints" / f"step-{EPOCHS * STEPS_PER_EPOCH:09d}"
        mine = folder / "checkpoints" / theirs.name
        shutil.copytree(mine, mine.with_name(f"step-{1:09d}"))  # no checkpoint of step 1
        shutil.rmtree(mine)
        shutil.copytree(theirs, mine)
        refuse(folder, "does not belong to this run", kind=CheckpointCorrupt)
        shutil.rmtree(mine)
        mine.with_name(f"step-{1:09d}").rename(mine)
        assert torch.equal(shoal.predict(folder, points()[0]).members, right)

    def test_the_one_before_is_used_where_the_newest_is_of_another_run(self, tmp_path):
        stopped(tmp_path / "run", 6)
        stopped(tmp_path / "other", 6, data=points(seed=1))
        kept = steps(tmp_path / "run" / "checkpoints")
        newest = tmp_path / "run" / "checkpoints" / f"step-{6:09d}"
        shutil.rmtree(newest)
        shutil.copytree(tmp_path / "other" / "checkpoints" / newest.name, newest)
        with pytest.warns(ShoalWarning, match=f"step {kept[-2]} is used instead"):
            run = resumed(tmp_path / "run")
        assert_same_run(run, run_in(None, schedule=Fuse()))

    def test_axes_of_another_run_are_not_trained_with(self, tmp_path):
        for seed, name in enumerate(("run", "other")):
            stopped(tmp_path / name, 3, method="forde", data=points(seed=seed))
        shutil.copy(tmp_path / "other" / "axes.safetensors", tmp_path / "run")
        with pytest.raises(CheckpointCorrupt) as caught:
            resumed(tmp_path / "run", method="forde")
        assert_one_sentence(caught.value, "axes.safetensors")


class TestUnknownAndWrong:
    def test_a_key_that_nothing_has(self, folder):
        change(folder, leanring_rate=0.1)
        refuse(folder, "leanring_rate", kind=StorageError)

    @pytest.mark.parametrize(
        "changes",
        [
            {"model": "mlp"},
            {"model": [7]},
            {"members": 1.5},
            {"members": True},
            {"seed": "zero"},
            {"method": [1]},
            {"likelihood": 3},
            {"likelihood": {"name": ["gaussian"]}},
            {"likelihood": {"name": "gaussian", "noise_std": "small"}},
            {"model": model(name=["mlp"])},
            {"model": model(hidden="wide")},
            {"model": model(activation=[1])},
            {"model": model(dropout="x")},
            {"model": model(input_shape=3)},
            {"model": model(outputs="many")},
            {"model": model(outputs=0)},
            {"model": model(input_shape=[0])},
            {"model": model(input_shape=[-3])},
            {"model": model(members="two")},
            {"model": model(members=0)},
        ],
        ids=str,
    )
    def test_settings_of_wrong_types(self, changes, folder):
        make_old(folder)  # whose config nothing vouches for
        change(folder, **changes)
        refuse(folder)

    @pytest.mark.parametrize(
        "changes",
        [
            {"model": model(hidden=[10**6, 10**6])},
            {"model": model(hidden=[2] * 9000)},
            {"model": model(hidden=[10**18])},
            {"model": model(input_shape=[10**6, 10**6])},
            {"model": model(outputs=10**12)},
            {"model": model(members=10**9), "members": 10**9},
            {"model": model(hidden=[2] * 1000) * 15, "members": 30},
            {"model": model() * 300, "members": 600},
        ],
        ids=["wide", "deep", "overflow", "inputs", "outputs", "members", "stacks", "groups"],
    )
    def test_networks_that_the_checkpoint_does_not_hold(self, changes, folder, monkeypatch):
        make_old(folder)
        change(folder, **changes)
        made = []
        monkeypatch.setattr("shoal.inference.ensemble.build_members", lambda *_: made.append(1))
        refuse(folder)
        assert not made, "memory was taken"

    @pytest.mark.parametrize(
        "changes",
        [
            {"seconds": "long"},
            {"seconds": None},
            {"notes": "one"},
            {"notes": [1]},
            {"data": 3},
            {"pixel_range": [0]},
            {"pixel_range": ["a", "b"]},
            {"run_id": 7},
        ],
        ids=str,
    )
    @pytest.mark.parametrize("age", ["old", "new"])
    def test_provenance_of_wrong_types(self, changes, age, folder):
        if age == "old":
            make_old(folder)
        path = folder / "provenance.json"
        table = json.loads(path.read_text()) | changes
        path.write_text(json.dumps(table if age == "old" else sealed(table)))
        refuse(folder, "provenance.json", kind=StorageError)

    @pytest.mark.parametrize(
        "changes",
        [
            {"step": "1"},
            {"step": 3},
            {"optimizer": []},
            {"optimizer": {"x.y": 1}},
            {"mapping": 1},
            {"mapping": {"kind": "eval"}},
            {"mapping": {"kind": "vmap", "chunk": -1}},
            {"mapping": {"kind": "vmap", "more": 1}},
            {"history": 7},
            {"history": {}},
            {"history": {"rows": 10**18, "bytes": 3, "sha256": ""}},
            {"history": {"rows": -1, "bytes": True, "sha256": ""}},
            {"history": [1]},
            {"history": [{"epoch": 1, "loss": "low"}]},
        ],
        ids=str,
    )
    def test_a_state_of_wrong_types_is_not_resumed(self, changes, folder):
        rewrite_state(folder, changes)
        with pytest.raises(ShoalError) as caught:
            run_in(folder, resume=True)
        assert_one_sentence(caught.value)

    @pytest.mark.parametrize("part", ["optimizer", "random", "tracker", "ensemble"])
    def test_tensors_of_other_shapes_are_not_resumed(self, part, tmp_path):
        stopped(tmp_path, 3)
        found = RunFolder(tmp_path).checkpoint()
        wrong = {name: torch.zeros(7, 7) for name in found.parts[part]}
        run = RunFolder(tmp_path).belongings
        state = load_checkpoint(tmp_path / "checkpoints", run=run).state
        parts = found.parts | {part: wrong}
        save_checkpoint(tmp_path / "checkpoints", found.step, parts, state, run=run)
        with pytest.raises(ShoalError) as caught:
            resumed(tmp_path)
        assert_one_sentence(caught.value)


def rewrite_state(folder, changes):
    """Another state.json in every checkpoint, under manifests that vouch for it."""
    for path in folder.glob("checkpoints/*/state.json"):
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))
        manifest = path.with_name("manifest.json")
        table = json.loads(manifest.read_text())
        table["files"]["state.json"] = {"size": path.stat().st_size, "sha256": sha256(path)}
        manifest.write_text(json.dumps(sealed(table)))


def sparse(path):
    with open(path, "wb") as file:
        file.truncate(1 << 40)


def deep_toml(path):
    path.write_text("a = " + "[" * 5000 + "]" * 5000)


def deep_json(path):
    path.write_text('{"a":' * 800 + "1" + "}" * 800)


class TestFilesThatAreNone:
    NAMES = ["config.toml", "provenance.json", "scores.json", "evidence.json"]
    NAMES += [f"checkpoints/step-{EPOCHS * STEPS_PER_EPOCH:09d}/{name}" for name in (
        "manifest.json", "state.json", "ensemble.safetensors")]  # fmt: skip
    PLANTS = {
        "pipe": os.mkfifo,
        "device": lambda path: os.symlink("/dev/zero", path),
        "folder": os.mkdir,
        "huge": sparse,
        "deep toml": deep_toml,
        "deep json": deep_json,
    }

    @pytest.mark.parametrize("plant", PLANTS)
    @pytest.mark.parametrize("name", NAMES)
    def test_it_is_refused_at_once(self, name, plant, folder):
        (folder / name).unlink(missing_ok=True)
        self.PLANTS[plant](folder / name)
        if name in ("scores.json", "evidence.json"):
            with pytest.raises(StorageError) as caught:
                load_report_data([folder])
            assert_one_sentence(caught.value, name)
        else:
            refuse(folder, kind=StorageError)

    @pytest.mark.parametrize("plant", PLANTS)
    def test_a_history_takes_no_weights_with_it(self, plant, folder):
        right = shoal.predict(folder, points()[0]).members
        (folder / "history.jsonl").unlink()
        self.PLANTS[plant](folder / "history.jsonl")
        with pytest.warns(ShoalWarning, match=r"history\.jsonl is damaged"):
            run = shoal.load(folder)
        assert [row["epoch"] for row in run.history] == [*range(1, EPOCHS + 1)]
        assert torch.equal(shoal.predict(run, points()[0]).members, right)

    def test_a_checkpoint_larger_than_its_networks_is_not_read_through(self, folder):
        path = next(folder.glob("checkpoints/*/optimizer.safetensors"))
        sparse(path)
        manifest = path.with_name("manifest.json")
        table = json.loads(manifest.read_text())
        table["files"][path.name]["size"] = 1 << 40
        manifest.write_text(json.dumps(sealed(table)))
        refuse(folder, "larger than it can be", kind=CheckpointCorrupt)


class TestHistory:
    def test_a_checkpoint_does_not_grow_with_it(self, tmp_path):
        rows = [{"epoch": epoch, "step": epoch, "loss": 0.5} for epoch in range(1, 2001)]
        rows[0]["note"] = "x" * (64 << 20)  # more than a table of JSON may have
        folder = RunFolder(tmp_path)
        folder.begin({"lr": 1.0}, {"run_id": "a", "seconds": 0.0})
        fake = SimpleNamespace(step=len(rows), parts=dict)
        fake.state = lambda: {"step": fake.step, "history": rows, "optimizer": {}, "mapping": {}}
        RunState.of(fake, {"run_id": "a", "seconds": 0.0}, []).write(folder)
        state = next(tmp_path.glob("checkpoints/*/state.json"))
        assert state.stat().st_size < 1000
        assert len(RunFolder(tmp_path).checkpoint().state["history"]) == len(rows)

    def test_rows_are_added_and_never_written_again(self, tmp_path):
        file, rows = HistoryFile(tmp_path / "history.jsonl"), [{"epoch": 1, "loss": 0.1}]
        first = file.keep(rows)
        inode, text = file.path.stat().st_ino, file.path.read_text()
        rows.append({"epoch": 2, "loss": None})
        second = file.keep(rows)
        assert file.path.stat().st_ino == inode and file.path.read_text().startswith(text)
        assert HistoryFile(file.path).read(first, 1) == rows[:1]
        assert HistoryFile(file.path).read(second, 2) == rows

    @pytest.mark.parametrize("rest", [b"", b'{"epoch": 2, "lo', b'{"epoch": 2}\n{"epoch": 3}\n'])
    def test_what_a_killed_writer_left_is_cut_off(self, rest, tmp_path):
        path, rows = tmp_path / "history.jsonl", [{"epoch": 1}, {"epoch": 2, "loss": 0.25}]
        kept = HistoryFile(path).keep(rows[:1])
        with path.open("ab") as file:
            file.write(rest)
        again = HistoryFile(path)
        assert again.read(kept, 1) == rows[:1]
        again.keep(rows)
        assert [json.loads(line) for line in path.read_text().splitlines()] == rows

    @pytest.mark.parametrize("harm", [lambda p: p.unlink(), lambda p: p.write_text("")])
    def test_a_file_lost_while_training_is_written_again(self, harm, tmp_path):
        file, rows = HistoryFile(tmp_path / "history.jsonl"), [{"epoch": 1}, {"epoch": 2}]
        file.keep(rows[:1])
        harm(file.path)
        kept = file.keep(rows)
        assert HistoryFile(file.path).read(kept, 2) == rows

    def test_a_damaged_row_is_told_and_left_without_numbers(self, folder):
        path = folder / "history.jsonl"
        lines = path.read_text().splitlines()
        path.write_text("\n".join([lines[0], lines[1].replace('"loss": ', '"loss": x')]) + "\n")
        with pytest.warns(ShoalWarning, match=f"2 of {EPOCHS} epochs have no numbers"):
            rows = shoal.load(folder).history
        assert rows[0] == json.loads(lines[0])
        assert [row["loss"] for row in rows[1:]] == [None, None]

    def test_a_changed_number_is_told(self, folder):
        path = folder / "history.jsonl"
        path.write_text(path.read_text().replace('"epoch": 1, "step": 4', '"epoch": 1, "step": 5'))
        with pytest.warns(ShoalWarning, match=r"history\.jsonl is damaged"):
            shoal.load(folder)


class TestOldRuns:
    """Folders that Shoal 0.1 wrote: the history in the checkpoint, nothing tied to anything."""

    WHAT = {"method": "kde", "optimizer": "adamw", "schedule": "cosine", "epochs": 3}
    PROBS = [0.2083713710308075, 0.2857853174209595, 0.2704685628414154, 0.23537474870681763]

    @pytest.fixture
    def old(self, tmp_path):
        return shutil.copytree(OLD, tmp_path / "old")

    def test_they_predict_what_they_did(self, old):
        found = shoal.predict(old, points()[0][:1]).probs[0]
        torch.testing.assert_close(found, torch.tensor(self.PROBS))
        assert [row["epoch"] for row in shoal.load(old).history] == [1]
        assert len(load_report_data([old]).entries[0].history) == 1

    @pytest.mark.skipif(
        platform.machine() != "x86_64", reason="the folder's random data have other bits here"
    )
    def test_they_are_resumed_to_the_same_end(self, old):
        run = quick(shoal_of(BUILD, 2), out=old, resume=True, **self.WHAT)
        whole = quick(shoal_of(BUILD, 2), **self.WHAT)
        for name, tensor in frozen(whole.ensemble).items():
            torch.testing.assert_close(run.ensemble.state[name].detach(), tensor, msg=name)
        assert [row["step"] for row in run.history] == [4, 8, 12]
        assert shoal.load(old).history == run.history
        assert_equal_trees(frozen(shoal.load(old).ensemble), frozen(run.ensemble))

    def test_the_checkpoint_before_is_used(self, old):
        (old / "checkpoints" / "step-000000007" / "random.safetensors").unlink()
        with pytest.warns(ShoalWarning, match="step 6 is used instead"):
            shoal.load(old)

    @pytest.mark.parametrize("again", [5, 6])
    def test_resuming_them_is_bit_exact_and_can_be_killed(self, again, tmp_path):
        stopped(tmp_path, 5)
        make_old(tmp_path)
        if again > 5:
            with pytest.raises(Fuse.Blown):
                run_in(tmp_path, schedule=Fuse(again), save_every=0, resume=True)
        run, whole = resumed(tmp_path), run_in(None, schedule=Fuse())
        assert_same_run(run, whole)
        assert story(shoal.load(tmp_path).history) == story(whole.history)

    def test_their_checkpoints_do_not_pass_for_those_of_a_new_run(self, folder, tmp_path):
        older = shutil.copytree(folder, tmp_path / "older")
        make_old(older)
        shutil.rmtree(folder / "checkpoints")
        shutil.copytree(older / "checkpoints", folder / "checkpoints")
        refuse(folder, "does not belong to this run", kind=CheckpointCorrupt)


class TestRunsOf02:
    """A folder that Shoal 0.2 wrote when `fit` named every option."""

    DATA = ((torch.arange(120) * 37 % 64) / 16 - 2).reshape(40, 3), torch.arange(40) % CLASSES
    WHAT = {"optimizer": "adamw", "schedule": "cosine", "epochs": 3}
    WHAT |= {"validation": 0.25, "patience": 2}

    @pytest.fixture
    def old(self, tmp_path):
        return shutil.copytree(OF_0_2, tmp_path / "old")

    def test_they_are_loaded_and_their_config_is_read(self, old):
        assert [row["step"] for row in shoal.load(old).history] == [3, 6]
        config = load_config(old / "config.toml")
        assert (config.method, config.epochs, config.patience) == ("f-kde", 3, 2)

    def test_they_are_resumed_to_the_same_end_with_the_arguments_of_0_2(self, old):
        with pytest.warns(ShoalWarning, match="no longer an option"):
            run = quick(
                shoal_of(BUILD, 2),
                self.DATA,
                out=old,
                resume=True,
                peer_timeout=60.0,
                stall_after=60.0,
                save_every=0,
                **self.WHAT,
            )
        whole = quick(shoal_of(BUILD, 2), self.DATA, **self.WHAT)
        for name, tensor in frozen(whole.ensemble).items():
            torch.testing.assert_close(run.ensemble.state[name].detach(), tensor, msg=name)
        assert [row["step"] for row in run.history] == [3, 6, 9]


def test_a_config_that_could_not_be_read_again_is_not_trained(tmp_path):
    space = shoal.spaces.InputGradients()
    for _ in range(12):
        space = shoal.spaces.Normalised(space)
    with pytest.raises(ConfigError, match=r"config\.toml"):
        quick(shoal_of(BUILD, 2), out=tmp_path, method=shoal.Repulsion(space), batch_size=BATCH)

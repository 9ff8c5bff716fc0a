import errno
import inspect
import json
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
import torch

import shoal
from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalWarning, StorageError
from shoal.core.storage import files
from shoal.core.storage.checkpoints import Checkpoint, load_checkpoint, save_checkpoint, steps

pytestmark = pytest.mark.usefixtures("warm")


def content(step, again, size):
    """All that a checkpoint holds follows from the step and from how often it has been saved."""
    value = step + again / 4
    parts = {
        "weights": {"fc.weight": torch.full((size, 7), value, dtype=torch.float64)},
        "optimizer": {"fc.weight.mean": torch.full((size,), -value), "step": torch.tensor(step)},
    }
    return parts, {"step": step, "again": again, "loss": 1 / (1 + value), "note": "x" * size}


WORKER = (
    inspect.getsource(content)
    + """
import os, signal, sys
import torch
from shoal.core.storage.checkpoints import save_checkpoint
torch.set_num_threads(1)

def save(folder, step, again, keep, size):
    parts, state = content(step, again, size)
    save_checkpoint(folder, step, parts, state, keep)
    os.write(1, f"saved {step} {again}\\n".encode())

def forever(folder, step, times, keep, size):
    while True:
        for again in range(times):
            save(folder, step, again, keep, size)
        step += 1

def killed_at(folder, step, again, keep, size, event):
    left = [event]
    def count(name, args):
        left[0] -= 1
        if left[0] == -1:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(count)
    save(folder, step, again, keep, size)

for line in sys.stdin:
    name, folder, *numbers = line.split()
    child = os.fork()
    if child == 0:
        os.write(1, f"child {os.getpid()}\\n".encode())
        globals()[name](folder, *map(int, numbers))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    os.write(1, f"ended {status}\\n".encode())
"""
)


class Worker:
    """A process that saves on command in a child of its own, and tells what it has done."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=Path(shoal.__file__).parents[1],
        )

    def start(self, name, folder, *numbers):
        line = " ".join([name, str(folder), *map(str, numbers)]) + "\n"
        self.process.stdin.write(line.encode())
        self.process.stdin.flush()
        word, pid = self.process.stdout.readline().split()
        assert word == b"child"
        return int(pid)

    def finish(self):
        """What was reported as saved, and the signal that ended the child."""
        saved = []
        while True:
            word, *numbers = self.process.stdout.readline().split()
            if word == b"ended":
                return saved, os.WTERMSIG(int(numbers[0]))
            saved.append(tuple(map(int, numbers)))

    def close(self):
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait()


@pytest.fixture(scope="module")
def worker():
    if not hasattr(os, "fork"):
        pytest.skip("this system cannot fork")
    worker = Worker()
    yield worker
    worker.close()


def assert_intact(loaded, size):
    """The content is exactly that of one save, no mixture of two; returns which."""
    parts, state = content(loaded.step, loaded.state["again"], size)
    assert loaded.state == state
    assert set(loaded.parts) == set(parts)
    for part, tensors in parts.items():
        assert files.layout(loaded.parts[part]) == files.layout(tensors)
        for name, tensor in tensors.items():
            assert torch.equal(loaded.parts[part][name], tensor)
    return loaded.step, loaded.state["again"]


def assert_all_intact(folder, copy, size):
    """Not only the newest checkpoint of a folder is whole, and none is taken for damaged."""
    shutil.copytree(folder, copy)
    while steps(copy):
        step, _ = assert_intact(load_checkpoint(copy), size)
        for path in copy.glob(f"step-{step:09d}*"):
            shutil.rmtree(path)
    shutil.rmtree(copy)


def save(folder, step, again=0, keep=2, size=5):
    parts, state = content(step, again, size)
    save_checkpoint(folder, step, parts, state, keep)


def visible(folder):
    return sorted(path.name for path in Path(folder).iterdir())


# Saving and loading


def test_what_was_saved_is_loaded(tmp_path):
    parts = {
        "weights": {"a": torch.randn(2, 3), "b": torch.tensor(float("nan"))},
        "random": {"state": torch.get_rng_state()},
        "nothing": {},
    }
    save_checkpoint(tmp_path / "new", 120, parts, {"epoch": 3, "lr": 0.1, "seen": (1, 2)})
    loaded = load_checkpoint(tmp_path / "new")
    assert isinstance(loaded, Checkpoint) and loaded.step == 120
    assert loaded.state == {"epoch": 3, "lr": 0.1, "seen": [1, 2]}
    assert set(loaded.parts) == set(parts) and loaded.parts["nothing"] == {}
    torch.testing.assert_close(loaded.parts, parts, rtol=0, atol=0, equal_nan=True)
    assert visible(tmp_path / "new") == ["step-000000120"]
    assert visible(tmp_path / "new" / "step-000000120") == [
        "manifest.json",
        "nothing.safetensors",
        "random.safetensors",
        "state.json",
        "weights.safetensors",
    ]


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(tmp_path, keep):
    for step in range(0, 60, 10):
        save(tmp_path, step, keep=keep)
        assert steps(tmp_path) == list(range(0, step + 1, 10))[-keep:]
        assert assert_intact(load_checkpoint(tmp_path), 5) == (step, 0)
    assert len(visible(tmp_path)) == keep


@pytest.mark.parametrize("keep", [1, 2])
def test_a_step_may_be_saved_again(tmp_path, keep):
    for step in (1, 2):
        for again in (0, 1, 2):
            save(tmp_path, step, again, keep)
            assert assert_intact(load_checkpoint(tmp_path), 5) == (step, again)
    assert visible(tmp_path) == ["step-000000001", "step-000000002"][-keep:]


def test_later_steps_of_an_abandoned_line_are_removed(tmp_path):
    for step in (10, 20, 30):
        save(tmp_path, step, keep=3)
    save(tmp_path, 15, keep=1)
    assert steps(tmp_path) == [15]
    assert assert_intact(load_checkpoint(tmp_path), 5) == (15, 0)


def test_large_steps_sort_by_number(tmp_path):
    for step in (999_999_999, 1_000_000_000):
        save(tmp_path, step)
    assert steps(tmp_path) == [999_999_999, 1_000_000_000]
    assert load_checkpoint(tmp_path).step == 1_000_000_000


def test_other_things_in_the_folder_are_let_be(tmp_path):
    save(tmp_path, 1)
    (tmp_path / "step-000000002").write_text("a file")
    (tmp_path / "step-000000003").symlink_to(tmp_path / "nowhere")
    (tmp_path / "step-4").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "step-000000001" / "extra.txt").write_text("a note")
    assert steps(tmp_path) == [1]
    assert assert_intact(load_checkpoint(tmp_path), 5) == (1, 0)
    save(tmp_path, 5, keep=1)
    assert len(visible(tmp_path)) == 5


def test_no_checkpoint(tmp_path):
    for folder in (tmp_path, tmp_path / "missing"):
        assert steps(folder) == []
        with pytest.raises(StorageError, match="has no checkpoint") as caught:
            load_checkpoint(folder)
        assert not isinstance(caught.value, CheckpointCorrupt)


@pytest.mark.parametrize(
    ("step", "part", "state", "keep"),
    [
        (-1, "weights", {}, 2),
        (1, "weights", {}, 0),
        (1, "../weights", {}, 2),
        (1, "a/b", {}, 2),
        (1, "", {}, 2),
        (1, ".hidden", {}, 2),
        (1, "weights", {1: 2}, 2),
        (1, "weights", {"a": {1, 2}}, 2),
    ],
)
def test_wrong_use_is_refused_before_anything_is_written(tmp_path, step, part, state, keep):
    with pytest.raises(ConfigError):
        save_checkpoint(tmp_path, step, {part: {"a": torch.zeros(2)}}, state, keep)
    assert visible(tmp_path) == []


def test_expected_tensors(tmp_path):
    save(tmp_path, 1)
    right = {part: files.layout(tensors) for part, tensors in content(1, 0, 5)[0].items()}
    assert_intact(load_checkpoint(tmp_path, right), 5)
    assert_intact(load_checkpoint(tmp_path, {"weights": right["weights"]}), 5)
    wrong = {"weights": {"fc.weight": ((5, 8), torch.float64)}}
    with pytest.raises(ConfigError, match=r"this run has weight fc.weight of shape \(5, 7\)"):
        load_checkpoint(tmp_path, wrong)
    with pytest.raises(ConfigError, match="no tensors 'momentum'; it has optimizer, weights"):
        load_checkpoint(tmp_path, right | {"momentum": {}})


# Kills


@pytest.mark.kill
@pytest.mark.parametrize(("times", "keep"), [(1, 2), (2, 1)], ids=["steps", "same step, keep 1"])
def test_kills_at_random_moments_lose_nothing(tmp_path, worker, times, keep):
    generator, size = random.Random(times), 2_000
    last, rounds, interrupted = (0, times), 0, 0
    while rounds < 25 or interrupted < 8:
        rounds += 1
        child = worker.start("forever", tmp_path, last[0] + 1, times, keep, size)
        while not steps(tmp_path):
            time.sleep(0.001)
        time.sleep(generator.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        saved, number = worker.finish()
        assert number == signal.SIGKILL
        interrupted += any(name.startswith(".tmp-") for name in visible(tmp_path))
        found = assert_intact(load_checkpoint(tmp_path), size)
        assert_all_intact(tmp_path, tmp_path.with_name("copy"), size)
        reported = saved[-1] if saved else last
        following = [reported, (reported[0], reported[1] + 1), (reported[0] + 1, 0)]
        assert found in following
        earliest = max(found[0] - keep + 1, 1)
        assert set(steps(tmp_path)) >= set(range(earliest, found[0] + 1))
        last = found
    save(tmp_path, last[0] + 1, keep=keep)
    assert all(name.startswith("step-") for name in visible(tmp_path))


@pytest.mark.kill
@pytest.mark.parametrize(
    ("step", "keep"),
    [
        (2, 1),
        (3, 2),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in ((2, 2), (3, 1))),
    ],
    ids=lambda value: str(value),
)
def test_a_kill_at_every_single_event_loses_nothing(tmp_path, worker, step, keep):
    size, event, found = 5, 0, set()
    while True:
        folder = tmp_path / str(event)
        for earlier in (1, 2):
            save(folder, earlier, keep=keep)
        worker.start("killed_at", folder, step, 1, keep, size, event)
        saved, number = worker.finish()
        which = assert_intact(load_checkpoint(folder), size)
        assert which in {(2, 0), (step, 1)}
        found.add(which)
        assert_all_intact(folder, tmp_path / "copy", size)
        if not number:
            break
        assert not saved
        save(folder, step, 2, keep=keep)
        assert assert_intact(load_checkpoint(folder), size) == (step, 2)
        assert visible(folder) == [f"step-{s:09d}" for s in (1, 2, 3) if s <= step][-keep:]
        shutil.rmtree(folder)
        event += 1
    assert saved == [(step, 1)] and found == {(2, 0), (step, 1)} and event > 20


@pytest.mark.kill
@pytest.mark.parametrize("times", [1, 3], ids=["steps", "same step"])
def test_a_reader_beside_a_writer_always_finds_a_whole_checkpoint(tmp_path, worker, times):
    child = worker.start("forever", tmp_path, 1, times, 1, 50)
    while not steps(tmp_path):
        time.sleep(0.001)
    seen = []
    try:
        while len(set(seen)) < 60:
            seen.append(assert_intact(load_checkpoint(tmp_path), 50))
    finally:
        os.kill(child, signal.SIGKILL)
        worker.finish()
    assert seen == sorted(seen)


# Damage


def mutations(data, generator):
    """Flips, cuts and extensions of the content of a file; None stands for its removal."""
    yield None
    yield b""
    yield bytes(len(data))
    yield data + b"\0"
    yield data + data
    yield data[1:]
    yield pickle.dumps({"a": 1})
    for _ in range(30):
        at = generator.randrange(len(data))
        yield data[:at]
        yield data[:at] + bytes([data[at] ^ 1 << generator.randrange(8)]) + data[at + 1 :]
        yield data[:at] + bytes([generator.randrange(256)]) + data[at + 1 :]
        yield data[:at] + data[at + 1 :]
        yield data[:at] + b"0" + data[at:]
        yield data[:at] + bytes(min(16, len(data) - at)) + data[at + 16 :]


@pytest.mark.parametrize("only", [False, True], ids=["one before", "none before"])
@pytest.mark.parametrize(
    "name", ["manifest.json", "state.json", "weights.safetensors", "optimizer.safetensors"]
)
def test_damage_is_never_taken_for_content(tmp_path, name, only):
    for step in (2,) if only else (1, 2):
        save(tmp_path, step)
    path = tmp_path / "step-000000002" / name
    sound, detected = path.read_bytes(), 0
    for data in mutations(sound, random.Random(name)):
        path.unlink(missing_ok=True)
        if data is not None:
            path.write_bytes(data)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                which = assert_intact(load_checkpoint(tmp_path), 5)
            except CheckpointCorrupt as error:
                assert only and "\n" not in str(error)
                which = (1, 0)
        if which == (1, 0):
            detected += 1
            assert only or [w.category for w in caught] == [ShoalWarning]
        else:
            assert which == (2, 0) and not caught
            assert name == "manifest.json" and json.loads(data) == json.loads(sound)
    assert detected > 150
    path.write_bytes(sound)
    assert assert_intact(load_checkpoint(tmp_path), 5) == (2, 0)


def test_the_warning_names_the_file_and_what_is_used(tmp_path):
    for step in (1, 2, 3):
        save(tmp_path, step, keep=3)
    (tmp_path / "step-000000003" / "state.json").unlink()
    with open(tmp_path / "step-000000002" / "weights.safetensors", "r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"\x77")
    with pytest.warns(ShoalWarning) as caught:
        assert assert_intact(load_checkpoint(tmp_path), 5) == (1, 0)
    first, second = (str(warning.message) for warning in caught)
    assert "step-000000003/state.json" in first and "no such file" in first
    assert "step-000000002/weights.safetensors" in second and "SHA-256" in second
    assert first.endswith("step 1 is used instead") and second.endswith("step 1 is used instead")


def test_files_of_two_checkpoints_do_not_mix(tmp_path):
    for step in (1, 2):
        save(tmp_path, step)
    shutil.copy(tmp_path / "step-000000001" / "weights.safetensors", tmp_path / "step-000000002")
    with pytest.warns(ShoalWarning, match="SHA-256"):
        assert assert_intact(load_checkpoint(tmp_path), 5) == (1, 0)
    os.rename(tmp_path / "step-000000001", tmp_path / "step-000000003")
    with pytest.raises(CheckpointCorrupt, match="of another step"):
        load_checkpoint(tmp_path)


def test_a_damaged_step_is_healed_by_saving_it_again(tmp_path):
    save(tmp_path, 1, keep=1)
    (tmp_path / "step-000000001" / "manifest.json").write_text("{}")
    with pytest.raises(CheckpointCorrupt, match="format"):
        load_checkpoint(tmp_path)
    save(tmp_path, 1, again=1, keep=1)
    assert assert_intact(load_checkpoint(tmp_path), 5) == (1, 1)


def deep(levels):
    table = {}
    for _ in range(levels):
        table = {"a": table}
    return table


def outside(manifest, name):
    manifest["files"][name] = manifest["files"].pop("weights.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        lambda m: outside(m, "../weights.safetensors"),
        lambda m: outside(m, "../../etc/weights.safetensors"),
        lambda m: outside(m, "/tmp/weights.safetensors"),
        lambda m: outside(m, "..\\weights.safetensors"),
        lambda m: outside(m, "weights.pt"),
        lambda m: outside(m, "manifest.json"),
        lambda m: outside(m, "missing.safetensors"),
        lambda m: m["files"].pop("state.json"),
        lambda m: m["files"].update({"state.json": []}),
        lambda m: m["files"]["state.json"].pop("sha256"),
        lambda m: m["files"]["state.json"].update(size=-1),
        lambda m: m.update(files=[]),
        lambda m: m.update(format=1),
        lambda m: m.update(format=4),
        lambda m: m.update(format="2"),
        lambda m: m.update(format=True),
        lambda m: m.update(run=[]),
        lambda m: m.update(run={"config.toml": "0"}),
        lambda m: m.update(extra=1),
        lambda m: m["files"]["state.json"].update(mode=7),
        lambda m: m.update(files=deep(100)),
        lambda m: m.update(step=2),
        lambda m: m.pop("step"),
    ],
)
def test_crafted_manifests_are_refused(tmp_path, change):
    folder = tmp_path / "run"
    save(folder, 1)
    path = folder / "step-000000001" / "manifest.json"
    shutil.copy(path.with_name("weights.safetensors"), tmp_path / "weights.safetensors")
    shutil.copy(path.with_name("weights.safetensors"), folder / "weights.safetensors")
    manifest = json.loads(path.read_text())
    change(manifest)
    for text in (json.dumps(manifest), json.dumps(files.sealed(manifest))):
        path.write_text(text)
        with pytest.raises(CheckpointCorrupt) as caught:
            load_checkpoint(folder)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["[1]", "null", '{"a": NaN}', "[" * 100_000], ids=len)
def test_unsound_content_under_a_right_digest_is_refused(tmp_path, text):
    save(tmp_path, 1)
    path = tmp_path / "step-000000001" / "state.json"
    path.write_text(text)
    manifest = json.loads(path.with_name("manifest.json").read_text())
    manifest["files"]["state.json"] = {"size": len(text), "sha256": files.sha256(path)}
    path.with_name("manifest.json").write_text(json.dumps(files.sealed(manifest)))
    with pytest.raises(CheckpointCorrupt, match="state.json"):
        load_checkpoint(tmp_path)


# Full disks


@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace", "chmod"])
def test_a_disk_that_fills_at_any_call_leaves_the_last_checkpoint(tmp_path, monkeypatch, call):
    genuine, failures = getattr(os, call), 0
    while True:
        folder, calls = tmp_path / str(failures), iter(range(10**6))
        save(folder, 1, keep=1)

        def failing(*args, calls=calls, at=failures, **kwargs):
            if next(calls) == at:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return genuine(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, failing)
            try:
                save(folder, 2, keep=1)
                break
            except StorageError as error:
                assert f"{folder}/step-000000002" in str(error) and "disk full" in str(error)
                assert "bytes needed" in str(error)
        assert assert_intact(load_checkpoint(folder), 5) in {(1, 0), (2, 0)}
        assert all(name.startswith("step-") for name in visible(folder))
        failures += 1
    assert failures >= {"mkdir": 2, "fsync": 5, "replace": 2, "chmod": 2}[call]


def test_a_full_disk(tmp_path):
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("a small file system cannot be mounted here")
    try:
        save(folder, 1, size=5_000)
        for size in (30_000, 50_000, 500_000):
            with pytest.raises(
                StorageError, match=r"step-000000002 \(\d+ bytes needed\): disk full"
            ):
                save(folder, 2, size=size)
            assert visible(folder) == ["step-000000001"]
            assert assert_intact(load_checkpoint(folder), 5_000) == (1, 0)
        save(folder, 2, size=1_000)
        assert assert_intact(load_checkpoint(folder), 1_000) == (2, 0)
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def test_no_folder_to_write_to(tmp_path):
    (tmp_path / "plain").write_text("a file")
    with pytest.raises(StorageError, match="cannot write .*plain/checkpoints/step-000000001"):
        save(tmp_path / "plain" / "checkpoints", 1)
    with pytest.raises(StorageError, match="is a file, not a folder"):
        load_checkpoint(tmp_path / "plain")


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors are named by /proc")
@pytest.mark.parametrize("step", [1, 2], ids=["new step", "same step"])
def test_all_is_on_the_disk_before_it_is_named(tmp_path, monkeypatch, step):
    save(tmp_path, 1)
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append(("fsync", os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(("replace", str(target)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save(tmp_path, step)
    target = tmp_path / f"step-{step:09d}"
    named = events.index(("replace", str(target)))
    synchronised = {Path(path).name for kind, path in events[:named] if kind == "fsync"}
    assert synchronised >= {path.name for path in target.iterdir()} | {target.name}
    assert events[named + 1] == ("fsync", str(tmp_path))

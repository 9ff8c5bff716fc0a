"""One checkpoint in shards: any split is read for any other, and no kill or damage goes unseen."""

import json
import os
import random
import shutil
import signal
import socket
import sys
import threading
import warnings
from itertools import accumulate, pairwise
from pathlib import Path

import pytest
import torch
from exchanges import PeerGone, SocketExchange, in_threads

from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalWarning, StorageError
from shoal.core.exchange import agreed
from shoal.core.storage import checkpoints
from shoal.core.storage.checkpoints import load_checkpoint, save_checkpoint, steps
from shoal.core.storage.files import layout, sealed
from shoal.core.storage.shards import Shard

pytestmark = pytest.mark.usefixtures("warm")

MEMBERS = 7
SPLIT = ("ensemble", "optimizer")
SPLITS = {
    1: [(7,)],
    2: [(4, 3), (1, 6)],
    3: [(3, 2, 2), (5, 1, 1)],
    4: [(2, 2, 2, 1), (0, 3, 0, 4)],
}
ALL = [split for splits in SPLITS.values() for split in splits]


def content(step):
    """Everything that a run of seven members saves: rows, common tensors, and plain values."""
    draw = torch.Generator().manual_seed(step)
    weights = torch.randn(MEMBERS, 3, 2, generator=draw)
    ensemble = {
        "alive": torch.arange(MEMBERS) != 2,
        "weights/fc": weights,
        "shared/trunk": torch.randn(4, generator=draw),
    }
    optimizer = {"0.mean": 2 * weights.double(), "0.step": torch.tensor(float(step))}
    random_state = {"cpu": torch.arange(9, dtype=torch.uint8)}
    return {"ensemble": ensemble, "optimizer": optimizer, "random": random_state}


def spans(split):
    return [slice(*pair) for pair in pairwise([0, *accumulate(split)])]


def of_members(part, name, span):
    """Rows of a tensor that belong to members; None for a tensor that all members share."""
    return None if part == "random" or name in ("shared/trunk", "0.step") else span


def share(parts, span, first):
    """What one process gives: its rows, and the rest if it is the first."""
    return {
        part: {
            name: tensor if of_members(part, name, span) is None else tensor[span]
            for name, tensor in tensors.items()
            if first or of_members(part, name, span) is not None
        }
        for part, tensors in parts.items()
    }


def save(exchange, folder, step, split, keep=2):
    span = spans(split)[exchange.rank]
    parts = share(content(step), span, exchange.rank == 0)
    shard = Shard(exchange, SPLIT, exchange.rank, exchange.world)
    save_checkpoint(folder, step, parts, {"step": step}, keep, shard=shard)


def save_in_threads(folder, step, split, keep=2):
    results = in_threads(len(split), lambda exchange: save(exchange, folder, step, split, keep))
    assert results == [None] * len(split)


def rows_of(span):
    return lambda part, name, _: [span] if of_members(part, name, span) else None


def assert_rows(loaded, span):
    expected = share(content(loaded.step), span, first=True)
    torch.testing.assert_close(loaded.parts, expected, rtol=0, atol=0)
    assert loaded.state == {"step": loaded.step}


def load_in_threads(folder, split, rows=True):
    def load(exchange):
        wanted = rows_of(spans(split)[exchange.rank]) if rows else None
        return load_checkpoint(folder, rows=wanted, exchange=exchange)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShoalWarning)
        return in_threads(len(split), load)


@pytest.mark.parametrize("wrote", ALL, ids=str)
def test_any_split_is_read_whole_and_for_any_other_split(tmp_path, wrote):
    save_in_threads(tmp_path, 5, wrote)
    loaded = load_checkpoint(tmp_path, {part: layout(t) for part, t in content(5).items()})
    assert_rows(loaded, slice(None))
    for read in ALL:
        for span, loaded in zip(spans(read), load_in_threads(tmp_path, read), strict=True):
            assert_rows(loaded, span)


def test_rows_may_have_gaps_and_be_none(tmp_path):
    save_in_threads(tmp_path, 5, (3, 2, 2))
    spans = [slice(0, 2), slice(4, 4), slice(4, 6)]
    rows = {"alive": [], "weights/fc": spans}
    loaded = load_checkpoint(tmp_path, rows=lambda part, name, _: rows.get(name))
    found, whole = loaded.parts["ensemble"], content(5)["ensemble"]
    assert torch.equal(found["weights/fc"], whole["weights/fc"][[0, 1, 4, 5]])
    assert found["alive"].shape == (0,) and torch.equal(
        found["shared/trunk"], whole["shared/trunk"]
    )
    with pytest.raises(ConfigError, match="has 7 rows"):
        load_checkpoint(tmp_path, rows=lambda *_: [slice(5, 8)])


def test_files_and_manifest_of_two_processes(tmp_path):
    save_in_threads(tmp_path, 5, (4, 3))
    names = sorted(path.name for path in (tmp_path / "step-000000005").iterdir())
    assert names == [
        "ensemble-00001-of-00002.safetensors",
        "ensemble-00002-of-00002.safetensors",
        "manifest.json",
        "optimizer-00001-of-00002.safetensors",
        "optimizer-00002-of-00002.safetensors",
        "random.safetensors",
        "state.json",
    ]
    manifest = json.loads((tmp_path / "step-000000005" / "manifest.json").read_text())
    assert manifest["format"] == 3
    assert manifest["files"].keys() | {"manifest.json"} == set(names)


def test_one_process_writes_the_same_bytes_with_and_without_a_shard(tmp_path):
    save_in_threads(tmp_path / "one", 5, (7,))
    save_checkpoint(tmp_path / "two", 5, content(5), {"step": 5})
    one, two = (
        {p.name: p.read_bytes() for p in (tmp_path / name / "step-000000005").iterdir()}
        for name in ("one", "two")
    )
    assert one == two and len(one) == 5
    assert json.loads(one["manifest.json"])["format"] == 2


def test_numbers_of_processes_may_change_from_save_to_save(tmp_path):
    for step, split in enumerate(ALL, 1):
        save_in_threads(tmp_path, step, split)
        assert_rows(load_checkpoint(tmp_path), slice(None))
    assert steps(tmp_path) == [len(ALL) - 1, len(ALL)]


def test_another_model_is_refused_by_every_process(tmp_path):
    save_in_threads(tmp_path, 5, (4, 3))
    wanted = {"ensemble": layout({**content(5)["ensemble"], "weights/fc": torch.zeros(6, 3, 2)})}
    spanned = rows_of(slice(0, 3))
    results = in_threads(
        2, lambda each: load_checkpoint(tmp_path, wanted, rows=spanned, exchange=each)
    )
    assert all(isinstance(result, ConfigError) for result in results)
    assert all("shape (7, 3, 2)" in str(result) for result in results)


# Errors


def failing_at(call, rank, monkeypatch):
    """Lets one thread's call number `at` of an operation of the system fail."""
    genuine = getattr(os, call)

    def patch(patcher, owners, at):
        count = iter(range(10**6))

        def failing(*args, **kwargs):
            if owners.get(threading.get_ident()) == rank and next(count) == at:
                raise OSError(28, os.strerror(28))
            return genuine(*args, **kwargs)

        patcher.setattr(os, call, failing)

    return patch


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("call", ["mkdir", "fsync", "replace", "chmod"])
def test_a_disk_that_fills_for_one_process_stops_the_save_of_all(tmp_path, monkeypatch, call, rank):
    save_in_threads(tmp_path, 1, (4, 3), keep=1)
    patch = failing_at(call, rank, monkeypatch)
    failures = 0
    while True:
        owners = {}

        def saving(exchange, owners=owners):
            owners[threading.get_ident()] = exchange.rank
            save(exchange, tmp_path, 2, (4, 3), keep=1)

        with monkeypatch.context() as patcher:
            patch(patcher, owners, failures)
            results = in_threads(2, saving)
        if results == [None, None]:
            break
        assert all(isinstance(result, StorageError) for result in results), results
        assert all("disk full" in str(r) and "bytes needed" in str(r) for r in results)
        assert "\n" not in str(results[1 - rank])
        assert_rows(load_checkpoint(tmp_path), slice(None))
        assert all(path.name.startswith("step-") for path in tmp_path.iterdir())
        failures += 1
    least = {"mkdir": 2, "fsync": 6, "replace": 2, "chmod": 3}[call]
    most_of_others = {"mkdir": 0, "fsync": 2, "replace": 0, "chmod": 2}[call]
    assert failures >= least if rank == 0 else failures == most_of_others


def test_a_disk_of_its_own_is_named_as_the_reason(tmp_path):
    def saving(exchange):
        where = tmp_path / str(exchange.rank) / "run"
        save(exchange, where, 1, (4, 3))

    for result in in_threads(2, saving):
        assert isinstance(result, StorageError) and "a disk that all processes share" in str(result)


def test_an_error_without_a_name_is_raised_in_all():
    def work(exchange):
        return agreed(exchange, lambda: 1 / exchange.rank)

    first, second = in_threads(2, work)
    assert isinstance(first, ZeroDivisionError)
    assert isinstance(second, StorageError) and "process 0 of 2" in str(second)


# Damage


def mutations(data, draw):
    yield None
    yield b""
    yield data + b"\0"
    yield data[:-1]
    for _ in range(12):
        at = draw.randrange(len(data))
        yield data[:at] + bytes([data[at] ^ 1 << draw.randrange(8)]) + data[at + 1 :]
        yield data[:at] + data[at + 1 :]


@pytest.mark.parametrize("how", ["whole", "by two processes"])
def test_any_changed_byte_sends_all_processes_to_the_step_before(tmp_path, how):
    for step in (1, 2):
        save_in_threads(tmp_path, step, (3, 2, 2))
    draw = random.Random(how)
    for path in sorted((tmp_path / "step-000000002").iterdir()):
        sound = path.read_bytes()
        for data in mutations(sound, draw):
            path.unlink(missing_ok=True)
            if data is not None:
                path.write_bytes(data)
            split = (7,) if how == "whole" else (2, 5)
            results = load_in_threads(tmp_path, split, rows=how != "whole")
            # A manifest with other white space says the same.
            known = {1, 2} if path.name == "manifest.json" else {1}
            met = {loaded.step for loaded in results}
            assert len(met) == 1 and met <= known
            for loaded, span in zip(results, spans(split), strict=True):
                assert_rows(loaded, span)
        path.write_bytes(sound)
    assert load_checkpoint(tmp_path).step == 2


def test_a_process_reads_through_only_the_shards_of_its_rows(tmp_path, monkeypatch):
    save_in_threads(tmp_path, 1, (2, 2, 2, 1))
    seen = []
    monkeypatch.setattr(
        checkpoints, "_check_digests", lambda path, files, names: seen.extend(names)
    )
    load_checkpoint(tmp_path, rows=rows_of(slice(3, 5)))
    # The first shard has the tensors that all members share.
    assert sorted(seen) == [
        *[f"ensemble-0000{k}-of-00004.safetensors" for k in (1, 2, 3)],
        *[f"optimizer-0000{k}-of-00004.safetensors" for k in (1, 2, 3)],
        "random.safetensors",
        "state.json",
    ]
    assert len(seen) == len(set(seen))


@pytest.mark.parametrize(
    "change",
    [
        lambda files: files.pop("ensemble-00002-of-00003.safetensors"),
        lambda files: files.update(
            {"ensemble-00004-of-00003.safetensors": files["ensemble-00003-of-00003.safetensors"]}
        ),
        lambda files: files.update(
            {"ensemble-00001-of-00002.safetensors": files["ensemble-00001-of-00003.safetensors"]}
        ),
        lambda files: files.update({"ensemble.safetensors": files["random.safetensors"]}),
        lambda files: files["random.safetensors"].update(header=7),
    ],
)
@pytest.mark.parametrize("rows", [None, rows_of(slice(0, 2))], ids=["whole", "rows"])
def test_crafted_splits_are_refused(tmp_path, change, rows):
    save_in_threads(tmp_path, 1, (3, 2, 2))
    folder = tmp_path / "step-000000001"
    for source, target in [("3-of-00003", "4-of-00003"), ("1-of-00003", "1-of-00002")]:
        names = [f"ensemble-0000{end}.safetensors" for end in (source, target)]
        shutil.copy(folder / names[0], folder / names[1])
    shutil.copy(folder / "random.safetensors", folder / "ensemble.safetensors")
    manifest = json.loads((folder / "manifest.json").read_text())
    change(manifest["files"])
    (folder / "manifest.json").write_text(json.dumps(sealed(manifest)))
    with pytest.raises(CheckpointCorrupt) as caught:
        load_checkpoint(tmp_path, rows=rows)
    assert "\n" not in str(caught.value)


def test_few_of_many_members_take_little_memory(tmp_path):
    status = Path("/proc/self/status")
    if not status.exists() or not os.access("/proc/self/clear_refs", os.W_OK):
        pytest.skip("this system does not tell the most memory of a process")

    def most():
        return int(status.read_text().split("VmHWM:")[1].split()[0]) << 10

    members, size = 100, 1 << 18
    save_checkpoint(tmp_path, 1, {"ensemble": {"w": torch.ones(members, size)}}, {})
    Path("/proc/self/clear_refs").write_text("5")
    before = most()
    loaded = load_checkpoint(tmp_path, rows=lambda *_: [slice(40, 43)])
    grown = most() - before
    assert loaded.parts["ensemble"]["w"].shape == (3, size)
    assert grown < 12 * 4 * size  # the file has a hundred rows


# Kills


def killed(folder, victim, event):
    """Two real processes save step 2; one is killed at an event of its own. Whether it was."""
    lines, children = socket.socketpair(), []
    for rank in (0, 1):
        child = os.fork()
        if child == 0:
            lines[1 - rank].close()
            code = 0
            try:
                if rank == victim:
                    count_down(event)
                save(SocketExchange(rank, lines[rank]), folder, 2, (4, 3), keep=1)
            except PeerGone:
                code = 75
            finally:
                os._exit(code)
        children.append(child)
    for line in lines:
        line.close()
    status = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    assert status[victim] in (0, -signal.SIGKILL) and status[1 - victim] in (0, 75)
    return status[victim] != 0


def count_down(event):
    left = [event]

    def count(name, args):
        left[0] -= 1
        if left[0] == -1:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)


@pytest.mark.kill
@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
@pytest.mark.parametrize("victim", [0, 1])
def test_a_kill_of_one_process_at_every_event_loses_nothing(tmp_path, victim):
    event, found = 0, set()
    while True:
        folder = tmp_path / str(event)
        save_in_threads(folder, 1, (4, 3), keep=1)
        was_killed = killed(folder, victim, event)
        loaded = load_checkpoint(folder)
        assert_rows(loaded, slice(None))
        found.add(loaded.step)
        if not was_killed:
            break
        save_in_threads(folder, 3, (3, 2, 2), keep=1)
        assert [path.name for path in folder.iterdir()] == ["step-000000003"]
        assert_rows(load_checkpoint(folder), slice(None))
        shutil.rmtree(folder)
        event += 1
    assert event > (25 if victim == 0 else 8)
    assert loaded.step == 2 and found == {1, 2}


@pytest.mark.skipif(not os.path.exists("/proc/self/fd"), reason="descriptors are named by /proc")
def test_the_files_of_all_processes_are_on_the_disk_before_the_manifest(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(f"rename {Path(target).name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    save_in_threads(tmp_path, 1, (3, 2, 2))
    written = events.index("manifest.json")
    shards = {f"{part}-0000{k}-of-00003.safetensors" for part in SPLIT for k in (1, 2, 3)}
    assert set(events[:written]) == shards | {"random.safetensors", "state.json"}
    assert events[written + 1 : written + 4] == [
        "step-000000001",
        "rename step-000000001",
        tmp_path.name,
    ]

import errno
import io
import json
import os
import pickle
import random
import resource
import subprocess
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalError, StorageError
from shoal.core.storage import disk, files
from shoal.core.storage.formats import parse_json, to_json

DTYPES = list(files._DTYPES.values())
LINUX = os.path.exists("/proc/self/statm")


WRITERS = {
    "bytes": lambda path, size: files.write_bytes(path, b"\1" * size),
    "text": lambda path, size: files.write_text(path, "x" * size),
    "json": lambda path, size: files.write_json(path, ["x" * size]),
    "tensors": lambda path, size: files.write_tensors(path, {"x": torch.ones(size // 4)}),
}


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def assert_same(left, right):
    assert set(left) == set(right)
    for name in left:
        assert left[name].shape == right[name].shape and left[name].dtype == right[name].dtype
        assert bits(left[name]) == bits(right[name]), name


def safetensors_bytes(header, body=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@contextmanager
def little_memory(extra=100 << 20):
    """Allocations beyond what is in use now and `extra` bytes fail."""
    if not LINUX:
        yield
        return
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (in_use + extra, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


@contextmanager
def small_files_only(size):
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.fixture
def tiny_disk(tmp_path):
    """A file system of one megabyte, where the system lets us mount one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(command, capture_output=True).returncode == 0
    except OSError:
        mounted = False
    if not mounted:
        pytest.skip("a small file system cannot be mounted here")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


# Writing


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2), (5,), (2, 3, 4)], ids=str)
def test_tensors_come_back_bit_for_bit(tmp_path, dtype, shape):
    data = torch.randint(0, 2, (torch.Size(shape).numel() * dtype.itemsize,), dtype=torch.uint8)
    if dtype is not torch.bool:
        data = data * 251 + torch.arange(len(data), dtype=torch.uint8)
    tensors = {"a b/ü": data.view(dtype).reshape(shape), "other": torch.arange(7)}
    files.write_tensors(tmp_path / "x.safetensors", tensors)
    assert_same(files.read_tensors(tmp_path / "x.safetensors"), tensors)
    assert_same(
        files.read_tensors(tmp_path / "x.safetensors", files.layout(tensors)),
        tensors,
    )


def test_views_and_shared_weights_are_written_out(tmp_path):
    base = torch.randn(4, 6)
    wave = torch.randn(3, dtype=torch.complex64)
    tensors = {
        "whole": base,
        "row": base[1],
        "column": base[:, 2],
        "transposed": base.T,
        "again": base,
        "expanded": torch.randn(1).expand(5),
        "parameter": torch.nn.Parameter(torch.randn(2)),
        "conjugate": wave.conj(),
        "imaginary": wave.conj().imag,
    }
    files.write_tensors(tmp_path / "x.safetensors", tensors)
    read = files.read_tensors(tmp_path / "x.safetensors")
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name


def test_tensors_read_do_not_follow_the_file(tmp_path):
    path = tmp_path / "x.safetensors"
    files.write_tensors(path, {"x": torch.ones(4096)})
    read = files.read_tensors(path)
    with open(path, "r+b") as file:
        file.seek(1000)
        file.write(b"\0" * 4000)
    assert torch.equal(read["x"], torch.ones(4096))


def test_order_of_expected_names_is_kept(tmp_path):
    tensors = {"z": torch.ones(2), "a": torch.ones(1, dtype=torch.int64), "m": torch.ones(3)}
    files.write_tensors(tmp_path / "x", tensors)
    assert list(files.read_tensors(tmp_path / "x", files.layout(tensors))) == ["z", "a", "m"]


@pytest.mark.parametrize(
    "tensors",
    [
        {"x": torch.zeros(2, dtype=torch.complex128)},
        {"x": torch.eye(2).to_sparse()},
        {"__metadata__": torch.zeros(2)},
    ],
    ids=["complex128", "sparse", "reserved name"],
)
def test_what_cannot_be_stored_is_refused_and_named(tmp_path, tensors):
    with pytest.raises(ConfigError, match=next(iter(tensors))):
        files.write_tensors(tmp_path / "x", tensors)
    assert list(tmp_path.iterdir()) == []


def test_a_header_that_could_not_be_read_is_not_written(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "MAX_HEADER", 1000)
    files.write_tensors(tmp_path / "few", {"x": torch.zeros(2)})
    with pytest.raises(ConfigError, match="40 tensors are too many"):
        files.write_tensors(tmp_path / "many", {f"x{i}": torch.zeros(2) for i in range(40)})
    assert [path.name for path in tmp_path.iterdir()] == ["few"]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_is_replaced_and_nothing_else_stays(tmp_path, writer):
    path = tmp_path / "new" / "folder" / "file"
    WRITERS[writer](path, 400)
    first = path.read_bytes()
    WRITERS[writer](path, 800)
    assert len(path.read_bytes()) == len(first) + 400
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize("writer", WRITERS)
def test_files_can_be_read_by_whom_the_umask_lets(tmp_path, writer):
    old = os.umask(0o027)
    try:
        WRITERS[writer](tmp_path / "file", 400)
    finally:
        os.umask(old)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o640


@pytest.mark.skipif(not LINUX, reason="names of descriptors are read from /proc")
@pytest.mark.parametrize("writer", WRITERS)
def test_content_is_on_the_disk_before_the_name_and_the_name_before_the_return(
    tmp_path, writer, monkeypatch
):
    events = []
    fsync, replace = os.fsync, os.replace

    def recorded_fsync(descriptor):
        events.append(("fsync", Path(os.readlink(f"/proc/self/fd/{descriptor}"))))
        fsync(descriptor)

    def recorded_replace(source, target):
        events.append(("replace", Path(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "replace", recorded_replace)
    WRITERS[writer](tmp_path / "file", 400)
    temporary = next(path for kind, path in events if kind == "replace")
    assert events == [("fsync", temporary), ("replace", temporary), ("fsync", tmp_path)]


@pytest.mark.parametrize("known", [True, False], ids=["the drive knows it", "it does not"])
def test_on_macos_the_cache_of_the_drive_is_written_too(tmp_path, monkeypatch, known):
    full, plain, fsync = [], [], os.fsync

    def control(descriptor, command):
        full.append(command)
        if not known:
            raise OSError(errno.ENOTTY, "Inappropriate ioctl for device")

    def recorded_fsync(descriptor):
        plain.append(descriptor)
        fsync(descriptor)

    macos = SimpleNamespace(F_FULLFSYNC=51, fcntl=control)
    monkeypatch.setattr("shoal.core.storage.disk.fcntl", macos)
    monkeypatch.setattr(os, "fsync", recorded_fsync)
    files.write_text(tmp_path / "file", "content")
    assert full == [51, 51]  # the file, then the folder
    assert len(plain) == (0 if known else 2)
    assert (tmp_path / "file").read_text() == "content"


def test_without_file_control_plain_synchronisation_is_used(tmp_path, monkeypatch):
    monkeypatch.setattr("shoal.core.storage.disk.fcntl", None)
    files.write_text(tmp_path / "file", "content")
    assert (tmp_path / "file").read_text() == "content"


@pytest.mark.skipif(not LINUX, reason="names of descriptors are read from /proc")
def test_new_folders_are_on_the_disk_up_to_one_that_we_may_not_change(tmp_path, monkeypatch):
    synchronised, access = [], os.access
    monkeypatch.setattr(
        os, "fsync", lambda fd: synchronised.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    monkeypatch.setattr(os, "access", lambda path, how: path != tmp_path and access(path, how))
    run = tmp_path / "runs" / "first"
    run.mkdir(parents=True)
    disk.sync_name(run / "config")
    assert synchronised == [str(run), str(run.parent)]


def fail_once(monkeypatch, call, at, code):
    """Makes one call of a function of `os` fail, the `at`-th from now on."""
    genuine, calls = getattr(os, call), iter(range(10**6))

    def failing(*args, **kwargs):
        if next(calls) == at:
            raise OSError(code, os.strerror(code))
        return genuine(*args, **kwargs)

    monkeypatch.setattr(os, call, failing)


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize(("call", "count"), [("mkdir", 1), ("fsync", 2), ("replace", 1)])
@pytest.mark.parametrize(
    ("code", "words"),
    [
        (errno.ENOSPC, "disk full"),
        (errno.EROFS, "read-only"),
        (errno.EXDEV, "different file systems"),
        (errno.EDQUOT, "quota"),
    ],
)
def test_every_failing_call_leaves_a_whole_file_and_nothing_else(
    tmp_path, monkeypatch, writer, call, count, code, words
):
    path = tmp_path / "file"
    WRITERS[writer](path, 800)
    after = path.read_bytes()
    for at in range(count):
        WRITERS[writer](path, 400)
        before = path.read_bytes()
        with monkeypatch.context() as patch:
            fail_once(patch, call, at, code)
            with pytest.raises(StorageError, match=words) as caught:
                WRITERS[writer](path, 800)
        assert str(path) in str(caught.value) and " bytes needed)" in str(caught.value)
        assert caught.value.exit_status == 74
        assert path.read_bytes() == (before if at == 0 else after)
        assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("writer", WRITERS)
def test_a_full_disk(tiny_disk, writer):
    path = tiny_disk / "file"
    WRITERS[writer](path, 400)
    before = path.read_bytes()
    with pytest.raises(StorageError, match=r"file \(\d{7} bytes needed\): disk full"):
        WRITERS[writer](path, 4_000_000)
    assert path.read_bytes() == before and list(tiny_disk.iterdir()) == [path]
    WRITERS[writer](path, 40_000)


@pytest.mark.parametrize("writer", WRITERS)
def test_a_file_beyond_the_size_limit_of_the_system(tmp_path, writer):
    path = tmp_path / "file"
    WRITERS[writer](path, 400)
    before = path.read_bytes()
    with small_files_only(10_000), pytest.raises(StorageError, match="larger than the system"):
        WRITERS[writer](path, 400_000)
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("writer", WRITERS)
def test_no_folder_to_write_to(tmp_path, writer):
    (tmp_path / "plain").write_text("a file")
    (tmp_path / "folder" / "inside").mkdir(parents=True)
    with pytest.raises(StorageError, match="cannot write .*plain.file"):
        WRITERS[writer](tmp_path / "plain" / "file", 400)
    with pytest.raises(StorageError, match="a folder"):
        WRITERS[writer](tmp_path / "folder", 400)
    with pytest.raises(StorageError, match="name is too long"):
        WRITERS[writer](tmp_path / ("x" * 300), 400)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["folder", "plain"]


def test_no_permission(tmp_path):
    folder = tmp_path / "closed"
    folder.mkdir()
    folder.chmod(0o555)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        with pytest.raises(StorageError, match="no permission"):
            files.write_text(folder / "file", "x")
    finally:
        if root:
            os.seteuid(0)
    assert list(folder.iterdir()) == []


# Temporaries


def test_sweep_removes_what_dead_writers_left_and_nothing_else(tmp_path):
    dead = subprocess.Popen(["true"])
    dead.wait()
    me, parent, host = os.getpid(), os.getppid(), disk.HOST
    stale = [
        f".tmp-{dead.pid}-00000000-00000000-{host}",
        f".tmp-{me}-00000000-00000000-{host}",
        f".tmp-{2**70}-00000000-00000000-{host}",
        f".tmp-{parent}-11111111-00000000-{host}",
        ".tmp-1-11111111-00000000-elsewhere-with-dashes",
    ]
    living = [
        f".tmp-{parent}-00000000-00000000-{host}",
        f".tmp-{dead.pid}-00000000-00000000-elsewhere",
        ".tmp-other",
        ".tmp-a-b-c-d",
        "tmp",
    ]
    for name in stale + living:
        (tmp_path / name / "inside").mkdir(parents=True)
        (tmp_path / name / "inside" / "file").write_text("x")
    for name in stale[-2:]:
        os.utime(tmp_path / name, (time.time() - 90_000,) * 2)
    with disk.staging(tmp_path) as mine:
        files.sweep(tmp_path)
        assert mine.is_dir()
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(living)
    files.sweep(tmp_path / "no such folder")


# JSON

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(values)
def test_json_round_trip_is_exact(value):
    text = to_json(value)
    assert repr(parse_json(text)) == repr(value)
    assert text == json.dumps(value)


def test_json_values_of_the_library(tmp_path):
    value = {
        "z": np.float32(0.5),
        "a": np.arange(3),
        "t": torch.tensor([[1.0, float("inf")]]),
        "n": [float("nan"), -float("inf"), 1e300],
        "p": Path("some/where"),
        "s": (np.int64(3), torch.tensor(True), None),
    }
    files.write_json(tmp_path / "x.json", value)
    read = files.read_json(tmp_path / "x.json")
    assert list(read) == list(value)
    assert read == {
        "z": 0.5,
        "a": [0, 1, 2],
        "t": [[1.0, None]],
        "n": [None, None, 1e300],
        "p": "some/where",
        "s": [3, True, None],
    }


@pytest.mark.parametrize("value", [{1: 2}, {"a": {None: 1}}, {1, 2}, b"x", object(), 1j])
def test_json_refuses_what_it_would_change(tmp_path, value):
    with pytest.raises(ConfigError, match="JSON"):
        files.write_json(tmp_path / "x.json", value)
    assert list(tmp_path.iterdir()) == []


UNSOUND_JSON = {
    "empty": b"",
    "half": b'{"a": [1, 2',
    "more": b"{} {}",
    "twice": b'{"a": 1, "a": 1}',
    "twice inside": b'[{"b": {"a": 1, "c": 2, "a": 1}}]',
    "nan": b'{"a": NaN}',
    "infinity": b"[-Infinity]",
    "overflow": b"[1e999]",
    "long number": b"1" * 10_000,
    "latin": '["\u00fc"]'.encode("latin-1"),
    "utf-16": '{"a": 1}'.encode("utf-16"),
    "mark": b"\xef\xbb\xbf{}",
    "zeros": bytes(1000),
    "deep lists": b"[" * 100_000 + b"]" * 100_000,
    "deep tables": b'{"a":' * 100_000 + b"1" + b"}" * 100_000,
    "pickle": pickle.dumps({"a": 1}),
}


@pytest.mark.parametrize("name", UNSOUND_JSON)
def test_unsound_json_is_refused_in_one_sentence(tmp_path, name):
    path = tmp_path / "x.json"
    path.write_bytes(UNSOUND_JSON[name])
    with little_memory(), pytest.raises(CheckpointCorrupt) as caught:
        files.read_json(path)
    assert str(caught.value).startswith(f"{path} is not sound JSON: ")
    assert "\n" not in str(caught.value)


def test_large_json_is_refused_unread(tmp_path):
    path = tmp_path / "x.json"
    path.write_text("[" + "1," * 500 + "1]")
    assert len(files.read_json(path, max_bytes=1003)) == 501
    with pytest.raises(CheckpointCorrupt, match="1003 bytes, more than the limit of 1002"):
        files.read_json(path, max_bytes=1002)
    with open(path, "wb") as file:
        file.truncate(1 << 40)
    with little_memory(), pytest.raises(CheckpointCorrupt, match="1099511627776 bytes"):
        files.read_json(path)


@pytest.mark.parametrize("read", [files.read_json, files.read_tensors, files.sha256])
def test_what_is_no_file_is_not_opened(tmp_path, read):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "plain").write_text("x")
    with pytest.raises(StorageError, match="no such file"):
        read(tmp_path / "missing")
    with pytest.raises(StorageError, match="is a file, not a folder"):
        read(tmp_path / "plain" / "below")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(StorageError, match="not an ordinary file"):
            read(path)


def test_sha256_of_a_known_text(tmp_path):
    files.write_text(tmp_path / "x", "abc")
    assert files.sha256(tmp_path / "x") == (
        "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    )


# Crafted tensor files


class Bomb:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def entry(dtype, shape, start, end):
    return {"x": {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}}


def crafted(marker):
    array = io.BytesIO()
    np.save(array, np.array([Bomb(marker)], dtype=object), allow_pickle=True)
    archive = io.BytesIO()
    torch.save({"x": torch.ones(2)}, archive)
    claims = np.lib.format.magic(1, 0) + b"\x76\0"
    claims += (
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (100000000000,)}".ljust(117) + b"\n"
    )
    return {
        "empty": b"",
        "short": b"\1\2\3",
        "pickle": pickle.dumps(Bomb(marker)),
        "npy of objects": array.getvalue(),
        "npy of 800 GB": claims,
        "torch archive": archive.getvalue(),
        "header of 2^64 bytes": b"\xff" * 8 + b"{}",
        "header of 99 MB": (99 << 20).to_bytes(8, "little") + b"{" * 1000,
        "sound header of 5 MB": safetensors_bytes(b"{}".ljust(5 << 20)),
        "header longer than the file": (1000).to_bytes(8, "little") + b"{}",
        "no JSON": safetensors_bytes(b"\x80\x04."),
        "deep JSON": safetensors_bytes(b"[" * 100_000),
        "deep table": safetensors_bytes(b'{"a":' * 100_000),
        "4 TB": safetensors_bytes(entry("F32", [10**12], 0, 4 * 10**12), b"\0" * 4),
        "4 TB view": safetensors_bytes(entry("F32", [10**12], 0, 4), b"\0" * 4),
        "hole": safetensors_bytes(entry("F32", [1], 4, 8), b"\0" * 8),
        "rest": safetensors_bytes(entry("F32", [1], 0, 4), b"\0" * 8),
        "backwards": safetensors_bytes(entry("F32", [1], 4, 0), b"\0" * 4),
        "negative": safetensors_bytes(entry("F32", [-1], 0, 4), b"\0" * 4),
        "beyond 64 bits": safetensors_bytes(entry("F32", [0, 2**64 - 1], 0, 0)),
        "beyond 64 bits together": safetensors_bytes(entry("F32", [0] + [2**40] * 3, 0, 0)),
        "5000 axes": safetensors_bytes(entry("F32", [1] * 5000, 0, 4), b"\0" * 4),
        "strange type": safetensors_bytes(entry("F7", [1], 0, 4), b"\0" * 4),
        "type of half bytes": safetensors_bytes(entry("F4", [2], 0, 1), b"\0"),
    }


@pytest.mark.parametrize("name", crafted(Path("none")))
def test_crafted_tensor_files_are_refused_before_memory_is_taken(tmp_path, name):
    path, marker = tmp_path / "x.safetensors", tmp_path / "code ran"
    path.write_bytes(crafted(marker)[name])
    with little_memory(), pytest.raises(CheckpointCorrupt) as caught:
        files.read_tensors(path)
    assert str(path) in str(caught.value) and "\n" not in str(caught.value)
    assert not marker.exists()


def test_random_damage_meets_only_documented_errors(tmp_path):
    path, generator = tmp_path / "x.safetensors", random.Random(0)
    files.write_tensors(path, {"a": torch.ones(3), "b": torch.ones(2, 2, dtype=torch.int8)})
    sound, refused = path.read_bytes(), 0
    for _ in range(500):
        data = bytearray(sound)
        for _ in range(generator.randint(1, 4)):
            data[generator.randrange(len(data))] = generator.randrange(256)
        path.write_bytes(data[: generator.choice([len(data), generator.randrange(len(data))])])
        try:
            files.read_tensors(path)
        except CheckpointCorrupt:
            refused += 1
    assert refused > 250


WANTED = {"fc.weight": ((3, 4), torch.float32), "fc.bias": ((3,), torch.float32)}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            {"fc.weight": torch.zeros(5, 4)},
            r"has weight fc.weight of shape \(5, 4\) and type float32, the model wants weight "
            r"fc.weight of shape \(3, 4\) and type float32",
        ),
        (
            {"fc.weight": torch.zeros(3, 4, dtype=torch.float64)},
            "has .* type float64, the model wants",
        ),
        ({"fc.bias": None}, r"has no weight fc.bias, the model wants weight fc.bias of shape \(3,"),
        ({"more": torch.zeros(2)}, r"has weight more of shape \(2,\).* wants no weight more"),
    ],
    ids=["shape", "type", "missing", "extra"],
)
def test_other_tensors_than_expected_are_a_matter_of_config(tmp_path, change, words):
    tensors = {"fc.weight": torch.zeros(3, 4), "fc.bias": torch.zeros(3)} | change
    path = tmp_path / "x.safetensors"
    files.write_tensors(path, {k: t for k, t in tensors.items() if t is not None})
    with pytest.raises(ConfigError, match=f"this run {words}") as caught:
        files.read_tensors(path, WANTED)
    assert str(path) in str(caught.value) and isinstance(caught.value, ShoalError)


def test_expected_is_checked_before_memory_is_taken(tmp_path):
    path = tmp_path / "x.safetensors"
    size = 4 << 30
    with open(path, "wb") as file:
        file.write(safetensors_bytes(entry("F32", [size // 4], 0, size)))
        file.truncate(file.tell() + size)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ConfigError, match="of shape .1073741824,"):
        files.read_tensors(path, {"x": ((3,), torch.float32)})
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 100_000

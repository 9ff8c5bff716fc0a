"""Where files are found, what is refused there, and one download for all."""

import io
import os
import signal
import subprocess
import sys
import tarfile
import threading
import time

import pytest
from file_server import described

from shoal.core.errors import DataError
from shoal.data.catalogue import COLLECTIONS
from shoal.data.files import store
from shoal.data.files.store import obtain, present

CONTENT = b"0123456789" * 100


@pytest.fixture
def shared(tmp_path, cache, monkeypatch):
    folder = tmp_path / "shared"
    (folder / "set").mkdir(parents=True)
    monkeypatch.setenv("SHOAL_DATA", str(folder))
    return folder


def test_the_shared_folder_comes_first_and_nothing_is_asked_for(site, shared, cache):
    file = described("set/a", CONTENT, site.put("a", CONTENT))
    (shared / "set" / "a").write_bytes(CONTENT)
    assert obtain(file) == [shared / "set" / "a"]
    assert site.requests == [] and not cache.exists()


def test_what_the_shared_folder_lacks_goes_into_the_cache(site, shared, cache):
    file = described("set/a", CONTENT, site.put("a", CONTENT))
    assert obtain(file) == [cache / "set" / "a"] == obtain(file)
    assert len(site.requests) == 1
    assert list((shared / "set").iterdir()) == []
    assert [path.name for path in (cache / "set").iterdir()] == ["a"]


@pytest.mark.parametrize("bad", [CONTENT[:-1], b"x" + CONTENT[1:]])
def test_a_bad_file_in_the_shared_folder_is_named_and_left_alone(site, shared, bad):
    file = described("set/a", CONTENT, site.put("a", CONTENT))
    place = shared / "set" / "a"
    place.write_bytes(bad)
    with pytest.raises(DataError, match="is (altered|truncated)") as caught:
        obtain(file)
    sentence = str(caught.value)
    assert sentence.startswith(str(place)) and file.addresses[0] in sentence
    assert place.read_bytes() == bad and site.requests == []


@pytest.mark.parametrize("bad", [CONTENT[:-1], b"x" + CONTENT[1:]])
def test_a_bad_file_in_the_cache_is_fetched_again(site, cache, bad, capsys):
    file = described("set/a", CONTENT, site.put("a", CONTENT))
    (cache / "set").mkdir(parents=True)
    (cache / "set" / "a").write_bytes(bad)
    assert obtain(file)[0].read_bytes() == CONTENT
    assert "fetching it again" in capsys.readouterr().err


def packed(**members):
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for name, content in members.items():
            info = tarfile.TarInfo(name.replace("__", "/"))
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        trap = tarfile.TarInfo("../../outside")
        trap.size = 4
        tar.addfile(trap, io.BytesIO(b"trap"))
        link = tarfile.TarInfo("bin/link")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
    return buffer.getvalue()


def test_files_are_taken_out_of_an_archive_by_name(site, cache, tmp_path):
    archive = packed(bin__a=CONTENT, bin__b=b"bbb", bin__c=b"never asked for")
    tar = described("set/all.tar.gz", archive, site.put("tar", archive))
    files = described("set/bin/a", CONTENT), described("set/bin/b", b"bbb")
    a, b = obtain(*files, archive=tar)
    assert a.read_bytes() == CONTENT and b.read_bytes() == b"bbb"
    assert obtain(*files, archive=tar) == [a, b] and len(site.requests) == 1
    names = {path.name for path in tmp_path.rglob("*")}
    assert not names & {"outside", "link", "c"}


def test_an_archive_in_the_shared_folder_is_unpacked_into_the_cache(shared, cache):
    archive = packed(bin__a=CONTENT)
    (shared / "set" / "all.tar.gz").write_bytes(archive)
    tar = described("set/all.tar.gz", archive)
    assert obtain(described("set/bin/a", CONTENT), archive=tar) == [cache / "set" / "bin" / "a"]


@pytest.mark.parametrize("content", [packed(bin__a=b"other"), packed(bin__z=CONTENT), b"no tar"])
def test_archives_without_the_file_are_refused(site, cache, content):
    tar = described("set/all.tar.gz", content, site.put("tar", content))
    with pytest.raises(DataError, match=r"all.tar.gz (does not hold set/bin/a|is not a sound)"):
        obtain(described("set/bin/a", CONTENT), archive=tar)


def test_present_tells_what_lies_there(shared):
    assert present("svhn") == "not here"
    (shared / "svhn").mkdir()
    (shared / "svhn" / "test_10k.npz").touch()
    assert present("svhn") == "partly here"
    (shared / "svhn" / "train_32x32.mat").touch()
    assert present("svhn") == "here"


def test_the_catalogue_is_complete():
    for name, held in COLLECTIONS.items():
        files = held.files if held.archive is None else (held.archive,)
        for file in files:
            assert file.path.startswith(f"{name}/") and file.size > 0
            assert file.addresses
            assert all(a.startswith(("https://", "http://")) for a in file.addresses)
        assert held.licence and held.download > 0


WORKER = """
import importlib.util, sys, types
# The package as a bare folder: these modules need nothing of torch, which takes seconds to import.
package = types.ModuleType("shoal.data")
package.__path__ = [importlib.util.find_spec("shoal").submodule_search_locations[0] + "/data"]
sys.modules["shoal.data"] = package
from shoal.data.catalogue import File
from shoal.data.files.store import obtain
path, size, digest, address = sys.argv[1:]
print("asking", flush=True)
print(obtain(File(path, int(size), digest, (address,)))[0], flush=True)
"""


@pytest.fixture
def start(cache):
    """Starts processes that want a file; they are gone afterwards."""
    started = []

    def process(file):
        command = [file.path, str(file.size), file.digest, file.addresses[0]]
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, *command],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        started.append(worker)
        assert worker.stdout.readline() == "asking\n"
        return worker

    yield process
    for worker in started:
        worker.kill()
        worker.communicate()


def until(condition):
    while not condition():
        time.sleep(0.02)


@pytest.mark.kill
def test_two_processes_download_only_once(site, cache, start):
    gate = threading.Event()
    file = described("set/a", CONTENT, site.put("a", CONTENT, wait=gate))
    first = start(file)
    until(lambda: site.requests)
    second = start(file)
    assert any("waiting for it" in line for line in second.stderr)
    gate.set()
    outputs = [process.communicate()[0].strip() for process in (first, second)]
    assert outputs == [str(cache / "set" / "a")] * 2
    assert len(site.requests) == 1


@pytest.mark.kill
def test_a_killed_download_is_resumed_by_the_next(site, cache, start):
    content = os.urandom(3 << 20)
    gate = threading.Event()
    file = described("set/a", content, site.put("a", content, wait=gate))
    worker = start(file)
    part = cache / "set" / "a.part"
    until(lambda: part.exists() and part.stat().st_size > 1 << 20)
    worker.send_signal(signal.SIGKILL)
    worker.wait()
    kept = part.stat().st_size
    gate.set()
    site.put("a", content)
    assert obtain(file)[0].read_bytes() == content
    assert site.requests[-1] == ("/a", f"bytes={kept}-")
    assert not part.exists() and not (cache / "set" / "lock").exists()


def test_a_second_download_waits_with_a_word(site, cache, capsys, monkeypatch):
    monkeypatch.setattr(store, "_PATIENCE", 0.3)
    file = described("set/a", CONTENT, site.put("a", CONTENT))
    with (
        store.FolderLock(cache / "set"),
        pytest.raises(store.StorageError, match="is being written by process"),
    ):
        obtain(file)
    assert "waiting for it" in capsys.readouterr().err

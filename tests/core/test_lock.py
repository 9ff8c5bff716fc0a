import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shoal
from shoal.core.errors import ShoalWarning, StorageError
from shoal.core.storage import lock as lock_module
from shoal.core.storage.lock import FolderLock

pytestmark = [
    pytest.mark.usefixtures("warm"),
    pytest.mark.skipif(lock_module.fcntl is None, reason="this system has no file locks"),
]

WORKER = """
import os, signal, sys
from shoal.core.errors import StorageError
from shoal.core.storage.lock import FolderLock

def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

def hold(folder):
    with FolderLock(folder):
        say("held", os.getpid())
        signal.pause()

def hold_and_fork(folder):
    with FolderLock(folder):
        if os.fork() == 0:
            say("held", os.getppid(), os.getpid())
        signal.pause()

def attempt(folder):
    try:
        with FolderLock(folder):
            say("got it")
    except StorageError as error:
        say(error)

def child_leaves_first(folder):
    with FolderLock(folder):
        child = os.fork()
        if child:
            os.waitpid(child, 0)
            say("held", os.getpid())
            signal.pause()

def count_to(folder, rounds):
    done = 0
    while done < int(rounds):
        try:
            with FolderLock(folder):
                with open(folder + "/count") as file:
                    value = int(file.read())
                with open(folder + "/count", "w") as file:
                    file.write(str(value + 1))
                done += 1
        except StorageError:
            pass
    say("done")

signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    name, *arguments = line.split()
    if os.fork() == 0:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        globals()[name](*arguments)
        os._exit(0)
"""


@pytest.fixture(scope="module")
def worker():
    """A process that runs a function of WORKER in a child of its own for every line it gets."""
    process = subprocess.Popen(
        [sys.executable, "-c", WORKER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(shoal.__file__).parents[1],
        text=True,
        bufsize=1,
    )
    yield process
    process.stdin.close()
    process.stdout.close()
    process.wait()


def start(worker, *words):
    worker.stdin.write(" ".join(map(str, words)) + "\n")


def answer(worker):
    return worker.stdout.readline().rstrip("\n")


def refusal(folder, pid):
    return (
        f"{folder} is being written by process {pid} on {socket.gethostname()}; "
        "wait for it or choose another folder"
    )


def test_a_second_lock_in_this_process_is_refused(tmp_path):
    folder = tmp_path / "new" / "run"
    with FolderLock(folder) as held:
        for other in (FolderLock(folder), FolderLock(str(folder)), held):
            with pytest.raises(StorageError) as caught, other:
                pass
            assert str(caught.value) == refusal(folder, os.getpid())
            assert caught.value.exit_status == 74
    with FolderLock(folder):
        pass


def test_nothing_stays_afterwards_even_after_an_error(tmp_path):
    held, before = FolderLock(tmp_path), os.listdir("/dev/fd")
    for _ in range(3):
        with pytest.raises(KeyError), held:
            assert (tmp_path / "lock").exists()
            raise KeyError
        assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/dev/fd")) == len(before)


@pytest.mark.timeout(20)
@pytest.mark.parametrize("plant", ["link", "broken link", "hard link", "pipe", "device", "folder"])
def test_only_an_ordinary_file_is_locked(plant, tmp_path):
    folder, mine = tmp_path / "theirs", tmp_path / "mine"
    folder.mkdir()
    mine.write_text("precious")
    {
        "link": lambda path: os.symlink(mine, path),
        "broken link": lambda path: os.symlink(tmp_path / "new", path),
        "hard link": lambda path: os.link(mine, path),
        "pipe": os.mkfifo,
        "device": lambda path: os.symlink("/dev/null", path),
        "folder": os.mkdir,
    }[plant](folder / "lock")
    before = len(os.listdir("/dev/fd"))
    with pytest.raises(StorageError, match="lock") as caught, FolderLock(folder):
        pass
    assert "\n" not in str(caught.value)
    assert mine.read_text() == "precious" and not (tmp_path / "new").exists()
    assert len(os.listdir("/dev/fd")) == before


def test_who_holds_it_is_told_in_printable_words(tmp_path):
    with FolderLock(tmp_path):
        (tmp_path / "lock").write_bytes(b"12 \x1b[2Jhost" + b"x" * 100_000)
        with pytest.raises(StorageError) as caught, FolderLock(tmp_path):
            pass
    assert str(caught.value).isprintable() and len(str(caught.value)) < 1000


def test_two_folders_do_not_mind_each_other(tmp_path):
    with FolderLock(tmp_path / "a"), FolderLock(tmp_path / "b"):
        pass


@pytest.mark.kill
def test_another_process_is_refused_and_a_dead_one_taken_over(tmp_path, worker):
    start(worker, "hold", tmp_path)
    word, pid = answer(worker).split()
    assert word == "held"
    start(worker, "attempt", tmp_path)
    assert answer(worker) == refusal(tmp_path, pid)
    with pytest.raises(StorageError) as caught, FolderLock(tmp_path):
        pass
    assert str(caught.value) == refusal(tmp_path, pid)
    kill(int(pid))
    assert (tmp_path / "lock").read_text().split() == [pid, socket.gethostname()]
    with FolderLock(tmp_path):
        assert (tmp_path / "lock").read_text().split()[0] == str(os.getpid())
        start(worker, "attempt", tmp_path)
        assert answer(worker) == refusal(tmp_path, os.getpid())
    start(worker, "attempt", tmp_path)
    assert answer(worker) == "got it"


@pytest.mark.kill
def test_a_living_child_does_not_keep_the_lock_of_a_dead_process(tmp_path, worker):
    start(worker, "hold_and_fork", tmp_path)
    word, pid, child = answer(worker).split()
    assert word == "held"
    with pytest.raises(StorageError), FolderLock(tmp_path):
        pass
    kill(int(pid))
    os.kill(int(child), 0)
    with FolderLock(tmp_path):
        pass
    os.kill(int(child), signal.SIGKILL)


@pytest.mark.kill
def test_a_child_that_leaves_the_block_does_not_release_the_lock(tmp_path, worker):
    start(worker, "child_leaves_first", tmp_path)
    word, pid = answer(worker).split()
    assert word == "held"
    with pytest.raises(StorageError) as caught, FolderLock(tmp_path):
        pass
    assert str(caught.value) == refusal(tmp_path, pid)
    kill(int(pid))


def kill(pid):
    """Kills a process that another one reaps, and waits until it is gone."""
    os.kill(pid, signal.SIGKILL)
    while True:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return


def test_only_one_of_many_holds_it_at_a_time(tmp_path, worker):
    (tmp_path / "count").write_text("0")
    for _ in range(4):
        start(worker, "count_to", tmp_path, 100)
    assert [answer(worker) for _ in range(4)] == ["done"] * 4
    assert (tmp_path / "count").read_text() == "400"


@pytest.mark.parametrize("text", [b"", b"999999999 gone\n", b"\xff\xfe\0", b"a b c d"])
def test_whatever_a_lock_file_says_it_is_taken_over(tmp_path, text):
    (tmp_path / "lock").write_bytes(text)
    with FolderLock(tmp_path):
        assert (tmp_path / "lock").read_text() == f"{os.getpid()} {socket.gethostname()}\n"


def test_an_owner_who_has_not_signed_yet(tmp_path):
    with FolderLock(tmp_path):
        (tmp_path / "lock").write_text("")
        with pytest.raises(StorageError, match="written by another process; wait"):
            FolderLock(tmp_path).__enter__()


def test_a_folder_that_was_removed_meanwhile(tmp_path):
    with contextlib.ExitStack() as former:
        former.enter_context(FolderLock(tmp_path / "run"))
        shutil.rmtree(tmp_path / "run")
        with FolderLock(tmp_path / "run"):
            former.close()
            with pytest.raises(StorageError), FolderLock(tmp_path / "run"):
                pass
    assert list((tmp_path / "run").iterdir()) == []


def test_no_folder_to_lock(tmp_path):
    (tmp_path / "plain").write_text("a file")
    with pytest.raises(StorageError, match="cannot lock .*plain/run: .* not a folder"):
        FolderLock(tmp_path / "plain" / "run").__enter__()
    (tmp_path / "lock").mkdir()
    with pytest.raises(StorageError, match="there is a folder of this name"):
        FolderLock(tmp_path).__enter__()


def test_systems_without_locks_are_named_in_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(lock_module, "fcntl", None)
    with (
        pytest.warns(ShoalWarning, match="this system has no file locks; let only one") as caught,
        FolderLock(tmp_path),
    ):
        assert list(tmp_path.iterdir()) == []
    assert caught[0].filename == __file__


def test_file_systems_without_locks_are_named_in_a_warning(tmp_path, monkeypatch):
    def unsupported(descriptor, operation):
        raise OSError(lock_module.errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock_module.fcntl, "flock", unsupported)
    with pytest.warns(ShoalWarning, match="its file system has no locks"), FolderLock(tmp_path):
        pass


def test_a_patient_lock_waits_until_the_other_is_gone(tmp_path, worker, capsys, monkeypatch):
    start(worker, "hold", tmp_path)
    _, pid = answer(worker).split()
    naps = []

    def nap(_):
        naps.append(os.kill(int(pid), signal.SIGKILL) if not naps else None)

    monkeypatch.setattr(lock_module.time, "sleep", nap)
    with FolderLock(tmp_path, wait=1e6):
        assert naps
    assert capsys.readouterr().err.count("waiting for it") == 1


def test_patience_ends(tmp_path):
    start = time.monotonic()
    with FolderLock(tmp_path), pytest.raises(StorageError, match="wait for it or choose another"):
        FolderLock(tmp_path, wait=0.25).__enter__()
    assert time.monotonic() - start >= 0.25

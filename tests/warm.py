"""Processes at the cost of a fork: a server that has imported torch and shoal, one a test worker.

Inside the fixture `warm` every process of this interpreter (`python -c`, `-m` or a script) starts
from the server, and so does what that process starts, as torchrun does. It is a real process with
its own number, pipes, signals and exit; only its imports are done. A test about imports, memory or
hashing starts a bare interpreter: it does not use the fixture.

Forking is safe before the first backward pass only, so nothing is trained in the server.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import random
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import NoneType

import pytest
from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

BARE, PYTHON = subprocess.Popen, sys.executable
ADDRESS = "SHOAL_TESTS_WARM_SERVER"
_LENGTH = 8


class Warm(BARE):
    """`subprocess.Popen` that asks the server for a fork where the command is this interpreter."""

    _link = None

    def _execute_child(self, args, *rest):
        (executable, preexec, _, fds, cwd, env, _, _, shell, *pipes) = rest[:15]
        command = _python_command(args)
        if command is None or executable or preexec or fds or shell:
            return super()._execute_child(args, *rest)
        ends = pipes[0], pipes[3], pipes[5]
        streams = [number if end == -1 else end for number, end in enumerate(ends)]
        environment = dict(os.environ if env is None else env)
        job = {
            "command": command,
            "folder": os.fspath(cwd or os.getcwd()),
            "environment": environment | {ADDRESS: _address()},
            "session": bool(rest[-2]),
            "asker": os.getpid(),
        }
        self._link = _ask(job, streams)
        self.pid = int.from_bytes(_received(self._link))
        self._child_created = True
        self._close_pipe_fds(*pipes)

    def _try_wait(self, wait_flags):
        if self._link is None:
            return super()._try_wait(wait_flags)
        if wait_flags & os.WNOHANG and not select.select([self._link], [], [], 0)[0]:
            return 0, 0
        status = int.from_bytes(_received(self._link))
        self._link.close()
        return self.pid, status

    def _internal_poll(self, *more, **options):
        if self._link is None:
            return super()._internal_poll(*more, **options)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                if self.returncode is None and (ended := self._try_wait(os.WNOHANG))[0]:
                    self._handle_exitstatus(ended[1])
            finally:
                self._waitpid_lock.release()
        return self.returncode


def children(pid):
    """Numbers of the running processes that a process of the server has started."""
    with _ask({"children": pid}, []) as link:
        return json.loads(link.makefile().readline())


@pytest.fixture(scope="module")
def warm():
    """Processes of this interpreter start from the server."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", Warm)
        yield


@pytest.fixture
def bare(monkeypatch):
    """In a module that uses `warm`: this test starts a bare interpreter."""
    monkeypatch.setattr(subprocess, "Popen", BARE)


def _python_command(args):
    """What Python is told to run; None if this is no plain command of this interpreter."""
    args = [os.fspath(each) for each in ([args] if isinstance(args, (str, bytes)) else args)]
    if len(args) < 2 or args[0] != PYTHON:
        return None
    words = args[2:] if args[1] == "-u" else args[1:]
    plain = words[0] in ("-c", "-m") or not words[0].startswith("-")
    return words if plain else None


def _address():
    return os.environ.get(ADDRESS) or _server()


@functools.cache
def _server():
    """Address of the server of this test worker; it ends with the worker."""
    address = os.path.join(tempfile.mkdtemp(prefix="shoal-warm-"), "server")
    command = [PYTHON, __file__, address]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    here = Path(__file__).resolve().parent
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(here.parent), str(here)])}
    server = BARE(command, env=environment, **pipes)
    _server.process = server  # its pipe stays open as long as this process lives
    assert server.stdout.readline() == b"ready\n"
    return address


def _ask(job, streams):
    link = socket.socket(socket.AF_UNIX)
    link.connect(_address())
    message = json.dumps(job).encode()
    socket.send_fds(link, [len(message).to_bytes(_LENGTH)], streams)
    link.sendall(message)
    return link


def _received(link, length=_LENGTH):
    content = b""
    while len(content) < length:
        part = link.recv(length - len(content))
        if not part:
            raise ConnectionError("the warm server has gone")
        content += part
    return content


class Server:
    """Forks a process for each job and tells whoever asked how it ended."""

    def __init__(self, address):
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(address)
        self.listener.listen(64)
        self.woken, self.waker = socket.socketpair()
        self.waker.setblocking(False)
        signal.set_wakeup_fd(self.waker.fileno())
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGINT, signal.SIGTERM):  # it ends with the test worker
            signal.signal(number, signal.SIG_IGN)
        self.running = {}

    def next_job(self):
        """Serve until a fork: the process that is to do the job returns it."""
        while True:
            ready = select.select([self.listener, self.woken, 0], [], [])[0]
            if 0 in ready:
                self.leave()
            if self.woken in ready:
                self.woken.recv(4096)
                self.reap()
            if self.listener in ready:
                job = self.accept()
                if job is not None:
                    return job

    def accept(self):
        link, _ = self.listener.accept()
        length, streams, _, _ = socket.recv_fds(link, _LENGTH, 3)
        job = json.loads(_received(link, int.from_bytes(length)))
        if "children" in job:
            mine = [pid for pid, (_, asker) in self.running.items() if asker == job["children"]]
            with link:
                link.sendall(f"{json.dumps(mine)}\n".encode())
            return None
        pid = os.fork()
        if pid == 0:
            self.close(link)
            for number, stream in enumerate(streams):
                os.dup2(stream, number)
                os.close(stream)
            return job
        for stream in streams:
            os.close(stream)
        self.running[pid] = link, job["asker"]
        with contextlib.suppress(BrokenPipeError):
            link.sendall(pid.to_bytes(_LENGTH))
        return None

    def reap(self):
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0]:
                link, _ = self.running.pop(ended[0])
                with link, contextlib.suppress(BrokenPipeError):
                    link.sendall(ended[1].to_bytes(_LENGTH))

    def close(self, *links):
        """A forked process keeps nothing of the server."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        others = [link for link, _ in self.running.values()]
        for each in (self.listener, self.woken, self.waker, *links, *others):
            each.close()
        self.running.clear()

    def leave(self):
        for pid in self.running:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        os._exit(0)


def preload():
    """Import what commands and runs import, late imports of torch included."""
    import numpy  # noqa: F401, ICN001
    import torch
    import torch.distributed.run

    import shoal
    import shoal.cli.main

    torch.set_num_threads(1)
    for name in shoal.__all__:
        getattr(shoal, name)
    ensemble = shoal.Ensemble.init(lambda: torch.nn.Linear(2, 2), members=2, seed=0)
    with torch.no_grad():
        ensemble(torch.zeros(1, 2))


def do(job):
    """Be the process that was asked for."""
    if job["session"]:
        os.setsid()
    os.chdir(job["folder"])
    os.environ.clear()
    os.environ.update(job["environment"])
    subprocess.Popen = subprocess_handler.Popen = Warm
    for stream, number, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        errors = "backslashreplace" if number == 2 else None
        buffering = 1 if number == 2 else -1
        opened = open(number, mode, buffering, errors=errors, closefd=False)  # noqa: SIM115
        setattr(sys, stream, opened)
        setattr(sys, f"__{stream}__", opened)
    random.seed()
    kind, *words = job["command"]
    sys.modules.pop(words[0] if kind == "-m" else None, None)
    paths = [path for path in os.environ.get("PYTHONPATH", "").split(os.pathsep) if path]
    first = {"-c": "", "-m": os.getcwd()}.get(kind) or os.path.dirname(os.path.abspath(kind))
    sys.path[:] = ["" if kind == "-c" else first, *paths, *sys.path[1:]]
    if kind == "-c":
        sys.argv[:] = ["-c", *words[1:]]
        exec(compile(words[0], "<string>", "exec"), {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv[:] = words
        runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [kind, *words]
        runpy.run_path(kind, run_name="__main__")


def ended(job):
    """Do a job and return its status, as an interpreter ends but without taking itself apart."""
    status = 0
    try:
        do(job)
    except SystemExit as leave:
        status = leave.code
        if not isinstance(status, (int, NoneType)):
            print(status, file=sys.stderr)
            status = 1
    except BaseException as error:
        sys.excepthook(type(error), error, error.__traceback__)
        status = 1
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGINT)
    threading._shutdown()
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None and not stream.closed:
                stream.flush()
        except OSError:
            status = 120
    return status or 0


if __name__ == "__main__":
    preload()
    gc.freeze()
    serving = Server(sys.argv[1])
    os.write(1, b"ready\n")
    os._exit(ended(serving.next_job()) & 0xFF)

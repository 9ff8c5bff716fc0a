"""Real processes, really killed: trainers that save after every step, and what a kill leaves.

Most of a trainer's time goes into saving, so most kills hit a save. A killed run is taken up again
until it is done, and must then equal an uninterrupted run bit for bit.
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
from small_runs import STEPS_PER_EPOCH, assert_same_folder, both, story

import shoal
from shoal.core.errors import StorageError
from shoal.core.storage.checkpoints import steps

WORKER = Path(__file__).with_name("training") / "kill_worker.py"
KILLS_A_RUN = 8
TOTAL, NEVER = 4 * STEPS_PER_EPOCH, -1


class Server:
    """Starts trainers at the cost of a fork."""

    def __init__(self):
        self.process = subprocess.Popen(
            [sys.executable, str(WORKER)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout.readline() == "ready\n", self.process.stderr.read()

    def ask(self, line, word):
        self.process.stdin.write(f"{line}\n")
        self.process.stdin.flush()
        answer, number = self.process.stdout.readline().split()
        assert answer == word
        return int(number)

    def attempt(self, method, folder, number=None, delay=0.0):
        """Train in `folder`, with a signal after a while; the exit status."""
        pid = self.ask(f"train {method} {NEVER} 0 {folder}", "pid")
        if number is not None:
            time.sleep(delay)
            os.kill(pid, number)
        return self.ask("wait", "exit")

    def interrupted(self, method, folder, step, *signals):
        """Train in `folder`, with signals in the middle of one step; the exit status."""
        pid = self.ask(f"train {method} {step} {len(signals)} {folder}", "pid")
        while begun(folder) < step:
            time.sleep(0.001)
        for number in signals:
            os.kill(pid, number)
            while not folder.with_name(f"{folder.name}.heard").exists():
                time.sleep(0.001)
        return self.ask("wait", "exit")

    def close(self):
        self.process.stdin.close()
        self.process.wait()
        trouble = self.process.stderr.read()
        self.process.stdout.close()
        self.process.stderr.close()
        return trouble


@contextmanager
def serving():
    """A server; at the end no trainer may have complained."""
    server = Server()
    yield server
    assert server.close() == ""


def uninterrupted(server, method, folder):
    """A whole run in `folder`; how many seconds it takes."""
    started = time.monotonic()
    assert server.attempt(method, folder) == 0
    return time.monotonic() - started


def begun(folder):
    """The step that was begun last: all before it were done, and all but one of them saved."""
    note = folder.with_name(f"{folder.name}.step")
    return int(note.read_text() or 0) if note.exists() else 0


def check_survivor(folder):
    """What a kill leaves: a folder that loads and lacks only what was not yet written."""
    saved = steps(folder / "checkpoints")
    if not saved:
        assert begun(folder) in (0, 1)
        with pytest.raises(StorageError):
            shoal.load(folder, both)
        return
    # A step begins while the one before is written, and not before the second last is written.
    assert saved[-1] in (
        begun(folder) - 1,
        begun(folder),
        begun(folder) + 1,
    )
    run = shoal.load(folder, both)
    assert run.ensemble.alive.all()
    assert len(run.history) == saved[-1] // STEPS_PER_EPOCH
    # Rows are there before the checkpoint that counts them: at most one is ahead of it.
    lines = (folder / "history.jsonl").read_text().splitlines()
    ahead = len(lines) - len(run.history)
    assert ahead in (0, 1)
    assert [json.loads(line) for line in lines[: len(run.history)]] == run.history


def check_finished(folder, whole):
    """A finished run equals the uninterrupted one bit for bit, and nothing else is left."""
    assert steps(folder / "checkpoints")[-1] == TOTAL
    assert_same_folder(folder, whole)
    lines = (folder / "history.jsonl").read_text().splitlines()
    expected = (whole / "history.jsonl").read_text().splitlines()
    assert story(map(json.loads, lines)) == story(map(json.loads, expected))
    names = {path.name for path in folder.iterdir()} - {"axes.safetensors"}
    assert names == {"config.toml", "provenance.json", "history.jsonl", "checkpoints"}
    assert not list(folder.rglob(".tmp-*"))


def kill_often(server, method, whole, seconds, kills, base):
    """Kill runs of a method until `kills` have hit; counts of kills, other signals and runs.

    Args:
        server: starts the trainers.
        method: the method of every run.
        whole: folder of an uninterrupted run.
        seconds: how long the uninterrupted run took.
        kills: number of SIGKILLs that must end a trainer.
        base: folder for the runs.
    """
    chance, counts = random.Random(method), {"kills": 0, "terms": 0, "runs": 0, "bit_exact": 0}
    while counts["kills"] < kills:
        folder = base / f"{method}-{counts['runs']}"
        counts["runs"] += 1
        for _ in range(KILLS_A_RUN):
            # a polite signal now and then: it may come at any moment too
            number = chance.choice([signal.SIGKILL] * 4 + [signal.SIGTERM])
            status = server.attempt(method, folder, number, chance.uniform(0, 0.6 * seconds))
            assert status in (0, -number, 143 if number == signal.SIGTERM else 0)
            check_survivor(folder)
            counts["kills"] += status == -signal.SIGKILL
            counts["terms"] += number == signal.SIGTERM and status != 0
        assert server.attempt(method, folder) == 0
        check_finished(folder, whole)
        counts["bit_exact"] += 1
    return counts

"""Runs that are repeated, and runs that are long: equal bits, and level memory."""

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import torch
from small_runs import both, points, quick, shoal_of, story

from shoal.core.storage.formats import to_json

ENGINES = ("auto", "vmap", "loop", "chunk:1", "chunk:2")
"""Every way to run members on the CPU that promises equal bits."""

COMPILED = ("vmap+compile",)
"""Settings that compile: equal bits with one compiler on one machine."""


def digest(method: str, engine: str, optimizer: str = "adamw", **options) -> str:
    """SHA-256 of all members, statistics and history of a small run."""
    run = quick(shoal_of(both), method=method, engine=engine, optimizer=optimizer, **options)
    found = hashlib.sha256(to_json(story(run.history)).encode())
    for name, tensor in sorted(run.ensemble.state.items()):
        found.update(name.encode() + tensor.detach().contiguous().numpy().tobytes())
    return found.hexdigest()


def digest_elsewhere(method: str, engine: str, hash_seed: int, threads: int = 1) -> str:
    """The digest in a new process, with other hashes of strings."""
    home = Path(__file__).resolve().parent
    paths = os.pathsep.join([str(home.parent), str(home)])
    env = {**os.environ, "PYTHONHASHSEED": str(hash_seed), "PYTHONPATH": paths}
    code = (
        f"import torch; torch.set_num_threads({threads})\n"
        f"from steady_runs import digest; print(digest({method!r}, {engine!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


def resident() -> float:
    """Resident set of this process now, in MB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def memory_of(steps: int, method: str = "f-kde", marks: int = 10) -> list[tuple[int, float]]:
    """Steps, and the resident set after them in MB, at equal distances of a run."""
    found, size = [], max(steps // 100, 1)

    def note(event):
        step = event.row["step"]
        if step % (steps // marks) == 0:
            found.append((step, round(resident(), 2)))

    data = points(10 * size)
    torch.manual_seed(0)
    quick(shoal_of(both), data, method=method, steps=steps, callbacks=[note])
    return found

"""Autotune on the CPU: number of threads, and member runner of convolutional networks."""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shoal.core.errors import StorageError
from shoal.core.storage.files import read_json, write_json
from shoal.core.types import Tree
from shoal.engine.members.group import Group
from shoal.engine.members.member_runner import MemberRunner

__all__ = ["SMALL", "faster_runner", "faster_threads", "set_threads"]

Step = Callable[[MemberRunner], object]
"""Computes one step without changing the members."""


def faster_threads(step: Step, mapping: MemberRunner) -> int:
    """One thread, or torch's current number of threads, whichever is faster."""
    most = torch.get_num_threads()
    if most == 1:
        return 1

    def timed(threads: int) -> float:
        torch.set_num_threads(threads)
        return _seconds(step, mapping)

    times = {threads: timed(threads) for threads in (most, 1)}
    torch.set_num_threads(most)
    return min(times, key=lambda threads: times[threads])


def faster_runner(step: Step, groups: Sequence[Group], batch: torch.Size) -> MemberRunner:
    """The faster of `vmap` and `loop`, from the stored choice or by timing."""
    name = _signature(groups, batch)
    known = _remembered()
    if known.get(name) not in ("vmap", "loop"):
        times = {kind: _seconds(step, MemberRunner(kind)) for kind in ("vmap", "loop")}
        known[name] = min(times, key=lambda kind: times[kind])
        if not _remember(known):
            return MemberRunner()  # a choice that cannot be stored might differ next time
    return MemberRunner(known[name])


def _seconds(step: Step, mapping: MemberRunner) -> float:
    step(mapping)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        step(mapping)
        times.append(time.perf_counter() - start)
    return min(times)


def _signature(groups: Sequence[Group], batch: torch.Size) -> str:
    weights = {f"{group.prefix}{n}": t for group in groups for n, t in group.weights.items()}
    shapes = [(name, tuple(t.shape)) for name, t in weights.items()]
    kinds = [type(m).__name__ for group in groups for m in group.skeleton.modules()]
    dtype = next(iter(weights.values())).dtype
    what = (shapes, kinds, tuple(batch), str(dtype), torch.__version__, os.cpu_count())
    return hashlib.sha256(repr(what).encode()).hexdigest()[:16]


def _place() -> Path:
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache) / "shoal" / "engines.json"


def _remembered() -> dict[str, str]:
    try:
        known = read_json(_place())
    except StorageError:
        return {}
    return known if isinstance(known, dict) else {}


def _remember(known: dict[str, str]) -> bool:
    try:
        _place().parent.mkdir(parents=True, exist_ok=True)
        write_json(_place(), known)
    except OSError:
        return False
    return True


SMALL = 3e7
"""Multiplications per step below which one thread is as fast as several."""


def set_threads(wanted: int | None, weights: Tree, batch_size: int) -> None:
    """Set the requested number of threads; by default one for small networks, else torch's choice.

    One thread sums in one order, so results do not depend on the number of cores.
    `OMP_NUM_THREADS` in the environment counts as a request.
    """
    count = sum(tensor.numel() for tensor in weights.values())
    if wanted is not None:
        torch.set_num_threads(wanted)
    elif "OMP_NUM_THREADS" not in os.environ and count * batch_size < SMALL:
        torch.set_num_threads(1)

"""A short trial on the CPU: how many threads, and for convolutions whether members run together.

On a busy machine a small step can take several times longer with two threads than with one, and
convolutions of many members at once can be slower or faster than one after another. Threads do not
change a result. The mapping changes its last digits, so a machine remembers what it found, and the
same run goes the same way again.
"""

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from shoal.core.errors import StorageError
from shoal.core.files import read_json, write_json
from shoal.inference.group import Group
from shoal.inference.mapping import Mapping

__all__ = ["faster_mapping", "faster_threads"]

Step = Callable[[Mapping], object]
"""Computes one step and changes nothing."""


def faster_threads(step: Step, mapping: Mapping) -> int:
    """One thread, or as many as torch has now, whichever takes a step sooner."""
    most = torch.get_num_threads()
    if most == 1:
        return 1

    def timed(threads: int) -> float:
        torch.set_num_threads(threads)
        return _seconds(step, mapping)

    times = {threads: timed(threads) for threads in (most, 1)}
    torch.set_num_threads(most)
    return min(times, key=lambda threads: times[threads])


def faster_mapping(step: Step, groups: Sequence[Group], batch: torch.Size) -> Mapping:
    """`vmap` or `loop`, as remembered or as tried."""
    name = _signature(groups, batch)
    known = _remembered()
    if known.get(name) not in ("vmap", "loop"):
        times = {kind: _seconds(step, Mapping(kind)) for kind in ("vmap", "loop")}
        known[name] = min(times, key=lambda kind: times[kind])
        if not _remember(known):
            return Mapping()  # what cannot be remembered could be chosen otherwise next time
    return Mapping(known[name])


def _seconds(step: Step, mapping: Mapping) -> float:
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

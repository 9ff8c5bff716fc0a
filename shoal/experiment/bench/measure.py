"""Measurement of time and memory, and a description of the machine."""

import gc
import os
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

__all__ = [
    "MIB",
    "Peak",
    "Timing",
    "Work",
    "interleave",
    "load",
    "machine",
    "seconds_of",
    "versions",
    "wait",
]

Work = Callable[[int], None]
"""Takes a number of training steps without waiting for the device."""

BLOCK = 0.1
"""Seconds between two readings of the clock, the only points that wait for the device."""

_ROUNDS = 3, 60

_STEPS = 400


@dataclass(frozen=True)
class Timing:
    """Milliseconds per step, one number per round.

    >>> Timing([3.0, 1.0, 2.0, 10.0], steps=5).median
    2.5

    Attributes:
        rounds: times in order.
        steps: steps per round.
    """

    rounds: list[float]
    steps: int

    @property
    def median(self) -> float:
        """Median of the rounds."""
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """First and third quartile of the rounds."""
        if len(self.rounds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Half the interquartile range, relative to the median."""
        low, high = self.quartiles
        return (high - low) / 2 / self.median

    def over(self, other: "Timing") -> float:
        """Time relative to another workload: the median of ratios within one round."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def seconds_of(work: Work, steps: int, device: torch.device) -> float:
    """Wall time of a block of steps, after all earlier work is done."""
    wait(device)
    start = time.perf_counter()
    work(steps)
    wait(device)
    return time.perf_counter() - start


def interleave(
    works: Sequence[Work], device: torch.device, seconds: float, block: float = BLOCK
) -> list[Timing]:
    """Time each workload for about `seconds`, with one block of each in every round.

    Args:
        works: warm workloads.
        device: device of the workloads.
        seconds: mean seconds per workload.
        block: target seconds of a block; long steps make it longer.
    """
    steps = [_block_steps(work, device, min(block, seconds)) for work in works]
    first = [seconds_of(work, n, device) for work, n in zip(works, steps, strict=True)]
    least, most = _ROUNDS
    count = min(max(int(seconds * len(works) / sum(first)), least), most)
    rounds = [
        [1e3 * seconds_of(work, n, device) / n for work, n in zip(works, steps, strict=True)]
        for _ in range(count)
    ]
    return [
        Timing(list(times), n) for times, n in zip(zip(*rounds, strict=True), steps, strict=True)
    ]


def _block_steps(work: Work, device: torch.device, block: float) -> int:
    """Steps that fill a block, found by doubling."""
    steps = 1
    while True:
        spent = seconds_of(work, steps, device)
        if spent >= block / 2 or steps >= _STEPS:
            return min(max(round(steps * block / spent), 1), _STEPS)
        steps *= 2


def wait(device: torch.device) -> None:
    """Wait for the device's queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


MIB = 2**20


class Peak:
    """Peak memory above the initial memory, in MiB; None if unknown."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        if device.type == "cuda":
            gc.collect()
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self.before = torch.cuda.memory_allocated(device)

    def forget(self) -> None:
        """Ignore the peak until now."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
            torch.cuda.reset_peak_memory_stats(self.device)

    def mib(self) -> float | None:
        """The peak so far."""
        if self.device.type != "cuda":
            return None
        torch.cuda.synchronize(self.device)
        return (torch.cuda.max_memory_allocated(self.device) - self.before) / MIB


def machine(device: torch.device) -> dict[str, Any]:
    """Processor, cores, threads and GPU, with its number of queues."""
    facts: dict[str, Any] = {
        "system": platform.platform(terse=True),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": str(device),
        "load": load(),
    }
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        facts |= {"gpu": properties.name, "gpu_memory_gib": properties.total_memory / 2**30}
        facts["gpu_connections"] = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS")
    return facts


def load() -> list[float] | None:
    """Mean number of runnable processes in the last 1, 5 and 15 minutes; None if unknown."""
    with suppress(OSError, AttributeError):
        return [round(average, 2) for average in os.getloadavg()]
    return None


def versions() -> dict[str, str | None]:
    """Versions of the software that affects the speed."""
    return {
        "shoal": _installed("shoal"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": _installed("numpy"),
        "safetensors": _installed("safetensors"),
        "cuda": torch.version.cuda,
    }


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _processor() -> str:
    with suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()

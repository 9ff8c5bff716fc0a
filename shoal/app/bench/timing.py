"""Times of several pieces of work, taken in turns so that a busy machine disturbs all alike."""

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

__all__ = ["Timing", "Work", "interleave", "seconds_of"]

Work = Callable[[int], None]
"""Takes a number of training steps without waiting for the device."""

BLOCK = 0.1
"""Seconds between two looks at the clock; the device is waited for there and nowhere else."""
_ROUNDS = 3, 60
_STEPS = 400


@dataclass(frozen=True)
class Timing:
    """Milliseconds a step, one number for each round.

    >>> Timing([3.0, 1.0, 2.0, 10.0], steps=5).median
    2.5

    Attributes:
        rounds: in the order in which they were taken.
        steps: in each round.
    """

    rounds: list[float]
    steps: int

    @property
    def median(self) -> float:
        """Of the rounds."""
        return statistics.median(self.rounds)

    @property
    def quartiles(self) -> tuple[float, float]:
        """Between them lies half of the rounds."""
        if len(self.rounds) < 2:
            return self.median, self.median
        low, _, high = statistics.quantiles(self.rounds, n=4, method="inclusive")
        return low, high

    @property
    def spread(self) -> float:
        """Half the distance of the quartiles, as a share of the median."""
        low, high = self.quartiles
        return (high - low) / 2 / self.median

    def over(self, other: "Timing") -> float:
        """How many times longer than another: the median of ratios within one round."""
        pairs = zip(self.rounds, other.rounds, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def seconds_of(work: Work, steps: int, device: torch.device) -> float:
    """Wall time of a block of steps, with everything before it done."""
    _wait(device)
    start = time.perf_counter()
    work(steps)
    _wait(device)
    return time.perf_counter() - start


def interleave(
    works: Sequence[Work], device: torch.device, seconds: float, block: float = BLOCK
) -> list[Timing]:
    """Time each piece of work for about `seconds`, one block of each in every round.

    Args:
        works: already warm.
        device: where they run.
        seconds: for each of them, on average.
        block: wanted length of a block; long steps make it longer.
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)

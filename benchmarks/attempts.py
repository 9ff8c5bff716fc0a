"""Timed attempts on a device, each by itself; a failure is a result."""

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from common import say

__all__ = ["Battery", "captured", "profile", "timed"]


def captured(step: Callable[[], object]) -> Callable[[], object]:
    """The step as a CUDA graph, after three warm-up steps for kernel selection."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        step()
    return graph.replay


def timed(step: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Milliseconds of single steps, after two warm-up steps."""
    times, start = [], time.perf_counter()
    for turn in range(200):
        begun = time.perf_counter()
        step()
        if device.type == "cuda":
            torch.cuda.synchronize()
        times.append(1e3 * (time.perf_counter() - begun))
        if turn >= 4 and time.perf_counter() - start > seconds:
            break
    return times[2:]


def profile(step: Callable[[], object]) -> list[dict[str, Any]]:
    """The twenty slowest kernels of one step."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recording

    with recording(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        step()
        torch.cuda.synchronize()
    rows = sorted(seen.key_averages(), key=lambda row: -row.self_device_time_total)[:20]
    return [{"kernel": row.key[:120], "calls": row.count, "ms": row.self_device_time_total / 1e3}
            for row in rows]  # fmt: skip


@contextmanager
def at_most(seconds: float) -> Iterator[None]:
    """Interrupt the block after so many seconds."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:.0f} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 0.1))
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Battery:
    """Runs attempts within a time limit, and keeps their results."""

    def __init__(self, seconds: float) -> None:
        self.end = time.perf_counter() + seconds
        self.results: dict[str, Any] = {}

    def __call__(self, name: str, work: Callable[[], Any]) -> None:
        """Run one attempt; a failure is its result."""
        left = self.end - time.perf_counter()
        try:
            if left < 1:
                raise TimeoutError("no time was left")
            with at_most(left):
                self.results[name] = work()
        except Exception as error:
            self.results[name] = {"failed": f"{type(error).__name__}: {str(error)[:300]}"}
        found = self.results[name]
        say(f"{name}: " + (f"{found['ms']:.2f} ms" if "ms" in found else str(found)[:300]))

"""What bounds a training step on a GPU? python benchmarks/profile_steps.py --models A,B

Networks have the names of `shoal bench --models`. Five steps as in `fit` are recorded, after
warm-up. For each network and method:

* `busy`: share of the time in which at least one kernel runs; the rest are launch gaps;
* `at_once`: kernels that run side by side, on average over the busy time;
* `kernels`: their number per step, and the slowest by name, in milliseconds per step.
"""

import time
from collections import Counter
from contextlib import ExitStack
from typing import Any

import torch
from common import finish, options, parser, say, title
from torch.profiler import ProfilerActivity, profile

from shoal.experiment.bench.battery import Contestant
from shoal.experiment.bench.plan import BenchPlan
from shoal.experiment.bench.zoo import find_network

STEPS, WARM_UP, SHOWN = 5, 10, 25


def busy_time(spans: list[tuple[float, float]]) -> float:
    """Length of the union of intervals.

    >>> busy_time([(0, 2), (1, 3), (5, 6)])
    4.0
    """
    total, end = 0.0, float("-inf")
    for first, last in sorted(spans):
        total += max(0.0, last - max(first, end))
        end = max(end, last)
    return total


def profiled(workload: Contestant) -> dict[str, Any]:
    """The profile of one network with one method."""
    with ExitStack() as stack:
        begun = time.perf_counter()
        work = workload.build(stack)
        work(WARM_UP)
        torch.cuda.synchronize()
        start = time.perf_counter() - begun
        begun = time.perf_counter()
        work(STEPS)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - begun
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            work(STEPS)
            torch.cuda.synchronize()
    kernels = [
        e for e in seen.events() if e.device_type.name == "CUDA" and e.time_range.elapsed_us()
    ]
    spans = [(e.time_range.start, e.time_range.end) for e in kernels]
    busy, summed, times = busy_time(spans), sum(b - a for a, b in spans), Counter()
    calls = Counter(e.name for e in kernels)
    for event in kernels:
        times[event.name] += event.time_range.elapsed_us()
    whole = max(b for _, b in spans) - min(a for a, _ in spans)
    slowest = [
        {"kernel": name[:140], "calls": calls[name] / STEPS, "ms": us / 1e3 / STEPS}
        for name, us in times.most_common(SHOWN)
    ]
    return {
        **workload.row(), "start": start, "ms": 1e3 * seconds / STEPS, "busy": busy / whole,
        "busy_ms": busy / 1e3 / STEPS, "at_once": summed / busy, "launched": len(kernels) / STEPS,
        "kernels": slowest,
    }  # fmt: skip


def main() -> None:
    """Profile every network with every method."""
    asked = parser(__doc__ or "")
    asked.add_argument("--models", default="transformers:llama", help="names of shoal bench")
    asked.add_argument("--methods", default="ensemble")
    asked.add_argument("--members", type=int)
    found = options(asked)
    plan = BenchPlan(str(found.device), (), (), (), members=found.members)
    rows = []
    for name in found.models.split(","):
        model = find_network(name)
        for method in found.methods.split(","):
            case = plan.case(model, model.precision)
            say(f"{name}, {method}")
            rows.append(profiled(Contestant(case, "shoal", method, "auto")))
    lines = []
    for row in rows:
        lines.append(
            f"{row['model']}, {row['method']}: {row['ms']:.2f} ms, busy {row['busy']:.0%}, "
            f"{row['at_once']:.2f} at once, {row['launched']:.0f} kernels, "
            f"start {row['start']:.1f} s"
        )
        lines += [f"  {k['ms']:8.3f} ms {k['calls']:7.1f}  {k['kernel']}" for k in row["kernels"]]
    finish({**title(found.device), "profiles": rows}, "\n".join(lines), found.out)


if __name__ == "__main__":
    main()

"""A battery: methods and engines on one network, timed in turns together with baselines.

A workload that cannot run becomes a row with the reason; the others continue.
"""

import gc
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from shoal.core.errors import ShoalError, ShoalWarning
from shoal.engine.members.precision import calculating_in
from shoal.experiment.bench.contestants import BareProducts, Case, EnsembleSteps, ModuleLoop
from shoal.experiment.bench.measure import Peak, Timing, Work, floor, interleave, seconds_of
from shoal.experiment.variants import parse_method
from shoal.training.fit import fit

__all__ = [
    "LOOP",
    "PRODUCTS",
    "Contestant",
    "Row",
    "Workload",
    "contestants",
    "measure",
    "reason",
    "train_once",
]

LOOP, PRODUCTS = "module loop", "bare products"

_WARM_UP = 8

Row = dict[str, Any]
"""One row of a table."""


class Workload(Protocol):
    """A workload to time."""

    @property
    def case(self) -> Case:
        """The training problem."""
        ...

    @property
    def what(self) -> str:
        """ "shoal", or the name of a baseline."""
        ...

    @property
    def label(self) -> str:
        """A label for tables."""
        ...

    def build(self, stack: ExitStack) -> Work:
        """The work, before warm-up; its context managers are entered on the stack."""
        ...

    def row(self) -> Row:
        """The columns that are known before the run."""
        ...


@dataclass(frozen=True)
class Contestant:
    """One row of a battery.

    Attributes:
        case: the training problem.
        what: "shoal", or one of the two baselines.
        method: name of the method.
        engine: name of the engine.
        legacy: the method as published.
    """

    case: Case
    what: str = "shoal"
    method: str | None = None
    engine: str | None = None
    legacy: bool = False

    @property
    def label(self) -> str:
        """A label for tables."""
        name = f"{self.method} as published" if self.legacy else self.method
        who = self.what if self.method is None else f"{name}, {self.engine}"
        return f"{self.case.network.name}, {who}, {self.case.precision}"

    def build(self, stack: ExitStack) -> Work:
        """The work, before warm-up, in the precision of the case while the stack is open."""
        if self.what == PRODUCTS:
            return BareProducts(self.case)
        ensemble = self.case.make()
        stack.enter_context(calculating_in(self.case.precision, ensemble))
        if self.method is None or self.engine is None:
            return ModuleLoop(self.case, ensemble.to("cpu"))
        return EnsembleSteps(self.case, ensemble, self.method, self.engine, self.legacy)

    def row(self) -> Row:
        """The columns that are known before the run."""
        case = self.case
        return {
            "model": case.network.name,
            "what": self.what,
            "method": self.method,
            "engine": self.engine,
            "legacy": self.legacy,
            "members": case.members,
            "batch_size": case.batch_size,
            "weights": case.weights,
            "precision": case.precision,
            "optimizer": case.optimizer,
            "device": str(case.device),
        }


def contestants(case: Case, methods: Sequence[str], engines: Sequence[str]) -> list[Contestant]:
    """The module loop, the bare products if there are any, and every method with every engine."""
    products = [Contestant(case, PRODUCTS)] if case.network.layers else []
    ours = [Contestant(case, "shoal", method, e) for e in engines for method in methods]
    return [Contestant(case, LOOP), *products, *ours]


def measure(
    workloads: Sequence[Workload], seconds: float, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """One row per workload, in order; all on one device and in one precision.

    Args:
        workloads: workloads to time.
        seconds: seconds per workload.
        say: called when a workload is warm, or when it cannot run.
    """
    device, threads = workloads[0].case.device, torch.get_num_threads()
    with ExitStack() as stack:
        started = [_start(workload, stack, threads, say) for workload in workloads]
        live = [work for work, _ in started if work is not None]
        timings = iter(interleave(live, device, seconds) if live else [])
        for work, row in started:
            row |= {} if work is None else _figures(next(timings), row)
        torch.set_num_threads(threads)
    rows = [row for _, row in started]
    del started, live
    gc.collect()
    return _compared(rows)


def _start(
    workload: Workload, stack: ExitStack, threads: int, say: Callable[[str], None]
) -> tuple[Work | None, Row]:
    """A warm workload and the first columns of its row; None if it cannot run."""
    workload.case.data()  # shared by all workloads, and not counted as memory
    row, begun, peak = workload.row(), time.perf_counter(), Peak(workload.case.device)
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            work = workload.build(stack)
            peak.forget()
            work(_WARM_UP)
            if workload.what != "shoal":
                _choose_threads(work, workload.case.device)
        except Exception as error:
            say(f"{workload.label}: {reason(error)}")
            return None, row | {"error": reason(error)}
    row |= {"memory_mib": peak.mib(), "setup_seconds": time.perf_counter() - begun}
    row |= {"memory_floor_mib": floor(work)} if isinstance(work, ModuleLoop) else {}
    notes = [str(w.message) for w in caught if issubclass(w.category, ShoalWarning)]
    row |= {"threads": torch.get_num_threads(), "note": "; ".join(dict.fromkeys(notes)) or None}
    say(f"{workload.label}: warm after {row['setup_seconds']:.1f} s")
    return _with_threads(work, row["threads"]), row


def _choose_threads(work: Work, device: torch.device) -> None:
    """Set one thread or all, whichever is faster, as in the training of an ensemble."""
    if device.type == "cpu" and (most := torch.get_num_threads()) > 1:
        times = {}
        for threads in (most, 1):
            torch.set_num_threads(threads)
            times[threads] = min(seconds_of(work, 1, device) for _ in range(3))
        torch.set_num_threads(min(times, key=lambda threads: times[threads]))


def _with_threads(work: Work, threads: int) -> Work:
    """The work, run with its chosen number of threads."""

    def run(steps: int) -> None:
        torch.set_num_threads(threads)
        work(steps)

    return run


def _figures(timing: Timing, row: Row) -> Row:
    samples = row["members"] * row["batch_size"]
    return {
        "timing": timing,
        "ms": timing.median,
        "quartiles_ms": list(timing.quartiles),
        "spread": timing.spread,
        "rounds_ms": timing.rounds,
        "steps_a_round": timing.steps,
        "member_samples_per_second": 1e3 * samples / timing.median,
    }


def _compared(rows: list[Row]) -> list[Row]:
    """Rows with time ratios within the same rounds, and memory relative to its floor."""
    timings = {row["what"]: row.get("timing") for row in rows if row["what"] != "shoal"}
    least = next((row["memory_floor_mib"] for row in rows if row.get("memory_floor_mib")), None)
    for row in rows:
        timing = row.pop("timing", None)
        if timing is None:
            continue
        loop, products = timings.get(LOOP), timings.get(PRODUCTS)
        row["times_faster_than_loop"] = loop and loop.over(timing)
        row["times_bare_products"] = products and timing.over(products)
        row["memory_over_floor"] = least and row["memory_mib"] and row["memory_mib"] / least
    return rows


def reason(error: Exception) -> str:
    """The reason of an error in one line."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, ShoalError):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


EPOCHS = 15


def train_once(case: Case, method: str, engine: str, epochs: int = EPOCHS) -> dict[str, Any]:
    """Seconds of one complete call of `fit`, or the reason why it cannot run."""
    row: dict[str, Any] = {"method": method, "engine": engine, "epochs": epochs}
    row |= {"points": case.points, "members": case.members, "batch_size": case.batch_size}
    row |= {"precision": case.precision, "optimizer": case.optimizer, "device": str(case.device)}
    try:
        ensemble = case.make()
        data = case.data()
        start = time.perf_counter()
        run = fit(
            ensemble, data, method=parse_method(method), engine=engine, lr=case.lr,
            optimizer=case.optimizer, epochs=epochs, batch_size=case.batch_size,
            precision=case.precision, progress=False,
        )  # fmt: skip
        if case.device.type == "cuda":
            torch.cuda.synchronize(case.device)
    except Exception as error:
        return row | {"error": reason(error)}
    seconds, steps = time.perf_counter() - start, run.history[-1]["step"]
    return row | {
        "seconds": seconds,
        "training_seconds": float(run.provenance["seconds"]),
        "steps": steps,
        "ms": 1e3 * seconds / steps,
    }

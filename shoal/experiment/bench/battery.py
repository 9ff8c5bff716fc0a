"""A battery: methods and engines on one network, timed in turns beside what they are held against.

Whatever cannot run becomes a row with a reason, and the others go on.
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
from shoal.engine.precision import calculating_in
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
"""One line of a table."""


class Workload(Protocol):
    """Something to time."""

    @property
    def case(self) -> Case:
        """What is trained."""
        ...

    @property
    def what(self) -> str:
        """ "shoal", or the name of what it is held against."""
        ...

    @property
    def label(self) -> str:
        """For people."""
        ...

    def build(self, stack: ExitStack) -> Work:
        """Ready to be warmed up; what it needs for as long as it runs is entered on the stack."""
        ...

    def row(self) -> Row:
        """What is known before anything has run."""
        ...


@dataclass(frozen=True)
class Contestant:
    """One line of a battery.

    Attributes:
        case: what is trained.
        what: "shoal", or one of the two things it is held against.
        method: by name.
        engine: by name.
        legacy: the method as published.
    """

    case: Case
    what: str = "shoal"
    method: str | None = None
    engine: str | None = None
    legacy: bool = False

    @property
    def label(self) -> str:
        """For people."""
        name = f"{self.method} as published" if self.legacy else self.method
        who = self.what if self.method is None else f"{name}, {self.engine}"
        return f"{self.case.network.name}, {who}, {self.case.precision}"

    def build(self, stack: ExitStack) -> Work:
        """Ready to be warmed up, in the precision of the case for as long as the stack lasts."""
        if self.what == PRODUCTS:
            return BareProducts(self.case)
        ensemble = self.case.make()
        stack.enter_context(calculating_in(self.case.precision, ensemble))
        if self.method is None or self.engine is None:
            return ModuleLoop(self.case, ensemble.to("cpu"))
        return EnsembleSteps(self.case, ensemble, self.method, self.engine, self.legacy)

    def row(self) -> Row:
        """What is known before anything has run."""
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
    """The module loop, the bare products where there are some, and every method by every engine."""
    products = [Contestant(case, PRODUCTS)] if case.network.layers else []
    ours = [Contestant(case, "shoal", method, e) for e in engines for method in methods]
    return [Contestant(case, LOOP), *products, *ours]


def measure(
    entries: Sequence[Workload], seconds: float, say: Callable[[str], None] = lambda line: None
) -> list[Row]:
    """One row for each entry, in order; all of one device and one precision.

    Args:
        entries: what to time.
        seconds: for each of them.
        say: told when an entry is warm, or that it cannot run.
    """
    device, threads = entries[0].case.device, torch.get_num_threads()
    with ExitStack() as stack:
        started = [_start(entry, stack, threads, say) for entry in entries]
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
    entry: Workload, stack: ExitStack, threads: int, say: Callable[[str], None]
) -> tuple[Work | None, Row]:
    """A warm contestant and the beginning of its row; None if it cannot run."""
    entry.case.data()  # shared with the others, and no part of anybody's memory
    row, begun, peak = entry.row(), time.perf_counter(), Peak(entry.case.device)
    torch.set_num_threads(threads)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            work = entry.build(stack)
            peak.forget()
            work(_WARM_UP)
            if entry.what != "shoal":
                _choose_threads(work, entry.case.device)
        except Exception as error:
            say(f"{entry.label}: {reason(error)}")
            return None, row | {"error": reason(error)}
    row |= {"memory_mib": peak.mib(), "setup_seconds": time.perf_counter() - begun}
    row |= {"memory_floor_mib": floor(work)} if isinstance(work, ModuleLoop) else {}
    notes = [str(w.message) for w in caught if issubclass(w.category, ShoalWarning)]
    row |= {"threads": torch.get_num_threads(), "note": "; ".join(dict.fromkeys(notes)) or None}
    say(f"{entry.label}: warm after {row['setup_seconds']:.1f} s")
    return _with_threads(work, row["threads"]), row


def _choose_threads(work: Work, device: torch.device) -> None:
    """One or all, whichever is faster: an ensemble is trained with as many as suit it, too."""
    if device.type == "cpu" and (most := torch.get_num_threads()) > 1:
        times = {}
        for threads in (most, 1):
            torch.set_num_threads(threads)
            times[threads] = min(seconds_of(work, 1, device) for _ in range(3))
        torch.set_num_threads(min(times, key=lambda threads: times[threads]))


def _with_threads(work: Work, threads: int) -> Work:
    """Each runs with the threads it chose when it was started."""

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
    """Ratios within the same rounds, and memory beside its floor."""
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
    """Why something cannot run, in one line."""
    line = str(error).strip().partition("\n")[0]
    if isinstance(error, ShoalError):
        return line
    return f"{type(error).__name__}: {line}" if line else type(error).__name__


EPOCHS = 15


def train_once(case: Case, method: str, engine: str, epochs: int = EPOCHS) -> dict[str, Any]:
    """Seconds of one call of `fit`, everything in it included, or why it cannot be done."""
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

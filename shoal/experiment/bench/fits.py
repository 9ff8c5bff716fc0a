"""Speed of whole calls of `fit`: their start, and milliseconds per step from then on.

A callback reads the clock after every epoch. The first epoch also holds what a call does before its
steps: moving the members, choosing an engine, building kernels and capturing the step.
"""

import gc
import time
import warnings
from collections.abc import Callable, Sequence

import torch

from shoal.core.errors import ShoalWarning
from shoal.experiment.bench.battery import LOOP, Contestant, Row, figures, measure, reason
from shoal.experiment.bench.measure import Peak, Timing, wait
from shoal.experiment.variants import parse_method
from shoal.training.fit import fit
from shoal.training.loop.callbacks import EpochEnd

__all__ = ["measure_fits"]

_EPOCHS, _STEPS = 4, 4_500
"""Fewest epochs of a call, the first of which is no round; most steps, fewer than are compiled."""


def measure_fits(
    workloads: Sequence[Contestant],
    seconds: float,
    say: Callable[[str], None] = lambda line: None,
) -> list[Row]:
    """One row per workload, as `measure` makes them; ensembles are timed by one call of `fit` each.

    `setup_seconds` of an ensemble is the start: what the call took beyond its steps.
    """
    baselines = [workload for workload in workloads if workload.what != "shoal"]
    rows = measure(baselines, seconds, say) if baselines else []
    rows += [_fitted(each, seconds, say) for each in workloads if each.what == "shoal"]
    loop = next((row["ms"] for row in rows if row["what"] == LOOP and "ms" in row), None)
    for row in rows:
        if row["what"] == "shoal" and "ms" in row:
            row["times_faster_than_loop"] = loop and loop / row["ms"]
            row["times_bare_products"] = row["memory_over_floor"] = None
    return rows


class _Clock:
    """Reads the clock after every epoch, and ends the run when its seconds are over.

    Attributes:
        marks: finished steps and the time, after every epoch.
    """

    def __init__(self, device: torch.device, seconds: float) -> None:
        self.device, self.seconds = device, seconds
        self.marks: list[tuple[int, float]] = []

    def __call__(self, event: EpochEnd) -> None:
        wait(self.device)
        now = time.perf_counter()
        self.marks.append((event.row["step"], now))
        if len(self.marks) >= _EPOCHS and now - self.marks[0][1] >= self.seconds:
            event.stop()

    def timing(self) -> Timing:
        """Milliseconds per step of every epoch but the first."""
        pairs = list(zip(self.marks, self.marks[1:], strict=False))
        rounds = [1e3 * (then - now) / (last - first) for (first, now), (last, then) in pairs]
        return Timing(rounds, pairs[0][1][0] - pairs[0][0][0])

    def start(self, begun: float) -> float:
        """Seconds until the end of the first epoch, less those of its steps."""
        steps, end = self.marks[0]
        return end - begun - steps * self.timing().median / 1e3


def _fitted(workload: Contestant, seconds: float, say: Callable[[str], None]) -> Row:
    case, row = workload.case, workload.row()
    data, clock, peak = case.data(), _Clock(case.device, seconds), Peak(case.device)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            ensemble = case.make()
            begun = time.perf_counter()
            fit(
                ensemble, data, method=parse_method(workload.method or "", workload.legacy),
                engine=workload.engine or "auto", lr=case.lr, optimizer=case.optimizer,
                steps=_STEPS, batch_size=case.batch_size, precision=case.precision,
                batches=case.batches, callbacks=[clock], progress=False,
            )  # fmt: skip
            timing, start = clock.timing(), clock.start(begun)
        except Exception as error:
            say(f"{workload.label}: {reason(error)}")
            return row | {"error": reason(error)}
    notes = [str(w.message) for w in caught if issubclass(w.category, ShoalWarning)]
    row |= {"memory_mib": peak.mib(), "setup_seconds": start}
    row |= {"threads": torch.get_num_threads(), "note": "; ".join(dict.fromkeys(notes)) or None}
    del ensemble
    gc.collect()
    row |= figures(timing, row)
    row.pop("timing")
    say(f"{workload.label}: {row['ms']:.4g} ms per step after {start:.1f} s")
    return row

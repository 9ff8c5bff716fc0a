"""The figures that loggers get at the end of a run, as PNG files."""

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from shoal import plots
from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.optional import require
from shoal.prediction.metrics.calibration import reliability
from shoal.prediction.metrics.regression import pit
from shoal.prediction.predictive import Predictive
from shoal.training.folder.run import Run
from shoal.training.loop.validation import Validation, evaluating

__all__ = ["Figures", "figures"]

POINTS = 10_000
"""Most validation points in a figure."""

DPI = 110


class Figures:
    """The figures of a run, drawn once for all its loggers.

    Args:
        held: batches of the run's validation data; None for none.
    """

    def __init__(self, held: Any = None) -> None:
        self._held = held
        self._found: list[tuple[str, bytes]] | None = None

    def of(self, run: Run) -> list[tuple[str, bytes]]:
        """Losses, forces, bandwidth and calibration by name; none without matplotlib."""
        if self._found is None:
            self._found = []
            try:
                self._found += figures(run, self._held)
            except Exception as error:  # a figure is not worth a run
                told = f"The loggers get no figures: {type(error).__name__}: {error}"
                warnings.warn(told, ShoalWarning, stacklevel=2)
        return self._found


def figures(run: Run, held: Any = None) -> Iterator[tuple[str, bytes]]:
    """The figures of a finished run, as PNG files, by name."""
    try:
        require("matplotlib", extra="report")
    except ConfigError:
        return
    method = run.config.get("method")
    method = method.get("name", "custom") if isinstance(method, Mapping) else str(method)
    for name, figure in _drawn(run, method, held):
        if figure is not None:
            yield name, plots.png(figure, DPI)


def _drawn(run: Run, method: str, held: Any) -> Iterator[tuple[str, Any]]:
    if run.history:
        yield "loss", plots.loss(run.history, method)
    if any(row.get("push") for row in run.history):
        yield "forces", plots.forces(run.history, method)
        yield "bandwidth", plots.bandwidth(run.history, method)
    if held is not None:
        yield "calibration", _calibration(run, method, held)


def _calibration(run: Run, method: str, held: Any) -> Any:
    """Reliability of classes or coverage of intervals; None if the targets have neither."""
    kinds = run.likelihood.about.kinds
    if "classes" not in kinds and "intervals" not in kinds:
        return None
    found = _predicted(run, held)
    if found is None:
        return None
    pred, y = found
    if "classes" in kinds:
        return plots.reliability({method: reliability(pred, y)})
    return plots.coverage({method: pit(pred, y)[:, 0]})


def _predicted(run: Run, held: Any) -> tuple[Predictive, Any] | None:
    """The prediction of the first validation points, each site a data point; None for none."""
    parts, targets, size, count = [], [], 0, 0
    with torch.no_grad(), evaluating(run.ensemble):
        for pred, y, _ in Validation(held).predictions(run.ensemble, run.likelihood):
            pred, y = pred.points(y)
            size = size or pred.size
            if pred.size == size:  # a member that is not finite on some batch is missing there
                parts.append(pred)
                targets.append(y)
                count += len(pred)
            if count >= POINTS:
                break
    return (Predictive.concat(parts), torch.cat(targets)) if parts else None

"""Losses, forces and bandwidth over the epochs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.plots.figure import INK, blank, legend, look, method_styles, percent, plot, power

__all__ = ["bandwidth", "bandwidths", "forces", "loss"]

History = Sequence[Mapping[str, Any]]


def _column(history: History, key: str) -> np.ndarray:
    """One number per row, or NaN."""
    numbers = [row.get(key) for row in history]
    return np.array([math.nan if number is None else number for number in numbers], dtype=float)


def _members(history: History) -> np.ndarray:
    """Loss of each member [rows, M], or NaN."""
    rows = [row.get("member_loss") or [] for row in history]
    width = max(map(len, rows), default=0)
    padded = [[*row, *[None] * (width - len(row))] for row in rows]
    return np.array([[math.nan if v is None else v for v in row] for row in padded], dtype=float)


def _over_epochs(axes: Any, history: History, key: str, **how: Any) -> None:
    values = _column(history, key)
    values[~(values > 0)] = math.nan
    how = {"marker": "." if len(values) < 40 else ""} | how
    axes.plot(_column(history, "epoch"), values, **how)


def _log(axes: Any) -> None:
    """Make the axis logarithmic where all values are positive and their range is large."""
    drawn = [np.asarray(line.get_ydata(), dtype=float) for line in axes.get_lines()]
    values = np.concatenate([values[np.isfinite(values)] for values in drawn])
    if values.size and values.min() > 0 and values.max() > 3 * values.min():
        axes.set_yscale("log")
        power(axes.yaxis)


@plot("loss")
def loss(history: History, method: str = "", title: str = "") -> Any:
    """Training loss of every member and the mean, and the ensemble's validation NLL.

    Args:
        history: rows of a run with "epoch", "loss" and "member_loss", maybe with "validation".
        method: method that gives the colour.
        title: written above.
    """
    figure, axes = blank()
    epochs, colour = _column(history, "epoch"), look(method).colour
    members = _members(history)
    if members.size:
        axes.plot(epochs, members, color=colour, alpha=0.45, linewidth=1)
        axes.plot([], [], color=colour, alpha=0.45, linewidth=1, label="each member")
    axes.plot(epochs, _column(history, "loss"), color=INK, label="mean")
    _validation(axes, history)
    _log(axes)
    axes.set(xlabel="epoch", ylabel="loss (nats per data point)", title=title)
    legend(figure, axes)
    return figure


def _validation(axes: Any, history: History) -> None:
    """The ensemble's NLL on validation data, with a dot at the best epoch."""
    held = [row.get("validation") or {} for row in history]
    values = _column([{"nll": row.get("nll", row.get("loss"))} for row in held], "nll")
    if not np.isfinite(values).any():
        return
    best, epochs = int(np.nanargmin(values)), _column(history, "epoch")
    words = "ensemble, validation"
    axes.plot(epochs, values, color=INK, linestyle="--", label=words)
    axes.plot(epochs[best], values[best], color=INK, marker="o", linestyle="", label="best epoch")


@plot("forces")
def forces(history: History, method: str = "", negligible: float = 1e-3, title: str = "") -> Any:
    """Driving force, repulsive force and force ratio, against the epochs.

    Args:
        history: rows of a run with "epoch", "drive", "push" and "ratio".
        method: method that gives the colour.
        negligible: force ratio below which repulsion is negligible, drawn as a dotted line.
        title: written above.
    """
    figure, (above, below) = blank(2, 1.4, sharex=True, height_ratios=(3, 2))
    colour = look(method).colour
    _over_epochs(above, history, "drive", color=INK, label="drive (data and prior)")
    _over_epochs(above, history, "push", color=colour, label="push (repulsion)", linestyle="--")
    _over_epochs(below, history, "ratio", color=colour)
    below.axhline(negligible, color=INK, linewidth=1, linestyle=":")
    for axes in (above, below):
        _log(axes)
    percent(below.yaxis)
    above.set(ylabel="norm of the force", title=title)
    below.set(xlabel="epoch", ylabel="force ratio")
    legend(figure, above)
    return figure


@plot("bandwidth")
def bandwidth(history: History, method: str = "", title: str = "") -> Any:
    """Squared bandwidth and effective number of members of the kernel, over the epochs.

    Args:
        history: rows of a run with "epoch", "h2" and "effective".
        method: method that gives the colour.
        title: written above.
    """
    figure, (above, below) = blank(2, 1.4, sharex=True)
    colour = look(method).colour
    _over_epochs(above, history, "h2", color=colour)
    _over_epochs(below, history, "effective", color=colour)
    _log(above)
    below.set_ylim(bottom=0)
    above.set(ylabel="bandwidth h²", title=title)
    below.set(xlabel="epoch", ylabel="effective members")
    return figure


@plot("bandwidths")
def bandwidths(histories: Mapping[str, Sequence[History]], title: str = "") -> Any:
    """Squared bandwidth over the epochs: thin lines for the seeds, a thick line for the mean.

    Args:
        histories: for each method, the histories of its runs.
        title: written above.
    """
    figure, axes = blank()
    styles = method_styles(histories)
    for label, runs in histories.items():
        colour, dashes = styles[label].colour, styles[label].linestyle
        for history in runs:
            _over_epochs(axes, history, "h2", color=colour, alpha=0.4, linewidth=1, marker="")
        rows = min(len(history) for history in runs)
        mean = np.mean([_column(history[:rows], "h2") for history in runs], axis=0)
        epochs = _column(runs[0][:rows], "epoch")
        axes.plot(epochs, mean, color=colour, linestyle=dashes, label=label)
    _log(axes)
    axes.set(xlabel="epoch", ylabel="bandwidth h²", title=title)
    legend(figure, axes)
    return figure

"""Draws of chains: traces and autocorrelation."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.plots.figure import COLOURS, INK, blank, legend, look, plot, tip

__all__ = ["autocorrelations", "traces"]

_SHOWN, _FEWEST = 8000, 50
"""Points of all lines together, and of one line at least, so that a page stays small."""

_NAMED = [COLOURS[name] for name in ("kde", "f-kde", "svgd", "ssge", "sge", "forde")]
"""Colours of chains that are told apart; more chains share one colour."""


def _lines(axes: Any, values: np.ndarray, start: int, states: Sequence[str], method: str) -> None:
    """One line per chain; a chain with a state is thick and has its state in the legend."""
    count = values.shape[1]
    every = -(-count // max(_SHOWN // len(values), _FEWEST))
    places, few = start + np.arange(count)[::every], len(values) <= len(_NAMED)
    plain = next((c for c, state in enumerate(states) if not state), None)
    for c, state in enumerate(states):
        colour = _NAMED[c % len(_NAMED)] if few or state else look(method).colour
        name = f"chain {c}" + (f" ({state})" if state else "")
        style = {"color": colour, "alpha": 0.9 if state or few else 0.5}
        label = {"label": name} if few or state else {"label": "each chain"} if c == plain else {}
        width = 2.0 if state else 1.0
        (line,) = axes.plot(places, values[c, ::every], linewidth=width, **style, **label)
        tip(line, name)


@plot("traces")
def traces(
    values: np.ndarray, name: str, states: Sequence[str], method: str = "", title: str = ""
) -> Any:
    """A quantity of every draw, one line per chain.

    Args:
        values: of all chains and draws [C, K].
        name: name of the quantity.
        states: what is wrong with each chain; empty if nothing is.
        method: method that gives the colour.
        title: written above.
    """
    figure, axes = blank()
    _lines(axes, np.asarray(values, dtype=float), 1, states, method)
    axes.set(xlabel="draw", ylabel=name, title=title)
    legend(figure, axes)
    return figure


@plot("autocorrelations")
def autocorrelations(
    values: np.ndarray, states: Sequence[str], method: str = "", title: str = ""
) -> Any:
    """Correlation of draws by their distance, one line per chain, and the mean of all chains.

    Args:
        values: of all chains and lags [C, L].
        states: what is wrong with each chain; empty if nothing is.
        method: method that gives the colour.
        title: written above.
    """
    figure, axes = blank()
    values = np.asarray(values, dtype=float)
    _lines(axes, values, 0, states, method)
    known = values[np.isfinite(values).all(1)]
    if len(known) > 1:
        axes.plot(known.mean(0), color=INK, label="mean")
    axes.axhline(0, color=INK, linewidth=1, linestyle=":")
    axes.set(xlabel="distance of two draws", ylabel="correlation", title=title)
    legend(figure, axes)
    return figure

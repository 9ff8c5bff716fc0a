"""Columns of a table: their importances, and how predictions follow one of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from shoal.core.optional import require
from shoal.plots.figure import INK, SIZE, blank, legend, look, plot, tip

__all__ = ["BARS", "LINES", "dependence", "importances"]

BARS, LINES = 12, 5
"""Most columns or categories, and most curves, in one figure."""

_LETTERS = 18
_COLOURS = ("kde", "f-kde", "svgd", "ssge", "ensemble")
_DASHES = ("-", "--", "-.", ":", "-")


def _short(name: str) -> str:
    return name if len(name) <= _LETTERS else f"{name[: _LETTERS - 1]}…"


@plot("importances")
def importances(
    names: Sequence[str],
    mean: Sequence[float] | np.ndarray,
    error: Sequence[float] | np.ndarray,
    score: str = "score",
    method: str = "",
    title: str = "",
) -> Any:
    """Permutation importances, the largest first, with their 95 % intervals.

    Args:
        names: names of the columns.
        mean: importance of each column.
        error: its standard error.
        score: name of the score that increases.
        method: method that gives the colour.
        title: written above.
    """
    order: list[int] = np.argsort(-np.asarray(mean), kind="stable")[:BARS].tolist()
    figure, axes = blank(height=(1.0 + 0.34 * len(order)) / SIZE[1])
    colour = look(method).colour
    for place, j in enumerate(order):
        reach = 1.96 * float(error[j])
        (bar,) = axes.barh([place], [float(mean[j])], height=0.62, color=colour, alpha=0.55)
        axes.errorbar([float(mean[j])], [place], xerr=[reach], color=INK, capsize=3, linewidth=1.2)
        tip(bar, f"{names[j]}: {mean[j]:.4g} ± {error[j]:.2g}")
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(order)), [_short(names[j]) for j in order])
    axes.set(xlabel=f"increase of {score}", title=title, ylim=(len(order) - 0.5, -0.5))
    axes.xaxis.get_major_locator().set_params(nbins=4)
    axes.grid(visible=False, axis="y")
    return figure


@plot("dependence")
def dependence(
    column: str,
    grid: np.ndarray,
    mean: np.ndarray,
    low: np.ndarray,
    high: np.ndarray,
    what: str = "mean prediction",
    names: Sequence[str] = (),
    method: str = "",
    title: str = "",
) -> Any:
    """Mean prediction over the values of one column, with the band of the members.

    Args:
        column: name of the column.
        grid: its values [G]: numbers, dates or texts.
        mean: mean prediction [G], or [G, K] of several curves.
        low: lower end of the band, as `mean`.
        high: upper end.
        what: name of the other axis.
        names: names of several curves, of which five are drawn.
        method: method that gives the colour of a single curve.
        title: written above.
    """
    single = mean.ndim == 1
    curves = [np.reshape(each, (len(grid), -1)).T for each in (mean, low, high)]
    colours = [look(name).colour for name in ((method,) if single else _COLOURS)]
    texts = grid.dtype == object
    figure, axes = blank(height=(1.0 + 0.34 * min(len(grid), BARS)) / SIZE[1] if texts else 1.0)
    if texts:
        order = np.argsort(-curves[0][0], kind="stable")[:BARS]
        grid, curves = grid[order], [each[:, order] for each in curves]
    for k, parts in enumerate(zip(*(each[:LINES] for each in curves), strict=True)):
        colour, dashes = colours[k], _DASHES[k]
        label = None if single else _short(str(names[k]) if k < len(names) else str(k))
        draw = _of_texts if texts else _of_numbers
        draw(axes, grid, parts, {"color": colour, "label": label}, dashes, k)
    axes.set(title=title, **({"xlabel": what} if texts else {"xlabel": column, "ylabel": what}))
    if texts:
        axes.set_yticks(range(len(grid)), [_short(str(value)) for value in grid])
        axes.set(ylim=(len(grid) - 0.5, -0.5))
    elif np.issubdtype(grid.dtype, np.datetime64):
        dates = require("matplotlib.dates", extra="report")
        locator = dates.AutoDateLocator(minticks=2, maxticks=7)
        axes.xaxis.set_major_locator(locator)
        axes.xaxis.set_major_formatter(dates.ConciseDateFormatter(locator))
    legend(figure, axes)
    return figure


Ends = tuple[np.ndarray, np.ndarray, np.ndarray]


def _of_numbers(
    axes: Any, grid: np.ndarray, parts: Ends, how: dict[str, Any], dashes: str, _: int
) -> None:
    mean, low, high = parts
    axes.fill_between(grid, low, high, color=how["color"], alpha=0.25, linewidth=0)
    axes.plot(grid, mean, linestyle=dashes, **how)


def _of_texts(
    axes: Any, grid: np.ndarray, parts: Ends, how: dict[str, Any], _: str, k: int
) -> None:
    mean, low, high = parts
    places = np.arange(len(grid)) + 0.12 * k
    axes.errorbar(mean, places, xerr=[mean - low, high - mean], fmt="o", capsize=3, **how)

"""Fidelity: predictions beside the true posterior, distances, and score shrinkage."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shoal.analysis.fidelity.score_shrinkage import Measurement
from shoal.plots.figure import INK, SIZE, blank, legend, method_styles, plot, power

__all__ = ["distances", "posterior_bands", "score_law", "stein_growth"]

Moments = tuple[Tensor, Tensor]


@plot("posterior-bands")
def posterior_bands(
    x: Tensor,
    truth: Moments,
    found: Mapping[str, Moments],
    data: Moments | None = None,
    title: str = "",
) -> Any:
    """Mean and two standard deviations of each method, over the band of the true posterior.

    Args:
        x: inputs [B], in any order.
        truth: mean and standard deviation of the posterior [B].
        found: mean and standard deviation of each method [B].
        data: training inputs and targets.
        title: written above.
    """
    figure, grid = blank(len(found), height=0.62 * len(found), sharex=True, squeeze=False)
    order = x.flatten().argsort()
    places, mean, std = (t.flatten()[order].numpy() for t in (x, *truth))
    for axes, (label, style) in zip(grid[:, 0], method_styles(found).items(), strict=True):
        axes.fill_between(
            places, mean - 2 * std, mean + 2 * std, color=INK, alpha=0.15, linewidth=0
        )
        predicted, stddev = (t.flatten()[order].numpy() for t in found[label])
        axes.plot(places, predicted, color=style.colour)
        for side in (-2, 2):
            axes.plot(
                places, predicted + side * stddev, color=style.colour, linestyle="--", linewidth=1.2
            )
        if data is not None:
            axes.plot(*(t.flatten() for t in data), ".", color=INK, alpha=0.7, markersize=4)
        axes.set(ylabel="y", title=label)
    grid[-1, 0].set(xlabel="input x")
    if title:
        figure.suptitle(title, x=0.02, ha="left", fontweight="bold")
    return figure


@plot("fidelity-distances")
def distances(
    table: Mapping[str, Mapping[str, float]], name: str = "total variation", title: str = ""
) -> Any:
    """One distance of every method on every problem, as shades with numbers.

    Args:
        table: for each method, the distance by problem.
        name: name of the distance.
        title: written above.
    """
    methods, problems = list(table), list(next(iter(table.values())))
    values = np.array([[table[m].get(p, np.nan) for p in problems] for m in methods])
    figure, axes = blank(height=0.35 + 0.075 * len(methods))
    figure.set_figwidth(1.25 * SIZE[0])
    # Problems differ in scale: shades are shares of the largest distance in the column.
    shades = values / np.nanmax(values, axis=0, keepdims=True)
    axes.imshow(shades, aspect="auto", vmin=0, vmax=1, cmap="cividis")
    for row, column in np.ndindex(*values.shape):
        ink = "black" if shades[row, column] > 0.6 else "white"
        text = f"{values[row, column]:.3f}"
        axes.text(column, row, text, ha="center", va="center", color=ink, fontsize=9.5)
    axes.set_xticks(range(len(problems)), problems)
    axes.set_yticks(range(len(methods)), methods)
    axes.xaxis.tick_top()
    axes.tick_params(length=0, labelsize=10)
    axes.grid(visible=False)
    axes.set(xlabel=f"{name} to the posterior (0 is the same)", title=title)
    return figure


@plot("stein-growth", cite=("gorham2017measuring",))
def stein_growth(curves: Mapping[str, Sequence[tuple[int, float]]], title: str = "") -> Any:
    """Squared kernel Stein discrepancy, unbiased, against the ensemble size: 0 for exact draws.

    Args:
        curves: for each method, pairs of ensemble size and discrepancy.
        title: written above.
    """
    figure, axes = blank()
    for label, style in method_styles(curves).items():
        sizes, values = zip(*curves[label], strict=True)
        axes.plot(sizes, values, label=label, linestyle=style.linestyle, **style.spot)
    axes.axhline(0, color=INK, linewidth=1, linestyle=":")
    axes.set(xscale="log", xlabel="ensemble size M", ylabel="squared Stein discrepancy")
    axes.set(title=title)
    power(axes.xaxis)
    legend(figure, axes)
    return figure


@plot("score-law")
def score_law(measured: Sequence[Measurement], title: str = "") -> Any:
    """Estimated / true score against the dimension: measurements as dots, theory as lines.

    Args:
        measured: from `shoal.analysis.fidelity.score_shrinkage.measure`.
        title: written above.
    """
    figure, axes = blank(height=1.1)
    styles = method_styles(dict.fromkeys(point.label for point in measured))
    for label, style in styles.items():
        points = [point for point in measured if point.label == label]
        d = [point.dimension for point in points]
        axes.plot(d, [p.predicted for p in points], color=style.colour, linewidth=1.2)
        shares = [p.share for p in points]
        axes.plot(d, shares, linestyle="none", label=label, **style.spot)
    axes.set(xscale="log", yscale="log", xlabel="dimension d", ylabel="estimated / true score")
    axes.set(title=title)
    power(axes.xaxis)
    power(axes.yaxis)
    legend(figure, axes)
    return figure

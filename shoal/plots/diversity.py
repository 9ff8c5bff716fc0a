"""Pairwise disagreement, diversity against accuracy, curvature at the members."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.figure import INK, SIZE, blank, legend, method_styles, percent, plot, power, tip

__all__ = ["curvature", "effective", "members", "pairwise"]

_ROOM_FOR_NUMBERS = 8


@plot("pairwise")
def pairwise(
    matrix: Tensor,
    words: str = "pairwise disagreement (% of inputs)",
    top: float | None = None,
    title: str = "",
) -> Any:
    """Pairwise disagreement: share of inputs with different labels, for every pair of members.

    Fort et al. (2019), arXiv 1912.02757.

    Args:
        matrix: fractions of inputs [M, M].
        words: label of the colour bar.
        top: the brightest fraction; by default the largest.
        title: written above.
    """
    figure, axes = blank(height=1.0)
    values = np.asarray(matrix, dtype=float)
    M = len(values)
    top = max(float(values.max()) if top is None else top, 1e-6)
    image = axes.imshow(100 * values, vmin=0, vmax=100 * top, interpolation="none")
    if M <= _ROOM_FOR_NUMBERS:
        for i, j in np.ndindex(M, M):
            colour = "white" if values[i, j] < 0.55 * top else "black"
            number = f"{100 * values[i, j]:.1f}"
            axes.text(j, i, number, color=colour, ha="center", va="center", fontsize=10)
    step = -(-M // 12)
    ticks = range(0, M, step)
    axes.set(xlabel="member", ylabel="member", title=title, xticks=ticks, yticks=ticks)
    axes.set_xticks(ticks, [str(i + 1) for i in ticks])
    axes.set_yticks(ticks, [str(i + 1) for i in ticks])
    axes.grid(visible=False)
    bar = figure.colorbar(image, ax=axes, label=words)
    bar.outline.set_visible(False)
    return figure


@plot("members")
def members(points: Mapping[str, tuple[Tensor, Tensor]], title: str = "") -> Any:
    """Diversity of each member against its accuracy.

    Diversity is a member's mean pairwise disagreement with the others, divided by its error rate.
    Fort et al. (2019), arXiv 1912.02757.

    Args:
        points: for each method, accuracy [M] and mean disagreement with the others [M].
        title: written above.
    """
    figure, axes = blank()
    styles = method_styles(points)
    for label, (accuracy, disagreement) in points.items():
        style = styles[label]
        rate, difference = (np.asarray(v, dtype=float) for v in (accuracy, disagreement))
        diversity = difference / np.maximum(1 - rate, 1e-12)
        axes.plot([], [], linestyle="", label=label, **style.spot)
        for index in np.flatnonzero(rate < 1):
            place = [rate[index]], [diversity[index]]
            (spot,) = axes.plot(*place, linestyle="", alpha=0.8, **style.spot)
            tip(spot, f"{label}, member {index + 1}: accuracy {rate[index]:.1%}")
    axes.axhline(1, color=INK, linewidth=1, linestyle=":")
    percent(axes.xaxis)
    axes.xaxis.get_major_locator().set_params(nbins=5)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set(xlabel="accuracy of the member", ylabel="disagreement / error rate", title=title)
    legend(figure, axes)
    return figure


@plot("curvature")
def curvature(found: Mapping[str, Tensor], title: str = "") -> Any:
    """The largest eigenvalues of the Hessian at every member, for each method.

    Args:
        found: for each method, eigenvalues [M, K] in descending order.
        title: written above.
    """
    figure, axes = blank()
    styles = method_styles(found)
    for index, (label, values) in enumerate(found.items()):
        style, rank = styles[label], np.arange(1, values.shape[1] + 1)
        offset = 0.12 * (index - (len(found) - 1) / 2)
        axes.plot(rank + offset, values.mean(0), color=style.colour, linestyle=style.linestyle)
        axes.plot([], [], label=label, linestyle=style.linestyle, **style.spot)
        for member, row in enumerate(np.asarray(values, dtype=float)):
            how = {"linestyle": "", "alpha": 0.6, "markersize": 5, **style.spot}
            (spots,) = axes.plot(rank + offset, row, **how)
            tip(spots, f"{label}, member {member + 1}: largest {row[0]:.3g}")
    if all(bool((values > 0).all()) for values in found.values()):
        axes.set_yscale("log")
        power(axes.yaxis)
    axes.set_xticks(rank if found else [])
    axes.set(xlabel="rank of the eigenvalue", ylabel="curvature of the loss", title=title)
    legend(figure, axes)
    return figure


@plot("effective", cite=("friedman2023vendi",))
def effective(
    found: Mapping[str, Mapping[str, tuple[float, float]]], members: int, title: str = ""
) -> Any:
    """Effective number of members in every space, with error bars.

    Args:
        found: for each method and space, the mean over seeds and its standard error.
        members: ensemble size.
        title: written above.
    """
    spaces = list(dict.fromkeys(space for numbers in found.values() for space in numbers))
    rows = len(spaces) * (1 + 0.35 * (len(found) - 1))
    figure, axes = blank(height=(1.2 + 0.42 * rows) / SIZE[1])
    styles = method_styles(found)
    for index, (label, numbers) in enumerate(found.items()):
        style = styles[label]
        axes.plot([], [], linestyle="", label=label, **style.spot)
        for space, (mean, error) in numbers.items():
            place = spaces.index(space) + 0.7 * ((index + 0.5) / len(found) - 0.5)
            bar = error if np.isfinite(error) else 0.0
            axes.errorbar([mean], [place], xerr=[bar], color=style.colour, capsize=3)
            (spot,) = axes.plot([mean], [place], markersize=7, **style.spot)
            tip(spot, f"{label}, {space}: {mean:.3g} of {members}")
    axes.axvline(members, color=INK, linewidth=1, linestyle=":")
    axes.set_yticks(range(len(spaces)), spaces)
    axes.set(xlim=(0.9, members + 0.15), ylim=(len(spaces) - 0.5, -0.5), title=title)
    axes.set(xlabel=f"effective number of {members} members")
    legend(figure, axes)
    return figure

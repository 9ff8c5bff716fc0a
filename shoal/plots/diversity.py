"""Do the members differ? Which labels they share, and what their differences cost."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.registry import plot
from shoal.plots.style import INK, blank, legend, looks, percent, tip

__all__ = ["members", "pairwise"]

_ROOM_FOR_NUMBERS = 8


@plot("pairwise")
def pairwise(
    matrix: Tensor,
    words: str = "different labels (% of inputs)",
    top: float | None = None,
    title: str = "",
) -> Any:
    """How often two members choose different labels, for every pair.

    Fort et al. (2019), arXiv 1912.02757.

    Args:
        matrix: fractions of inputs [M, M].
        words: what the fractions are.
        top: the brightest fraction, for several matrices to share; by default the largest.
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

    Diversity is how often a member's label differs from those of the others, in units of its own
    error rate. Fort et al. (2019), arXiv 1912.02757.

    Args:
        points: for each method, accuracy [M] and mean disagreement with the others [M].
        title: written above.
    """
    figure, axes = blank()
    styles = looks(points)
    for label, (accuracy, disagreement) in points.items():
        style = styles[label]
        right, apart = (np.asarray(v, dtype=float) for v in (accuracy, disagreement))
        diversity = apart / np.maximum(1 - right, 1e-12)
        sound = right < 1
        axes.plot([], [], linestyle="", label=label, **style.spot)
        for index in np.flatnonzero(sound):
            place = [right[index]], [diversity[index]]
            (spot,) = axes.plot(*place, linestyle="", alpha=0.8, **style.spot)
            tip(spot, f"{label}, member {index + 1}: accuracy {right[index]:.1%}")
    axes.axhline(1, color=INK, linewidth=1, linestyle=":")
    percent(axes.xaxis)
    axes.xaxis.get_major_locator().set_params(nbins=5)
    axes.set_ylim(0, 1.05 * axes.get_ylim()[1])
    axes.set(xlabel="accuracy of the member", ylabel="differs / errs", title=title)
    legend(figure, axes)
    return figure

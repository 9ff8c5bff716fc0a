"""How sharp the members' minima are, and how many functions they amount to."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.registry import plot
from shoal.plots.style import INK, SIZE, blank, legend, looks, power, tip

__all__ = ["curvature", "effective"]


@plot("curvature")
def curvature(found: Mapping[str, Tensor], title: str = "") -> Any:
    """The largest eigenvalues of the Hessian at every member, for each method.

    Args:
        found: for each method, eigenvalues [M, K] in descending order.
        title: written above.
    """
    figure, axes = blank()
    styles = looks(found)
    for index, (label, values) in enumerate(found.items()):
        style, rank = styles[label], np.arange(1, values.shape[1] + 1)
        aside = 0.12 * (index - (len(found) - 1) / 2)
        axes.plot(rank + aside, values.mean(0), color=style.colour, linestyle=style.linestyle)
        axes.plot([], [], label=label, linestyle=style.linestyle, **style.spot)
        for member, row in enumerate(np.asarray(values, dtype=float)):
            how = {"linestyle": "", "alpha": 0.6, "markersize": 5, **style.spot}
            (spots,) = axes.plot(rank + aside, row, **how)
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
    """How many different networks the members amount to in every space, with error bars.

    Args:
        found: for each method and space, the mean over seeds and its standard error.
        members: how many there are.
        title: written above.
    """
    spaces = list(dict.fromkeys(space for numbers in found.values() for space in numbers))
    rows = len(spaces) * (1 + 0.35 * (len(found) - 1))
    figure, axes = blank(height=(1.2 + 0.42 * rows) / SIZE[1])
    styles = looks(found)
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
    axes.set(xlabel=f"different members, out of {members}")
    legend(figure, axes)
    return figure

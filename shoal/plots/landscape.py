"""Loss landscape: diversity, paths, planes and trajectories."""

from collections.abc import Mapping
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.analysis.diversity import (
    diversity,
    hard_bound,
    hard_floor,
    independent_errors,
    perturbed_reference,
)
from shoal.core.optional import require
from shoal.plots.figure import COLOURS, INK, blank, legend, percent, plot, tip

__all__ = ["diversity_plane", "function_map", "profile", "similarity", "surface"]

LOOKS = {
    "members": ("#c03c00", "*"),
    "swa": ("#a83c78", "P"),
    "random": ("#848484", "x"),
    "dropout": ("#6c54cc", "s"),
    "diagonal": ("#0078a8", "^"),
    "low-rank": ("#00a854", "v"),
    "low-rank-scaled": ("#24783c", "D"),
    "swag": ("#d87800", "o"),
}
"""Colour and marker of each kind of function."""

_ERRORS = 4

PATHS = {
    "straight": "#848484",
    "aligned": "#0078a8",
    "tunnel": "#c03c00",
    "bezier": "#24783c",
}
"""Colour of each kind of path."""


@plot("diversity-plane", cite=("fort2019deep",))
def diversity_plane(
    points: Mapping[str, tuple[Tensor, Tensor]], reference: float, classes: int, title: str = ""
) -> Any:
    """Diversity of functions against accuracy, with theoretical curves.

    The figure omits functions with more than five times the error rate of the reference.

    Args:
        points: accuracy [K] and difference from the reference [K] of each kind of function.
        reference: accuracy of the reference.
        classes: number of classes.
        title: written above.
    """
    figure, axes = blank(height=1.25)
    best = max(
        [reference, *(float(accuracy.max()) for accuracy, _ in points.values() if len(accuracy))]
    )
    low = max(1 / classes, reference - _ERRORS * (1 - reference))
    high = min(best + 0.1 * (best - low), 0.9995)
    _limits(axes, reference, torch.linspace(low, high, 200).double(), classes)
    for name, (accuracy, difference) in reversed(list(points.items())):
        colour, marker = LOOKS.get(name, (INK, "."))
        how = {"color": colour, "marker": marker, "linestyle": "", "alpha": 0.8}
        shown = (accuracy >= low) & (accuracy < 1)
        x, y = accuracy[shown], diversity(difference[shown], accuracy[shown])
        big = 11 if name == "members" else 5
        axes.plot([], [], label=_words(name), markersize=min(big, 8), **how)
        (spots,) = axes.plot(x, y, markersize=big, **how)
        tip(spots, f"{_words(name)}: {len(accuracy)} functions")
    percent(axes.xaxis)
    axes.xaxis.get_major_locator().set_params(nbins=5)
    axes.set_xlim(low, high)
    axes.set_ylim(0, 1.15 * float(_bound(reference, high, classes)))
    axes.set(xlabel="accuracy", ylabel="disagreement with member 1 / error rate", title=title)
    legend(figure, axes)
    return figure


def _bound(reference: float, accuracy: float, classes: int) -> Tensor:
    a = torch.tensor(min(accuracy, reference), dtype=torch.float64)
    return diversity(hard_bound(reference, a, classes), a).clamp_max(2.5)


def _limits(axes: Any, reference: float, a: Tensor, classes: int) -> None:
    curves = {
        "hard bound": (hard_bound(reference, a, classes), "-"),
        "independent errors": (independent_errors(reference, a, classes), "--"),
        "perturbed at random": (perturbed_reference(reference, a, classes).clamp_min(0), ":"),
    }
    for name, (difference, dashes) in curves.items():
        shown = a <= reference if name.startswith("perturbed") else a < 1
        line = diversity(difference, a)[shown]
        axes.plot(a[shown], line, color=INK, linestyle=dashes, linewidth=1.2, label=name)
    floor = diversity(hard_floor(reference, a), a)
    axes.fill_between(a, 0, floor, color=INK, alpha=0.12, linewidth=0)


def _words(name: str) -> str:
    return {"members": "other members", "low-rank-scaled": "low-rank, scaled"}.get(name, name)


@plot("profile", cite=("fort2019large", "garipov2018loss"))
def profile(
    paths: Mapping[str, tuple[Tensor, Tensor]],
    words: str = "disagreement",
    share: bool = True,
    title: str = "",
) -> Any:
    """Loss along paths between two members, and the difference from both members.

    Args:
        paths: for each path the loss [K] and the difference from the two ends [2, K].
        words: label of the difference.
        share: the difference is a share, shown in per cent.
        title: written above.
    """
    figure, (above, below) = blank(2, 1.5, sharex=True)
    for name, (loss, difference) in paths.items():
        t, colour = np.linspace(0, 1, len(loss)), PATHS.get(name, INK)
        above.plot(t, loss, color=colour, label=name)
        below.plot(t, difference[0], color=colour)
        below.plot(t, difference[1], color=colour, linestyle="--")
        (spot,) = above.plot([t[len(t) // 2]], [loss[len(t) // 2]], "o", color=colour)
        tip(
            spot,
            f"{name}: loss {float(loss[len(t) // 2]):.3g} at the middle, "
            f"{float(loss[0]):.3g} at the start",
        )
    for dashes, end in (("-", "from the first"), ("--", "from the second")):
        above.plot([], [], color=INK, linestyle=dashes, label=f"difference {end}")
    above.set(ylabel="training loss (nats)", title=title)
    above.set_ylim(bottom=0)
    if share:
        percent(below.yaxis)
    below.set_ylim(bottom=0)
    below.set_xticks([0, 0.5, 1], ["first member", "middle", "second member"])
    for label, side in zip(below.get_xticklabels(), ("left", "center", "right"), strict=True):
        label.set_horizontalalignment(side)
    below.set(xlabel="position on the path", ylabel=words)
    legend(figure, above)
    return figure


@plot("surface", cite=("fort2019deep", "garipov2018loss"))
def surface(
    across: Tensor,
    up: Tensor,
    values: Tensor,
    marks: Tensor,
    words: str = "loss",
    origin: bool = False,
    title: str = "",
) -> Any:
    """A number over a plane of weight space, with the members that span it.

    Args:
        across: first coordinate of the grid [W].
        up: second coordinate of the grid [H].
        values: values at the grid points [H, W]. Values far above the straight lines between the
            members, and the highest 5 %, share one colour.
        marks: positions of the members [R, 2].
        words: label of the colour bar.
        origin: also mark the origin of weight space.
        title: written above.
    """
    MaxNLocator = require("matplotlib.ticker", extra="report").MaxNLocator
    figure, axes = blank(height=1.2)
    finite = values[values.isfinite()].double()
    spots = torch.cat([marks.double(), torch.zeros(1, 2).double()]) if origin else marks.double()
    barrier = _highest_between(across, up, values.double(), spots)
    low, high = float(finite.min()), min(float(finite.quantile(0.95)), 1.2 * barrier)
    shown = values.double().nan_to_num(nan=high, posinf=high).clamp(max=high).numpy()
    levels = np.linspace(low, max(high, low + 1e-9), 13)
    filled = axes.contourf(across, up, shown, levels=levels, cmap="cividis", extend="max")
    axes.contour(
        across, up, shown, levels=levels[1:-1:2], colors="white", linewidths=0.5, alpha=0.6
    )
    named = [(*mark.tolist(), str(index + 1)) for index, mark in enumerate(marks)]
    for x, y, name in [*named, *([(0.0, 0.0, "0")] if origin else [])]:
        how = {"markerfacecolor": "white", "markeredgecolor": "black", "markersize": 15}
        axes.plot([x], [y], "o", **how)
        axes.text(x, y, name, color="black", ha="center", va="center_baseline", fontsize=11)
    axes.grid(visible=False)
    axes.set_aspect("equal")
    axes.set(xlabel="weights, first direction", ylabel="weights, second direction", title=title)
    ticks = [tick for tick in MaxNLocator(6).tick_values(low, high) if low <= tick <= high]
    bar = figure.colorbar(filled, ax=axes, label=words, ticks=ticks)
    bar.outline.set_visible(False)
    return figure


def _highest_between(across: Tensor, up: Tensor, values: Tensor, spots: Tensor) -> float:
    """The largest value on the straight lines between the spots, at the nearest grid points."""
    t = torch.linspace(0, 1, 101, dtype=torch.float64)[:, None]
    lines = [(1 - t) * a + t * b for a, b in combinations(spots, 2)]
    x, y = torch.cat(lines).T if lines else spots.T
    columns = (x[:, None] - across.double()).abs().argmin(1)
    rows = (y[:, None] - up.double()).abs().argmin(1)
    heights = values[rows, columns]
    heights = heights[heights.isfinite()]
    return float(heights.max()) if len(heights) else float("inf")


_TRACKS = ("f-kde", "kde", "f-svgd", "ssge", "sge", "forde")


@plot("similarity", cite=("fort2019deep",))
def similarity(
    matrix: Tensor, owner: Tensor, words: str, share: bool = False, title: str = ""
) -> Any:
    """Similarity of the snapshots of several members; each block is a pair of members.

    Args:
        matrix: similarity or difference of every two snapshots [K, K], ordered by member.
        owner: the member of each snapshot [K].
        words: label of the colour bar.
        share: show the values in per cent.
        title: written above.
    """
    figure, axes = blank(height=1.0)
    values = np.asarray(matrix, dtype=float) * (100 if share else 1)
    image = axes.imshow(values, interpolation="none")
    owners = np.asarray(owner)
    edges = np.flatnonzero(np.diff(owners)) + 0.5
    for edge in edges:
        axes.axhline(edge, color="white", linewidth=1.5)
        axes.axvline(edge, color="white", linewidth=1.5)
    bounds = np.concatenate([[-0.5], edges, [len(owners) - 0.5]])
    centres = (bounds[:-1] + bounds[1:]) / 2
    names = [f"member {index + 1}" for index in range(len(centres))]
    axes.set_xticks(centres, names)
    axes.set_yticks(centres, names, rotation=90, va="center")
    axes.tick_params(length=0)
    axes.grid(visible=False)
    axes.set(xlabel="training time →", ylabel="← training time", title=title)
    figure.colorbar(image, ax=axes, label=words).outline.set_visible(False)
    return figure


@plot("function-map", cite=("fort2019deep",))
def function_map(points: Tensor, owner: Tensor, title: str = "") -> Any:
    """Training trajectories of the members in function space; near points are similar functions.

    Args:
        points: position of every snapshot [K, 2], ordered by member and training time.
        owner: the member of each snapshot [K].
        title: written above.
    """
    figure, axes = blank(height=1.1)
    places, owners = np.asarray(points, dtype=float), np.asarray(owner)
    for member in np.unique(owners):
        path, colour = places[owners == member], COLOURS[_TRACKS[int(member) % len(_TRACKS)]]
        axes.plot(path[:, 0], path[:, 1], "-", color=colour, alpha=0.6, linewidth=1.5)
        axes.plot(path[1:-1, 0], path[1:-1, 1], "o", color=colour, markersize=4)
        axes.plot(*path[0], marker="x", color=colour, markersize=8, markeredgewidth=2)
        (end,) = axes.plot(*path[-1], marker="*", color=colour, markersize=14, linestyle="")
        tip(end, f"member {member + 1}, trained")
        axes.plot([], [], "o-", color=colour, label=f"member {member + 1}")
    axes.plot([], [], "x", color=INK, label="start")
    axes.plot([], [], "*", color=INK, markersize=10, label="end")
    axes.set(xticks=[], yticks=[], xlabel="t-SNE 1", ylabel="t-SNE 2", title=title)
    legend(figure, axes)
    return figure

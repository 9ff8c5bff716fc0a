"""Training seen from afar: how alike its snapshots are, and where each member went."""

from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.registry import plot
from shoal.plots.style import COLOURS, INK, blank, legend, tip

__all__ = ["function_map", "similarity"]

_TRACKS = ("f-kde", "kde", "f-svgd", "ssge", "sge", "forde")


def _colour(member: int) -> str:
    return COLOURS[_TRACKS[member % len(_TRACKS)]]


@plot("similarity", cite=("fort2019deep",))
def similarity(
    matrix: Tensor, owner: Tensor, words: str, share: bool = False, title: str = ""
) -> Any:
    """How alike the snapshots of several members are, each block one pair of members.

    Args:
        matrix: similarity or difference of every two snapshots [K, K], member after member.
        owner: which member each snapshot is of [K].
        words: what the numbers are.
        share: shown in per cent.
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
    axes.set(xlabel="training goes right", ylabel="training goes down", title=title)
    figure.colorbar(image, ax=axes, label=words).outline.set_visible(False)
    return figure


@plot("function-map", cite=("fort2019deep",))
def function_map(points: Tensor, owner: Tensor, title: str = "") -> Any:
    """Where training took each member in the space of functions, alike functions near each other.

    Args:
        points: a place for every snapshot [K, 2], member after member, in the order of training.
        owner: which member each snapshot is of [K].
        title: written above.
    """
    figure, axes = blank(height=1.1)
    places, owners = np.asarray(points, dtype=float), np.asarray(owner)
    for member in np.unique(owners):
        path, colour = places[owners == member], _colour(int(member))
        axes.plot(path[:, 0], path[:, 1], "-", color=colour, alpha=0.6, linewidth=1.5)
        axes.plot(path[1:-1, 0], path[1:-1, 1], "o", color=colour, markersize=4)
        axes.plot(*path[0], marker="x", color=colour, markersize=8, markeredgewidth=2)
        (end,) = axes.plot(*path[-1], marker="*", color=colour, markersize=14, linestyle="")
        tip(end, f"member {member + 1}, trained")
        axes.plot([], [], "o-", color=colour, label=f"member {member + 1}")
    axes.plot([], [], "x", color=INK, label="start")
    axes.plot([], [], "*", color=INK, markersize=10, label="end")
    axes.set(
        xticks=[], yticks=[], xlabel="map of functions (t-SNE)", ylabel="near is alike", title=title
    )
    legend(figure, axes)
    return figure

"""Room for ticks, labels and legends around the axes of a figure, measured once.

matplotlib's layouts measure every text two or three times, which takes most of the time of a page.
The figures here are simple grids of axes, for which one measurement is enough.
"""

from typing import Any

import numpy as np
from matplotlib.layout_engine import LayoutEngine
from matplotlib.text import Annotation
from matplotlib.transforms import Bbox

__all__ = ["Margins"]

_PAD = 3.0
"""Points between what is drawn and the edge, and between neighbours on each side."""


class Margins(LayoutEngine):
    """Give axes the room that labels and legends leave."""

    _adjust_compatible = True
    _colorbar_gridspec = True

    def execute(self, fig: Any) -> None:
        """Measure what is around the axes of each cell of the grid, and move the cells."""
        cells: dict[Any, list[Any]] = {}
        for axes in fig.axes:
            if axes.get_subplotspec() is not None:
                spec = axes.get_subplotspec().get_topmost_subplotspec()
                cells.setdefault(spec, []).append(axes)
        if cells:
            # one renderer for all, since it caches its measurements
            renderer, pad = fig._get_renderer(), _PAD * fig.dpi / 72
            above = [*fig.legends, *fig.texts]
            high = sum(artist.get_window_extent(renderer).height + pad for artist in above)
            around = {spec: _around(inside, renderer) for spec, inside in cells.items()}
            fig.subplots_adjust(**_places(fig, around, pad, high))


def _places(
    fig: Any, around: dict[Any, tuple[float, ...]], pad: float, above: float
) -> dict[str, float]:
    """Edges of the grid and the gaps in it, as `subplots_adjust` wants them."""
    rows, columns = next(iter(around)).get_gridspec().get_geometry()
    # room before and after each line between columns or rows, the outermost lines included
    across, down = np.zeros((2, columns + 1)), np.zeros((2, rows + 1))
    for spec, (left, right, bottom, top) in around.items():
        for room, span, before, after in (
            (across, spec.colspan, left, right),
            (down, spec.rowspan, top, bottom),
        ):
            room[0, span.start] = max(room[0, span.start], before)
            room[1, span.stop] = max(room[1, span.stop], after)
    left, right, wspace = _along(across, fig.bbox.width, pad)
    top, bottom, hspace = _along(down, fig.bbox.height, pad, above)
    edges = {"left": left, "right": right, "bottom": 1 - bottom, "top": 1 - top}
    return edges | {"wspace": wspace, "hspace": hspace}


def _around(inside: list[Any], renderer: Any) -> tuple[float, ...]:
    """How far labels reach to the left, right, below and above the axes of a cell."""
    drawn = []
    for axes in inside:
        # text within the axes needs no room
        beside = [text for text in axes.texts if isinstance(text, Annotation)]
        how = {"for_layout_only": True, "bbox_extra_artists": beside}
        drawn.append(axes.get_tightbbox(renderer, **how))
    drawn = Bbox.union(drawn)
    bare = Bbox.union([axes.get_window_extent() for axes in inside])
    return bare.x0 - drawn.x0, drawn.x1 - bare.x1, bare.y0 - drawn.y0, drawn.y1 - bare.y1


def _along(
    room: np.ndarray, length: float, pad: float, above: float = 0.0
) -> tuple[float, float, float]:
    """First and last edge as shares of the length, and the gap as a share of a cell."""
    count = room.shape[1] - 1
    first, last = above + room[0, 0] + pad, length - room[1, -1] - pad
    gap = float((room[0, 1:-1] + room[1, 1:-1]).max(initial=0.0)) + 2 * pad
    cell = (last - first - (count - 1) * gap) / count
    # keep a minimum width where the labels leave no room
    cell = max(cell, 0.02 * length)
    last = max(last, first + count * cell)
    return first / length, last / length, gap / cell

"""Images with their predictions, and class-activation maps of the members."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from torch import Tensor

from shoal.core.errors import DataError
from shoal.plots.figure import INK, SIZE, blank, plot, tip

__all__ = ["attention", "gallery"]

_GAP = 0.05

_LINE = 0.17
"""Height of a caption line in inches."""


@plot("gallery")
def gallery(
    images: Tensor,
    captions: Sequence[str] = (),
    columns: int = 6,
    tips: Sequence[str] = (),
    title: str = "",
) -> Any:
    """Small images in rows, each with a caption below.

    Args:
        images: grey or coloured [n, 1 or 3, H, W]; bytes, or floats from 0 to 1.
        captions: a few characters per image.
        columns: images per row.
        tips: a tooltip per image.
        title: written above.
    """
    if images.ndim != 4 or images.shape[1] not in (1, 3) or len(images) == 0:
        raise DataError(f"images must be [n, 1 or 3, H, W], not {list(images.shape)}")
    pixels = images.permute(0, 2, 3, 1).cpu().numpy()
    pixels = pixels / 255.0 if pixels.dtype == np.uint8 else pixels.clip(0, 1)
    rows = -(-len(images) // columns)
    tall = images.shape[2] / images.shape[3]
    line = _LINE * columns / SIZE[0]
    lines = 1 + max((caption.count("\n") for caption in captions), default=-1)
    step = tall + _GAP + line * lines
    figure, axes = blank(height=(SIZE[0] * (rows * step + line * bool(title)) / columns) / SIZE[1])
    figure.set_layout_engine("none")
    axes.set_position((0, 0, 1, 1))
    corners = []
    for index, image in enumerate(pixels):
        row, column = divmod(index, columns)
        caption, words = (_at(texts, index) for texts in (captions, tips))
        corners.append(_show(axes, image, (column, row * step, tall), caption, words))
    _frame(axes, np.array(corners))
    axes.set(xlim=(0, columns), ylim=(rows * step, -line * bool(title)), aspect="auto")
    axes.set_axis_off()
    axes.set_title(title, y=1, pad=-12)
    return figure


def _at(texts: Sequence[str], index: int) -> str:
    return texts[index] if index < len(texts) else ""


def _show(
    axes: Any, image: np.ndarray, place: tuple[float, float, float], caption: str, words: str
) -> tuple[float, ...]:
    """Draw one image with its caption, and return its extent."""
    left, top, tall = place
    extent = (left + _GAP / 2, left + 1 - _GAP / 2, top + tall - _GAP / 2, top + _GAP / 2)
    grey = {"cmap": "gray", "vmin": 0, "vmax": 1} if image.shape[-1] == 1 else {}
    pixels = image.squeeze(-1) if grey else image
    shown = axes.imshow(pixels, extent=extent, interpolation="none", **grey)
    if words:
        tip(shown, words)
    left, right, bottom, top = extent
    middle = (left + right) / 2
    axes.text(middle, bottom + _GAP, caption, ha="center", va="top", fontsize=10)
    return extent


def _frame(axes: Any, corners: np.ndarray) -> None:
    """Draw a pale line around every image, so that pale images have an edge."""
    left, right, bottom, top = corners.T
    gap = np.full(len(corners), np.nan)
    x = np.stack([left, right, right, left, left, gap], -1)
    y = np.stack([bottom, bottom, top, top, bottom, gap], -1)
    axes.plot(x.ravel(), y.ravel(), color=INK, alpha=0.2, linewidth=0.6)


_MEMBERS = 6


@plot("attention", cite=("selvaraju2017grad",))
def attention(
    image: Tensor,
    maps: Mapping[str, Tensor],
    diversity: Mapping[str, float],
    title: str = "",
) -> Any:
    """Class-activation maps of one image: one column per member, one row per depth.

    Args:
        image: [C, H, W] in bytes.
        maps: maps [M, h, w] in bytes by depth; at most six members are drawn.
        diversity: for each depth, 1 minus the mean cosine between the maps of two members.
        title: written above.
    """
    columns = min(len(next(iter(maps.values()))), _MEMBERS)
    pixels = np.asarray(image.permute(1, 2, 0), dtype=float) / 255
    pixels = pixels[..., 0] if pixels.shape[-1] == 1 else pixels
    rows = len(maps)
    height = 0.35 + 0.95 * rows
    figure, panels = blank(rows, height / 3.5, ncols=columns + 1, squeeze=False)
    for row, (depth, values) in enumerate(maps.items()):
        ends = (-0.5, pixels.shape[1] - 0.5, pixels.shape[0] - 0.5, -0.5)
        panels[row][0].imshow(pixels, cmap="gray", interpolation="none")
        panels[row][0].set_ylabel(f"{depth}\n{diversity[depth]:.2f}", rotation=0, ha="right",
                                  va="center", fontsize=10)  # fmt: skip
        for member in range(columns):
            heat = np.asarray(values[member], dtype=float) / 255
            panels[row][member + 1].imshow(heat, vmin=0, vmax=1, extent=ends, interpolation="none")
    for index, panel in enumerate(np.ravel(panels)):
        panel.set(xticks=[], yticks=[])
        panel.grid(visible=False)
        for side in panel.spines.values():
            side.set_visible(False)
        if index <= columns:
            panel.set_title("image" if index == 0 else str(index), fontsize=10)
    if title:
        figure.suptitle(title)
    return figure

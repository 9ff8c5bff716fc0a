"""What the members look at: class-activation maps side by side."""

from collections.abc import Mapping
from typing import Any

import numpy as np
from torch import Tensor

from shoal.plots.registry import plot
from shoal.plots.style import blank

__all__ = ["attention"]

_MEMBERS = 6


@plot("attention", cite=("selvaraju2017grad",))
def attention(
    image: Tensor,
    maps: Mapping[str, Tensor],
    diversity: Mapping[str, float],
    title: str = "",
) -> Any:
    """Class-activation maps of one image: one column a member, one row a depth.

    Args:
        image: [C, H, W] in bytes.
        maps: by the name of the depth, [M, h, w] in bytes; six members are drawn at most.
        diversity: one minus the mean cosine between the maps of two members, for each depth.
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

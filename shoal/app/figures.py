"""The figures of a page as files of their own."""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from shoal.app.blocks import Block, Fold, Picture, Section
from shoal.core.files import write_bytes, write_text
from shoal.plots.png import PAPER, png
from shoal.plots.svg import svg

__all__ = ["pictures", "slug", "write_figures"]

BLACK = "#1a1a1a"
"""Ink of a file, on its white paper."""


def write_figures(
    sections: Mapping[str, Section],
    folder: Path,
    after: Callable[[Section], None] = lambda section: None,
) -> list[Path]:
    """Write every figure as `SECTION-NN-title.png` and `.svg`; the PNG files are returned.

    Args:
        sections: of a page, by name.
        folder: where to.
        after: called when the figures of a section are written.
    """
    written = []
    for name, section in sections.items():
        for number, picture in enumerate(pictures(section.blocks), 1):
            stem = f"{name}-{number:02d}-{slug(picture.title)}"
            write_bytes(folder / f"{stem}.png", png(picture.figure, 150))
            drawn = svg(picture.figure, "figure", picture.title).replace("currentColor", BLACK)
            drawn = drawn.replace("<svg ", f'<svg style="background:{PAPER}" ', 1)
            write_text(folder / f"{stem}.svg", drawn)
            written.append(folder / f"{stem}.png")
        after(section)
    return written


def pictures(blocks: Iterable[Block]) -> Iterator[Picture]:
    """Every figure, those in folds as well."""
    for block in blocks:
        if isinstance(block, Picture):
            yield block
        elif isinstance(block, Fold):
            yield from pictures(block.blocks)


def slug(title: str) -> str:
    """A title as part of the name of a file.

    >>> slug("Diverse and accurate?")
    'diverse-and-accurate'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60]

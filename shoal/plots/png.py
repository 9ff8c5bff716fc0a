"""Figures as picture files."""

import io
from typing import Any

__all__ = ["png"]

PAPER = "#ffffff"
"""A file has no reader's setting to follow."""


def png(figure: Any, dpi: int) -> bytes:
    """The figure on white, as the content of a file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor=PAPER)
    return stream.getvalue()

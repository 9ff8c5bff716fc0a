"""A figure: its name, the common style, and its file as SVG or PNG."""

import functools
import html
import io
import re
from collections.abc import Callable
from typing import Any, TypeVar

from shoal.core.optional import require
from shoal.core.registry import Registry
from shoal.plots.style import INK, rc

__all__ = ["plot", "png", "registry", "svg"]

registry = Registry("plot")

F = TypeVar("F", bound=Callable[..., Any])


def plot(name: str, cite: tuple[str, ...] = ()) -> Callable[[F], F]:
    """File a function that takes numbers and returns a figure; it is drawn in the common style."""

    def file(draw: F) -> F:
        @functools.wraps(draw)
        def drawn(*args: Any, **options: Any) -> Any:
            with require("matplotlib", extra="report").rc_context(rc()):
                return draw(*args, **options)

        return registry.register(name, cite)(drawn)  # pyright: ignore[reportReturnType]

    return file


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

_TIP = re.compile(r'<g id="tip:([0-9a-f]*)">')

_IMAGE_TIP = re.compile(r'<image ([^>]*?)id="tip:([0-9a-f]*)"([^>]*)/>')

_NAMED = re.compile(r'(\bid="|url\(#|href="#)')

_FONT = re.compile(r"(font: [^;\"]*?\d+(?:\.\d+)?px|font-family:) [^;\"]*")

_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)


def svg(figure: Any, name: str, label: str = "") -> str:
    """The figure as one `<svg>` element that can stand inside an HTML page or alone.

    Text stays text, in the system's font; ink becomes `currentColor`; tooltips become `<title>`
    elements; every id starts with `name`, so that many figures can share a page.

    Args:
        figure: a matplotlib figure.
        name: a word that no other figure on the page has.
        label: what a screen reader says instead of the picture.
    """
    matplotlib = require("matplotlib", extra="report")
    canvas = require("matplotlib.backends.backend_svg", extra="report").FigureCanvasSVG
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        # not by savefig, which draws the figure once more before it draws the figure
        canvas(figure).print_svg(stream, metadata={"Date": None})
    text = stream.getvalue()
    text = _METADATA.sub("", text[text.index("<svg") :])
    text = _TIP.sub(lambda found: f"<g>{_title(found[1])}", text)
    text = _IMAGE_TIP.sub(
        lambda found: f"<image {found[1]}{found[3]}>{_title(found[2])}</image>", text
    )
    text = _NAMED.sub(rf"\g<1>{name}-", text)
    text = _FONT.sub(rf"\1 {FONT}", text).replace(INK, "currentColor")
    return text.replace("<svg ", f'<svg role="img" aria-label="{html.escape(label)}" ', 1)


def _title(code: str) -> str:
    return f"<title>{html.escape(bytes.fromhex(code).decode())}</title>"


PAPER = "#ffffff"
"""A file has no reader's setting to follow."""


def png(figure: Any, dpi: int) -> bytes:
    """The figure on white, as the content of a file."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor=PAPER)
    return stream.getvalue()

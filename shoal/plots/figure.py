"""The registry of figures, their common style, and their SVG and PNG files."""

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
    """Register a function that returns a figure, and draw the figure in the common style."""

    def register(draw: F) -> F:
        @functools.wraps(draw)
        def drawn(*args: Any, **options: Any) -> Any:
            with require("matplotlib", extra="report").rc_context(rc()):
                return draw(*args, **options)

        return registry.register(name, cite)(drawn)  # pyright: ignore[reportReturnType]

    return register


FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif"

_TIP = re.compile(r'<g id="tip:([0-9a-f]*)">')

_IMAGE_TIP = re.compile(r'<image ([^>]*?)id="tip:([0-9a-f]*)"([^>]*)/>')

_NAMED = re.compile(r'(\bid="|url\(#|href="#)')

_FONT = re.compile(r"(font: [^;\"]*?\d+(?:\.\d+)?px|font-family:) [^;\"]*")

_METADATA = re.compile(r"<metadata>.*?</metadata>\s*", re.DOTALL)


def svg(figure: Any, name: str, label: str = "") -> str:
    """The figure as one `<svg>` element, for an HTML page or a file.

    Text stays text, in the system's font. Ink becomes `currentColor`, tooltips become `<title>`
    elements. Every id starts with `name`, so that many figures can share a page.

    Args:
        figure: a matplotlib figure.
        name: unique name of the figure on the page.
        label: text for screen readers.
    """
    matplotlib = require("matplotlib", extra="report")
    canvas = require("matplotlib.backends.backend_svg", extra="report").FigureCanvasSVG
    stream = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": name}):
        # savefig would draw the figure twice
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
"""Background of a file, which has no light or dark setting."""


def png(figure: Any, dpi: int) -> bytes:
    """The figure on white, as PNG bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor=PAPER)
    return stream.getvalue()

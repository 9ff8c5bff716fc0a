"""The registry of figures, their common style, and their SVG and PNG files.

Each method has a colour with enough contrast on light and dark pages. In an SVG the colour of text
and axes is `currentColor`, so that one file fits both.
"""

import functools
import html
import io
import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeVar

from shoal.core.optional import require
from shoal.core.registry import Registry

__all__ = [
    "COLOURS",
    "INK",
    "SIZE",
    "MethodStyle",
    "blank",
    "legend",
    "look",
    "method_styles",
    "percent",
    "plot",
    "png",
    "power",
    "rc",
    "registry",
    "svg",
    "tip",
]


INK = "#010203"
"""Placeholder for the text colour of the page; nearly black in a PNG."""

SIZE = (4.8, 3.5)
"""Size of a figure in inches: narrow, so that text is readable on a phone."""

COLOURS: dict[str, str] = {
    "ensemble": "#848484",
    "kde": "#0078a8",
    "f-kde": "#d87800",
    "sge": "#6c54cc",
    "f-sge": "#7884fc",
    "ssge": "#a83c78",
    "f-ssge": "#c078cc",
    "svgd": "#24783c",
    "f-svgd": "#00a854",
    "forde": "#c03c00",
}
"""Colour of each method. The colours differ under common colour blindness and have a contrast of at
least 3 to 1 on light and dark pages."""

_LINE, _LETTER, _HANDLE = 0.24, 0.1, 0.64
"""Sizes in a legend in inches: row height, letter width, handle width."""

_TICKS = 5
_VARIANTS = (("full", "-"), ("none", "--"), ("left", "-."), ("top", ":"))
_MARKERS = dict(zip(COLOURS, "osD^vPX<>d", strict=True))


@dataclass(frozen=True)
class MethodStyle:
    """The style of a method in every figure.

    Attributes:
        colour: colour of lines and markers.
        marker: marker of points.
        fillstyle: fill of the marker, different for variants of one method.
        linestyle: line style, different for variants of one method.
    """

    colour: str
    marker: str
    fillstyle: str = "full"
    linestyle: str = "-"

    @property
    def spot(self) -> dict[str, Any]:
        """matplotlib settings of a point."""
        return {"color": self.colour, "marker": self.marker, "fillstyle": self.fillstyle}


def look(label: str) -> MethodStyle:
    """Style of a method, by a label that starts with the method's name.

    The user's own method always gets the style of the same built-in method.

    >>> look("f-kde (lr = 0.01)") == look("f-kde")
    True
    >>> look("forde+fraction=0.25:16") == look("forde")
    True
    """
    name, *_ = re.split(r"[\s:(+]", label.strip(), maxsplit=1)
    stem = name.partition("-")[0]
    if name not in COLOURS and stem in COLOURS:
        name = stem  # "forde-identity" is a variant of "forde"
    if name not in COLOURS:
        name = list(COLOURS)[1 + zlib.crc32(name.encode()) % (len(COLOURS) - 1)]
    return MethodStyle(COLOURS[name], _MARKERS[name])


def method_styles(labels: Iterable[str]) -> dict[str, MethodStyle]:
    """Styles of several labels in one figure; variants of a method differ by fill and dash.

    >>> [style.fillstyle for style in method_styles(["kde", "sge", "kde (lr = 0.1)"]).values()]
    ['full', 'full', 'none']
    """
    styles: dict[str, MethodStyle] = {}
    for label in labels:
        style = look(label)
        earlier = sum(other.colour == style.colour for other in styles.values())
        fill, dashes = _VARIANTS[earlier % len(_VARIANTS)]
        styles[label] = MethodStyle(style.colour, style.marker, fill, dashes)
    return styles


def rc() -> dict[str, Any]:
    """The matplotlib settings of every figure."""
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    clear = ("figure.facecolor", "axes.facecolor", "savefig.facecolor", "legend.facecolor")
    return dict.fromkeys(ink, INK) | dict.fromkeys(clear, "none") | {
        "axes.grid": True,
        "axes.labelsize": 12,
        "axes.linewidth": 0.8,
        "axes.spines.right": False,
        "axes.spines.top": False,
        "axes.titlelocation": "left",
        "axes.titlesize": 12,
        "axes.titleweight": "bold",
        "figure.figsize": SIZE,
        "font.size": 11.5,
        "grid.alpha": 0.14,
        "grid.color": INK,
        "image.cmap": "cividis",
        "legend.fontsize": 11,
        "legend.frameon": False,
        "lines.linewidth": 2.0,
        "lines.markersize": 6.0,
        # the user's run and data names may contain a dollar sign
        "text.parse_math": False,
    }  # fmt: skip


def blank(rows: int = 1, height: float = 1.0, **options: Any) -> tuple[Any, Any]:
    """A figure with one or more axes, one above the other.

    Args:
        rows: number of axes.
        height: height of the figure, as a multiple of the usual one.
        options: arguments of `Figure.subplots`.
    """
    Figure = require("matplotlib.figure", extra="report").Figure
    margins = require("shoal.plots.margins", extra="report").Margins
    figure = Figure(figsize=(SIZE[0], SIZE[1] * height), layout=margins())
    grid = figure.subplots(rows, **options)
    for axes in figure.axes:
        axes.locator_params(nbins=_TICKS)
    return figure, grid


def legend(figure: Any, axes: Any) -> None:
    """Draw a legend above the axes where there are at least two labels."""
    handles, labels = axes.get_legend_handles_labels()
    if len(labels) > 1:
        columns = _columns(labels)
        rows = -(-len(labels) // columns)
        figure.set_figheight(figure.get_figheight() + _LINE * (rows - 1))
        places = {"loc": "upper left", "borderaxespad": 0.2}
        figure.legend(handles, labels, ncols=columns, columnspacing=1.4, **places)


def _columns(labels: list[str]) -> int:
    """The number of legend columns that fit."""
    for columns in (4, 3, 2):
        rows, more = divmod(len(labels), columns)
        starts = [i * rows + min(i, more) for i in range(columns + 1)]
        parts = [labels[a:b] for a, b in pairwise(starts)]
        longest = [max(map(len, part), default=0) for part in parts]
        if sum(longest) * _LETTER + columns * _HANDLE <= SIZE[0]:
            return columns
    return 1


def tip(artist: Any, text: str) -> None:
    """Give an artist a tooltip, which an SVG shows under the pointer."""
    artist.set_gid("tip:" + text.encode().hex())


def percent(axis: Any) -> None:
    """Label an axis of fractions in per cent."""
    axis.set_major_formatter(_formatter(lambda value: f"{100 * value:.6g} %"))


def power(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers near one and powers of ten elsewhere."""
    ticker = require("matplotlib.ticker", extra="report")
    low, high = axis.get_view_interval()
    steps = (1.0,) if high > 100 * low else (1.0, 2.0, 5.0)
    axis.set_major_locator(ticker.LogLocator(subs=steps, numticks=7))
    axis.set_major_formatter(_formatter(_power_of_ten))
    axis.set_minor_formatter(ticker.NullFormatter())
    axis.set_minor_locator(
        ticker.LogLocator(subs=(2.0, 5.0), numticks=9) if len(steps) == 1 else ticker.NullLocator()
    )


def _power_of_ten(value: float) -> str:
    if 0.01 <= value <= 1000:
        return f"{value:g}"
    mantissa, exponent = f"{value:.0e}".split("e")
    raised = str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
    return ("" if mantissa == "1" else f"{mantissa}·") + "10" + raised


def _formatter(words: Callable[[float], str]) -> Any:
    ticker = require("matplotlib.ticker", extra="report")
    return ticker.FuncFormatter(lambda value, _: words(value))


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


_ALIGNED = 'preserveAspectRatio="xMinYMin meet"'
"""In a box of other proportions, a figure stands at the left, below its title."""


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
    text = _TIP.sub(lambda match: f"<g>{_title(match[1])}", text)
    text = _IMAGE_TIP.sub(
        lambda match: f"<image {match[1]}{match[3]}>{_title(match[2])}</image>", text
    )
    text = _NAMED.sub(rf"\g<1>{name}-", text)
    text = _FONT.sub(rf"\1 {FONT}", text).replace(INK, "currentColor")
    return text.replace(
        "<svg ", f'<svg role="img" aria-label="{html.escape(label)}" {_ALIGNED} ', 1
    )


def _title(code: str) -> str:
    return f"<title>{html.escape(bytes.fromhex(code).decode())}</title>"


PAPER = "#ffffff"
"""Background of a file, which has no light or dark setting."""


def png(figure: Any, dpi: int) -> bytes:
    """The figure on white, as PNG bytes."""
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=dpi, facecolor=PAPER)
    return stream.getvalue()

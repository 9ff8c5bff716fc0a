"""The common style of figures: a colour per method, text in the colour of the page.

`shoal.plots.figure` replaces the colour of text and axes by `currentColor`, so that one SVG fits
light and dark pages. The method colours have enough contrast on both.
"""

import re
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from shoal.core.optional import require

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
    "power",
    "rc",
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

    >>> [style.fillstyle for style in looks(["kde", "sge", "kde (lr = 0.1)"]).values()]
    ['full', 'full', 'none']
    """
    found: dict[str, MethodStyle] = {}
    for label in labels:
        style = look(label)
        earlier = sum(other.colour == style.colour for other in found.values())
        fill, dashes = _VARIANTS[earlier % len(_VARIANTS)]
        found[label] = MethodStyle(style.colour, style.marker, fill, dashes)
    return found


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
    made = require("matplotlib.figure", extra="report").Figure
    margins = require("shoal.plots.margins", extra="report").Margins
    figure = made(figsize=(SIZE[0], SIZE[1] * height), layout=margins())
    found = figure.subplots(rows, **options)
    for axes in figure.axes:
        axes.locator_params(nbins=_TICKS)
    return figure, found


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

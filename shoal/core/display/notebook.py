"""Notebook display of the main objects: a small table of facts, and a figure.

Figures are SVG without any library, in the colours of a light or dark page: text and axes have the
page's own colour (`currentColor`). A figure has at most a few kilobytes, however long a run is:
curves are thinned to 80 points.
"""

import html
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shoal.core.display.text import number

__all__ = ["Curve", "bars_svg", "curves_svg", "facts_html"]


def facts_html(title: str, facts: Mapping[str, object], figure: str = "") -> str:
    """A table with a heading and one fact in each row; facts of None are left out.

    Args:
        title: the heading.
        facts: what to show, by name.
        figure: an SVG element to stand below, as `curves_svg` and `bars_svg` make it.

    >>> facts_html("Run", {"members": 5, "folder": None})
    '<table><caption>Run</caption><tr><th>members</th><td>5</td></tr></table>'
    """
    known = {name: fact for name, fact in facts.items() if fact is not None}
    rows = [
        f"<tr><th>{html.escape(name)}</th><td>{html.escape(str(fact))}</td></tr>"
        for name, fact in known.items()
    ]
    table = f"<table><caption>{html.escape(title)}</caption>{''.join(rows)}</table>"
    return f"{table}<div>{figure}</div>" if figure else table


WIDTH, HEIGHT = 380, 170
LEFT, RIGHT, TOP, BOTTOM = 58, 372, 24, 132
MOST = 80
"""Points of a curve."""

INK, BLUE, ORANGE = "currentColor", "#0078a8", "#d87800"
"""Colours with a contrast of at least 3 to 1 on light and dark pages."""

Values = Sequence[float | None]


@dataclass(frozen=True)
class Curve:
    """A line, with the area between two others where they are given.

    Attributes:
        values: heights at the common places; None or not finite where there is none.
        colour: colour of the line.
        dashed: draw dashes.
        low: lower edges of an area around the line.
        high: upper edges.
    """

    values: Values
    colour: str = INK
    dashed: bool = False
    low: Values | None = None
    high: Values | None = None


class _Scale:
    """From values to places on the page; logarithmic where values of one sign differ much."""

    def __init__(self, values: Iterator[float]) -> None:
        ordered = sorted(values) or [0.0, 1.0]
        self.low, self.high = ordered[0], ordered[-1]
        self.log = self.low > 0 and self.high > 10 * self.low

    def __call__(self, value: float) -> float:
        low, high, value = (
            (math.log(v) for v in (self.low, self.high, value))
            if self.log
            else (self.low, self.high, value)
        )
        share = (value - low) / (high - low) if high > low else 0.5
        return BOTTOM - share * (BOTTOM - TOP)


def _finite(values: Values) -> Iterator[float]:
    return (value for value in values if value is not None and math.isfinite(value))


def _chosen(count: int) -> list[int]:
    """At most `MOST` numbers from 0 to count - 1, with both ends."""
    if count <= MOST:
        return list(range(count))
    return [round(index * (count - 1) / (MOST - 1)) for index in range(MOST)]


def curves_svg(
    curves: Mapping[str, Curve], x_label: str, x_ends: tuple[float, float], y_label: str
) -> str:
    """Curves over common places, with their names above.

    Args:
        curves: the curves by name, all of the same length.
        x_label: what the places are.
        x_ends: the numbers of the first and the last place.
        y_label: what the heights are.
    """
    parts = [[c.values, c.low or (), c.high or ()] for c in curves.values()]
    scale = _Scale(value for part in parts for values in part for value in _finite(values))
    drawn = [mark for curve in curves.values() for mark in _marks(curve, scale)]
    names = _names({name: curve for name, curve in curves.items() if name})
    y_ends = (scale.low, scale.high)
    label = f"{y_label}, log scale" if scale.log else y_label
    return _framed([*drawn, *names], x_label, x_ends, label, y_ends)


def _marks(curve: Curve, scale: _Scale) -> Iterator[str]:
    """The area, the line, and a dot for a single value."""
    if curve.low is not None and curve.high is not None:
        edge = [*_places(curve.low, scale), *reversed(_places(curve.high, scale))]
        yield f'<polygon points="{" ".join(edge)}" fill="{BLUE}" fill-opacity="0.25"/>'
    places = _places(curve.values, scale)
    if len(places) == 1:
        x, y = places[0].split(",")
        yield f'<circle cx="{x}" cy="{y}" r="3" fill="{curve.colour}"/>'
    else:
        yield (
            f'<polyline points="{" ".join(places)}" fill="none" stroke="{curve.colour}" '
            f'stroke-width="1.8"{_dashes(curve)}/>'
        )


def _places(values: Values, scale: _Scale) -> list[str]:
    last = max(len(values) - 1, 1)
    places = []
    for index in _chosen(len(values)):
        value = values[index]
        if value is not None and math.isfinite(value):
            x = LEFT + (RIGHT - LEFT) * (index / last if len(values) > 1 else 0.5)
            places.append(f"{x:.1f},{scale(value):.1f}")
    return places


def _dashes(curve: Curve) -> str:
    return ' stroke-dasharray="5 3"' if curve.dashed else ""


def _names(curves: Mapping[str, Curve]) -> Iterator[str]:
    """A short piece of every line, with its name."""
    x = LEFT
    for name, curve in curves.items():
        yield (
            f'<line x1="{x}" y1="10" x2="{x + 18}" y2="10" stroke="{curve.colour}" '
            f'stroke-width="2"{_dashes(curve)}/>'
        )
        yield f'<text x="{x + 22}" y="14">{html.escape(name)}</text>'
        x += 40 + 6 * len(name)


def bars_svg(
    shares: Sequence[float], x_label: str, x_ends: tuple[float, float], y_label: str
) -> str:
    """Bars beside each other: the share of the data in each bin.

    Args:
        shares: heights, from 0.
        x_label: what the bins divide.
        x_ends: lower end of the first bin and upper end of the last bin.
        y_label: what the heights are.
    """
    most = max(shares, default=0.0) or 1.0
    width = (RIGHT - LEFT) / max(len(shares), 1)
    drawn = []
    for index, share in enumerate(shares):
        high = (BOTTOM - TOP) * share / most
        drawn.append(
            f'<rect x="{LEFT + index * width + 1:.1f}" y="{BOTTOM - high:.1f}" '
            f'width="{width - 2:.1f}" height="{high:.1f}" fill="{BLUE}"/>'
        )
    return _framed(drawn, x_label, x_ends, y_label, (0.0, most))


def _framed(
    drawn: Sequence[str],
    x_label: str,
    x_ends: tuple[float, float],
    y_label: str,
    y_ends: tuple[float, float],
) -> str:
    """The figure with two axes, the numbers at their ends, and their labels."""
    (left, right), (low, high) = ([number(end) for end in ends] for ends in (x_ends, y_ends))
    middle, half = (LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2
    written = [
        (LEFT, BOTTOM + 15, "start", left),
        (RIGHT, BOTTOM + 15, "end", right if right != left else ""),
        (LEFT - 4, BOTTOM, "end", low if low != high else ""),
        (LEFT - 4, TOP + 8, "end", high),
        (middle, BOTTOM + 30, "middle", x_label),
    ]
    texts = [
        f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}">{html.escape(text)}</text>'
        for x, y, anchor, text in written
        if text
    ]
    turned = f'transform="rotate(-90 10 {half:g})" text-anchor="middle"'
    texts.append(f'<text x="10" y="{half:g}" {turned}>{html.escape(y_label)}</text>')
    label = html.escape(f"{y_label} against {x_label}", quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" aria-label="{label}" '
        f'width="{WIDTH}" height="{HEIGHT}" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'fill="currentColor" font-size="11" style="max-width: 100%">'
        f'<path d="M{LEFT},{TOP}V{BOTTOM}H{RIGHT}" fill="none" stroke="currentColor" '
        f'stroke-opacity="0.4"/>{"".join(drawn)}{"".join(texts)}</svg>'
    )

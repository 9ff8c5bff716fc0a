"""The small figures of the guide: intervals around zero, or counts of significant differences."""

import html
from collections.abc import Sequence
from typing import NamedTuple

from studies.guide.evidence import Compared

WIDTH, ROW, TOP = 560, 22, 26
LEFT, RIGHT = 190, 450
MIDDLE = (LEFT + RIGHT) / 2
BETTER, WORSE, NEITHER, INK = "#0078a8", "#c03c00", "#848484", "#1d2126"


class Interval(NamedTuple):
    """A line of a figure: a difference and its interval, on a scale of its own.

    Attributes:
        label: what was measured.
        found: the difference.
        better: 1 if higher is better, -1 if lower is better.
        scale: factor of the number that is shown.
        digits: digits of that number.
        unit: unit of that number.
    """

    label: str
    found: Compared
    better: int
    scale: float = 1.0
    digits: int = 3
    unit: str = ""

    def drawing(self, y: float) -> str:
        """The interval as a line and the difference as a point; right of the middle is better."""
        low, high = sorted((self.better * self.found.low, self.better * self.found.high))
        half = 0.92 * (RIGHT - MIDDLE) / max(abs(low), abs(high))
        centre = self.better * self.found.difference
        colour = BETTER if low > 0 else WORSE if high < 0 else NEITHER
        shown = f"{self.scale * self.found.difference:+.{self.digits}f}{self.unit}"
        return (
            f'<path d="M{MIDDLE + half * low:.1f} {y}H{MIDDLE + half * high:.1f}" '
            f'stroke="{colour}" stroke-width="3"/>'
            f'<circle cx="{MIDDLE + half * centre:.1f}" cy="{y}" r="4.5" fill="{colour}"/>'
            f'<text x="{RIGHT + 12}" y="{y + 4}">{html.escape(shown)}</text>'
        )


class Counts(NamedTuple):
    """A line of a figure: how many data sets are significantly better, worse, or neither."""

    label: str
    better: int
    worse: int
    of: int

    def drawing(self, y: float) -> str:
        """A bar in three colours, worse at the left and better at the right."""
        neither = self.of - self.better - self.worse
        x, parts = float(LEFT), []
        shares = (self.worse, WORSE), (neither, NEITHER), (self.better, BETTER)
        for count, colour in shares:
            width = (RIGHT - LEFT) * count / self.of
            parts.append(
                f'<rect x="{x:.1f}" y="{y - 6}" width="{width:.1f}" height="12" fill="{colour}"/>'
            )
            x += width
        shown = f"{self.better} better"
        return "".join(parts) + f'<text x="{RIGHT + 12}" y="{y + 4}">{shown}</text>'


def svg(rows: Sequence[Interval | Counts]) -> str:
    """A figure of a few lines, drawn on white."""
    height = TOP + ROW * len(rows) + 4
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" '
        f'height="{height}" font-family="system-ui, sans-serif" font-size="12" fill="{INK}">'
    ]
    if any(isinstance(row, Interval) for row in rows):
        parts.append(f'<path d="M{MIDDLE} {TOP - 6}V{height - 4}" stroke="{INK}"/>')
    parts.append(
        f'<text x="{LEFT}" y="15" fill="{WORSE}">worse</text>'
        f'<text x="{RIGHT}" y="15" text-anchor="end" fill="{BETTER}">better</text>'
    )
    for i, row in enumerate(rows):
        y = TOP + ROW * (i + 0.5)
        label = html.escape(row.label)
        parts.append(f'<text x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{label}</text>')
        parts.append(row.drawing(y))
    return "\n".join([*parts, "</svg>\n"])

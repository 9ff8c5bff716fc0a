"""The blocks of a section, and the registry of sections."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.registry import Registry
from shoal.page.report_data import ReportData

__all__ = [
    "Block",
    "Builder",
    "Figure",
    "Fold",
    "Heading",
    "Listing",
    "Remark",
    "Section",
    "Slider",
    "SliderRow",
    "Statement",
    "Table",
    "TableCell",
    "folded",
    "registry",
    "section",
]


@dataclass(frozen=True)
class Statement:
    """A number in large type and the sentence that explains it.

    Attributes:
        name: the subject, in one or two words.
        number: the number as text.
        sentence: the explanation.
        tone: "good", "mind" where attention is needed, or "plain".
        advice: what to do next, where attention is needed.
        code: the line to type for it.
    """

    name: str
    number: str
    sentence: str
    tone: str = "plain"
    advice: str = ""
    code: str = ""


@dataclass(frozen=True, eq=False)
class Figure:
    """A matplotlib figure, with its title and a caption that says how to read it."""

    figure: Any
    title: str
    reading: str


@dataclass(frozen=True)
class TableCell:
    """Text of a cell, its sort key, and a tone as in `Statement`."""

    text: str
    value: float | str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """A table that a click on a heading sorts; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    reading: str = ""


@dataclass(frozen=True)
class Listing:
    """Text in a fixed-width font, to copy.

    Attributes:
        title: heading.
        text: the text.
        file: name under which a link saves the text.
        shown: False shows the link alone.
    """

    title: str
    text: str
    file: str = ""
    shown: bool = True


@dataclass(frozen=True)
class Remark:
    """A sentence.

    Attributes:
        text: the sentence.
        tone: "info", or "mind" where attention is needed.
        code: the line to type.
    """

    text: str
    tone: str = "info"
    code: str = ""


@dataclass(frozen=True)
class Heading:
    """A heading within a section."""

    text: str


@dataclass(frozen=True)
class SliderRow:
    """The name of a row, and its cells at every place of the slider."""

    name: str
    cells: Sequence[Sequence[str]]

    @property
    def columns(self) -> list[list[str]]:
        """The texts of each column, one per place of the slider."""
        return [list(column) for column in zip(*self.cells, strict=True)]


@dataclass(frozen=True)
class Slider:
    """A table whose numbers follow a slider.

    Attributes:
        title: heading.
        label: what the slider sets.
        places: the text of every place of the slider.
        start: index of the first place that is shown.
        columns: names of the columns.
        rows: one row per method.
        reading: how to read the table.
    """

    title: str
    label: str
    places: Sequence[str]
    start: int
    columns: Sequence[str]
    rows: Sequence[SliderRow]
    reading: str = ""


@dataclass(frozen=True)
class Fold:
    """Blocks that are hidden until the reader opens them."""

    title: str
    blocks: Sequence["Block"]


Block = Statement | Figure | Table | Listing | Remark | Heading | Slider | Fold


def rest_folded(figures: Iterable[Figure], title: str, shown: int = 4) -> Iterator[Block]:
    """The first figures, and the others in a fold with this title."""
    drawn = list(figures)
    yield from drawn[:shown]
    if drawn[shown:]:
        yield Fold(title, drawn[shown:])


def folded(table: Table, rows: int = 12) -> Block:
    """The table, in a fold where it has more than `rows` rows."""
    return table if len(table.rows) <= rows else Fold(table.title, [table])


@dataclass(frozen=True)
class Section:
    """One question of the page.

    Attributes:
        question: the heading.
        answer: one or two sentences below the heading.
        blocks: figures, tables and remarks.
    """

    question: str
    answer: str
    blocks: Sequence[Block] = field(default_factory=tuple)


Build = Callable[[ReportData], Section | None]


@dataclass(frozen=True)
class Builder:
    """A registered section.

    Attributes:
        build: makes the section; None where the runs lack the numbers.
        order: sections stand in ascending order.
        evaluated: whether the section needs an evaluated run.
    """

    build: Build
    order: int
    evaluated: bool


registry = Registry("section")


def section(name: str, order: int, evaluated: bool = True) -> Callable[[Build], Build]:
    """Register a function as a section of every page."""

    def register(build: Build) -> Build:
        registry.register(name)(Builder(build, order, evaluated))
        return build

    return register

"""What a section of the page is made of, and the registry of sections."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from shoal.core.registry import Registry
from shoal.page.report_data import ReportData

__all__ = [
    "Block",
    "Builder",
    "Fold",
    "Heading",
    "Listing",
    "Picture",
    "Remark",
    "Section",
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
        name: what it is about, in a word or two.
        number: a few characters.
        sentence: complete by itself.
        tone: "good", "mind" for what deserves attention, or "plain".
    """

    name: str
    number: str
    sentence: str
    tone: str = "plain"


@dataclass(frozen=True, eq=False)
class Picture:
    """A matplotlib figure, a title above and a sentence below that says how to read it."""

    figure: Any
    title: str
    reading: str


@dataclass(frozen=True)
class TableCell:
    """Text of a cell, the number it is sorted by, and a tone as in `Statement`."""

    text: str
    value: float | str = ""
    tone: str = ""


@dataclass(frozen=True)
class Table:
    """Rows that sort by a click on a heading; the first column names the row."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[TableCell]]
    reading: str = ""


@dataclass(frozen=True)
class Listing:
    """Text in fixed width to copy.

    Attributes:
        title: what it is.
        text: as it is.
        file: a link saves the text under this name.
        shown: False leaves only the link.
    """

    title: str
    text: str
    file: str = ""
    shown: bool = True


@dataclass(frozen=True)
class Remark:
    """A sentence."""

    text: str


@dataclass(frozen=True)
class Heading:
    """A line that begins something new within a section."""

    text: str


@dataclass(frozen=True)
class Fold:
    """Blocks that are shown when asked for."""

    title: str
    blocks: Sequence["Block"]


Block = Statement | Picture | Table | Listing | Remark | Heading | Fold


def folded(table: Table, rows: int = 12) -> Block:
    """The table as it is, or shown when asked for where it has more rows than that."""
    return table if len(table.rows) <= rows else Fold(table.title, [table])


@dataclass(frozen=True)
class Section:
    """One question of the page.

    Attributes:
        question: the heading.
        answer: one sentence, before any evidence.
        blocks: the evidence.
    """

    question: str
    answer: str
    blocks: Sequence[Block] = field(default_factory=tuple)


Build = Callable[[ReportData], Section | None]


@dataclass(frozen=True)
class Builder:
    """A registered section.

    Attributes:
        build: makes the section, or None when the runs have nothing to say to its question.
        order: sections are told in ascending order.
        judged: it needs an assessment.
    """

    build: Build
    order: int
    judged: bool


registry = Registry("section")


def section(name: str, order: int, judged: bool = True) -> Callable[[Build], Build]:
    """File a function as a section of every page."""

    def file(build: Build) -> Build:
        registry.register(name)(Builder(build, order, judged))
        return build

    return file

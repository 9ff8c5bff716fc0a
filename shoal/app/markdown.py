"""Tables as text, for pages that are read as files."""

from collections.abc import Iterable, Sequence

__all__ = ["markdown_table"]


def markdown_table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, without a line break at its end.

    >>> print(markdown_table(["method", "members"], [["kde", 10]]))
    | method | members |
    | --- | --- |
    | kde | 10 |
    """
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)

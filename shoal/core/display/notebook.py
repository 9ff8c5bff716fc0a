"""Notebook display of the main objects: a small table of facts, and a figure."""

import html
from collections.abc import Mapping

__all__ = ["facts_html"]


def facts_html(title: str, facts: Mapping[str, object], figure: str = "") -> str:
    """A table with a heading and one fact in each row; facts of None are left out.

    Args:
        title: the heading.
        facts: what to show, by name.
        figure: an SVG element to stand below, as `shoal.core.display.small_figures` makes it.

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

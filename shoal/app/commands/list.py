"""`shoal list`: everything that has a name."""

from argparse import Namespace

from shoal.app.listing import KINDS, entries, listing_text, plain
from shoal.app.outcome import Outcome, table

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """The entries of one kind, or the kinds."""
    if options.kind is not None:
        found = entries(options.kind)
        return Outcome(listing_text(found), plain(found))
    names = {kind: [entry.name for entry in entries(kind)] for kind in KINDS}
    rows = [[kind, str(len(found)), _some(found)] for kind, found in names.items()]
    width = max(len(row[2]) for row in rows)
    text = table([[kind, count, some.ljust(width)] for kind, count, some in rows])
    return Outcome(f"{text}\n\nType 'shoal list KIND' for what each of them is.", names)


def _some(names: list[str], room: int = 60) -> str:
    shown: list[str] = []
    for name in names:
        if len(", ".join([*shown, name])) > room:
            return f"{', '.join(shown)}, ..."
        shown.append(name)
    return ", ".join(shown)

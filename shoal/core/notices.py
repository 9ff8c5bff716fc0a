"""Words on standard error about work that takes long, unless quiet was asked for."""

import re
import sys
from contextvars import ContextVar

__all__ = ["notice", "printable", "quiet"]

quiet: ContextVar[bool] = ContextVar("quiet", default=False)
"""Set by `--quiet` and `--json`."""

# C0 and C1 controls but tab and newline, marks that turn the direction of writing, line separators,
# and halves of characters, which no terminal can be sent.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]"
)


def printable(text: str) -> str:
    """The text with its control characters spelled out; tabs and ends of lines stay.

    Whatever is shown to a person goes through here: a name from a file must not steer a terminal.

    >>> print(printable("run \\x1b[2J of \\u202eyesterday"))
    run \\x1b[2J of \\u202eyesterday
    """
    return _UNPRINTABLE.sub(lambda found: found[0].encode("unicode_escape").decode(), text)


def notice(sentence: str) -> None:
    """Say something that is not the result."""
    if not quiet.get():
        print(f"shoal: {printable(sentence)}", file=sys.stderr, flush=True)

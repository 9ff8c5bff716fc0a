"""Words on standard error about work that takes long, unless quiet was asked for."""

import sys
from contextvars import ContextVar

__all__ = ["notice", "quiet"]

quiet: ContextVar[bool] = ContextVar("quiet", default=False)
"""Set by `--quiet` and `--json`."""


def notice(sentence: str) -> None:
    """Say something that is not the result."""
    if not quiet.get():
        print(f"shoal: {sentence}", file=sys.stderr, flush=True)

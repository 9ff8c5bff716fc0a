"""Who started a run: Python code, a typed command or an estimator; the report answers in kind."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["caller", "calling"]

_CALLER: ContextVar[Mapping[str, Any] | None] = ContextVar("caller", default=None)


@contextmanager
def calling(interface: str, **facts: Any) -> Iterator[None]:
    """A block whose runs record that they were started by this interface.

    Args:
        interface: "command line" or "estimator".
        facts: plain values that a later call needs, such as the parameters of the estimator.
    """
    token = _CALLER.set({"interface": interface, **facts})
    try:
        yield
    finally:
        _CALLER.reset(token)


def caller() -> dict[str, Any] | None:
    """What `calling` says around this call; None for plain Python.

    >>> with calling("command line"):
    ...     caller()
    {'interface': 'command line'}
    """
    known = _CALLER.get()
    return None if known is None else dict(known)

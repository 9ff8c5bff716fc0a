"""Several processes that do one thing together, or fail together.

The core knows no process group: whoever has one hands over an `Exchange`.
"""

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalError, StorageError, first_line

__all__ = ["Alone", "Exchange", "agreed"]

T = TypeVar("T")
_KINDS = {kind.__name__: kind for kind in (CheckpointCorrupt, ConfigError, StorageError)}


class Exchange(Protocol):
    """What processes need to write and read one checkpoint together.

    Attributes:
        rank: number of this process, from 0.
        world: number of processes.
    """

    rank: int
    world: int

    def gather(self, value: Any, /) -> list[Any]:
        """The values of all processes in the order of their ranks; waits for all of them.

        Values are of types that JSON has.
        """
        ...


class Alone:
    """The exchange of a single process."""

    rank, world = 0, 1

    def gather(self, value: Any, /) -> list[Any]:
        """The value itself."""
        return [value]


def agreed(exchange: Exchange, work: Callable[[], T]) -> list[T]:
    """Results of the work of all processes; an error of one process is raised in all.

    Every process calls `gather` once, whether its own work succeeds or fails. So no process waits
    for one that gave up.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = work()
    except Exception as error:
        failure = error
    answers = exchange.gather([value, _described(failure)])
    if failure is not None:
        raise failure
    for rank, (_, trouble) in enumerate(answers):
        if trouble is not None:
            kind, text = trouble
            raise _KINDS[kind](f"{text} (found by process {rank} of {exchange.world})")
    return [result for result, _ in answers]


def _described(failure: Exception | None) -> list[str] | None:
    """The kind of an error that all processes raise, and its text."""
    if failure is None:
        return None
    if not isinstance(failure, ShoalError):
        return ["StorageError", f"{type(failure).__name__}: {first_line(failure)}"]
    kinds = [kind.__name__ for kind in type(failure).__mro__]
    return [next((kind for kind in kinds if kind in _KINDS), "StorageError"), str(failure)]

"""Which failed runs of a grid are tried again; a failed run never stops the others."""

import warnings
from typing import Generic, Protocol, TypeVar

from shoal.core.errors import ConfigError, DataError, RunFailed, ShoalError, ShoalWarning

__all__ = ["Attempts", "run_error"]


class Named(Protocol):
    """A run with a name that users know."""

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        ...


Point = TypeVar("Point", bound=Named)


class Attempts(Generic[Point]):
    """The failed attempts at the runs of a grid.

    An error of data or settings would repeat, so its run is not tried again.

    Args:
        retries: number of further attempts at a failed run.

    Attributes:
        failed: runs that are given up, with their last error.
    """

    def __init__(self, retries: int) -> None:
        if retries < 0:
            raise ConfigError(f"the number of retries is 0 or more, not {retries}")
        self.retries = retries
        self.failed: dict[Point, ShoalError] = {}
        self._count: dict[Point, int] = {}

    def again(self, point: Point, error: ShoalError) -> bool:
        """Whether to try the failed run once more; if not, the run is recorded as failed."""
        count = self._count[point] = self._count.get(point, 0) + 1
        if isinstance(error, DataError | ConfigError) or count > self.retries:
            self.failed[point] = error
            return False
        text = f"{point.name} failed and is tried again: {error}"
        warnings.warn(text, ShoalWarning, stacklevel=3)
        return True


def run_error(error: Exception) -> ShoalError:
    """The error of a run as one sentence; of an unexpected error its name and last line.

    >>> str(run_error(ZeroDivisionError("division by zero")))
    'ZeroDivisionError: division by zero'
    """
    if isinstance(error, ShoalError):
        return error
    lines = str(error).strip().splitlines()
    failed = RunFailed(": ".join([type(error).__name__, *lines[-1:]]))
    failed.__cause__ = error
    return failed

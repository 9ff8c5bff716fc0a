"""The errors for users, each with its exit status on the command line."""

from shoal.core.display.progress import printable

__all__ = [
    "CheckpointCorrupt",
    "ConfigError",
    "DataError",
    "OutOfRange",
    "PeerLost",
    "RunFailed",
    "ShoalError",
    "ShoalWarning",
    "StorageError",
    "first_line",
    "named_line",
]


class ShoalError(Exception):
    """Base of every error that the user can correct; its text is one clear sentence.

    The sentence may quote a file, so control characters are escaped.
    """

    exit_status = 1

    def __str__(self) -> str:
        return printable(super().__str__())


class ConfigError(ShoalError, ValueError):
    """A name, key, type or combination of settings that Shoal does not know."""

    exit_status = 2


class DataError(ShoalError, ValueError):
    """Data that cannot be trained on or predicted for."""

    exit_status = 65


class OutOfRange(DataError, IndexError):
    """An index beyond the last member or data point; it also ends a loop over them."""


class StorageError(ShoalError, OSError):
    """A file or folder that cannot be read or written."""

    exit_status = 74


class PeerLost(ShoalError):
    """A worker process died."""

    exit_status = 75


class RunFailed(ShoalError):
    """A run of a grid that ended with an unexpected error."""

    exit_status = 70


class CheckpointCorrupt(StorageError):
    """A file whose content differs from its manifest."""


class ShoalWarning(UserWarning):
    """A warning that does not stop the work."""

    def __str__(self) -> str:
        return printable(super().__str__())


def first_line(error: BaseException) -> str:
    """The first line of an exception's message, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def named_line(error: BaseException) -> str:
    """The type of an exception and the first line of its message.

    >>> named_line(ValueError("too short"))
    'ValueError: too short'
    """
    line = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {line}" if line else type(error).__name__

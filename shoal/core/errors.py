"""The errors a user can meet, each with the exit status that the command line gives it."""

from shoal.core.progress import printable

__all__ = [
    "CheckpointCorrupt",
    "ConfigError",
    "DataError",
    "PeerLost",
    "ShoalError",
    "ShoalWarning",
    "StorageError",
]


class ShoalError(Exception):
    """Base of every error that is the user's to mend; its text is one clear sentence.

    The sentence may quote a file, so its control characters are spelled out.
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


class StorageError(ShoalError, OSError):
    """A file or folder that cannot be read or written."""

    exit_status = 74


class PeerLost(ShoalError):
    """A process that worked for this one and died."""

    exit_status = 75


class CheckpointCorrupt(StorageError):
    """A file whose content is not what its manifest says."""


class ShoalWarning(UserWarning):
    """Something worth knowing that does not stop the work."""

    def __str__(self) -> str:
        return printable(super().__str__())

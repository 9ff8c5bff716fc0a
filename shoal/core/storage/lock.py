"""One writer per folder: a lock that the system releases when its process ends."""

import contextlib
import errno
import os
import socket
import time
import warnings
import weakref
from pathlib import Path
from typing import Self

from shoal.core.display.progress import notice
from shoal.core.errors import ShoalWarning, StorageError
from shoal.core.storage.disk import open_plain, storage_errors

try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = ["FolderLock"]

_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP)
_PAUSE = 0.1
_SIGNATURE = 300


class FolderLock:
    """Keeps other writers out of a folder during a `with` block.

    The lock is a lock of the operating system on the file `lock`, which is removed at the end. The
    system releases the lock when the process ends, so a remaining file is reused. A link of that
    name is refused. On a system without such locks, a warning says so and the block runs
    unprotected.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder, FolderLock(folder):
    ...     with FolderLock(folder):
    ...         pass  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    shoal.core.errors.StorageError: ... is being written by process ...

    Args:
        folder: folder to lock, created if needed.
        wait: seconds to wait for another writer.
    """

    def __init__(self, folder: Path | str, wait: float = 0.0) -> None:
        self.folder = Path(folder)
        self.wait = wait
        self._waiting = False
        self.path = self.folder / "lock"
        self._descriptor: int | None = None

    def __enter__(self) -> Self:
        with storage_errors("lock", self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            deadline = time.monotonic() + self.wait
            while not self._acquire(deadline):
                pass
        return self

    def __exit__(self, *exception: object) -> None:
        if self._descriptor is not None:
            with contextlib.suppress(OSError):
                if self._owns_name(self._descriptor):
                    self.path.unlink()
            self._close()

    def _acquire(self, deadline: float) -> bool:
        """Whether the attempt is final; if not, another process holds or removed the file."""
        if fcntl is None:
            self._warn("this system has no file locks")
            return True
        descriptor = open_plain(self.path, os.O_RDWR | os.O_CREAT)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if not self._owns_name(descriptor):
                return False
            self._descriptor = descriptor
        except BlockingIOError:
            if time.monotonic() >= deadline:
                refusal = f"{self._holder(descriptor)}; wait for it or choose another folder"
                raise StorageError(refusal) from None
            self._pause(descriptor)
            return False
        except OSError as problem:
            if problem.errno not in _UNSUPPORTED:
                raise
            self._warn("its file system has no locks")
            return True
        finally:
            if self._descriptor != descriptor:
                os.close(descriptor)
        self._sign(descriptor)
        return True

    def _sign(self, descriptor: int) -> None:
        """Writes the process into the file, and lets forked children close their copy."""
        os.ftruncate(descriptor, 0)
        os.write(descriptor, f"{os.getpid()} {socket.gethostname()}\n".encode())
        close = weakref.WeakMethod(self._close)
        os.register_at_fork(after_in_child=lambda: (method := close()) and method())

    def _owns_name(self, descriptor: int) -> bool:
        try:
            return os.path.samestat(os.fstat(descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def _pause(self, descriptor: int) -> None:
        if not self._waiting:
            notice(f"{self._holder(descriptor)}; waiting for it")
            self._waiting = True
        time.sleep(_PAUSE)

    def _holder(self, descriptor: int) -> str:
        words = os.pread(descriptor, _SIGNATURE, 0).decode(errors="replace").split()
        who = f"process {words[0]} on {words[1]}" if len(words) == 2 else "another process"
        return f"{self.folder} is being written by {who}"

    def _warn(self, why: str) -> None:
        warnings.warn(
            f"{self.folder} cannot be locked because {why}; let only one process write to it",
            ShoalWarning,
            stacklevel=4,
        )

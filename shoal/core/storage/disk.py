"""Atomic writes to the disk, and errors of the disk as one sentence.

A file is written inside a temporary folder next to its place, synchronised and renamed into place;
then the folder is synchronised. A process killed meanwhile leaves only a temporary folder.

A power loss also loses what the system has not yet written, and in any order. Hence four steps:

1. Synchronise each new file: its content is on the disk before any lasting name leads to it.
2. Synchronise the new folder: the names of its files are on the disk before its own name.
3. Rename. The file system does a rename whole or not at all, before or after a power loss.
4. Synchronise the parent folder: the new name is on the disk before the caller goes on.

Older checkpoints are renamed away only after step 4. So at every moment the disk has a complete
one. On macOS, `fsync` leaves data in the cache of the drive, which may write them in another order;
F_FULLFSYNC waits for the drive itself.
"""

import contextlib
import errno
import os
import re
import secrets
import shutil
import socket
import stat
import time
from collections.abc import Iterator
from pathlib import Path

from shoal.core.errors import ConfigError, StorageError
from shoal.core.values import describe_value

try:
    import fcntl
except ImportError:
    fcntl = None

__all__ = [
    "HOST",
    "alive",
    "checked_path",
    "flush",
    "machine_memory",
    "open_plain",
    "read_plain",
    "replacing",
    "size_of",
    "staging",
    "storage_errors",
    "sweep",
    "sync",
    "sync_name",
]

HOST = re.sub(r"[^\w.]", "_", socket.gethostname())[:64]
_PROCESS = secrets.token_hex(4)
_DAY = 86_400

_REASONS = {
    errno.ENOSPC: "disk full",
    errno.EDQUOT: "disk quota used up",
    errno.EFBIG: "the file is larger than the system allows",
    errno.EACCES: "no permission",
    errno.EPERM: "no permission",
    errno.EROFS: "the file system is read-only",
    errno.ENOTDIR: "a part of the path is a file, not a folder",
    errno.EISDIR: "there is a folder of this name",
    errno.EEXIST: "there is a file where a folder should be",
    errno.ENOENT: "there is no such file or folder",
    errno.ENAMETOOLONG: "the name is too long",
    errno.EXDEV: "the folder and its temporary files are on different file systems",
    errno.EIO: "the disk reports an error",
    errno.ELOOP: "it is a link, which is not followed",
}


def checked_path(path: str | os.PathLike, name: str) -> Path:
    """The path, if it can be the name of a file or folder.

    >>> checked_path("runs/first", "out").name
    'first'
    """
    if not isinstance(path, str | os.PathLike) or isinstance(os.fspath(path), bytes):
        raise ConfigError(f"{name} must be a path as text, not {describe_value(path)}")
    if not str(path):
        raise ConfigError(f"{name} is empty; give the path of a folder, or '.' for this folder")
    try:
        encoded = os.fsencode(path)
    except UnicodeEncodeError:
        encoded = b"\0"
    if b"\0" in encoded:
        raise ConfigError(f"{name} has a character that no file name can have: {str(path)!r}")
    return Path(path)


@contextlib.contextmanager
def storage_errors(action: str, path: Path, needed: int | None = None) -> Iterator[None]:
    """Turns errors of the operating system into a `StorageError` of one sentence.

    Args:
        action: The failed action: "read", "write", "lock".
        path: The file or folder.
        needed: Bytes that the action needs.
    """
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = _REASONS.get(error.errno or 0, error.strerror or str(error))
        size = "" if needed is None else f" ({needed} bytes needed)"
        raise StorageError(f"cannot {action} {path}{size}: {reason}") from error


@contextlib.contextmanager
def staging(folder: Path) -> Iterator[Path]:
    """A temporary folder inside `folder`, always removed afterwards."""
    if not folder.is_dir():
        folder.mkdir(parents=True, exist_ok=True)
        sync(folder.parent)
    stage = folder / f".tmp-{os.getpid()}-{_PROCESS}-{secrets.token_hex(4)}-{HOST}"
    stage.mkdir()
    try:
        yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def replacing(path: Path, needed: int) -> Iterator[Path]:
    """A temporary path for the caller to write and synchronise; it then replaces `path`.

    Args:
        path: The file to create or replace when the block ends without an error.
        needed: Bytes to write, for the error message.
    """
    with storage_errors("write", path, needed), staging(path.parent) as stage:
        temporary = stage / path.name
        yield temporary
        os.replace(temporary, path)
        sync(path.parent)


def sync(path: Path) -> None:
    """Waits until a file, or the listing of a folder, is on the disk."""
    folder = path.is_dir()
    if folder and os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY if folder else os.O_RDWR)
    try:
        flush(descriptor)
    except OSError as error:
        if not folder or error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def flush(descriptor: int) -> None:
    """Waits until the data of an open file are on the disk, also beyond the cache of the drive."""
    full = getattr(fcntl, "F_FULLFSYNC", None)
    if fcntl is not None and full is not None:
        with contextlib.suppress(OSError):  # network and foreign file systems do not know it
            fcntl.fcntl(descriptor, full)
            return
    os.fsync(descriptor)


def sync_name(path: Path) -> None:
    """Waits until all folders that lead to a path are on the disk, as far as we may change them."""
    for folder in path.absolute().parents:
        if not os.access(folder, os.R_OK | os.W_OK):
            break
        sync(folder)


def size_of(path: Path) -> int:
    """Bytes of an ordinary file; pipes, devices and folders are refused without opening them."""
    with storage_errors("read", path):
        status = os.stat(path)
    if not stat.S_ISREG(status.st_mode):
        raise StorageError(f"cannot read {path}: it is not an ordinary file")
    return status.st_size


def open_plain(path: Path, flags: int) -> int:
    """A descriptor to write to a new file, or to an ordinary file with a single name.

    Links, pipes and devices are refused, since another user may have chosen their destination.
    """
    # Without the last flag, a pipe would wait for its other end.
    safe = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | safe, 0o666)
    status = os.fstat(descriptor)
    if stat.S_ISREG(status.st_mode) and status.st_nlink <= 1:
        return descriptor
    os.close(descriptor)
    raise StorageError(f"cannot write {path}: it is not an ordinary file with a single name")


def read_plain(path: Path, most: int = 64 << 20) -> bytes:
    """The bytes of an ordinary file of at most `most`; pipes and longer files are refused."""
    if size_of(path) > most:
        raise StorageError(f"cannot read {path}: it is larger than the limit of {most:,} bytes")
    with storage_errors("read", path), path.open("rb") as file:
        return file.read(most)


def machine_memory() -> int | None:
    """Bytes of memory of this machine; None if unknown."""
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return None


def sweep(folder: Path | str) -> None:
    """Removes the temporary folders of dead processes in `folder`."""
    for path in Path(folder).glob(".tmp-*"):
        if _stale(path):
            shutil.rmtree(path, ignore_errors=True)


def _stale(path: Path) -> bool:
    words = path.name.split("-", 4)
    if len(words) != 5 or not words[1].isdecimal():
        return False
    pid, process, host = int(words[1]), words[2], words[4]
    if host == HOST and (process != _PROCESS if pid == os.getpid() else not alive(pid)):
        return True
    with contextlib.suppress(OSError):
        return time.time() - path.stat().st_mtime > _DAY
    return False


def alive(pid: int) -> bool:
    """Whether a process of this machine runs; True if unknown."""
    if os.name == "nt":
        return True
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True

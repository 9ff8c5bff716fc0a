"""One write at a time beside the work of the caller."""

import functools
import os
import threading
import weakref
from collections.abc import Callable

__all__ = ["BackgroundWriter"]


class BackgroundWriter:
    """Runs writes in a thread of their own, one after the other.

    A new write waits for the one before. So at most one copy of the data is in memory, and the
    caller is held up only when the disk is slower than the interval between writes. A fork waits
    for the write too, since a child would inherit the locks of the thread.

    >>> writer, seen = BackgroundWriter(), []
    >>> writer.start(lambda: seen.append(1))
    >>> writer.wait(), seen
    (None, [1])
    """

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def start(self, write: Callable[[], None]) -> None:
        """Begin a write; the error of the write before must have been asked for by `wait`."""
        error = self.wait()
        if error is not None:
            raise error
        _waiting_forks()
        _WRITERS.add(self)
        self._thread = threading.Thread(target=self._run, args=(write,), name="shoal-writer")
        self._thread.start()

    def wait(self) -> Exception | None:
        """Wait for the write in progress; its error, which is then forgotten."""
        self._join()
        error, self._error = self._error, None
        return error

    def _join(self) -> None:
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _run(self, write: Callable[[], None]) -> None:
        try:
            write()
        except Exception as error:
            self._error = error


_WRITERS: weakref.WeakSet[BackgroundWriter] = weakref.WeakSet()


@functools.cache
def _waiting_forks() -> None:
    """From the first write on, let forks wait for writes in progress."""
    if hasattr(os, "register_at_fork"):
        os.register_at_fork(before=_wait_for_all)


def _wait_for_all() -> None:
    for writer in list(_WRITERS):
        if writer._thread is not threading.current_thread():
            writer._join()

"""Signals that stop a run after it is saved."""

import signal
import threading
from types import FrameType

__all__ = ["Interruption"]

_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGUSR1") if hasattr(signal, name)
]


class Interruption:
    """Records the first SIGINT, SIGTERM or SIGUSR1; a second signal acts at once.

    Attributes:
        received: number of the received signal; None if there is none.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, object] = {}

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._note) for number in _SIGNALS}
        return self

    def __exit__(self, *exception: object) -> None:
        self._put_back()

    def stop(self) -> None:
        """Raise KeyboardInterrupt, or SystemExit with 128 + the number of the signal."""
        if self.received == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + (self.received or 0))

    def _note(self, number: int, _: FrameType | None) -> None:
        self.received = number
        self._put_back()

    def _put_back(self) -> None:
        for number, handler in self._before.items():
            # None stands for a handler that was not set from Python and cannot be set from it.
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # pyright: ignore
        self._before = {}

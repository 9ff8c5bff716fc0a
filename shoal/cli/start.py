"""The way into the command line, and out: Ctrl-C is one sentence and 130 at any moment.

Python answers a signal with a traceback while it imports and dies of it while it shuts down; both
take long enough to be hit.
"""

import os
import signal
import sys
from types import FrameType

__all__ = ["start"]

_INTERRUPTED = 130


def start() -> int:
    """Run the command that was typed; the exit status is that of `shoal.cli.main.main`."""
    # Members run side by side on a GPU. The driver opens eight queues unless it is told before it
    # starts, and members that share a queue wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    signal.signal(signal.SIGINT, _leave)
    from shoal.cli.main import main

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        # a second one, while the first was being answered
        status = _INTERRUPTED
    # the answer is out, and what is left is to go
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _leave(_: int, __: FrameType | None) -> None:
    """Nothing has begun that would have to be saved or closed."""
    sys.stderr.write("shoal: stopped\n")
    sys.stderr.flush()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(start())

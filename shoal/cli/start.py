"""The entry point of the command line: Ctrl-C always gives one sentence and exit status 130.

On its own, Python prints a traceback during imports and is killed by the signal at shutdown. Both
phases are long enough for a user to hit.
"""

import os
import signal
import sys
from types import FrameType

__all__ = ["start"]

_INTERRUPTED = 130


def start() -> int:
    """Run the typed command, and return the exit status of `shoal.cli.main.main`."""
    # Members run side by side on a GPU. The driver opens eight queues unless it is told before it
    # starts, and members that share a queue wait for each other.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    signal.signal(signal.SIGINT, _leave)
    from shoal.cli.main import main

    try:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        status = main()
    except KeyboardInterrupt:
        # a second Ctrl-C, while the first was handled
        status = _INTERRUPTED
    # the output is complete, and only the shutdown is left
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return status


def _leave(_: int, __: FrameType | None) -> None:
    """Exit at once: nothing needs to be saved or closed yet."""
    sys.stderr.write("shoal: stopped\n")
    sys.stderr.flush()
    os._exit(_INTERRUPTED)


if __name__ == "__main__":
    sys.exit(start())

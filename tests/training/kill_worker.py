"""A process that has loaded everything and forks a trainer for each folder it is given.

`train METHOD PAUSE SIGNALS FOLDER` on standard input is answered by `pid N`, and `wait` by
`exit STATUS` (negative for a signal) when the trainer has ended; until then its process id belongs
to nobody else. In step PAUSE the trainer waits for so many signals, and after the first one makes
the file FOLDER.heard. Beside the folder, FOLDER.step holds the number of the step that was begun
last; it is never synchronised, since only the process dies.

Forking is safe only before the first backward pass, so nothing is trained in this process.
"""

import os
import signal
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from small_runs import both, points, quick, shoal_of  # noqa: E402

from shoal.core.errors import ShoalWarning  # noqa: E402
from shoal.training.options.optim import make_optimizer  # noqa: E402


class Diary:
    """A constant learning rate that notes which step it was asked for."""

    def __init__(self, folder: Path, pause: int, signals: int) -> None:
        self.file = os.open(folder.with_name(f"{folder.name}.step"), os.O_RDWR | os.O_CREAT)
        self.heard = folder.with_name(f"{folder.name}.heard")
        self.pause, self.signals = pause, signals

    def __call__(self, step: int, steps: int) -> float:
        before = signal.getsignal(signal.SIGTERM)
        os.pwrite(self.file, f"{step:6d}".encode(), 0)
        if step == self.pause:
            # the first signal is noted, and puts the handlers back that were there before
            while signal.getsignal(signal.SIGTERM) == before:
                time.sleep(0.001)
            self.heard.touch()
            while self.signals > 1:
                time.sleep(0.001)
        return 1.0


def train(method: str, pause: int, signals: int, folder: Path) -> int:
    """The exit status of a run that saves after every step."""
    diary = Diary(folder, pause, signals)
    options = {"method": method, "optimizer": "adamw", "schedule": diary, "epochs": 4}
    try:
        quick(both, out=folder, save_every=0, resume=True, **options)
    except SystemExit as stop:
        return int(stop.code or 0)
    except KeyboardInterrupt:
        return 130
    return 0


def warm_up() -> None:
    """Let torch import what it imports late."""
    ensemble = shoal_of(both)
    make_optimizer("adamw", ensemble.weights, 1e-3)
    with torch.no_grad():
        ensemble(points()[0])


def start(method: str, pause: int, signals: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = train(method, pause, signals, folder)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", ShoalWarning)
    # Python 3.12 and later warn of threads at a fork; here they are torch's, and idle
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    warm_up()
    print("ready", flush=True)
    pid = 0
    for line in sys.stdin:
        verb, *words = line.rstrip("\n").split(" ", 4)
        if verb == "train":
            pid = start(words[0], int(words[1]), int(words[2]), Path(words[3]))
            print("pid", pid, flush=True)
        else:
            print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

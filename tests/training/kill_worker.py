"""A process that has loaded everything and forks a trainer for each folder it is given.

`train METHOD PAUSE FOLDER` on standard input is answered by `pid N`, and `wait` by `exit STATUS`
(negative for a signal) when the trainer has ended; until then its process id belongs to nobody
else. The trainer sleeps for a while in step PAUSE. Beside the folder, FOLDER.step holds the number
of the step that was begun last; it is never synchronised, since only the process dies.

Forking is safe only before the first backward pass, so nothing is trained in this process.
"""

import os
import sys
import time
import traceback
import warnings
from pathlib import Path

import torch

sys.path.append(str(Path(__file__).parents[1]))

from small_runs import both, points, quick, shoal_of  # noqa: E402

from shoal.core.errors import ShoalWarning  # noqa: E402
from shoal.training.optim import make_optimizer  # noqa: E402


class Diary:
    """A constant learning rate that notes which step it was asked for."""

    def __init__(self, path: Path, pause: int) -> None:
        self.file, self.pause = os.open(path, os.O_RDWR | os.O_CREAT), pause

    def __call__(self, step: int, steps: int) -> float:
        os.pwrite(self.file, f"{step:6d}".encode(), 0)
        if step == self.pause:
            time.sleep(1.0)
        return 1.0


def train(method: str, pause: int, folder: Path) -> int:
    """The exit status of a run that saves after every step."""
    diary = Diary(folder.with_name(f"{folder.name}.step"), pause)
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


def start(method: str, pause: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        status = train(method, pause, folder)
    except Exception:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(status)


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("error", ShoalWarning)
    warm_up()
    print("ready", flush=True)
    pid = 0
    for line in sys.stdin:
        verb, *words = line.rstrip("\n").split(" ", 3)
        if verb == "train":
            pid = start(words[0], int(words[1]), Path(words[2]))
            print("pid", pid, flush=True)
        else:
            print("exit", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

"""Snapshots of the members after every k-th epoch; older snapshots are thinned.

The latest snapshots all stay, since averages within a mode use them. Of the older snapshots every
second, fourth, eighth and so on stays, so their number is bounded for every length of run. The
choice depends on the epoch alone: a resumed run ends with the same files as an uninterrupted run.
"""

import re
from dataclasses import dataclass
from pathlib import Path

import torch

from shoal.core.errors import StorageError
from shoal.core.storage.files import read_tensors, write_tensors
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble

__all__ = ["BOUND", "RECENT", "Trajectory", "copy_state", "wanted"]

BOUND = 60
"""Largest number of snapshots that a run keeps."""

RECENT = 20
"""Number of latest snapshots that are never thinned."""

_FILE = re.compile(r"epoch-(\d{6,9})\.safetensors", re.ASCII)


def wanted(epoch: int, every: int, bound: int = BOUND, recent: int = RECENT) -> list[int]:
    """Epochs whose snapshots are kept once `epoch` is done; 0 is the initialisation.

    >>> wanted(100, every=10, bound=8, recent=4)
    [0, 20, 40, 60, 70, 80, 90, 100]
    """
    marks = range(0, epoch + 1, every)
    late, early = marks[max(len(marks) - recent, 0) :], marks[: max(len(marks) - recent, 0)]
    stride = 1
    while len(early[::stride]) > bound - recent:
        stride *= 2
    return [*early[::stride], *late]


@dataclass(frozen=True)
class Trajectory:
    """The snapshots in the folder of a run.

    Attributes:
        folder: the run's folder.
    """

    folder: Path

    @property
    def path(self) -> Path:
        """Folder of the snapshots."""
        return self.folder / "trajectory"

    def keep(self, epoch: int, every: int, state: Tree) -> None:
        """Write the snapshot of one epoch, and remove snapshots that are thinned out."""
        write_tensors(self._file(epoch), {name: tensor.detach() for name, tensor in state.items()})
        kept = set(wanted(epoch, every))
        for known in self.epochs():
            if known < epoch and known not in kept:
                self._file(known).unlink(missing_ok=True)

    def epochs(self, until: int | None = None) -> list[int]:
        """Epochs with a snapshot, up to `until`."""
        matches = (_FILE.fullmatch(path.name) for path in self.path.glob("epoch-*.safetensors"))
        known = sorted(int(match[1]) for match in matches if match)
        return [epoch for epoch in known if until is None or epoch <= until]

    def state(self, epoch: int) -> Tree:
        """`Ensemble.changing_state` after an epoch."""
        if epoch not in self.epochs():
            raise StorageError(
                f"{self.path} has no snapshot of epoch {epoch}; it has {self.epochs()}"
            )
        return read_tensors(self._file(epoch))

    def _file(self, epoch: int) -> Path:
        return self.path / f"epoch-{epoch:06d}.safetensors"


def copy_state(ensemble: Ensemble) -> Tree:
    """A copy of what training may change, in new memory."""
    with torch.no_grad():
        return {name: tensor.detach().clone() for name, tensor in ensemble.changing_state.items()}

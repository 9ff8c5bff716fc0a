"""The history of a run: measures of every step, one row per epoch, and the file of the rows.

A `Tracker` sums the measures on the device. At the end of an epoch its sums become a row. The file
has one line of JSON per row. New rows are appended, and are on the disk before the checkpoint that
refers to them. A checkpoint stores the number of bytes of its rows and their SHA-256. The next save
removes bytes that a killed process wrote after them. A damaged file does not affect the weights: a
warning reports it, and unreadable rows load without numbers.
"""

import hashlib
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, ShoalWarning, StorageError
from shoal.core.storage.disk import flush, open_plain, size_of, storage_errors
from shoal.core.storage.files import write_bytes
from shoal.core.storage.formats import parse_json, to_json
from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports
from shoal.engine.processes.mesh import Mesh
from shoal.training.step.results import StepInfo

__all__ = [
    "LESS",
    "NEGLIGIBLE",
    "HistoryFile",
    "Tracker",
    "balance_sentence",
    "best_epoch",
    "best_epochs",
    "divergence_sentence",
    "has_diverged",
    "held_out_loss",
    "is_row",
    "read_history",
]

NEGLIGIBLE = 1e-3
"""Repulsion is negligible in an epoch whose largest force ratio is below this value."""

LESS = "lower the learning rate or set clip"
"""What to do about members that diverge."""

MAX_BYTES = 1 << 30
_MAX_LOST = 1_000_000
_FORCES = ("loss", "drive", "push", "ratio", "ratio_max", "h2", "effective")
_NUMBERS = ("step", *_FORCES, "lr", "seconds")
_MEMBERS = "member_loss"
_HELD = "member_validation"

Row = dict[str, Any]


class Tracker:
    """Sums over the steps of an epoch, as tensors; only `row` waits for the device.

    Attributes:
        sums: steps, the four measures, and each member's loss, summed over the epoch [5 + M].
        ratio_max: the largest force ratio in the epoch.
        lived: number of steps for which each member has been finite [M].
        last: the four measures and each member's loss of the last step [4 + M]; None unless kept.
    """

    def __init__(self, members: int, device: torch.device) -> None:
        self.sums = torch.zeros(5 + members, device=device)
        self.ratio_max = torch.zeros((), device=device)
        self.lived = torch.zeros(members, dtype=torch.int64, device=device)
        self.one = torch.ones(1, device=device)
        self.last: Tensor | None = None

    def keep_last(self) -> None:
        """Keep the measures of every step until the next step."""
        self.last = torch.zeros_like(self.sums[1:])

    def restart(self) -> None:
        """Begin a new epoch."""
        self.sums.zero_()
        self.ratio_max.zero_()

    def add(self, info: StepInfo) -> None:
        """Add one step, in place."""
        if self.last is not None:
            self.last.copy_(torch.cat([info.measures, info.loss.float()]))
        if kernel_supports(self.sums, info.measures, info.loss):
            totals = self.sums, self.ratio_max, self.lived
            fused.step_kernels.add_to_history(*totals, info.measures, info.loss, info.alive)
            return
        self.sums += torch.cat([self.one, info.measures, info.loss.float()])
        torch.fmax(self.ratio_max, info.ratio, out=self.ratio_max)
        self.lived += info.alive

    def of_all(self, mesh: Mesh) -> "Tracker":
        """A tracker of the members of all processes; all processes must call this."""
        per_member = torch.stack([self.sums[5:].double(), self.lived.double()], 1)
        losses, lived = mesh.gather(per_member, self.lived > 0, "history")[0].unbind(1)
        whole = Tracker(mesh.total, self.sums.device)
        whole.sums.copy_(torch.cat([self.sums[:5], losses.to(self.sums)]))
        whole.ratio_max.copy_(self.ratio_max)
        whole.lived.copy_(lived)
        return whole

    def loss(self) -> Tensor:
        """Mean loss over members and the steps of the epoch so far, a new scalar."""
        return (self.sums[5:] / self.sums[0]).mean()

    def mark_diverged(self, diverged: Tensor) -> None:
        """Mark members that diverged in the last step [M]."""
        self.lived -= diverged.to(self.lived.dtype)

    def row(self, step: int) -> dict[str, Any]:
        """Means over the epoch that ended with `step`; None for values that are not finite."""
        count, *sums = self.sums.tolist()
        return self._row([total / max(count, 1) for total in sums], step, float(self.ratio_max))

    def last_row(self, step: int) -> dict[str, Any]:
        """Measures of the last step alone; needs `keep_last`."""
        if self.last is None:
            return {}
        return self._row(self.last.tolist(), step)

    def _row(self, means: list[float], step: int, ratio_max: float | None = None) -> dict[str, Any]:
        drive, push, h2, effective, *losses = means
        diverged = self.diverged(step)
        finite = [loss for i, loss in enumerate(losses) if i not in diverged]
        row = {
            "loss": sum(finite) / len(finite) if finite else math.nan,
            "drive": drive,
            "push": push,
            "ratio": push / drive if drive > 0 else (math.inf if push > 0 else 0.0),
            **({} if ratio_max is None else {"ratio_max": ratio_max}),
            "h2": h2,
            "effective": effective,
        }
        return {
            **{name: _finite(value) for name, value in row.items()},
            "member_loss": [_finite(loss) for loss in losses],
            "alive": len(finite),
        }

    def diverged(self, step: int) -> dict[int, int]:
        """Diverged members, and the step at which each diverged."""
        return {i: lived for i, lived in enumerate(self.lived.tolist()) if lived < step}

    @property
    def state(self) -> dict[str, Tensor]:
        """Tensors for a checkpoint."""
        return {"sums": self.sums, "ratio_max": self.ratio_max, "lived": self.lived}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def held_out_loss(row: Mapping[str, Any]) -> float:
    """Validation NLL of an epoch, or the validation loss of a likelihood without NLL; or NaN."""
    measures = row.get("validation") or {}
    value = measures.get("nll", measures.get("loss"))
    return math.nan if value is None else value


def best_epoch(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The first epoch with the lowest validation NLL; None without any.

    >>> best_epoch([{"epoch": e, "validation": {"nll": v}} for e, v in ((1, 2.0), (2, 1.0))])
    2
    """
    known = [(held_out_loss(row), row["epoch"]) for row in rows if row.get("validation")]
    return min((pair for pair in known if math.isfinite(pair[0])), default=(0.0, None))[1]


def best_epochs(rows: Sequence[Mapping[str, Any]]) -> list[int | None] | None:
    """The first epoch with each member's lowest NLL on its fold; None for a run without folds.

    >>> best_epochs([{"epoch": 1, "member_validation": [2.0, 1.0]},
    ...              {"epoch": 2, "member_validation": [1.0, None]}])
    [2, 1]
    """
    known = [(row["epoch"], row[_HELD]) for row in rows if row.get(_HELD)]
    if not known:
        return None
    best: list[tuple[float, int | None]] = [(math.inf, None)] * len(known[0][1])
    for epoch, losses in known:
        pairs = zip(best, losses, strict=True)
        best = [(n, epoch) if n is not None and n < b[0] else b for b, n in pairs]
    return [epoch for _, epoch in best]


def balance_sentence(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """One sentence if repulsion was negligible in at least one epoch; None otherwise."""
    known = [row for row in rows if row["ratio_max"] is not None]
    quiet = [row for row in known if row["ratio_max"] < NEGLIGIBLE]
    if not quiet:
        return None
    if len(quiet) == len(rows):
        when = "in every epoch: the run is in effect a plain ensemble"
    else:
        when = f"in {len(quiet)} of {len(rows)} epochs: there the run is in effect a plain ensemble"
    ratio = max(row["ratio"] for row in quiet)
    return f"The force ratio (push / drive) was at most {ratio:.1g} {when}."


def has_diverged(rows: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the last loss is far above the first loss, or not finite.

    Far means twice the first loss and at least one nat more. The minimum of one nat is for trained
    members: their loss begins near 0 and may double.

    >>> has_diverged([{"loss": 2.3}, {"loss": 3e19}]), has_diverged([{"loss": 0.1}, {"loss": 0.3}])
    (True, False)
    """
    if not rows or "loss" not in rows[-1]:
        return False
    began, ended = _ends(rows)
    return ended is None or (began is not None and ended > began + max(abs(began), 1.0))


def divergence_sentence(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """One sentence for a diverged run; None otherwise."""
    if not has_diverged(rows):
        return None
    began, ended = _ends(rows)
    what = "is not finite" if ended is None else f"went from {began:.3g} to {ended:.3g} nats"
    return f"Training diverged: the loss {what}; {LESS}."


def _ends(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Loss before the first step (older runs: of the first epoch), and loss of the last epoch."""
    first = rows[0].get("initial_loss")
    return rows[0].get("loss") if first is None else first, rows[-1]["loss"]


class HistoryFile:
    """The rows that a run has written so far.

    Args:
        path: the file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._knows(b"", 0)

    def keep(self, rows: Sequence[Row]) -> dict[str, Any]:
        """Write the new rows; returns the reference by which `read` finds all rows.

        Args:
            rows: all rows of the run; rows written or read before must be unchanged.
        """
        fresh = _lines(rows[self._rows :])
        if not (self._size and self._add(fresh)):
            fresh = _lines(rows)
            write_bytes(self.path, fresh)
            self._knows(b"", 0)
        self._digest.update(fresh)
        self._size, self._rows = self._size + len(fresh), len(rows)
        return {"rows": self._rows, "bytes": self._size, "sha256": self._digest.hexdigest()}

    def read(self, reference: Mapping[str, Any], step: int) -> list[Row]:
        """The rows that a checkpoint of this step refers to."""
        count, size = _counted(reference, self.path)
        data, trouble = b"", "it is shorter than it was"
        try:
            data = _bytes_of(self.path, size)
        except StorageError as error:
            trouble = str(error)
        if len(data) == size:
            trouble = "its SHA-256 differs"
            if hashlib.sha256(data).hexdigest() == reference["sha256"]:
                rows, lost = _parsed(data, count)
                if not lost:
                    self._knows(data, count)
                    return rows
        rows, lost = _parsed(data, count)
        if lost and rows[-1]["step"] is None:
            rows[-1]["step"] = step
        warnings.warn(
            f"{self.path} is damaged ({trouble}): {lost} of {count} epochs have no numbers, other "
            f"epochs may have wrong numbers; the weights are not affected",
            ShoalWarning,
            stacklevel=4,
        )
        return rows

    def _knows(self, data: bytes, rows: int) -> None:
        self._digest, self._size, self._rows = hashlib.sha256(data), len(data), rows

    def _add(self, fresh: bytes) -> bool:
        """Append lines to the known lines; False if the known lines are missing."""
        with storage_errors("write", self.path, len(fresh)):
            try:
                descriptor = open_plain(self.path, os.O_RDWR)
            except FileNotFoundError:
                return False
            with open(descriptor, "r+b") as file:
                if file.seek(0, os.SEEK_END) < self._size:
                    return False
                file.truncate(self._size)
                file.seek(self._size)
                file.write(fresh)
                file.flush()
                flush(file.fileno())
        return True


def read_history(path: Path) -> list[Row]:
    """All complete rows of a file, none without a file; unreadable rows have no numbers."""
    if not path.exists():
        return []
    data = _bytes_of(path, MAX_BYTES)
    data = data[: data.rfind(b"\n") + 1]  # another process may be writing the rest
    rows, lost = _parsed(data, data.count(b"\n"))
    if lost:
        warnings.warn(
            f"{path} cannot be read as history: {lost} of {len(rows)} epochs have no numbers",
            ShoalWarning,
            stacklevel=2,
        )
    return rows


def _lines(rows: Sequence[Row]) -> bytes:
    return "".join(to_json(row) + "\n" for row in rows).encode()


def _counted(reference: Mapping[str, Any], path: Path) -> tuple[int, int]:
    sound = isinstance(reference, dict) and reference.keys() == {"rows", "bytes", "sha256"}
    counts = [reference["rows"], reference["bytes"]] if sound else []
    if not sound or any(type(n) is not int or not 0 <= n <= MAX_BYTES for n in counts):
        raise CheckpointCorrupt(f"the checkpoint has no valid reference to {path}")
    return counts[0], counts[1]


def _bytes_of(path: Path, most: int) -> bytes:
    if size_of(path) > MAX_BYTES:
        raise StorageError(f"{path} is larger than the limit of {MAX_BYTES:,} bytes for a history")
    with storage_errors("read", path), path.open("rb") as file:
        return file.read(most)


def _parsed(data: bytes, count: int) -> tuple[list[Row], int]:
    """`count` rows, and how many of them have no numbers."""
    lines = data.split(b"\n")[:count]
    rows = [_row(line, epoch) for epoch, line in enumerate(lines, 1)]
    lost = count - len(rows) + rows.count(None)
    if lost > _MAX_LOST:
        raise CheckpointCorrupt(f"the history has {lost:,} rows that cannot be read")
    rows += [None] * (count - len(rows))
    return [_blank(epoch) if row is None else row for epoch, row in enumerate(rows, 1)], lost


def _row(line: bytes, epoch: int) -> Row | None:
    try:
        row = parse_json(line.decode())
    except ValueError:
        return None
    return row if is_row(row, epoch) else None


def is_row(row: Any, epoch: int) -> bool:
    """Whether keys and types are those of the history row of this epoch."""
    if not isinstance(row, dict) or row.get("epoch") != epoch or type(row["epoch"]) is not int:
        return False
    lists, held = [row.get(name) or [] for name in (_MEMBERS, _HELD)], row.get("validation") or {}
    return (
        all(isinstance(each, list) and all(map(_is_number, each)) for each in lists)
        and all(_is_number(row.get(name)) for name in _NUMBERS)
        and type(row.get("alive", 0)) is int
        and isinstance(held, dict)
        and all(map(_is_number, held.values()))
    )


def _is_number(value: Any) -> bool:
    # A JSON integer may have thousands of digits, which no float can hold.
    return value is None or isinstance(value, float) or (type(value) is int and abs(value) < 2**63)


def _blank(epoch: int) -> Row:
    return {"epoch": epoch, **dict.fromkeys(_NUMBERS), _MEMBERS: []}

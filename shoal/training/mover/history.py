"""History: measures of every step, summed on the device and written once per epoch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.engine.kernels import fused
from shoal.engine.kernels.fused import kernel_supports
from shoal.engine.processes.mesh import Mesh
from shoal.training.step.results import StepInfo

__all__ = [
    "LESS",
    "NEGLIGIBLE",
    "Tracker",
    "balance_sentence",
    "best_epoch",
    "divergence_sentence",
    "has_diverged",
    "held_out_loss",
]

NEGLIGIBLE = 1e-3
"""Repulsion is negligible in an epoch whose largest force ratio is below this value."""

LESS = "lower the learning rate or set clip"
"""What to do about members that diverge."""


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
            kept = self.sums, self.ratio_max, self.lived
            fused.step_kernels.add_to_history(*kept, info.measures, info.loss, info.alive)
            return
        self.sums += torch.cat([self.one, info.measures, info.loss.float()])
        torch.fmax(self.ratio_max, info.ratio, out=self.ratio_max)
        self.lived += info.alive

    def of_all(self, mesh: Mesh) -> "Tracker":
        """A tracker of the members of all processes; all processes must call this."""
        own = torch.stack([self.sums[5:].double(), self.lived.double()], 1)
        losses, lived = mesh.gather(own, self.lived > 0, "history")[0].unbind(1)
        whole = Tracker(mesh.total, self.sums.device)
        whole.sums.copy_(torch.cat([self.sums[:5], losses.to(self.sums)]))
        whole.ratio_max.copy_(self.ratio_max)
        whole.lived.copy_(lived)
        return whole

    def loss(self) -> Tensor:
        """Mean loss over members and the steps of the epoch so far, a new scalar."""
        return (self.sums[5:] / self.sums[0]).mean()

    def mark_diverged(self, found: Tensor) -> None:
        """Mark members that diverged in the last step [M]."""
        self.lived -= found.to(self.lived.dtype)

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
    found = row.get("validation") or {}
    value = found.get("nll", found.get("loss"))
    return math.nan if value is None else value


def best_epoch(rows: Sequence[Mapping[str, Any]]) -> int | None:
    """The first epoch with the lowest validation NLL; None without any.

    >>> best_epoch([{"epoch": e, "validation": {"nll": v}} for e, v in ((1, 2.0), (2, 1.0))])
    2
    """
    known = [(held_out_loss(row), row["epoch"]) for row in rows if row.get("validation")]
    return min((pair for pair in known if math.isfinite(pair[0])), default=(0.0, None))[1]


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

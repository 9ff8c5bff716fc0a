"""History: what every step told, gathered on the device and written once an epoch."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shoal.training.step import StepInfo

__all__ = ["NEGLIGIBLE", "Tracker", "balance_sentence", "divergence_sentence", "has_diverged"]

NEGLIGIBLE = 1e-3
"""Below this ratio of push to drive, through a whole epoch, members are independent in effect."""


class Tracker:
    """Sums over the steps of an epoch, as tensors: nothing waits for the device before `row`.

    Attributes:
        sums: steps, the four measures, and each member's loss, summed over the epoch [5 + M].
        ratio_max: the largest ratio of push to drive in the epoch.
        lived: how many steps of the run each member has been finite [M].
    """

    def __init__(self, members: int, device: torch.device) -> None:
        self.sums = torch.zeros(5 + members, device=device)
        self.ratio_max = torch.zeros((), device=device)
        self.lived = torch.zeros(members, dtype=torch.int64, device=device)
        self.one = torch.ones(1, device=device)

    def restart(self) -> None:
        """Begin an epoch."""
        self.sums.zero_()
        self.ratio_max.zero_()

    def add(self, info: StepInfo) -> None:
        """Take in one step, in place."""
        self.sums += torch.cat([self.one, info.measures, info.loss.float()])
        torch.fmax(self.ratio_max, info.ratio, out=self.ratio_max)
        self.lived += info.alive

    def loss(self) -> Tensor:
        """Mean loss over members and the steps of the epoch so far, a scalar of its own."""
        return (self.sums[5:] / self.sums[0]).mean()

    def bury(self, found: Tensor) -> None:
        """Members that the last step made infinite, found only after it [M]."""
        self.lived -= found.to(self.lived.dtype)

    def row(self, step: int) -> dict[str, Any]:
        """Means over the epoch that ended with `step`; None, as in JSON, where not finite."""
        count, *sums = self.sums.tolist()
        drive, push, h2, effective, *losses = (total / max(count, 1) for total in sums)
        dead = self.deaths(step)
        living = [loss for i, loss in enumerate(losses) if i not in dead]
        row = {
            "loss": sum(living) / len(living) if living else math.nan,
            "drive": drive,
            "push": push,
            "ratio": push / drive if drive > 0 else (math.inf if push > 0 else 0.0),
            "ratio_max": float(self.ratio_max),
            "h2": h2,
            "effective": effective,
        }
        return {
            **{name: _finite(value) for name, value in row.items()},
            "member_loss": [_finite(loss) for loss in losses],
            "alive": len(living),
        }

    def deaths(self, step: int) -> dict[int, int]:
        """Members that stopped being finite before `step`, and when."""
        return {i: lived for i, lived in enumerate(self.lived.tolist()) if lived < step}

    @property
    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"sums": self.sums, "ratio_max": self.ratio_max, "lived": self.lived}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def balance_sentence(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """One sentence when repulsion was negligible through an epoch; None when it never was."""
    known = [row for row in rows if row["ratio_max"] is not None]
    quiet = [row for row in known if row["ratio_max"] < NEGLIGIBLE]
    if not quiet:
        return None
    if len(quiet) == len(rows):
        when = "throughout: this is a plain ensemble in effect"
    else:
        when = f"in {len(quiet)} of {len(rows)} epochs: a plain ensemble in effect in those"
    ratio = max(row["ratio"] for row in quiet)
    return f"The force ratio (push / drive) was at most {ratio:.1g} {when}."


def has_diverged(rows: Sequence[Mapping[str, Any]]) -> bool:
    """The loss ended far above where it began, or is not a finite number any more.

    Far is as much again as it began with, and at least one nat: a loss that begins near 0, as that
    of trained members, may well double.

    >>> has_diverged([{"loss": 2.3}, {"loss": 3e19}]), has_diverged([{"loss": 0.1}, {"loss": 0.3}])
    (True, False)
    """
    if not rows or "loss" not in rows[-1]:
        return False
    began, ended = _ends(rows)
    return ended is None or (began is not None and ended > began + max(abs(began), 1.0))


def divergence_sentence(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """One sentence for a run that diverged; None for any other."""
    if not has_diverged(rows):
        return None
    began, ended = _ends(rows)
    what = "is not finite" if ended is None else f"went from {began:.3g} to {ended:.3g} nats"
    return f"Training diverged: the loss {what}; lower the learning rate or set clip."


def _ends(rows: Sequence[Mapping[str, Any]]) -> tuple[float | None, float | None]:
    """Loss before the first step, or of the first epoch in older runs, and of the last epoch."""
    first = rows[0].get("initial_loss")
    return rows[0].get("loss") if first is None else first, rows[-1]["loss"]

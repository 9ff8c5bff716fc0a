"""History: what every step told, gathered on the device and written once an epoch."""

import math
from typing import Any

import torch
from torch import Tensor

from shoal.core.types import Tree
from shoal.training.step import StepInfo

__all__ = ["NEGLIGIBLE", "Tracker", "balance_sentence"]

NEGLIGIBLE = 1e-3
"""Below this ratio of push to drive, through a whole epoch, members are independent in effect."""


class Tracker:
    """Sums over the steps of an epoch, as tensors: nothing waits for the device before `row`.

    Attributes:
        totals: sums over the steps so far.
        died: the step at which each member stopped being finite [M], -1 for the living.
    """

    def __init__(self, members: int, device: torch.device) -> None:
        self.died = torch.full((members,), -1, dtype=torch.int64, device=device)
        self.totals: Tree = {
            "count": torch.zeros((), device=device),
            "measures": torch.zeros(4, device=device),
            "ratio_max": torch.zeros((), device=device),
            "member_loss": torch.zeros(members, device=device),
        }

    def restart(self) -> None:
        """Begin an epoch."""
        for tensor in self.totals.values():
            tensor.zero_()

    def add(self, info: StepInfo, step: int | Tensor) -> None:
        """Take in one step, in place."""
        totals = self.totals
        totals["count"] += 1
        totals["measures"] += info.measures
        totals["member_loss"] += info.loss
        torch.fmax(totals["ratio_max"], info.ratio, out=totals["ratio_max"])
        self.bury(info.alive, step)

    def bury(self, alive: Tensor, step: int | Tensor) -> None:
        """Note the step at which members stopped being finite."""
        self.died.copy_(torch.where((self.died < 0) & ~alive, step, self.died))

    def row(self) -> dict[str, Any]:
        """Means over the epoch, as a file will hold them: None where there is no finite one."""
        totals = {name: tensor.cpu() for name, tensor in self.totals.items()}
        count = totals["count"].clamp(min=1)
        member_loss = totals["member_loss"] / count
        living = self.died.cpu() < 0
        drive, push, h2, effective = (totals["measures"] / count).tolist()
        row = {
            "loss": float(member_loss[living].mean()) if living.any() else math.nan,
            "drive": drive,
            "push": push,
            "ratio": push / drive if drive > 0 else (math.inf if push > 0 else 0.0),
            "ratio_max": float(totals["ratio_max"]),
            "h2": h2,
            "effective": effective,
        }
        return {
            **{name: _finite(value) for name, value in row.items()},
            "member_loss": [_finite(value) for value in member_loss.tolist()],
            "alive": int(living.sum()),
        }

    def deaths(self) -> dict[int, int]:
        """Members that stopped being finite, and when."""
        return {i: step for i, step in enumerate(self.died.tolist()) if step >= 0}

    @property
    def state(self) -> dict[str, Tensor]:
        """For a checkpoint."""
        return {"died": self.died, **self.totals}

    def load_state(self, state: dict[str, Tensor]) -> None:
        """Continue from a checkpoint."""
        for name, tensor in self.state.items():
            tensor.copy_(state[name])


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def balance_sentence(rows: list[dict[str, Any]], strength: float) -> str | None:
    """One sentence when repulsion was negligible through an epoch; None when it never was."""
    known = [row for row in rows if row["ratio_max"] is not None]
    quiet = [row for row in known if row["ratio_max"] < NEGLIGIBLE]
    if not quiet:
        return None
    ratio = max(row["ratio"] for row in quiet)
    if len(quiet) == len(rows):
        when = "throughout: this is a plain ensemble in effect"
    else:
        when = (
            f"in {len(quiet)} of {len(rows)} epochs, a plain ensemble in effect while they lasted"
        )
    advice = f"try strength={strength * 0.1 / ratio:.0e}" if ratio > 0 else "try a larger strength"
    return (
        f"Repulsion was at most {ratio:.1e} of the drive {when}; "
        f"to let members repel each other, {advice}, or a higher temperature."
    )

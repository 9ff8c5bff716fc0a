"""The small figure of a run in a notebook: its losses over the epochs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.small_figures import ORANGE, Curve, curves_svg

__all__ = ["history_svg"]


def history_svg(history: Sequence[Mapping[str, Any]]) -> str:
    """Mean loss, the range of the members' losses, and NLL on validation data, as SVG.

    An empty text where no epoch has a finite loss, as for adopted members.
    """
    losses = [row.get("loss") for row in history]
    if not any(_finite(loss) for loss in losses):
        return ""
    members = [[loss for loss in row.get("member_loss") or () if _finite(loss)] for row in history]
    curves = {
        "training loss, all members": Curve(
            losses,
            low=[min(each, default=None) for each in members],
            high=[max(each, default=None) for each in members],
        )
    }
    held_out = [(row.get("validation") or {}).get("nll") for row in history]
    if any(_finite(value) for value in held_out):
        curves["validation NLL"] = Curve(held_out, ORANGE, dashed=True)
    ends = (history[0].get("epoch", 1), history[-1].get("epoch", len(history)))
    return curves_svg(curves, "epoch", ends, "nats per data point")


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)

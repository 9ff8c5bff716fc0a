"""A run in a notebook: a table of facts, and a small figure of its losses over the epochs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from shoal.core.display.notebook import ORANGE, Curve, curves_svg, facts_html

__all__ = ["history_svg", "run_html"]


def run_html(run: Any, facts: Mapping[str, object]) -> str:
    """The table of a `Run` with these facts, and the figure of its history."""
    where = "not kept in a folder" if run.folder is None else run.folder
    notes = {"notes": " ".join(run.notes) or None, "folder": where}
    every = {**facts, "ensemble": run.ensemble, **notes}
    return facts_html("Run", every, history_svg(run.history))


def history_svg(history: Sequence[Mapping[str, Any]]) -> str:
    """Mean loss, the range of the members' losses, and NLL on validation data, as SVG.

    An empty text where no epoch has a finite loss, as for adopted members.
    """
    losses = [row.get("loss") for row in history]
    if not any(_finite(loss) for loss in losses):
        return ""
    members = [[loss for loss in row.get("member_loss") or () if _finite(loss)] for row in history]
    curves = {
        "training loss (area: all members)": Curve(
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

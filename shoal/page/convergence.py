"""Whether the training loss converged, from the losses of the epochs."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shoal.prediction.statistics import linear_change
from shoal.training.history import divergence_sentence

__all__ = ["Trend", "loss_sentence", "loss_trend"]

_FEWEST = 8
"""Epochs below which the course of a loss cannot be told from its noise."""

_SHARE = 0.03
"""A loss has converged when it changes by less than this in the last third of training."""

_NATS = 0.01
"""Losses nearer to 0 than this are measured by it: no density depends on so little."""


class Trend(NamedTuple):
    """Where a loss was going at the end of training.

    Attributes:
        kind: what can be said.
        change: of the loss in the last third of training, along a straight line; in nats.
    """

    kind: Literal["short", "falling", "rising", "converged", "unclear"]
    change: float = math.nan


def loss_trend(losses: Sequence[float], began: float | None = None) -> Trend:
    """Where the loss was going, by the last third of the epochs.

    Converged is a test of equivalence: the 95 % interval of the change must lie within 3 % of all
    that the loss has fallen, and within 3 % of the loss itself. A change that only cannot be told
    from noise is unclear. Falling and rising are significant changes that are not that small.

    >>> loss_trend([2.0 * 0.5**epoch + 1.0 for epoch in range(30)]).kind
    'converged'
    >>> loss_trend([2.0 * 0.97**epoch for epoch in range(30)]).kind
    'falling'

    Args:
        losses: mean of each epoch.
        began: loss before the first step; None takes that of the first epoch.
    """
    if len(losses) < _FEWEST or not all(map(math.isfinite, losses)):
        return Trend("short")
    last = losses[-max(5, math.ceil(len(losses) / 3)) :]
    level = sum(last) / len(last)
    fallen = max(losses[0] if began is None else began, losses[0]) - level
    change, low, high = linear_change(last)
    margin = _SHARE * min(max(fallen, 0.0), max(abs(level), _NATS))
    if -margin <= low and high <= margin and margin > 0:
        return Trend("converged", change)
    if high < 0:
        return Trend("falling", change)
    return Trend("rising" if low > 0 else "unclear", change)


def loss_sentence(history: Sequence[Mapping[str, Any]]) -> str:
    """Whether the loss of a run diverged, converged, or was on its way; empty if it cannot be told.

    >>> loss_sentence([{"loss": 2.0 * 0.5**epoch + 1.0} for epoch in range(30)])
    'The training loss converged.'
    """
    diverged = divergence_sentence(history)
    if diverged is not None:
        return diverged
    losses = [math.nan if row.get("loss") is None else float(row["loss"]) for row in history]
    kind, change = loss_trend(losses, history[0].get("initial_loss") if history else None)
    size = f"by {abs(change):.2g} nats in the last third of training"
    return {
        "converged": "The training loss converged.",
        "falling": f"The training loss was still falling, {size}: train longer.",
        "rising": f"The training loss was rising, {size}: lower the learning rate.",
        "unclear": "The training loss has no significant trend in the last third of training.",
        "short": "",
    }[kind]

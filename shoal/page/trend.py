"""The trend of a loss at the end of training, as a verdict and in words."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shoal.prediction.statistics import linear_change
from shoal.training.folder.history import best_epoch, divergence_sentence

__all__ = ["Trend", "loss_sentence", "loss_trend", "still_falling"]

_FEWEST = 8
"""A trend needs at least this many epochs."""

_SHARE = 0.03
"""A converged loss changes by less than this share in the last third of training."""

_NATS = 0.01
"""Losses closer to 0 than this count as this value."""


class Trend(NamedTuple):
    """The trend of a loss at the end of training.

    Attributes:
        kind: the verdict.
        change: change of the loss in the last third of training, by a linear fit, in nats.
    """

    kind: Literal["short", "falling", "rising", "converged", "unclear"]
    change: float = math.nan


def loss_trend(losses: Sequence[float], began: float | None = None) -> Trend:
    """The trend of the loss over the last third of the epochs.

    "converged" is an equivalence test: the 95 % interval of the change must lie within 3 % of the
    total fall of the loss, and within 3 % of the loss. "falling" and "rising" are significant
    changes larger than 3 %. Any other change is "unclear".

    >>> loss_trend([2.0 * 0.5**epoch + 1.0 for epoch in range(30)]).kind
    'converged'
    >>> loss_trend([2.0 * 0.97**epoch for epoch in range(30)]).kind
    'falling'

    Args:
        losses: mean loss of each epoch.
        began: loss before the first step; None takes the first epoch's.
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


def still_falling(history: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the loss falls at the end, and the validation loss does not say otherwise.

    In a history that is too short for a trend, the last epoch decides.

    >>> still_falling([{"loss": 2.0}, {"loss": 1.5}]), still_falling([{"loss": 2.0}])
    (True, False)
    """
    losses = _losses(history)
    if len(losses) < 2 or best_epoch(history) not in (None, len(history)):
        return False
    kind, _ = loss_trend(losses, history[0].get("initial_loss"))
    return kind == "falling" or (kind == "short" and losses[-1] < (1 - _SHARE) * losses[-2])


def _losses(history: Sequence[Mapping[str, Any]]) -> list[float]:
    return [math.nan if row.get("loss") is None else float(row["loss"]) for row in history]


def loss_sentence(history: Sequence[Mapping[str, Any]], advise: bool = True) -> str:
    """Whether the loss diverged, converged, fell or rose; empty for a short history.

    Without `advise` the sentence has no advice, for a run that was warned of something else.

    >>> loss_sentence([{"loss": 2.0 * 0.5**epoch + 1.0} for epoch in range(30)])
    'The training loss converged.'
    """
    diverged = divergence_sentence(history)
    if diverged is not None:
        return diverged
    losses = _losses(history)
    kind, change = loss_trend(losses, history[0].get("initial_loss") if history else None)
    size = f"by {abs(change):.2g} nats in the last third of training"
    # A longer training helps only if the validation NLL falls too.
    helps = advise and best_epoch(history) in (None, len(history))
    longer, slower = ": train longer" * helps, ": lower the learning rate" * advise
    return {
        "converged": "The training loss converged.",
        "falling": f"The training loss was still falling, {size}{longer}.",
        "rising": f"The training loss was rising, {size}{slower}.",
        "unclear": "The training loss has no significant trend in the last third of training.",
        "short": "",
    }[kind]

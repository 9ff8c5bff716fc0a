"""Presets: what the estimators do where their parameters say nothing, and the search of "best"."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from shoal.core.errors import ConfigError
from shoal.training.loop.callbacks import EpochEnd

__all__ = [
    "PRESETS_FOR_CLASSES",
    "PRESETS_FOR_NUMBERS",
    "Clock",
    "Patience",
    "Recipe",
    "batch_for",
    "chosen",
    "recipe_of",
]


@dataclass(frozen=True)
class Recipe:
    """The settings that a preset has, and that parameters of the same name replace.

    Attributes:
        members: ensemble size.
        folds: parts of the data of which each member holds out one.
        hidden: widths of the hidden layers.
        dropout: dropout probability of hidden units.
        numbers: encoding of numbers.
        epochs: most passes over the data.
        n_iter_no_change: epochs without an improvement, after which training ends; see `Patience`.
        learning_rate: learning rate of Adam.
        prior_std: standard deviation of the Gaussian prior of the weights.
        likelihood: distribution of the targets; None for that of the estimator.
        candidates: changes of these settings that compete on out-of-fold data.
    """

    members: int = 16
    folds: int = 8
    hidden: tuple[int, ...] = (128, 128)
    dropout: float = 0.0
    numbers: str = "piecewise"
    epochs: int = 400
    n_iter_no_change: int | None = 10
    learning_rate: float = 3e-3
    prior_std: float = 1.0
    likelihood: Any = None
    candidates: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


_CANDIDATES = {
    "periodic numbers": {"numbers": "periodic"},
    "wide layers": {"hidden": (256, 256)},
    "more dropout": {"dropout": 0.25},
}
_FAST = Recipe(4, 4, hidden=(64, 64), epochs=100, n_iter_no_change=5, learning_rate=5e-3)

PRESETS_FOR_NUMBERS = {
    "fast": _FAST,
    "default": Recipe(),
    "best": Recipe(members=32, n_iter_no_change=30, candidates=_CANDIDATES),
}
PRESETS_FOR_CLASSES = {
    name: replace(recipe, dropout=0.1) for name, recipe in PRESETS_FOR_NUMBERS.items()
}
"""Chosen on the development half of the suite of tables; see docs/results/tables."""


def recipe_of(presets: Mapping[str, Recipe], name: Any, given: Mapping[str, Any]) -> Recipe:
    """The settings of a preset, and those parameters that are not None."""
    if not isinstance(name, str) or name not in presets:
        raise ConfigError(f"preset must be one of {tuple(presets)}, not {name!r}")
    return replace(presets[name], **{k: v for k, v in given.items() if v is not None})


SMALLEST_BATCH, LARGEST_BATCH, STEPS, MOST_STEPS = 16, 256, 16, 200
"""Bounds of a batch, steps of an epoch between them, and most steps of an epoch."""


def batch_for(n: int) -> int:
    """Data points per batch: the power of two nearest to n / 16, from 16 to 256.

    From 51,200 points on, batches grow so that an epoch has about 200 steps.

    >>> batch_for(100), batch_for(1000), batch_for(10_000), batch_for(100_000)
    (16, 64, 256, 512)
    """
    size = min(max(n / STEPS, SMALLEST_BATCH), LARGEST_BATCH)
    return min(n, 2 ** round(math.log2(max(size, n / MOST_STEPS))))


FEWEST_EPOCHS = 20
"""Epochs below which a time limit takes members away instead."""


class Clock:
    """The seconds that `fit` may take, None for no limit.

    A learning rate that falls to 0 needs to know the number of epochs before the first one, so a
    pilot measures the seconds of an epoch.
    """

    def __init__(self, limit: float | None) -> None:
        if limit is not None and not (isinstance(limit, int | float) and limit > 0):
            raise ConfigError(f"time_limit must be seconds above 0 or None, not {limit!r}")
        self.end = None if limit is None else time.monotonic() + limit

    def left(self) -> float:
        """Seconds that are left."""
        return math.inf if self.end is None else self.end - time.monotonic()

    def stop(self, event: EpochEnd) -> None:
        """A callback: ends the run when the time is over."""
        if self.left() <= 0:
            event.stop("the time limit is over")

    def fitting(
        self, recipe: Recipe, train: Callable[[Recipe, Callable[..., None]], Any]
    ) -> Recipe:
        """The recipe with as many epochs, and members, as fit into the time that is left."""
        if self.end is None:
            return recipe
        times: list[float] = []

        def watch(event: EpochEnd) -> None:
            times.append(time.monotonic())
            if len(times) > 2 or self.left() <= 0:
                event.stop("the pilot has measured the seconds of an epoch")

        train(replace(recipe, epochs=3), watch)
        seconds = (times[-1] - times[0]) / max(len(times) - 1, 1)
        epochs = math.floor(0.9 * self.left() / max(seconds, 1e-4))
        if epochs >= min(FEWEST_EPOCHS, recipe.epochs):
            return replace(recipe, epochs=min(epochs, recipe.epochs))
        members = max(2, recipe.members * epochs // FEWEST_EPOCHS)
        folds = min(recipe.folds, members)
        return replace(recipe, members=members, folds=folds, epochs=FEWEST_EPOCHS)


LEAST = 0.005
"""Share of the mean loss by which it must fall to count as an improvement."""


class Patience:
    """A callback that ends a run with folds when its members no longer improve.

    Members improve if the mean of their best losses falls by `LEAST` within so many epochs. Small
    steps count together, and noise in the losses of single members does not go on for ever.
    """

    def __init__(self, epochs: int) -> None:
        self.epochs, self.best, self.last, self.known = epochs, math.inf, 0, np.zeros(0)

    def __call__(self, event: EpochEnd) -> None:
        """Follow the losses of the members on their folds."""
        losses = [math.inf if loss is None else loss for loss in event.row["member_validation"]]
        self.known = np.minimum(self.known, losses) if len(self.known) else np.array(losses)
        finite = self.known[np.isfinite(self.known)]
        mean = float(finite.mean()) if len(finite) else math.inf
        if mean < self.best - LEAST * abs(mean):
            self.best, self.last = mean, event.epoch
        if event.epoch - self.last >= self.epochs:
            event.stop(f"members have not improved in {self.epochs} epochs")


def chosen(recipe: Recipe, score: Callable[[Recipe], float], say: Callable[[str], None]) -> Recipe:
    """The best of a recipe and its candidates by successive halving; smaller scores are better.

    All train for a quarter of the epochs, the better half for half of them, with one member for
    each fold. Jamieson & Talwalkar (2016), arXiv 1502.07943.
    """
    rest = {"as it is": recipe}
    rest |= {name: replace(recipe, **change) for name, change in recipe.candidates.items()}
    share = 4
    while len(rest) > 1:
        scores: dict[str, float] = {}
        for name, each in rest.items():
            small = replace(each, members=each.folds, epochs=max(each.epochs // share, 1))
            scores[name] = score(small)
            say(f"search: {name}, {small.epochs} epochs: {scores[name]:.4g}")
        kept = sorted(scores, key=scores.__getitem__)[: len(rest) // 2]
        rest, share = {name: rest[name] for name in kept}, max(share // 2, 1)
    return next(iter(rest.values()))

"""`shoal.cross_conformal`: intervals and sets from the folds of a run, without validation data."""

import os
from typing import Any

from torch import Tensor

from shoal.core.arguments import checked, share
from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Dataset
from shoal.evaluation.data_arguments import Labelled
from shoal.evaluation.out_of_fold import FoldPredictions, fold_predictions
from shoal.inference.likelihoods.real_targets import Standardising
from shoal.prediction.decisions.cross_conformal import (
    CrossConformalIntervals,
    CrossConformalSets,
    cross_conformal_intervals,
    cross_conformal_sets,
)
from shoal.training.folder.run import Run, opened

__all__ = ["cross_conformal", "fitted_rule"]


@checked(level=share)
def cross_conformal(
    run: Run | str | os.PathLike[str],
    level: float = 0.9,
    *,
    score: str | None = None,
    data: Dataset | Labelled | None = None,
    batch_size: int = 1024,
) -> CrossConformalIntervals | CrossConformalSets:
    """A rule for CV+ intervals of numbers or sets of classes, fitted to all training points.

        rule = shoal.cross_conformal(run)
        low, high = rule(shoal.predict(run, x_new))

    Every training point has its score from the members that hold it out, so no data are set aside.
    `rule.guarantee` says what holds and on which conditions, `rule.at(0.8)` is the rule at another
    level. See `shoal.decisions.cross_conformal_intervals` and `cross_conformal_sets`.

    A guarantee counts data points. Weights of data points therefore must be whole numbers, which
    are repetitions; all repetitions of a point are in its fold.

    Args:
        run: a run that was trained with `folds`, or its folder.
        level: wished share of intervals or sets that contain the target.
        score: "scaled" (default), "absolute" or "cqr" for numbers; "lac" (default) or "aps" for
            classes.
        data: the training data, if the run cannot load its own: a `Dataset`, or a pair (x, y).
        batch_size: points of each fold per forward pass.
    """
    run = opened(run)
    if run.config.get("frozen"):
        raise ConfigError(
            "this run has frozen members, which may have learned from every point and push the "
            "others; train all members together: fit(..., folds=8)"
        )
    return fitted_rule(run, fold_predictions(run, data, batch_size), level, score)


def fitted_rule(
    run: Run, held_out: FoldPredictions, level: float, score: str | None = None
) -> CrossConformalIntervals | CrossConformalSets:
    """The rule of a run from its out-of-fold predictions, whose weights are repetitions."""
    pred, y, weight, folds, member_folds = held_out
    if not isinstance(y, Tensor):
        raise DataError("cross_conformal needs targets in one array, and several came by name")
    classes = "classes" in run.likelihood.about.kinds
    fitted: Any = cross_conformal_sets if classes else cross_conformal_intervals
    chosen = {} if score is None else {"score": score}
    repeated = None if weight is None else _repetitions(weight)
    known = {"repeated": repeated, "knew": _knew(run)}
    return fitted(pred, y, folds, member_folds, level, **known, **chosen)


def _repetitions(weight: Tensor) -> Tensor:
    if bool((weight != weight.round()).any()):
        raise DataError(
            "the run has weights of data points that are no whole numbers, and a guarantee counts "
            "points; train with whole numbers, which are repetitions, or without sample_weight"
        )
    return weight


def _knew(run: Run) -> tuple[str, ...]:
    """What members of a run learned of the points that they hold out."""
    config = run.config
    ways = {
        "best epochs were chosen on the folds": config.get("keep") != "last",
        "the folds ended the run": config.get("patience") is not None,
        "members repel members that trained on them": bool(config.get("strength")),
        "noise or temperature is calibrated on the folds": bool(run.likelihood.calibration),
        "the unit is that of all targets": isinstance(run.likelihood, Standardising),
    }
    return tuple(way for way, used in ways.items() if used)

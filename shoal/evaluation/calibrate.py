"""`shoal.calibrate`: a run whose predicted distribution fits points that members never saw."""

import math
import os
from dataclasses import replace
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.structure import parted
from shoal.data.batches.sources import gathered
from shoal.evaluation.data_arguments import Labelled
from shoal.evaluation.evaluate import SCORES
from shoal.evaluation.out_of_fold import fold_predictions
from shoal.prediction import predict
from shoal.prediction.decisions.scaling import Shape, calibrated
from shoal.prediction.predictive import Predictive
from shoal.training.folder.calibration import calibration_note, write_calibration
from shoal.training.folder.run import Run, opened

__all__ = ["calibrate"]


def calibrate(
    run: Run | str | os.PathLike[str],
    data: Labelled | None = None,
    *,
    shape: Shape = "trained",
    batch_size: int = 1024,
) -> Run:
    r"""The run with a likelihood that held-out points have calibrated; its members stay the same.

    Real targets: the noise is multiplied by the factor with which the central 90 % interval holds
    90 % of the held-out targets. Labels: the logits are divided by the temperature of the smallest
    NLL. `predict`, `evaluate`, `report` and `export` of the new run use the number. It stays in the
    folder of the run, if there is one, until the members are trained on. Evidence, landscape and
    `grow` use the likelihood of the training. A second calibration replaces the first.

    A run with folds is calibrated by its out-of-fold predictions, of M / K members each. What they
    say is carried over to the M members of the ensemble; see `decisions.scaling.calibrated`. With
    M / K = 1 this is not possible, and intervals are rather too wide.

    Args:
        run: a run, or its folder.
        data: for a run with folds, its training data, if it cannot load its own. For a run without
            folds, held-out data: a pair (x, y), a `Split` or a loader. Test data are then no test
            any more.
        shape: "auto" lets the held-out points also choose the shape of noise per input: Gaussian,
            or Student's t with 10, 5 or 3 degrees of freedom if it is clearly better.
        batch_size: inputs per forward pass.
    """
    run = opened(run).trained
    pred, y, weight, apart = _held_out(run, data, batch_size)
    likelihood = calibrated(pred, y, weight, apart=apart, shape=shape)
    results = {name: kept for name, kept in run.results.items() if name != "evaluation"}
    if run.folder is not None:
        write_calibration(run.folder, likelihood)
        (run.folder / SCORES).unlink(missing_ok=True)  # it describes the run before
    notes = [*run.notes, calibration_note(likelihood)]
    return replace(run, likelihood=likelihood, notes=notes, results=results)


def _held_out(run: Run, data: Any, batch_size: int) -> tuple[Predictive, Any, Any, float]:
    """Predictions, targets and weights of held-out points, and how far members move apart."""
    folds = run.config.get("folds")
    if folds is not None:
        pred, y, weight, *_ = fold_predictions(run, data, batch_size)
        members, frozen = run.ensemble.members, int(run.config.get("frozen") or 0)
        return pred, y, weight, _apart((members - frozen) // folds, members)
    if data is None:
        raise ConfigError(
            "a run without folds is calibrated on held-out data; pass data=(x, y), or train it "
            "with fit(..., folds=8)"
        )
    split = gathered(data, run.ensemble.dtype)
    if split.y is None:
        raise ConfigError("calibration needs inputs and targets; pass data=(x, y)")
    y, weight = parted(split.y)
    return predict(run, split, batch_size=batch_size), y, weight, 1.0


def _apart(few: int, members: int) -> float:
    """The factor of `calibrated` for mixtures of `few` of the members; 1 for single members."""
    if few < 2:
        return 1.0
    return math.sqrt((1 + 1 / few - 2 / members) / (1 - 1 / few))

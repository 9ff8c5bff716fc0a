"""`shoal.evaluate`: metrics of one prediction, or the full evaluation of a run."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch

from shoal.core.display.progress import Ticker
from shoal.core.errors import ConfigError
from shoal.data.corruptions import SEVERITIES
from shoal.data.dataset import Dataset
from shoal.evaluation.evaluation import Evaluation
from shoal.evaluation.given_data import Inputs, Labelled, Shifts, evaluation_data, opened, placed
from shoal.evaluation.scores import evaluate_run
from shoal.prediction import metrics
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.training.folder.run import Run

__all__ = ["Evaluation", "evaluate", "splits_ticker"]

_FEW = 10


def splits_ticker(data: Dataset, quiet: bool) -> Ticker:
    """A ticker over the shifts and OOD sets of an evaluation, silent if they are few."""
    total = len(data.shifts) + len(data.ood)
    return Ticker(total, show=not quiet and total > _FEW)


@overload
def evaluate(
    source: Predictive,
    data: ArrayLike,
    ood: Predictive | None = None,
    *,
    sample_weight: ArrayLike | None = None,
) -> dict[str, float]: ...


@overload
def evaluate(
    source: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    ood: Mapping[str, Inputs] | None = None,
    *,
    shifts: Shifts | None = None,
    severities: Sequence[int] = SEVERITIES,
    gallery: int = 12,
    device: torch.device | str | None = None,
    keep: bool = True,
    progress: bool = False,
) -> Evaluation: ...


def evaluate(
    source: Predictive | Run | str | os.PathLike[str],
    data: Any = None,
    ood: Any = None,
    *,
    shifts: Shifts | None = None,
    severities: Sequence[int] = SEVERITIES,
    sample_weight: ArrayLike | None = None,
    gallery: int = 12,
    device: torch.device | str | None = None,
    keep: bool = True,
    progress: bool = False,
) -> dict[str, float] | Evaluation:
    """Metrics of a prediction by name; or the evaluation of a run, with data for the report.

        scores = shoal.evaluate(shoal.predict(run, x_test), y_test)      # {"accuracy": ...}
        found = shoal.evaluate(run, (x_test, y_test), ood={"letters": x_letters})
        found.test["nll"], found.ood["letters"]["auroc_entropy"]

    The evaluation of a run stays in its folder, or in memory for a run without a folder, and
    `shoal.report` shows it. The command `shoal evaluate RUN` does the same.

    Args:
        source: a prediction, a run, or the folder of a run.
        data: for a prediction the labels or targets [B]. For a run the test set: a pair (x, y), a
            loader of such batches, or a `Dataset` with a test set, shifts and OOD sets; by
            default the data set of the run, if it can be loaded by name.
        ood: out-of-distribution (OOD) inputs by name: arrays, tensors or loaders. For a prediction,
            the prediction of the same ensemble for OOD inputs.
        shifts: changed test inputs by name: pairs (x, y), or inputs with the test targets; or for
            images the names of corruptions (`shoal list corruptions`), "standard" or "all".
        severities: corruption severities, from 1 to 5.
        sample_weight: weight of each target of a prediction [B]. For a run, give the test set as
            (x, y, weight): its scores are weighted, its figures are not.
        gallery: number of images to keep at each end of disagreement, entropy and confidence.
        device: device to compute on; None keeps the device of the members.
        keep: store the evaluation in the folder or the run.
        progress: show progress if there are many splits.
    """
    if isinstance(source, Predictive):
        if shifts is not None or data is None:
            raise ConfigError(
                "a prediction is evaluated with its targets; type: shoal.evaluate(pred, y)"
            )
        return metrics.evaluate(source, data, ood, sample_weight)
    if sample_weight is not None:
        raise ConfigError("for a run give the test set with its weights, as (x, y, weight)")
    run = placed(opened(source), device)
    dataset = evaluation_data(run, data, ood, shifts, severities)
    with splits_ticker(dataset, not progress) as ticker:
        return evaluate_run(run, dataset, gallery=gallery, after=ticker.tick, keep=keep)

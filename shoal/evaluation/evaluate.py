"""`shoal.evaluate`: metrics of one prediction, or everything about a run that data can tell."""

import os
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch

from shoal.core.errors import ConfigError
from shoal.core.progress import Ticker
from shoal.data.corruptions import SEVERITIES
from shoal.data.dataset import Dataset
from shoal.evaluation.evaluation import Evaluation
from shoal.evaluation.given_data import Inputs, Labelled, Shifts, evaluation_data, opened, placed
from shoal.evaluation.scores import evaluate_run
from shoal.prediction import metrics
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.training.run import Run

__all__ = ["Evaluation", "evaluate", "splits_ticker"]

_FEW = 10


def splits_ticker(data: Dataset, quiet: bool) -> Ticker:
    """A ticker over the parts that `assess` judges; it says nothing where they are few."""
    total = len(data.shifts) + len(data.ood)
    return Ticker(total, show=not quiet and total > _FEW)


@overload
def evaluate(
    source: Predictive, data: ArrayLike, ood: Predictive | None = None
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
    gallery: int = 12,
    device: torch.device | str | None = None,
    keep: bool = True,
    progress: bool = False,
) -> dict[str, float] | Evaluation:
    """Metrics of a prediction by name; or all scores of a run, and what the report draws.

        scores = shoal.evaluate(shoal.predict(run, x_test), y_test)      # {"accuracy": ...}
        found = shoal.evaluate(run, (x_test, y_test), ood={"letters": x_letters})
        found.test["nll"], found.ood["letters"]["auroc_entropy"]

    The evaluation of a run is kept in its folder, or in memory with a run that has none, so that
    `shoal.report` shows it. The command `shoal evaluate RUN` does the same.

    Args:
        source: a prediction; or a run, or its folder.
        data: for a prediction the labels or targets [B]. For a run the test data: a pair (x, y), a
            loader of such batches, or a `Dataset` with its test data, shifts and OOD sets; by
            default the data set that the run was trained on, where it can be loaded by name.
        ood: out-of-distribution inputs by name: arrays, tensors or loaders. For a prediction, the
            prediction of the same ensemble for such inputs.
        shifts: changed test data by name: pairs (x, y), or inputs that have the test targets; or
            for images the names of corruptions (`shoal list corruptions`), "standard" or "all".
        severities: of the corruptions, some of 1 to 5.
        gallery: how many images to keep at each end of disagreement, entropy and confidence.
        device: where to compute; None stays where the members are.
        keep: False leaves the folder and the run as they are.
        progress: show how far it is where there are many splits.
    """
    if isinstance(source, Predictive):
        if shifts is not None or data is None:
            raise ConfigError(
                "a prediction is evaluated by its targets; type: shoal.evaluate(pred, y)"
            )
        return metrics.evaluate(source, data, ood)
    run = placed(opened(source), device)
    dataset = evaluation_data(run, data, ood, shifts, severities)
    with splits_ticker(dataset, not progress) as ticker:
        return evaluate_run(run, dataset, gallery=gallery, after=ticker.tick, keep=keep)

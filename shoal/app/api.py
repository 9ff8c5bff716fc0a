"""The verbs that accept a run folder wherever a run will do."""

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch

from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood
from shoal.prediction import predict as prediction
from shoal.prediction.predictive import Predictive
from shoal.training.run import Run, load

__all__ = ["predict", "report"]


def predict(
    source: Run | Ensemble | str | os.PathLike,
    x: Any,
    *,
    batch_size: int = 1024,
    device: str | torch.device | None = None,
    likelihood: Likelihood | None = None,
) -> Predictive:
    """What the members say about new inputs, without gradients and in batches.

    Args:
        source: a run, an ensemble, or the folder of a run.
        x: an array or tensor [B, ...], or an iterable of batches.
        batch_size: how many inputs go through the members at once.
        device: where to compute; None stays where the members are.
        likelihood: what the outputs of an ensemble mean; a run knows.
    """
    options = {"batch_size": batch_size, "device": device, "likelihood": likelihood}
    return prediction(source, x, load=load, **options)


def report(
    runs: Sequence[Run | str | os.PathLike] | Iterable[Run], path: str | Path, **options: Any
) -> Path:
    """Write one self-contained page about one or several runs; see `shoal.app.report.report`."""
    from shoal.app.report import report as write

    return write(runs, path, **options)

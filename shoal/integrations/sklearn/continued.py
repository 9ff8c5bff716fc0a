"""`partial_fit`: members that are trained already go on, with one pass over new data points."""

import copy
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.inference.likelihoods import Likelihood
from shoal.training.folder.history import Tracker
from shoal.training.folder.run import Run
from shoal.training.options.options import StepOptions
from shoal.training.stepper import Stepper

__all__ = ["LOOP", "begun", "next_pass"]

LOOP = ("epochs", "steps", "schedule", "validation", "folds", "patience", "keep", "annealing")
"""Options of `fit` that a single pass does not have."""

_STEP = ("method", "strength", "prior", "optimizer", "lr", *StepOptions.__annotations__)
_STATE = "partial_fit"


def begun(run: Run, x: np.ndarray, y: np.ndarray) -> Run:
    """The run of the first pass, which remembers its data points."""
    return replace(run, results={_STATE: {"points": 0, "rows": _row_keys(x, y), "stepper": None}})


def _row_keys(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """One number per different data point: a random projection of its inputs and targets."""
    points = np.column_stack([x.reshape(len(x), -1), y]).astype(np.float64)
    return np.unique(points @ np.random.default_rng(0).normal(size=points.shape[1]))


def next_pass(
    run: Run,
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray | None = None,
    given: Mapping[str, Any] | None = None,
) -> Run:
    """The run after one more pass of all members over these data points.

    The optimiser goes on from one such pass to the next. The learning rate is constant. N of the
    posterior is the number of different points so far; after `fit`, its points count beside them.
    The unit of the targets and a calibration stay as they were.
    No member holds out any of these points, so the run has no folds any more.

    Args:
        run: the run; it stays as it is.
        x: inputs as the networks take them [N, ...].
        y: targets as the likelihood takes them.
        weight: weights of the data points [N].
        given: arguments of the user's own that a config stores by name only.
    """
    began, config = time.perf_counter(), run.config
    ensemble, trained = copy.deepcopy(run.ensemble), run.trained.likelihood
    known = {name: config[name] for name in _STEP if config.get(name) is not None}
    for name, value in known.items():
        if isinstance(value, Mapping) and "custom" in value:
            known[name] = (given or {})[name]
    fresh = {"points": run.provenance["data"]["points"], "rows": np.zeros(0), "stepper": None}
    before = run.results.get(_STATE, fresh)
    rows = np.union1d(before["rows"], _row_keys(x, y))
    seen, state = before["points"] + len(rows), before["stepper"]
    stepper = Stepper(ensemble, seen, likelihood=trained, seed=config["seed"], inputs=x, **known)
    if state is not None:
        stepper.load_state_dict({**state, "n": seen})
    tracker, first = Tracker(ensemble.members, ensemble.device), stepper.step
    own = config["batches"] == "own" and weight is None
    for batch in _batches(
        x, y, weight, config["batch_size"], ensemble.members if own else 1, (config["seed"], first)
    ):
        tracker.add(stepper(batch, own=own))
    row = tracker.row(stepper.step - first) | {
        "epoch": len(run.history) + 1,
        "step": (run.history[-1]["step"] if run.history else 0) + stepper.step - first,
        "lr": config["lr"],
        "seconds": time.perf_counter() - began,
    }
    assert stepper.likelihood is not None
    return replace(
        run,
        ensemble=ensemble.eval(),
        likelihood=_as_calibrated(stepper.likelihood, run.likelihood),
        config={**config, "folds": None},
        history=[*run.history, row],
        folder=None,
        results={_STATE: {**before, "rows": rows, "stepper": stepper.state_dict()}},
    )


def _batches(
    x: np.ndarray,
    y: np.ndarray,
    weight: np.ndarray | None,
    size: int,
    members: int,
    seed: tuple[int, int],
) -> Iterator[tuple[Tensor, ...]]:
    """The points in random order, `size` at a time; for several members [M, B, ...]."""
    random = generator(seed[0], "partial_fit", seed[1])
    orders = torch.stack([torch.randperm(len(y), generator=random) for _ in range(members)])
    parts = [torch.tensor(each) for each in (x, y, weight) if each is not None]
    for rows in orders.split(size, 1):
        chosen = rows if members > 1 else rows[0]
        yield tuple(part[chosen] for part in parts)


def _as_calibrated(likelihood: Likelihood, known: Likelihood) -> Likelihood:
    """The likelihood with the calibration of another one."""
    for numbers in known.calibration.values():
        return likelihood.calibrated(torch.tensor(numbers, dtype=torch.float64))
    return likelihood

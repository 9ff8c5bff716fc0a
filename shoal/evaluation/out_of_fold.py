"""`shoal.out_of_fold`: predictions for training points by members that never trained on them."""

import os
from typing import Any, NamedTuple

import torch
from torch import Tensor

from shoal.core.arguments import whole
from shoal.core.errors import ConfigError, DataError
from shoal.core.structure import joined, parted
from shoal.data.batches.orders import Folds
from shoal.data.batches.sources import batches_of
from shoal.data.dataset import Dataset
from shoal.engine.members.precision import calculating_in
from shoal.evaluation.data_arguments import Labelled
from shoal.prediction.predictive import Predictive
from shoal.training.fit import in_type
from shoal.training.folder.own_data import own_data
from shoal.training.folder.provenance import about_data
from shoal.training.folder.run import Run, opened
from shoal.training.loop.folds import FoldMixture, fold_outputs
from shoal.training.loop.validation import evaluating

__all__ = ["FoldPredictions", "fold_predictions", "out_of_fold", "trained_on"]


def out_of_fold(
    run: Run | str | os.PathLike[str],
    data: Dataset | Labelled | None = None,
    *,
    batch_size: int = 1024,
) -> Predictive:
    r"""Predictions for all N training points, each by the members that hold it out.

    With K folds, $p(y | x_n) = \frac{1}{|M_n|} \sum_{i \in M_n} p(y \,|\, f_i(x_n))$ with
    $M_n = \{i : i \bmod K = \mathrm{fold}(n)\}$. Each point has M / K members. Where K does not
    divide M, members of folds with fewer members are repeated, which leaves their mixture the same.

    `shoal.evaluate(shoal.out_of_fold(run), y)` scores the run without a validation set. Members
    that are frozen, as in a grown run, may have seen any point and are left out.

    Args:
        run: a run that was trained with `folds`, or its folder.
        data: the training data, if the run cannot load its own: a `Dataset`, or a pair (x, y).
        batch_size: points of each fold per forward pass.

    Returns:
        The predictions, in the order of the training points; on the CPU.
    """
    return fold_predictions(opened(run), data, batch_size).pred


class FoldPredictions(NamedTuple):
    """Training points as the members that hold them out predict them, in their order.

    Attributes:
        pred: the out-of-fold predictions.
        y: the targets.
        weight: the weights of the points; None for equal weights.
        folds: the fold of every point [N].
        member_folds: the fold that each finite member holds out [M].
    """

    pred: Predictive
    y: Any
    weight: Tensor | None
    folds: Tensor
    member_folds: Tensor


def fold_predictions(run: Run, data: Any = None, batch_size: int = 1024) -> FoldPredictions:
    """The predictions of `out_of_fold`, with what belongs to them."""
    count = run.config.get("folds")
    if count is None:
        raise ConfigError("this run has no folds; train it with fit(..., folds=8)")
    batches = _training_points(run, data)
    folds = Folds(batches.n, count, run.config["seed"])
    ensemble, first = run.ensemble, int(run.config.get("frozen") or 0)
    steps, parts, targets = list(folds.steps(whole("batch_size", batch_size))), [], []
    precision = run.config.get("precision")
    with torch.no_grad(), evaluating(ensemble), calculating_in(precision, ensemble):
        for x, y in batches.read(rows.flatten() for rows, _ in steps):
            parts.append(fold_outputs(ensemble, x, range(ensemble.members), folds).cpu())
            targets.append(y)
    outputs = torch.cat(parts, 1)[first:]
    sound = ensemble.alive[first:].cpu() & (outputs < torch.inf).flatten(1).all(-1)
    finite = sound.nonzero().flatten()
    members = [first + place for place in finite.tolist()]
    _check_members(folds, members)
    rows, counts = (torch.cat(each, 1) for each in zip(*steps, strict=True))
    mixture = FoldMixture.of(folds, members, counts)
    order = rows.flatten()[mixture.rows].argsort()
    shape = run.target_shape
    mixed = mixture.mixed(outputs[finite])[:, order]
    pred = Predictive(mixed, run.likelihood, None, None if shape is None else 1 + len(shape))
    read = torch.cat([each.flatten() for each, _ in steps])  # points in the order of `targets`
    place = torch.empty(folds.n, dtype=torch.int64).index_copy_(0, read, torch.arange(len(read)))
    y, weight = parted(joined(targets).to("cpu").index_select(0, place))
    return FoldPredictions(pred, y, weight, folds.of_points, torch.tensor(members) % count)


def _training_points(run: Run, data: Any) -> Any:
    """The data points of the run in their order, if these are its data."""
    ensemble, seed, weight = run.ensemble, run.config["seed"], None
    if data is None and run.given is not None:
        data, weight = run.given.data, run.given.weight
    elif data is None:
        data = own_data(run, "this run", "pass data=(x, y)", whole=True)
    place, takes = (ensemble.device, ensemble.dtype), ensemble.takes_whole
    batches = batches_of(data, 1, seed, *place, whole=takes, weight=weight)
    batches = in_type(batches, run.likelihood, ensemble.dtype)
    if not trained_on(run, batches):
        raise DataError(
            "these are not the training data of the run; pass the same points, in the same order "
            "and with the same weights"
        )
    return batches


def trained_on(run: Run, batches: Any) -> bool:
    """Whether these are the training data of the run, in their order and with their weights."""
    return about_data(batches)["data"] == run.provenance["data"]


def _check_members(folds: Folds, members: list[int]) -> None:
    """Refuse members that leave a fold to nobody."""
    missing = sorted(set(range(folds.count)) - {member % folds.count for member in members})
    if missing:
        raise ConfigError(
            f"no finite member of this run holds out fold {missing[0]}; {folds.count} folds need "
            f"{folds.count} trained members or more, so train with members={folds.count}"
        )

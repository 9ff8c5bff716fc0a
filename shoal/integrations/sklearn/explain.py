"""What the columns of a table do to the predictions of a fitted estimator.

Columns are those of the caller's X, before preprocessing: one column is permuted or fixed with all
the inputs of the networks that come from it.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from scipy.stats.mstats import mquantiles

from shoal.core.errors import ConfigError, DataError
from shoal.core.optional import require
from shoal.data.batches.orders import Folds
from shoal.data.batches.sources import batches_of
from shoal.data.dataset import Split
from shoal.engine.members.precision import calculating_in
from shoal.evaluation.columns import (
    Explanation,
    Importances,
    PartialDependence,
    Permuted,
    dependence_of,
    permutation_importances,
)
from shoal.evaluation.out_of_fold import trained_on
from shoal.integrations.sklearn.columns import (
    as_numbers,
    as_seconds,
    is_table,
    kind_of,
    merged,
    rows_of,
)
from shoal.prediction.predictive import Predictive
from shoal.training.fit import in_type
from shoal.training.folder.run import Run
from shoal.training.loop.folds import FoldMixture, fold_outputs
from shoal.training.loop.validation import evaluating

__all__ = [
    "column_names",
    "explained",
    "fitted_importances",
    "given_importances",
    "importances_of_fit",
    "partial_dependence",
]

FEW, CURVES = 200, 3
"""Points of a curve of the report, and most columns that have one."""

AT_ONCE = 8192
"""Rows that are prepared and predicted at once."""

MOST, FEWEST, WIDE = 500, 100, 15
"""Points of the importances of `fit`: most, fewest, and columns from which they become fewer."""


def column_names(model: Any) -> tuple[str, ...]:
    """Names of the columns of X: those of the table, or x0, x1, ..."""
    known = getattr(model, "feature_names_in_", None)
    names = [f"x{i}" for i in range(model.n_features_in_)] if known is None else known
    return tuple(map(str, names))


def importances_of_fit(model: Any, points: Any, validation: Any = None) -> Importances | None:
    """The importances that a fitted estimator keeps: one permutation of some held-out points.

    Args:
        model: the estimator, with its run.
        points: training points, in the order of the run, with `X`, `y` and `weight`.
        validation: points that all members held out; None if there are none.

    Returns:
        The importances; None for inputs without columns, and where no member is finite.
    """
    if not is_table(points.X) and points.X.ndim != 2:
        return None
    count = max(FEWEST, min(MOST, MOST * WIDE // model.n_features_in_))
    if len(points.y) < 2 or not bool(model.run_.ensemble.alive.any()):
        return None
    if model.run_.config.get("folds"):
        return _out_of_fold(model, points, count)
    data, where = points, "training"
    if validation is not None and len(validation.y) > 1:
        data, where = validation, "validation"
    if len(data.y) > count:
        rows = np.random.default_rng(0).permutation(len(data.y))[:count]
        data = data.rows(np.sort(rows))
    return _whole(model, data, where, repeats=1)


def fitted_importances(model: Any) -> Importances:
    """The importances that `fit` found."""
    known = getattr(model, "_importances", None)
    if known is None:
        raise ConfigError(
            "this model has no importances from its training; type model.importances(X, y)"
        )
    return known


def given_importances(model: Any, points: Any, repeats: int, seed: int) -> Importances:
    """The importances on given points: of the whole ensemble, or out-of-fold at training points."""
    _check_columns(points.X)
    run = model.run_
    if run.config.get("folds"):
        X, y, weight, _ = merged(*points)
        known = type(points)(X, y, model._weighted(y, weight))
        where = run.ensemble.device, run.ensemble.dtype
        split = Split(model._prepared(X), y)
        batches = batches_of(split, 1, run.config["seed"], *where, weight=known.weight)
        if trained_on(run, in_type(batches, run.likelihood, run.ensemble.dtype)):
            return _out_of_fold(model, known, len(y), repeats, seed)
    return _whole(model, points, "given", repeats, seed)


def _whole(model: Any, points: Any, data: str, repeats: int = 1, seed: int = 0) -> Importances:
    """The importances for the whole ensemble."""
    X, y, weight = points

    def permuted(jobs: Sequence[Permuted]) -> Iterator[Predictive]:
        size = max(1, AT_ONCE // len(y))
        for start in range(0, len(jobs), size):
            block = jobs[start : start + size]
            pred = model.predictive(_with_permuted(X, block))
            for place in range(len(block)):
                yield pred[place * len(y) : (place + 1) * len(y)]

    return permutation_importances(
        column_names(model),
        model.predictive(X),
        permuted,
        y,
        data=data,
        weight=weight,
        repeats=repeats,
        seed=seed,
    )


def _out_of_fold(
    model: Any, points: Any, count: int, repeats: int = 1, seed: int = 0
) -> Importances:
    """The importances at about `count` training points, each for the members that hold it out."""
    run, ensemble = model.run_, model.run_.ensemble
    folds = Folds(len(points.y), run.config["folds"], run.config["seed"])
    chosen, counts = next(folds.steps(min(folds.largest, max(2, count // folds.count))))
    mixture = FoldMixture.of(folds, ensemble.alive.nonzero().flatten().tolist(), counts)
    rows, kept = chosen.flatten().numpy(), mixture.rows.numpy()
    used = points.rows(rows[kept])
    # A fold that is shorter ends with a point that does not count, and may have any value.
    place = np.zeros(len(rows), dtype=np.int64)
    place[kept] = np.arange(len(kept))

    def predict(inputs: np.ndarray, copies: int) -> Iterator[Predictive]:
        by_copy = inputs.reshape(copies, len(kept), -1)[:, place]
        return _mixtures(run, folds, mixture, by_copy)

    def permuted(jobs: Sequence[Permuted]) -> Iterator[Predictive]:
        size = max(1, AT_ONCE // len(kept))
        for start in range(0, len(jobs), size):
            block = jobs[start : start + size]
            prepared = model._prepared(_with_permuted(used.X, block))
            yield from predict(prepared, len(block))

    precision = run.config.get("precision")
    members = ensemble.alive.nonzero().flatten().cpu().numpy()
    with torch.no_grad(), evaluating(ensemble), calculating_in(precision, ensemble):
        return permutation_importances(
            column_names(model),
            next(predict(model._prepared(used.X), 1)),
            permuted,
            used.y,
            data="out-of-fold",
            weight=used.weight,
            members=members[mixture.places[mixture.folds].T.numpy()],
            repeats=repeats,
            seed=seed,
        )


def _mixtures(
    run: Run, folds: Folds, mixture: FoldMixture, inputs: np.ndarray
) -> Iterator[Predictive]:
    """Out-of-fold predictions of several copies of the points of all folds [C, K b, D].

    One forward pass has them all: in each fold its points of every copy.
    """
    ensemble, shape = run.ensemble, run.target_shape
    copies = torch.as_tensor(inputs).to(ensemble.device, ensemble.dtype)
    x = copies.unflatten(1, (folds.count, -1)).transpose(0, 1).flatten(0, 2)
    outputs = fold_outputs(ensemble, x, range(ensemble.members), folds)[ensemble.alive].cpu()
    axes = None if shape is None else 1 + len(shape)
    for each in outputs.unflatten(1, (len(copies), -1)).unbind(1):
        yield Predictive(mixture.mixed(each), run.likelihood, None, axes)


def _check_columns(X: Any) -> None:
    if not is_table(X) and X.ndim != 2:
        raise ConfigError(
            f"X has {X.ndim} axes, so it has no columns to permute; importances are for tables"
        )


def _with_permuted(X: Any, jobs: Sequence[Permuted]) -> Any:
    """Copies of X below each other, each with one column permuted."""
    rows = np.tile(np.arange(len(X)), len(jobs))
    copies = rows_of(X, rows)
    for column in sorted({j for j, _ in jobs}):
        source = rows.copy()
        for place, (j, order) in enumerate(jobs):
            if j == column:
                source[place * len(X) : (place + 1) * len(X)] = order
        if is_table(X):
            copies.isetitem(column, X.iloc[source, column].array)
        else:
            copies[:, column] = X[source, column]
    return copies


def explained(model: Any, points: Any, run: Any) -> Explanation | None:
    """What the report says about the columns: importances, and curves of the strongest ones.

    The importances have two permutations of at most 500 points, the curves 25 values at 200 points.
    Only the run of the model itself is explained.
    """
    own = run.provenance.get("run_id") == model.run_.provenance.get("run_id")
    if not own or len(points.y) < 2 or (not is_table(points.X) and points.X.ndim != 2):
        return None
    order = np.random.default_rng(0).permutation(len(points.y))
    found = _whole(model, points.rows(np.sort(order[:MOST])), "test", repeats=2)
    low, few = found.interval()[0], points.rows(np.sort(order[:FEW]))
    strongest = [j for j in np.argsort(-found.mean)[:CURVES] if low[j] > 0]
    curves = [partial_dependence(model, few.X, int(j), 25) for j in strongest]
    return Explanation(found, tuple(curves))


def partial_dependence(
    model: Any, X: Any, column: str | int, grid: int | Sequence[Any] | np.ndarray = 50
) -> PartialDependence:
    """The partial dependence of a fitted estimator on one column of X, checked by the estimator."""
    _check_columns(X)
    names = column_names(model)
    index = _index(names, column)
    kind, values = _grid(X, index, names[index], grid)
    block = max(1, AT_ONCE // len(X))
    parts = [
        model.predictive(_with_value(X, index, values[start : start + block]))
        for start in range(0, len(values), block)
    ]
    return dependence_of(names[index], kind, values, Predictive.concat(parts))


def _index(names: Sequence[str], column: str | int) -> int:
    if isinstance(column, str) and column in names:
        return names.index(column)
    if isinstance(column, int | np.integer) and -len(names) <= column < len(names):
        return int(column) % len(names)
    raise DataError(
        f"there is no column {column!r}; the columns are {', '.join(names[:10])}"
        f"{' ...' if len(names) > 10 else ''}"
    )


def _grid(X: Any, index: int, name: str, grid: Any) -> tuple[str, np.ndarray]:
    """Kind of the column, and the values at which to predict.

    A whole number asks for so many values between the quantiles 0.05 and 0.95, or for all values
    if the column has no more, as in scikit-learn. Categories always have all values.
    """
    column = X.iloc[:, index] if is_table(X) else X[:, index]
    kind = kind_of(column) if is_table(X) else "numbers"
    if not isinstance(grid, int | np.integer):
        values = np.asarray(grid, dtype=object if kind == "categories" else None)
        if values.ndim != 1 or not len(values):
            raise DataError("grid must be a number of values, or a list of them")
        return kind, values.astype("datetime64[s]") if kind == "dates" else values
    if grid < 2:
        raise DataError(f"grid={grid} came; give 2 values or more, or a list of values")
    if kind == "categories":
        values = require("pandas", extra="frames").unique(column.dropna().astype(object))
        return kind, np.asarray(sorted(values, key=str), dtype=object)
    one = X.iloc[:, [index]] if is_table(X) else X[:, [index]]
    numbers = (as_seconds(one) if kind == "dates" else as_numbers(one))[:, 0]
    known = numbers[~np.isnan(numbers)]
    if not len(known):
        raise DataError(f"column {name!r} has gaps only; give the values, grid=[...]")
    values = np.unique(known)
    if len(values) > grid:
        low, high = np.asarray(mquantiles(known, [0.05, 0.95]))
        values = np.linspace(low, high, int(grid))
    return kind, values.astype("datetime64[s]") if kind == "dates" else values


def _with_value(X: Any, index: int, values: np.ndarray) -> Any:
    """Copies of X below each other, each with one value in the column."""
    copies = rows_of(X, np.tile(np.arange(len(X)), len(values)))
    column = np.repeat(values, len(X))
    if is_table(X):
        copies.isetitem(index, column)
    else:
        copies[:, index] = column
    return copies

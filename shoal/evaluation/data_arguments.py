"""Data arguments of the functions about a run, turned into a `Dataset`."""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, TypeGuard

import numpy as np
import torch
from torch import Tensor

from shoal.core.arguments import list_of, text
from shoal.core.devices import usable_device
from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.sources import gathered, gathered_inputs
from shoal.data.corruptions import SEVERITIES, with_corruptions
from shoal.data.dataset import Dataset, Split
from shoal.data.load import load as load_data
from shoal.prediction.predictive import ArrayLike
from shoal.training.folder.own_data import data_name, has_own_data, own_data, what_to_type
from shoal.training.folder.run import Run, opened

__all__ = [
    "Inputs",
    "Labelled",
    "Shifts",
    "evaluation_data",
    "opened",
    "placed",
    "splits_of",
    "training_data",
]

Inputs = Tensor | np.ndarray | Split | Iterable[Any]
"""An array or tensor [B, ...], a `Split`, or a loader of batches."""

Labelled = tuple[ArrayLike, ArrayLike] | Split | Iterable[Any]
"""A pair (x, y), a `Split`, or a loader of batches (x, y)."""

Shifts = Mapping[str, Inputs | Labelled] | str | Sequence[str]
"""Changed test inputs by name, or names of corruptions."""


def placed(run: Run, device: torch.device | str | None) -> Run:
    """The run with its members on a device; the user's run is not moved."""
    if device is None or (there := usable_device(device)) == run.ensemble.device:
        return run
    return replace(run, ensemble=copy.deepcopy(run.ensemble).to(there))


def evaluation_data(
    run: Run,
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    ood: Mapping[str, Inputs] | None = None,
    shifts: Shifts | None = None,
    severities: Sequence[int] = SEVERITIES,
    verb: str = "evaluate",
) -> Dataset:
    """The data set on which a run is evaluated; see `shoal.evaluate`."""
    if data is None:
        advice = f"type: {what_to_type(verb, run.config)}"
        dataset = own_data(run, _name(run), advice)
        if dataset.test is None and has_own_data(run.config):
            raise ConfigError(f"the data of {_name(run)} have no test set; {advice}")
    elif isinstance(data, Dataset):
        dataset = data
    elif _is_description(data):
        dataset = load_data(data)
    else:
        dataset = _tested(run, gathered(data, run.ensemble.dtype))
    read = partial(gathered_inputs, dtype=run.ensemble.dtype, takes=run.ensemble.takes_inputs)
    return _with_shifts(_with_ood(dataset, ood, read), shifts, severities, read)


def training_data(
    run: Run | None,
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    test: Labelled | None = None,
    advice: str = "pass data=(x, y)",
    dtype: torch.dtype = torch.float32,
) -> Dataset:
    """The data set on which a run was trained, with a test set.

    Args:
        run: the run; None if there is no run yet, and `data` is required.
        data: a data set, or training data; None loads the data set of the run.
        test: test set, in place of that of the data set.
        advice: what to do if the data of the run cannot be loaded.
        dtype: type of floating-point numbers.
    """
    if data is None and run is not None:
        dataset = own_data(run, _name(run), advice)
    elif isinstance(data, Dataset):
        dataset = data
    elif _is_description(data):
        dataset = load_data(data)
    else:
        name = data_name({} if run is None else run.config)
        dataset = Dataset(name, gathered(data, dtype))
    return dataset if test is None else replace(dataset, test=gathered(test, dtype))


def splits_of(
    data: Dataset | Labelled,
    test: Labelled | None,
    ood: Mapping[str, Inputs] | None,
    shifts: Shifts | None,
) -> Dataset:
    """A data set of training data, test set, OOD sets and shifts."""
    dataset = training_data(None, data, test)
    return _with_shifts(
        _with_ood(dataset, ood, gathered_inputs), shifts, SEVERITIES, gathered_inputs
    )


def _is_description(data: Any) -> TypeGuard[str | Mapping[str, Any]]:
    """Whether data are named or described by a table, not a dict of tensors."""
    if isinstance(data, str):
        return True
    return isinstance(data, Mapping) and not any(hasattr(v, "__array__") for v in data.values())


def _name(run: Run) -> str:
    return "this run" if run.folder is None else str(run.folder)


def _tested(run: Run, test: Split) -> Dataset:
    """A data set with a test set only; its training data are empty."""
    if test.y is None:
        raise DataError("a run is evaluated on inputs and targets; pass a pair (x_test, y_test)")
    pixels = run.provenance.get("pixel_range") if hasattr(run, "provenance") else None
    return Dataset(
        data_name(run.config),
        train=Split(test.x[:0], test.y[:0]),
        test=test,
        pixel_range=None if pixels is None else (float(pixels[0]), float(pixels[1])),
    )


def _with_ood(
    data: Dataset, ood: Mapping[str, Inputs] | None, read: Callable[[Any], Split]
) -> Dataset:
    if ood is None:
        return data
    _check_names("ood", ood)
    splits = {name: read(x) for name, x in ood.items()}
    _check_shapes("ood", splits, data)
    return replace(data, ood={**data.ood, **splits})


def _with_shifts(
    data: Dataset,
    shifts: Shifts | None,
    severities: Sequence[int],
    read: Callable[[Any], Split],
) -> Dataset:
    if shifts is None:
        return data
    if isinstance(shifts, str):
        return with_corruptions(data, shifts, severities)
    if not isinstance(shifts, Mapping):
        return with_corruptions(data, list_of(text)("shifts", shifts), severities)
    _check_names("shifts", shifts)
    splits = {name: read(split) for name, split in shifts.items()}
    _check_shapes("shifts", splits, data)
    targets = None if data.test is None else data.test.y
    for name, split in splits.items():
        if split.y is None and (targets is None or len(targets) != len(split)):
            raise DataError(
                f"the shift '{name}' has {len(split)} inputs without targets, but the test set "
                f"has another number of targets; pass a pair (x, y)"
            )
    named = {
        n: split if split.y is not None else Split(split.x, targets) for n, split in splits.items()
    }
    return replace(data, shifts={**data.shifts, **named})


def _check_names(what: str, splits: Any) -> None:
    named = isinstance(splits, Mapping) and all(isinstance(name, str) for name in splits)
    if not named:
        raise DataError(
            f"{what} is a dict of names to inputs, not {type(splits).__name__}; "
            f"type {what}={{'letters': x}}"
        )


def _check_shapes(what: str, splits: Mapping[str, Split], data: Dataset) -> None:
    wanted = data.input_shape
    for name, split in splits.items():
        if tuple(split.x.shape[1:]) != wanted:
            raise DataError(
                f"the inputs of {what} '{name}' have shape {tuple(split.x.shape[1:])}, "
                f"but test inputs have shape {wanted}"
            )

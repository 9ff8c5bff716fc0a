"""The UCI regression problems: their tables as text, and their standard splits."""

import io
from typing import Literal

import numpy as np
import torch

from shoal.core.display.progress import notice
from shoal.core.errors import ConfigError, DataError
from shoal.core.random import generator
from shoal.core.registry import nearest
from shoal.core.storage.files import write_bytes
from shoal.data.catalogue import UCI_PATH, UCI_TEXT
from shoal.data.dataset import Dataset, Scaling, Split, registry, standardise
from shoal.data.files.download import fetch_bytes
from shoal.data.files.raw import content_digest
from shoal.data.files.readers import read_arrays
from shoal.data.files.store import cache, in_cache, path_of, writing

__all__ = ["PROBLEMS", "fetch_problem", "uci"]

_FOLDERS = {
    "boston": "bostonHousing",
    "concrete": "concrete",
    "energy": "energy",
    "kin8nm": "kin8nm",
    "naval": "naval-propulsion-plant",
    "power": "power-plant",
    "protein": "protein-tertiary-structure",
    "wine": "wine-quality-red",
    "yacht": "yacht",
}

_SPLITS = {"protein": 5}

_LARGEST = 64 << 20


def fetch_problem(problem: str, base: str = UCI_TEXT) -> list[np.ndarray]:
    """Inputs [N, D], targets [N] and test masks [splits, N] of one problem."""
    address = f"{base}{_FOLDERS[problem]}/data/"
    splits = _SPLITS.get(problem, 20)
    notice(f"downloading the UCI problem '{problem}' and its {splits} splits")
    table = _numbers(address + "data.txt", 2)
    columns, target = (
        _places(address, f"index_{of}.txt", table.shape[1]) for of in ("features", "target")
    )
    test = np.zeros((splits, len(table)), bool)
    for split in range(splits):
        test[split, _places(address, f"index_test_{split}.txt", len(table))] = True
    return [np.ascontiguousarray(table[:, columns]), table[:, target[0]].copy(), test]


def _places(address: str, name: str, end: int) -> np.ndarray:
    numbers = _numbers(address + name, 1)
    places = numbers.astype(np.int64)
    if (places != numbers).any() or places.min() < 0 or places.max() >= end:
        raise DataError(f"{address}{name} lists indices outside 0 to {end - 1}")
    return places


def _numbers(address: str, axes: Literal[1, 2]) -> np.ndarray:
    try:
        lines = fetch_bytes(address, _LARGEST, UCI_PATH).decode("ascii").splitlines()
        table = np.loadtxt(lines, ndmin=axes)
    except ValueError as error:
        raise DataError(f"{address} is not a table of numbers ({error})") from None
    if table.size == 0:
        raise DataError(f"{address} is empty")
    return table


PROBLEMS = {
    "boston": "090b9fae7432d692a3d063c4fe5e28aa8ea20e836200db4fda7f21fdfc226187",
    "concrete": "264f6d3269cfdc25e069cf88e89fb177c79554320691d6858aeffbab71bab467",
    "energy": "320988ea77b8cd2815af7fe347a18744692723f670c0b161ee4f1a4cfa072f27",
    "kin8nm": "64459916f4f9e48e7905c7cb7dd2e47cd01170026fb676816477df6a93f33aa2",
    "naval": "0ba9cc6494e1889e0abe1d69bbaf92a6ce363e2a3129adce1e0055249ca1aa36",
    "power": "19060142dc0622803009ed7c381caaa7af2da006e6fc71d6005c732f70b2f727",
    "protein": "53aa6c88f2a30bfb796a97f66bc4a70659fec64f515c8f66ac53c0723806d778",
    "wine": "5034337639fe6df420586878f9564f14d9d318a42763ff4e7d5018c170b485f3",
    "yacht": "c13783261d22bf9bfdd2c863102c9a692b8f61ee5cb999a3266c0b9da391f056",
}
"""The problems, each with the SHA-256 of its inputs, targets and splits."""

_ARRAYS = ("x", "y", "test")


@registry.register("uci", cite=("hernandez2015probabilistic", "gal2016dropout"))
def uci(problem: str = "boston", split: int = 0, validation: int = 0, seed: int = 0) -> Dataset:
    """One of nine regression problems of the UCI repository, in one of its published splits.

    The test set has a tenth of the points. Inputs and targets are standardised by the mean and the
    standard deviation of the training data. `Dataset.scaling` converts back to the units of the
    targets, in which papers report RMSE and log-likelihood.

    Args:
        problem: boston, concrete, energy, kin8nm, naval, power, protein, wine or yacht.
        split: index of the published split, 0 to 19; 0 to 4 for protein.
        validation: number of training points to hold out.
        seed: fixes the held-out points.
    """
    if problem not in PROBLEMS:
        raise ConfigError(f"there is no UCI problem '{problem}'; {nearest(problem, PROBLEMS)}")
    x, y, held_out = _arrays(problem)
    if not 0 <= split < len(held_out):
        raise ConfigError(
            f"split of '{problem}' must be from 0 to {len(held_out) - 1}, not {split}"
        )
    test = torch.from_numpy(held_out[split])
    train = (~test).nonzero().squeeze(1)
    if not 0 <= validation < len(train) - 1:
        raise ConfigError(f"validation must be from 0 to {len(train) - 2:,}, not {validation}")
    kept, train = _kept(train, validation, seed)
    inputs, _, _ = standardise(torch.from_numpy(x), torch.from_numpy(x)[train])
    targets, mean, std = standardise(torch.from_numpy(y), torch.from_numpy(y)[train])

    def split_of(rows: torch.Tensor) -> Split:
        return Split(inputs[rows].float(), targets[rows].float())

    return Dataset(
        name=f"uci-{problem}",
        train=split_of(train),
        test=split_of(test.nonzero().squeeze(1)),
        validation=split_of(kept) if validation else None,
        scaling=Scaling(float(mean), float(std)),
    )


def _kept(rows: torch.Tensor, count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    if count == 0:
        return rows[:0], rows
    order = torch.randperm(len(rows), generator=generator(seed, "uci", "validation"))
    return rows[order[:count].sort().values], rows[order[count:].sort().values]


def _arrays(problem: str) -> list[np.ndarray]:
    """Inputs, targets and test masks [splits, rows], checked."""
    arrays = _read(problem)
    if arrays is None:
        with writing("uci"):
            arrays = _read(problem)
            if arrays is None:
                _build()
                arrays = _read(problem)
    if arrays is None:
        raise DataError(f"{cache() / UCI_PATH} could not be read back after it was written")
    return arrays


def _read(problem: str) -> list[np.ndarray] | None:
    path = path_of(UCI_PATH)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            held = read_arrays(file, [f"{problem}_{name}" for name in _ARRAYS])
        wrong = "" if _is_sound(problem, list(held.values())) else "its content is altered"
    except DataError as error:
        held, wrong = {}, str(error)
    if not wrong:
        return list(held.values())
    if not in_cache(path):
        raise DataError(f"{path} cannot be used for '{problem}': {wrong}; replace it")
    notice(f"{path} cannot be used for '{problem}': {wrong}; fetching it again")
    path.unlink(missing_ok=True)
    return None


def _is_sound(problem: str, arrays: list[np.ndarray]) -> bool:
    return content_digest(*arrays) == PROBLEMS[problem]


def _build() -> None:
    """Download and check every problem, and write all of them into one file."""
    arrays: dict[str, np.ndarray] = {}
    for problem in PROBLEMS:
        fetched = fetch_problem(problem)
        if not _is_sound(problem, fetched):
            raise DataError(f"the UCI problem '{problem}' differs from the published version")
        arrays |= {f"{problem}_{name}": array for name, array in zip(_ARRAYS, fetched, strict=True)}
    packed = io.BytesIO()
    np.savez_compressed(packed, **arrays)  # type: ignore[arg-type]
    write_bytes(cache() / UCI_PATH, packed.getvalue())

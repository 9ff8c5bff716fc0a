"""UCI problems as they are published: a folder of text each.

`data.txt` is a table, `index_features.txt` and `index_target.txt` name its columns, and
`index_test_k.txt` lists the rows of the k-th test part; the others are to train on.
"""

from typing import Literal

import numpy as np

from shoal.core.errors import DataError
from shoal.core.notices import notice
from shoal.data.catalogue import UCI_PATH, UCI_TEXT
from shoal.data.download import fetch_bytes

__all__ = ["fetch_problem"]

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
        raise DataError(f"{address}{name} lists places outside 0 to {end - 1}")
    return places


def _numbers(address: str, axes: Literal[1, 2]) -> np.ndarray:
    try:
        lines = fetch_bytes(address, _LARGEST, UCI_PATH).decode("ascii").splitlines()
        found = np.loadtxt(lines, ndmin=axes)
    except ValueError as error:
        raise DataError(f"{address} is not a table of numbers ({error})") from None
    if found.size == 0:
        raise DataError(f"{address} is empty")
    return found

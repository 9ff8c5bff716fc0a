"""CIFAR-10H: what people answered when they were shown the test images of CIFAR-10.

Peterson, Battleday, Griffiths & Russakovsky (2019), arXiv 1908.07086; for non-commercial use.
"""

import io
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.files import write_bytes
from shoal.core.notices import notice
from shoal.data.catalogue import VOTES_ADDRESS
from shoal.data.download import fetch_bytes
from shoal.data.raw import content_digest
from shoal.data.readers import read_arrays
from shoal.data.store import cache, in_cache, path_of, writing

__all__ = ["human_labels"]

_PATH = "cifar10/cifar10h_counts.npz"
_CONTENT = "6291dd382f84434ac7233c1d3c1bba7010b614ca8391b848fff4b036b9794f8a"
_LARGEST = 2 << 20


def human_labels() -> Tensor:
    """Share of the people who chose each class, [10000, 10], in the order of CIFAR-10's test.

    A soft label to judge probabilities by: how far is the ensemble's doubt from that of people?
    """
    counts = _read()
    if counts is None:
        with writing("cifar10"):
            counts = _read()
            counts = _fetched() if counts is None else counts
    votes = torch.from_numpy(counts).double()
    return (votes / votes.sum(1, keepdim=True)).float()


def _read() -> np.ndarray | None:
    path = path_of(_PATH)
    if path is None:
        return None
    try:
        with path.open("rb") as file:
            return _checked(read_arrays(file, ("counts",))["counts"])
    except DataError as error:
        return _refuse(path, f"{path} cannot be used: {error}")


def _refuse(path: Path, sentence: str) -> None:
    if not in_cache(path):
        raise DataError(f"{sentence}; replace or remove it")
    notice(f"{sentence}; fetching it again")
    path.unlink(missing_ok=True)


def _checked(counts: np.ndarray) -> np.ndarray:
    if content_digest(counts) != _CONTENT:
        raise DataError("it does not hold the votes of CIFAR-10H")
    return counts


def _fetched() -> np.ndarray:
    """The published array as bytes, kept under the name that a shared folder has it."""
    content = io.BytesIO(fetch_bytes(VOTES_ADDRESS, _LARGEST, _PATH))
    try:
        published = np.lib.format.read_array(content, allow_pickle=False)
        counts = _checked(published.astype(np.uint8))
    except ValueError as error:
        raise DataError(f"{VOTES_ADDRESS} cannot be used: {error}") from None
    packed = io.BytesIO()
    np.savez_compressed(packed, counts=counts)
    write_bytes(cache() / _PATH, packed.getvalue())
    return counts

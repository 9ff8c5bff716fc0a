"""CIFAR-10H: what people answered when they were shown the test images of CIFAR-10.

Peterson, Battleday, Griffiths & Russakovsky (2019), arXiv 1908.07086; for non-commercial use.
"""

import io

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.files import write_bytes
from shoal.data.catalogue import VOTES_TEXT
from shoal.data.download import fetch_bytes
from shoal.data.raw import content_digest
from shoal.data.readers import read_arrays
from shoal.data.store import cache, path_of, writing

__all__ = ["human_labels"]

_PATH = "cifar10/cifar10h_counts.npz"
_CONTENT = "6291dd382f84434ac7233c1d3c1bba7010b614ca8391b848fff4b036b9794f8a"
_LARGEST = 2 << 20


def human_labels() -> Tensor:
    """Share of the people who chose each class, [10000, 10], in the order of CIFAR-10's test.

    A soft label to judge probabilities by: how far is the ensemble's doubt from that of people?
    """
    path = path_of(_PATH)
    if path is None:
        with writing("cifar10"):
            _build()
        path = cache() / _PATH
    try:
        with path.open("rb") as file:
            counts = read_arrays(file, ("counts",))["counts"]
    except DataError as error:
        raise DataError(f"{path} cannot be used: {error}") from None
    if content_digest(counts) != _CONTENT:
        raise DataError(f"{path} is altered: it does not hold the votes of CIFAR-10H; remove it")
    votes = torch.from_numpy(counts).double()
    return (votes / votes.sum(1, keepdim=True)).float()


def _build() -> None:
    """The published array, smaller, under the name that a shared folder has it."""
    published = np.lib.format.read_array(
        io.BytesIO(fetch_bytes(VOTES_TEXT, _LARGEST)), allow_pickle=False
    )
    packed = io.BytesIO()
    np.savez_compressed(packed, counts=published.astype(np.uint8))
    write_bytes(cache() / _PATH, packed.getvalue())

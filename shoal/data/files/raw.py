"""Images and labels of the public data sets, as bytes, from their published files."""

import hashlib
import io
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.core.display.progress import notice
from shoal.core.errors import DataError
from shoal.core.optional import require
from shoal.core.storage.disk import storage_errors
from shoal.core.storage.files import write_bytes
from shoal.data.catalogue import CIFAR_BATCHES, CIFAR_TAR, COLLECTIONS, VOTES_ADDRESS
from shoal.data.files.download import fetch_bytes
from shoal.data.files.readers import read_arrays, read_idx
from shoal.data.files.store import cache, in_cache, obtain, path_of, writing

__all__ = [
    "RAW",
    "Images",
    "content_digest",
    "human_labels",
    "read_batch",
    "read_svhn_mat",
    "read_svhn_npz",
]

Images = tuple[np.ndarray, np.ndarray]
"""Bytes [N, C, H, W] and labels [N]."""

SVHN_TEST = 10_000
"""Size of the test set, the first house numbers, as in published comparisons."""

_SVHN_NPZ = "svhn/test_10k.npz"

_SVHN_CONTENT = "d90cc38cdd293f35495dc3fe0f14fbab1a6772ebaf4bae0e32e5d9f7d289885e"

_RECORD = 1 + 3 * 32 * 32


def content_digest(*arrays: np.ndarray) -> str:
    """SHA-256 of the numbers in arrays, independent of the file format."""
    total = hashlib.sha256()
    for array in arrays:
        total.update(np.ascontiguousarray(array).data)
    return total.hexdigest()


def read_batch(path: Path) -> Images:
    """A binary batch of CIFAR-10: records of a label and the bytes of 3 x 32 x 32."""
    with storage_errors("read", path):
        size = path.stat().st_size
        content = np.fromfile(path, np.uint8) if size and size % _RECORD == 0 else None
    if content is None:
        raise DataError(f"{path} has {size:,} bytes, not a whole number of records of {_RECORD:,}")
    records = content.reshape(-1, _RECORD)
    return _checked(records[:, 1:].reshape(-1, 3, 32, 32), records[:, 0], path)


def read_svhn_npz(path: Path) -> Images:
    """The first 10,000 test digits, `x` (N, 32, 32, 3) and `y`; other content is refused."""
    with path.open("rb") as file:
        try:
            arrays = read_arrays(file, ("x", "y"))
        except DataError as error:
            raise DataError(f"{path} cannot be used: {error}") from None
    if content_digest(arrays["x"], arrays["y"]) != _SVHN_CONTENT:
        raise DataError(f"{path} is altered: it does not hold the first 10,000 test digits of SVHN")
    return arrays["x"].transpose(0, 3, 1, 2), arrays["y"]


def read_svhn_mat(path: Path, first: int | None = None) -> Images:
    """House numbers from a MATLAB file, `X` (32, 32, 3, N) and `y` with 10 for zero."""
    try:
        variables = require("scipy.io", extra="report").loadmat(path, variable_names=("X", "y"))
        x, y = variables["X"], variables["y"].ravel()
    except (KeyError, ValueError, TypeError, OSError) as error:
        raise DataError(f"{path} is not a MATLAB file with X and y ({error})") from error
    if x.dtype != np.uint8 or x.shape[:3] != (32, 32, 3) or x.shape[3] != len(y):
        raise DataError(
            f"{path} holds X of shape {x.shape} and {len(y)} labels; wanted 32 x 32 x 3"
        )
    digits = (y[:first] % 10).astype(np.uint8)
    return _checked(x[..., :first].transpose(3, 2, 0, 1), digits, path)


def _checked(x: np.ndarray, y: np.ndarray, path: Path) -> Images:
    if y.max() > 9:
        place = int(np.argmax(y > 9))
        raise DataError(f"{path} has label {y[place]} at place {place}; wanted 0 to 9")
    return x, y


def _idx(name: str, split: str) -> Images:
    start = "train" if split == "train" else "t10k"
    files = [f for f in COLLECTIONS[name].files if f.path.startswith(f"{name}/{start}-")]
    images, labels = obtain(*files)
    x, y = read_idx(images, 3), read_idx(labels, 1)
    if len(x) != len(y):
        raise DataError(f"{images} has {len(x)} images, but {labels} has {len(y)} labels")
    return _checked(x[:, None], y, labels)


def _cifar10(split: str) -> Images:
    wanted = CIFAR_BATCHES[:-1] if split == "train" else CIFAR_BATCHES[-1:]
    batches = [read_batch(path) for path in obtain(*wanted, archive=CIFAR_TAR)]
    images, labels = zip(*batches, strict=True)
    return np.concatenate(images), np.concatenate(labels)


def _svhn(split: str) -> Images:
    train, test = COLLECTIONS["svhn"].files
    if split == "train":
        return read_svhn_mat(obtain(train)[0])
    packed = path_of(_SVHN_NPZ)
    if packed is not None:
        return read_svhn_npz(packed)
    return read_svhn_mat(obtain(test)[0], SVHN_TEST)


RAW: dict[str, Callable[[str], Images]] = {
    **{name: partial(_idx, name) for name in ("mnist", "fashion-mnist", "kmnist", "notmnist")},
    "cifar10": _cifar10,
    "svhn": _svhn,
}
"""For each data set, images by split, `"train"` or `"test"`; NotMNIST has a test set only."""


_PATH = "cifar10/cifar10h_counts.npz"

_CONTENT = "6291dd382f84434ac7233c1d3c1bba7010b614ca8391b848fff4b036b9794f8a"

_LARGEST = 2 << 20


def human_labels() -> Tensor:
    """Share of people who chose each class [10000, 10], in the order of the CIFAR-10 test set.

    These soft labels serve to evaluate predicted probabilities against human uncertainty.
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
            return _checked_labels(read_arrays(file, ("counts",))["counts"])
    except DataError as error:
        return _refuse(path, f"{path} cannot be used: {error}")


def _refuse(path: Path, sentence: str) -> None:
    if not in_cache(path):
        raise DataError(f"{sentence}; replace or remove it")
    notice(f"{sentence}; fetching it again")
    path.unlink(missing_ok=True)


def _checked_labels(counts: np.ndarray) -> np.ndarray:
    if content_digest(counts) != _CONTENT:
        raise DataError("it does not hold the votes of CIFAR-10H")
    return counts


def _fetched() -> np.ndarray:
    """The published array as bytes, stored under its name in a shared folder."""
    content = io.BytesIO(fetch_bytes(VOTES_ADDRESS, _LARGEST, _PATH))
    try:
        published = np.lib.format.read_array(content, allow_pickle=False)
        counts = _checked_labels(published.astype(np.uint8))
    except ValueError as error:
        raise DataError(f"{VOTES_ADDRESS} cannot be used: {error}") from None
    packed = io.BytesIO()
    np.savez_compressed(packed, counts=counts)
    write_bytes(cache() / _PATH, packed.getvalue())
    return counts

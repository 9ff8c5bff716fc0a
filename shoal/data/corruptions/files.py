"""The published files of CIFAR-10-C, if they are downloaded.

Zenodo record 2535967: for each corruption one `.npy` of 50,000 byte images [N, 32, 32, 3], those of
severity 1 first, and `labels.npy`. The files are mapped into memory and read on demand.
"""

from pathlib import Path

import numpy as np
import torch
from numpy.lib import format as npy

from shoal.core.errors import DataError, StorageError
from shoal.core.storage.disk import storage_errors
from shoal.data.corruptions.registry import SEVERITIES
from shoal.data.dataset import Split
from shoal.data.files.store import folders

__all__ = ["FOLDER", "PublishedFiles"]

FOLDER = "CIFAR-10-C"


class PublishedFiles:
    """The files of CIFAR-10-C; errors in a file appear when it is first opened.

    Args:
        place: folder of the files; None for `CIFAR-10-C` in the data folders.
    """

    def __init__(self, place: Path | str | None = None) -> None:
        found = [place / FOLDER for place in folders()] if place is None else [Path(place)]
        self.place = next((path for path in found if path.is_dir()), found[0])

    def __call__(self, name: str, severity: int) -> Split:
        """Images of one corruption and severity, with their labels."""
        images, labels = self._images(name), self._labels()
        count = len(images) // len(SEVERITIES)
        rows = slice((severity - 1) * count, severity * count)
        x = torch.from_numpy(np.array(images[rows])).permute(0, 3, 1, 2).float() / 255
        return Split(x.contiguous(), torch.from_numpy(labels[rows].astype(np.int64)))

    def count(self, name: str) -> int:
        """Number of images per severity, after a check of the file."""
        images, labels = self._images(name), self._labels()
        if len(labels) != len(images):
            raise DataError(
                f"{self.place} has {len(labels):,} labels, but {len(images):,} images in "
                f"{_file(name)}; download them again"
            )
        return len(images) // len(SEVERITIES)

    def _images(self, name: str) -> np.ndarray:
        images = self._mapped(_file(name))
        sound = images.dtype == np.uint8 and images.ndim == 4 and images.shape[-1] == 3
        if not sound or not len(images) or len(images) % len(SEVERITIES):
            raise DataError(
                f"{self.place / _file(name)} holds {images.dtype} {list(images.shape)}; "
                f"wanted bytes [5 n, 32, 32, 3], n images at each of five severities"
            )
        return images

    def _labels(self) -> np.ndarray:
        labels = self._mapped("labels.npy")
        if labels.dtype.kind not in "iu" or labels.ndim != 1:
            raise DataError(
                f"{self.place / 'labels.npy'} holds {labels.dtype} {list(labels.shape)}; "
                f"wanted one whole number per image"
            )
        return labels

    def _mapped(self, file: str) -> np.ndarray:
        path = self.place / file
        if not path.is_file():
            raise StorageError(
                f"there is no file {path}; unpack CIFAR-10-C (Zenodo record 2535967) there, or "
                f"leave out corruption_files, so that Shoal computes the corruptions"
            )
        # Python's parser raises any error for a damaged header.
        with storage_errors("read", path):
            try:
                return npy.open_memmap(path, mode="r")
            except OSError:
                raise
            except Exception as error:
                raise DataError(f"{path} is not a sound array of numpy ({error})") from None


def _file(name: str) -> str:
    return f"{name.replace('-', '_')}.npy"

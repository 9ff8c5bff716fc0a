"""Members that live in the memory of the host or on disk, and visit the device in blocks.

The tensors [M, ...] of all members, and all that belongs to every member, stay on the host. Blocks
of members are copied to the device, and changed tensors are copied back.
"""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.storage.disk import storage_errors
from shoal.engine.resources.transfer import Block, block_transfer

__all__ = ["Offload"]


class Offload:
    """Where the members of an ensemble live, and how they reach the device.

    Attributes:
        device: device of the computation.
        resident: number of members on the device at a time.
        place: "host" or "disk".
    """

    def __init__(
        self, device: torch.device, resident: int, place: str = "host", folder: Path | None = None
    ) -> None:
        """Prepare the transfer.

        Args:
            device: device of the computation.
            resident: number of members on the device at a time.
            place: "host" for the memory of the host, "disk" for files.
            folder: folder of the files; None for the folder of temporary files. The files have no
                names, so nothing remains of them after the process.
        """
        self.device, self.resident, self.place, self.folder = device, resident, place, folder
        self._files: dict[int, mmap.mmap] = {}
        self._transfer = block_transfer(device, place == "disk", self._release)

    def __deepcopy__(self, memo: dict[int, Any]) -> "Offload":
        return self

    @property
    def slots(self) -> int:
        """Blocks on the device at a time: on a GPU one is computed, another is on its way."""
        return self._transfer.slots

    @property
    def block(self) -> int:
        """Members per block."""
        return max(self.resident // self.slots, 1)

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor on the host, with any numbers."""
        count = torch.Size(shape).numel()
        if self.place == "disk" and count:
            return self._mapped(count * dtype.itemsize).view(dtype).view(*shape)
        pinned = self.device.type == "cuda"
        return torch.empty(*shape, dtype=dtype, pin_memory=pinned)

    def stored(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """A copy of a tensor [M, ...] on the host, made row by row."""
        copy = self.empty(tensor.shape, dtype or tensor.dtype)
        for to, row in zip(copy.split(1), tensor.detach().split(1), strict=True):
            to.copy_(row)
            self._release(to)
        return copy

    def visit(self, blocks: Sequence[Block]) -> Iterator[list[Tensor]]:
        """Copies of the blocks on the device, see `BlockTransfer.visit`."""
        return self._transfer.visit(blocks)

    def store(self, host: Tensor, value: Tensor) -> None:
        """Copy a value to its place on the host, see `BlockTransfer.store`."""
        self._transfer.store(host, value)

    def flush(self) -> None:
        """Wait until everything is on the host."""
        self._transfer.flush()

    def _mapped(self, size: int) -> Tensor:
        folder = None if self.folder is None else str(self.folder)
        with storage_errors("write", Path(folder or tempfile.gettempdir())):
            with tempfile.TemporaryFile(dir=folder) as file:
                _reserve(file.fileno(), size)
                mapped = mmap.mmap(file.fileno(), size)
        tensor = torch.frombuffer(mapped, dtype=torch.uint8)
        self._files[tensor.untyped_storage().data_ptr()] = mapped
        return tensor

    def _release(self, tensor: Tensor) -> None:
        """Let the system take back the memory of a tensor in a file; the file keeps the numbers."""
        start = tensor.untyped_storage().data_ptr()
        mapped = self._files.get(start)
        if mapped is None or not hasattr(mmap, "MADV_DONTNEED"):
            return
        first, last = 0, len(mapped)
        if tensor.is_contiguous():
            first = tensor.data_ptr() - start
            last = first + tensor.numel() * tensor.element_size()
        first -= first % mmap.PAGESIZE
        mapped.madvise(mmap.MADV_DONTNEED, first, last - first)


def _reserve(file: int, size: int) -> None:
    """Give the file its size; a full disk is found now, not as a fault in the middle of a step."""
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file, 0, size)
    else:
        os.ftruncate(file, size)

"""Draws of chains, in memory and as files that are written while the chains move.

A folder `sampling` holds the state of the chains as a checkpoint, and the draws so far in files of
flat weights [k, M, D]. The checkpoint has the SHA-256 of every file. Files that it does not name
were written after it, and the chains will write them again. When all draws are there, they become
the members of an ordinary run, and the folder is removed.
"""

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt
from shoal.core.storage.checkpoints import load_checkpoint, save_checkpoint, steps
from shoal.core.storage.files import read_tensors, sha256, write_tensors
from shoal.core.types import Tree

__all__ = ["DrawStore"]

BLOCK = 64 << 20
"""Bytes of draws that wait on a GPU: fetching one draw would wait for its step."""


class DrawStore:
    """The draws [K, M, D] of M chains, in the chosen precision.

    Attributes:
        draws: memory for all draws, on the CPU.
        count: number of draws so far.
    """

    def __init__(
        self, shape: tuple[int, int, int], dtype: torch.dtype, folder: Path | None
    ) -> None:
        self.draws = torch.empty(shape, dtype=dtype)
        self.count, self._written = 0, 0
        self._files: dict[str, str] = {}
        self._folder = None if folder is None else folder / "sampling"
        self._block: Tensor | None = None
        self._waiting = 0

    def add(self, x: Tensor) -> None:
        """Keep the positions of all chains [M, D]; those on a GPU wait there for others."""
        if x.device.type == "cpu":
            self.draws[self.count].copy_(x)
        else:
            if self._block is None:
                most = max(BLOCK // (x.numel() * self.draws.itemsize), 1)
                shape = min(most, len(self.draws)), *x.shape
                self._block = torch.empty(shape, dtype=self.draws.dtype, device=x.device)
            self._block[self._waiting].copy_(x)
            self._waiting += 1
        self.count += 1
        if self._block is not None and self._waiting == len(self._block):
            self.collect()

    def collect(self) -> None:
        """Fetch the draws that wait on a GPU."""
        if self._block is not None and self._waiting:
            first = self.count - self._waiting
            self.draws[first : self.count].copy_(self._block[: self._waiting])
            self._waiting = 0

    def save(self, step: int, state: Tree, values: Mapping[str, Any]) -> None:
        """Write the draws since the last save, then the state of the chains that refers to them."""
        if self._folder is None:
            return
        self.collect()
        if self.count > self._written:
            name = f"draws-{self._written:09d}.safetensors"
            part = self.draws[self._written : self.count]
            write_tensors(self._folder / name, {"x": part})
            self._files[name] = sha256(self._folder / name)
            self._written = self.count
        about = {**values, "files": self._files, "count": self.count}
        save_checkpoint(self._folder, step, {"chains": state}, about)

    def restore(self, device: torch.device) -> tuple[int, Tree, dict[str, Any]] | None:
        """Step, state and values of the last save; None if there is none."""
        if self._folder is None or not steps(self._folder):
            return None
        saved = load_checkpoint(self._folder)
        self._files = dict(saved.state["files"])
        self.count = 0
        for name, digest in sorted(self._files.items()):
            path = self._folder / Path(name).name
            if sha256(path) != digest:
                raise CheckpointCorrupt(f"{path} is not what was saved; draw again, without resume")
            part = read_tensors(path)["x"]
            self.draws[self.count : self.count + len(part)] = part
            self.count += len(part)
        if self.count != saved.state["count"]:
            raise CheckpointCorrupt(f"{self._folder} lacks draws; draw again, without resume")
        self._written = self.count
        return saved.step, {n: t.to(device) for n, t in saved.parts["chains"].items()}, saved.state

    def clear(self) -> None:
        """Remove the files: the draws have become a run."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

"""Images of the pre-trained study: a small file that travels, and the sets made from it.

The sets that judge are `test`, `corrupted` and `svhn`. Strengths and points are chosen on `held`
and `shifted`, which come from the training images of CIFAR-10.

| set | images |
| --- | --- |
| train | training images 0 to 15,999; seed s with 1,000 images has 1,000 s to 1,000 s + 999 |
| held | training images 48,000 to 49,999 |
| shifted | `held`, rotated by 15 to 45 degrees: none of the nineteen corruptions |
| test | test images 0 to 2,999 |
| corrupted | test images 0 to 999 under nineteen corruptions; image i has severity 1 + i mod 5 |
| svhn | test images 0 to 2,999 of SVHN |
| shuffled | training images 30,000 to 31,999, their sixteen patches in random order: points |
| mixed | means of two training images of 30,000 to 31,999: points |
"""

import math
import os
from functools import cached_property
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from shoal.core.random import generator
from shoal.data.corruptions import corrupt
from shoal.data.corruptions import registry as corruptions

__all__ = ["JUDGES", "Images", "pack"]

TRAIN, HELD, POINTS = slice(0, 16_000), slice(48_000, 50_000), slice(30_000, 32_000)
TEST, CORRUPTED, SVHN = 3_000, 1_000, 3_000
JUDGES = ("test", "corrupted", "svhn")
LIMIT = 47 * 2**20
"""Bytes of the packed folder, so that it is easy to copy to another machine."""


def pack(folder: Path, data: Path | None = None) -> int:
    """Write images.xz (lossless) and labels.npy into a folder; returns the folder's bytes."""
    data = data or Path(os.environ.get("SHOAL_DATA", Path.home() / ".cache/shoal-data"))
    batches = data / "cifar10/cifar-10-batches-bin"
    train = np.concatenate([_binary(batches / f"data_batch_{i}.bin") for i in range(1, 6)])
    test = _binary(batches / "test_batch.bin")[:TEST]
    kept = np.concatenate([train[part] for part in (TRAIN, HELD, POINTS)] + [test])
    with np.load(data / "svhn/test_10k.npz") as file:
        digits = file["x"][:SVHN].transpose(0, 3, 1, 2)
    x = np.concatenate([kept[:, 1:].reshape(-1, 3, 32, 32), digits])
    folder.mkdir(parents=True, exist_ok=True)
    _write_xz(folder / "images.xz", _residuals(x))
    np.save(folder / "labels.npy", kept[:, 0])
    assert np.array_equal(_restored(_read_xz(folder / "images.xz")), x), "packing is lossless"
    return sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())


class Images:
    """The sets by name, as bytes [N, 3, 32, 32] on a device."""

    def __init__(self, folder: Path, device: str = "cpu", quick: bool = False) -> None:
        x = torch.from_numpy(_restored(_read_xz(folder / "images.xz")))
        y = torch.from_numpy(np.load(folder / "labels.npy").astype(np.int64))
        sizes = [part.stop - part.start for part in (TRAIN, HELD, POINTS)] + [TEST, SVHN]
        names = ("train", "held", "points", "test", "svhn")
        found = dict(zip(names, x.split(sizes), strict=True))
        if quick:
            found = {name: part[: 400 if name == "train" else 60] for name, part in found.items()}
        labels = dict(zip(names, y.split(sizes[:-1]), strict=False))
        self.labels = {name: part[: len(found[name])].to(device) for name, part in labels.items()}
        self.x = {name: part.to(device) for name, part in found.items()}
        self.corruptible = min(CORRUPTED, len(found["test"]))

    def rows(self, size: int, seed: int) -> slice:
        """Which training images a seed has; a size of 0 is all of them."""
        if not size:
            return slice(None)
        first = seed % max(len(self.x["train"]) // size, 1) * size
        return slice(first, first + size)

    def training(self, size: int, seed: int) -> tuple[Tensor, Tensor]:
        """The training images and labels of a seed."""
        rows = self.rows(size, seed)
        return self.x["train"][rows], self.labels["train"][rows]

    def __getitem__(self, name: str) -> Tensor:
        made = {"shifted": "_shifted", "corrupted": "_corrupted"}
        made |= {"shuffled": "_shuffled", "mixed": "_mixed"}
        return getattr(self, made[name]) if name in made else self.x[name]

    def targets(self, name: str) -> Tensor | None:
        """Labels of a set; None for images of other classes."""
        if name == "corrupted":
            return self.labels["test"][: self.corruptible].repeat(len([*corruptions]))
        return self.labels.get("held" if name == "shifted" else name)

    @cached_property
    def _corrupted(self) -> Tensor:
        """Corruption by corruption; each has every severity for a fifth of the images."""
        clean, found = self.x["test"][: self.corruptible].float() / 255, []
        for name in corruptions:
            done = torch.empty_like(clean)
            for severity in range(1, 6):
                # `first` keys the random numbers; images of one severity need no neighbours
                rows = slice(severity - 1, None, 5)
                done[rows] = corrupt(clean[rows], name, severity)
            found.append((255 * done).round().byte())
        return torch.cat(found)

    @cached_property
    def _shifted(self) -> Tensor:
        x = self.x["held"].float()
        draw = torch.rand(len(x), generator=generator(0, "angles")).to(x)
        sign = 1 - 2.0 * (torch.arange(len(x), device=x.device) % 2)
        angle = sign * math.pi / 12 * (1 + 2 * draw)
        cos, sin, zero = angle.cos(), angle.sin(), torch.zeros_like(angle)
        turn = torch.stack([cos, -sin, zero, sin, cos, zero], 1).reshape(-1, 2, 3)
        grid = torch.nn.functional.affine_grid(turn, list(x.shape), align_corners=False)
        turned = torch.nn.functional.grid_sample(
            x, grid, padding_mode="reflection", align_corners=False
        )
        return turned.round().clamp(0, 255).byte()

    @cached_property
    def _shuffled(self) -> Tensor:
        x = self.x["points"]
        n = len(x)
        patches = x.reshape(n, 3, 4, 8, 4, 8).permute(0, 2, 4, 1, 3, 5).reshape(n, 16, 3, 8, 8)
        order = torch.rand(n, 16, generator=generator(0, "patches")).argsort(1).to(x.device)
        mixed = patches[torch.arange(n, device=x.device)[:, None], order]
        mixed = mixed.reshape(n, 4, 4, 3, 8, 8).permute(0, 3, 1, 4, 2, 5)
        return mixed.reshape(n, 3, 32, 32).contiguous()

    @cached_property
    def _mixed(self) -> Tensor:
        x = self.x["points"].float()
        return ((x + x.roll(1, 0)) / 2).round().byte()


def _binary(path: Path) -> np.ndarray:
    """Rows of a binary batch of CIFAR-10: the label, then 3,072 pixels."""
    return np.fromfile(path, np.uint8).reshape(-1, 3073)


def _residuals(x: np.ndarray) -> np.ndarray:
    """Red and blue minus green, then each pixel minus its prediction from left and upper pixels."""
    planes = np.stack([x[:, 1], x[:, 0] - x[:, 1], x[:, 2] - x[:, 1]])
    left, up = np.zeros_like(planes), np.zeros_like(planes)
    left[..., 1:], up[..., 1:, :] = planes[..., :-1], planes[..., :-1, :]
    corner = np.zeros_like(planes)
    corner[..., 1:, 1:] = planes[..., :-1, :-1]
    return planes - _guess(left, up, corner)


def _restored(residuals: np.ndarray) -> np.ndarray:
    """The inverse of `_residuals`, pixel by pixel for all images at once."""
    r = np.ascontiguousarray(residuals.transpose(2, 3, 0, 1))
    p = np.zeros((33, 33, *r.shape[2:]), np.uint8)
    for i in range(32):
        for j in range(32):
            p[i + 1, j + 1] = r[i, j] + _guess(p[i + 1, j], p[i, j + 1], p[i, j])
    green, red, blue = p[1:, 1:].transpose(2, 3, 0, 1)
    return np.ascontiguousarray(np.stack([red + green, green, blue + green], 1))


def _guess(left: np.ndarray, up: np.ndarray, corner: np.ndarray) -> np.ndarray:
    """The median of left, up and left + up - corner, all as signed bytes (the MED predictor)."""
    a, b, c = (each.view(np.int8).astype(np.int16) for each in (left, up, corner))
    high, low = np.maximum(a, b), np.minimum(a, b)
    middle = np.where(c >= high, low, np.where(c <= low, high, a + b - c))
    return middle.astype(np.uint8)


def _write_xz(path: Path, residuals: np.ndarray) -> None:
    import lzma

    head = np.array(residuals.shape, "<i8").tobytes()
    path.write_bytes(lzma.compress(head + residuals.tobytes(), preset=6))


def _read_xz(path: Path) -> np.ndarray:
    import lzma

    raw = lzma.decompress(path.read_bytes())
    shape = np.frombuffer(raw[:32], "<i8")
    return np.frombuffer(raw, np.uint8, offset=32).reshape(shape)

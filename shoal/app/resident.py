"""The data of a grid: loaded once, moved once, known never to change."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch

from shoal.core.remember import settle
from shoal.data.dataset import Dataset, Split

__all__ = ["ROOM", "Kept", "resident"]

ROOM = {"cpu": 1 << 30, "cuda": 16 << 30}
"""Bytes of shifts that a process keeps; those beyond are made again for each run."""


def resident(data: Dataset, device: torch.device | str | None) -> Dataset:
    """The data set with every part on the device, so that no run has to move or check it again."""
    place = torch.device("cpu" if device is None else device)
    ood = {name: _settled(split, place) for name, split in data.ood.items()}
    shifts: Any = Kept(data.shifts, place, _room(place))
    test = None if data.test is None else _settled(data.test, place)
    return replace(data, train=_settled(data.train, place), test=test, shifts=shifts, ood=ood)


class Kept(Mapping[str, Split]):
    """Parts of a data set by name, each moved to the device and kept there while there is room.

    Args:
        parts: made when asked for, or there already.
        device: where they are wanted.
        room: bytes to keep.
    """

    def __init__(self, parts: Mapping[str, Split], device: torch.device, room: int) -> None:
        self.parts, self.device, self.room = parts, device, room
        self._kept: dict[str, Split] = {}

    def __getitem__(self, name: str) -> Split:
        if name in self._kept:
            return self._kept[name]
        split = _settled(self.parts[name], self.device)
        size = split.x.numel() * split.x.element_size()
        if size <= self.room:
            self.room -= size
            self._kept[name] = split
        return split

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)


def _settled(split: Split, device: torch.device) -> Split:
    y = None if split.y is None else split.y.to(device)
    moved = replace(split, x=split.x.to(device), y=y)
    settle(moved.x, moved.y)
    return moved


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(ROOM["cuda"], free // 4)
    return ROOM["cpu"]

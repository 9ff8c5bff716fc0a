"""A grid of runs, methods by sizes by seeds: resumable, because every run keeps its own folder."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.disk import storage_errors
from shoal.core.errors import ConfigError, DataError, ShoalError
from shoal.core.files import write_text
from shoal.core.formats import parse_toml, to_toml
from shoal.core.lock import FolderLock
from shoal.data.arrays import mark_constant
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.scores import evaluate_run
from shoal.experiment.build import check_names, train
from shoal.experiment.config import DEFAULTS, Config, make_config
from shoal.experiment.variants import Variant
from shoal.inference.ensemble import Ensemble
from shoal.inference.initialise import Build
from shoal.interaction.estimators import needs_eigenpairs
from shoal.interaction.flows import Wasserstein
from shoal.interaction.methods import METHODS

__all__ = [
    "ROOM",
    "CachedSplits",
    "Grid",
    "GridPoint",
    "check_grid",
    "resident",
    "run_cell",
    "run_grid",
]

ROOM = {"cpu": 1 << 30, "cuda": 16 << 30}
"""Bytes of shifts that a process keeps; those beyond are made again for each run."""


def resident(data: Dataset, device: torch.device | str | None) -> Dataset:
    """The data set with every part on the device, so that no run has to move or check it again."""
    place = torch.device("cpu" if device is None else device)
    ood = {name: _settled(split, place) for name, split in data.ood.items()}
    shifts: Any = CachedSplits(data.shifts, place, _room(place))
    test = None if data.test is None else _settled(data.test, place)
    return replace(data, train=_settled(data.train, place), test=test, shifts=shifts, ood=ood)


class CachedSplits(Mapping[str, Split]):
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
    mark_constant(moved.x, moved.y)
    return moved


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(ROOM["cuda"], free // 4)
    return ROOM["cpu"]


_FREE = ("members", "seed", "init_seed", "out", "device", "save_every")


@dataclass(frozen=True)
class GridPoint:
    """One run of a grid."""

    variant: Variant
    members: int
    seed: int

    @property
    def name(self) -> str:
        """Name of its folder."""
        label = self.variant.label.replace(":", "-x")
        return f"{label}-m{self.members}-s{self.seed}"


@dataclass(frozen=True)
class Grid:
    """Everything that is to be run.

    Attributes:
        config: what all runs share.
        folder: has a folder for each run.
        variants: the methods.
        sizes: numbers of members.
        seeds: how many seeds, from the config's on.
        build: makes one network, where it is the user's own and the config cannot name it.
    """

    config: Config
    folder: Path
    variants: tuple[Variant, ...]
    sizes: tuple[int, ...]
    seeds: int
    build: Build | None = field(default=None, compare=False)

    @property
    def cells(self) -> list[GridPoint]:
        """All runs, one seed after another, so that a grid that was stopped is balanced."""
        first = self.config.seed
        return [
            GridPoint(variant, size, seed)
            for seed in range(first, first + self.seeds)
            for size in self.sizes
            for variant in self.variants
        ]

    @property
    def queue(self) -> list[GridPoint]:
        """What is not done, within each seed the longest first, so that jobs end together."""
        waiting = [cell for cell in self.cells if not self.is_done(cell)]
        return sorted(waiting, key=lambda cell: (cell.seed, -cell.members, not _slow(cell)))

    def place(self, cell: GridPoint) -> Path:
        """Folder of one run."""
        return self.folder / cell.name

    def is_done(self, cell: GridPoint) -> bool:
        """It has been trained and judged."""
        return (self.place(cell) / "scores.json").exists()

    def config_of(self, cell: GridPoint) -> Config:
        """The config of one run."""
        changed: dict[str, Any] = {"members": cell.members, "seed": cell.seed}
        if cell.variant.method != "custom":
            changed["method"] = cell.variant.spec
        if cell.variant.strength is not None:
            changed["strength"] = cell.variant.strength
        return make_config(self.config.table | changed, self.config.name)


def run_grid(
    grid: Grid,
    data: Dataset,
    after: Callable[[GridPoint], None] = lambda cell: None,
    prepare: Callable[[Ensemble], None] = lambda ensemble: None,
) -> dict[GridPoint, ShoalError]:
    """Train and judge what is not done yet; a run that was stopped goes on where it was.

    Args:
        grid: what to run.
        data: what the config of the grid names.
        after: called when a run is done.
        prepare: called with each ensemble before it is trained.

    Returns:
        The runs that came to nothing, and why; the others have their scores in their folders.
    """
    check_grid(grid, data)
    failed: dict[GridPoint, ShoalError] = {}
    with FolderLock(grid.folder):
        for cell in grid.queue:
            try:
                run_cell(grid, cell, data, prepare)
            except DataError as error:
                failed[cell] = error
            after(cell)
    return failed


def run_cell(
    grid: Grid,
    cell: GridPoint,
    data: Dataset,
    prepare: Callable[[Ensemble], None] = lambda ensemble: None,
) -> None:
    """Train one run, or what is left of it, and judge it; its scores complete it."""
    config, place = grid.config_of(cell), grid.place(cell)
    how = {"resume": True, "progress": False, "prepare": prepare, "build": grid.build}
    evaluate_run(train(config, data, place, **how), data)


def _slow(cell: GridPoint) -> bool:
    """Its steps need eigenpairs, which take longer than the rest of a small network's step."""
    method = METHODS.get(cell.variant.method)
    flow = None if method is None or method.repulsion is None else method.repulsion.flow
    return isinstance(flow, Wasserstein) and needs_eigenpairs(flow.estimator)


def check_grid(grid: Grid, data: Dataset) -> None:
    """Refuse a grid of which some run could not begin, or whose folder holds another grid."""
    if data.test is None:
        raise DataError(
            f"the data set '{data.name}' has no test part to compare methods by; "
            f"in Python pass test=(x_test, y_test)"
        )
    custom = any(variant.method == "custom" for variant in grid.variants)
    if custom and isinstance(grid.config.method, str):
        raise ConfigError("the config composes no repulsion of its own, so 'custom' means nothing")
    for cell in grid.cells:
        check_names(grid.config_of(cell))
    _check_same(grid)


def _check_same(grid: Grid) -> None:
    """The folder keeps what its runs share; a grid of other settings needs another folder."""
    path = grid.folder / "grid.toml"
    shared = _shared(grid.config)
    if not path.exists():
        write_text(path, to_toml(shared))
        return
    with storage_errors("read", path):
        known = parse_toml(path.read_text(encoding="utf-8"), str(path))
    # settings that are newer than the file had their defaults when it was written
    known = {key: DEFAULTS[key] for key in shared if DEFAULTS[key] is not MISSING} | known
    wanted = parse_toml(to_toml(shared), str(path))
    for key in sorted(known.keys() | wanted.keys()):
        if known.get(key) != wanted.get(key):
            raise ConfigError(
                f"{grid.folder} holds runs with {key} = {known.get(key)!r}, not "
                f"{wanted.get(key)!r}; choose another folder with -o (in Python out=...)"
            )


def _shared(config: Config) -> dict[str, Any]:
    free = (*_FREE, "method") if isinstance(config.method, str) else _FREE
    return {key: value for key, value in config.table.items() if key not in free}

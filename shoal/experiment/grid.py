"""A grid of runs, methods by ensemble sizes by seeds; each run has its own resumable folder.

A failed run never stops the others, and is tried again unless its error would repeat.
"""

import warnings
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError, DataError, RunFailed, ShoalError, ShoalWarning
from shoal.core.storage.disk import read_plain, storage_errors
from shoal.core.storage.files import write_text
from shoal.core.storage.formats import parse_toml, to_toml
from shoal.core.storage.lock import FolderLock
from shoal.data.batches.arrays import mark_constant
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.evaluate import evaluate_run
from shoal.experiment.build import check_names, train
from shoal.experiment.config import DEFAULTS, Config, apply_override, make_config
from shoal.experiment.variants import Variant
from shoal.inference.ensemble import Ensemble
from shoal.inference.members import Build
from shoal.interaction.estimators import needs_eigenpairs
from shoal.interaction.flows import Wasserstein
from shoal.interaction.methods import METHODS
from shoal.training.options.options import AUTO, KEPT, NAMES

__all__ = [
    "ROOM",
    "Attempts",
    "CachedSplits",
    "Grid",
    "GridPoint",
    "check_grid",
    "resident",
    "run_error",
    "run_grid",
    "run_point",
]


ROOM = {"cpu": 1 << 30, "cuda": 16 << 30}
"""Bytes of shifts that a process keeps; further shifts are computed again for each run."""


def resident(data: Dataset, device: torch.device | str | None) -> Dataset:
    """The data set with every split on the device, so that no run moves or checks it again."""
    place = torch.device("cpu" if device is None else device)
    ood = {name: _placed(split, place) for name, split in data.ood.items()}
    if isinstance(data.shifts, dict):
        shifts: Any = {name: _placed(split, place) for name, split in data.shifts.items()}
    else:
        shifts = CachedSplits(data.shifts, place, _room(place))
    test = None if data.test is None else _placed(data.test, place)
    return replace(data, train=_placed(data.train, place), test=test, shifts=shifts, ood=ood)


class CachedSplits(Mapping[str, Split]):
    """Splits by name, each moved to the device and kept there while there is room.

    Args:
        splits: splits by name, possibly computed on access.
        device: device of the splits.
        room: number of bytes to keep.
    """

    def __init__(self, splits: Mapping[str, Split], device: torch.device, room: int) -> None:
        self.splits, self.device, self.room = splits, device, room
        self._kept: dict[str, Split] = {}

    def __getitem__(self, name: str) -> Split:
        if name in self._kept:
            return self._kept[name]
        split = _placed(self.splits[name], self.device)
        size = split.x.numel() * split.x.element_size()
        if size <= self.room:
            self.room -= size
            self._kept[name] = split
        return split

    def __iter__(self) -> Iterator[str]:
        return iter(self.splits)

    def __len__(self) -> int:
        return len(self.splits)


def _placed(split: Split, device: torch.device) -> Split:
    y = None if split.y is None else split.y.to(device)
    moved = replace(split, x=split.x.to(device), y=y)
    mark_constant(moved.x, moved.y)
    return moved


def _room(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return min(ROOM["cuda"], free // 4)
    return ROOM["cpu"]


_FREE = ("members", "seed", "init_seed", "out", *(name for name in NAMES if name not in KEPT))
"""Keys in which the runs of a grid may differ: the others decide what is compared."""


@dataclass(frozen=True)
class GridPoint:
    """One run of a grid: method, ensemble size and seed."""

    variant: Variant
    members: int
    seed: int

    @property
    def name(self) -> str:
        """Name of the run's folder."""
        label = self.variant.label.replace(":", "-x")
        return f"{label}-m{self.members}-s{self.seed}"


@dataclass(frozen=True)
class Grid:
    """All runs of a comparison.

    Attributes:
        config: the settings that all runs share.
        folder: contains a folder per run.
        variants: the methods.
        sizes: ensemble sizes.
        seeds: number of seeds; the first is that of the config.
        build: builds one network, for a custom network that a config cannot name.
    """

    config: Config
    folder: Path
    variants: tuple[Variant, ...]
    sizes: tuple[int, ...]
    seeds: int
    build: Build | None = field(default=None, compare=False)

    @property
    def points(self) -> list[GridPoint]:
        """All grid points, seed by seed, so that a stopped grid is balanced."""
        first = self.config.seed
        points = [
            GridPoint(variant, variant.members or size, seed)
            for seed in range(first, first + self.seeds)
            for size in self.sizes
            for variant in self.variants
        ]
        return list(dict.fromkeys(points))

    @property
    def queue(self) -> list[GridPoint]:
        """Unfinished grid points, within each seed the longest first, so that jobs end together."""
        waiting = [point for point in self.points if not self.is_done(point)]
        return sorted(waiting, key=lambda point: (point.seed, -point.members, not _slow(point)))

    def place(self, point: GridPoint) -> Path:
        """Folder of one run."""
        return self.folder / point.name

    def is_done(self, point: GridPoint) -> bool:
        """Whether the run is trained and evaluated."""
        return (self.place(point) / "scores.json").exists()

    def config_of(self, point: GridPoint) -> Config:
        """The config of one run."""
        changed: dict[str, Any] = {"members": point.members, "seed": point.seed}
        if point.variant.method != "custom":
            changed["method"] = point.variant.spec
        if point.variant.strength is not None:
            changed["strength"] = point.variant.strength
        elif point.variant.method == AUTO:
            changed["strength"] = AUTO  # the search chooses it, whatever the config says
        elif not point.variant.repels:
            changed["strength"] = None  # a strength of the config is one of its repulsion
        table = self.config.table | changed
        for key, value in point.variant.options:
            table = apply_override(table, f"{key}={value}", DEFAULTS)
        return make_config(table, self.config.name)


class Attempts:
    """The failed attempts at the runs of a grid.

    An error of data or settings would repeat, so its run is not tried again.

    Args:
        retries: number of further attempts at a failed run.

    Attributes:
        failed: runs that are given up, with their last error.
    """

    def __init__(self, retries: int) -> None:
        if retries < 0:
            raise ConfigError(f"the number of retries is 0 or more, not {retries}")
        self.retries = retries
        self.failed: dict[GridPoint, ShoalError] = {}
        self._count: dict[GridPoint, int] = {}

    def again(self, point: GridPoint, error: ShoalError) -> bool:
        """Whether to try the failed run once more; if not, the run is recorded as failed."""
        count = self._count[point] = self._count.get(point, 0) + 1
        if isinstance(error, DataError | ConfigError) or count > self.retries:
            self.failed[point] = error
            return False
        text = f"{point.name} failed and is tried again: {error}"
        warnings.warn(text, ShoalWarning, stacklevel=3)
        return True


def run_error(error: Exception) -> ShoalError:
    """The error of a run as one sentence; of an unexpected error its name and last line.

    >>> str(run_error(ZeroDivisionError("division by zero")))
    'ZeroDivisionError: division by zero'
    """
    if isinstance(error, ShoalError):
        return error
    lines = str(error).strip().splitlines()
    failed = RunFailed(": ".join([type(error).__name__, *lines[-1:]]))
    failed.__cause__ = error
    return failed


def run_grid(
    grid: Grid,
    data: Dataset,
    after: Callable[[GridPoint], None] = lambda point: None,
    prepare: Callable[[Ensemble], None] = lambda ensemble: None,
    *,
    retries: int = 1,
) -> dict[GridPoint, ShoalError]:
    """Train and evaluate all unfinished runs; a stopped run continues where it was.

    Args:
        grid: the runs.
        data: the data set of the config.
        after: called after each run.
        prepare: called with each ensemble before it is trained.
        retries: further attempts at a failed run, as `Attempts` counts them.

    Returns:
        The failed runs with their errors; the other runs have scores in their folders.
    """
    check_grid(grid, data)
    attempts = Attempts(retries)
    with FolderLock(grid.folder):
        waiting = deque(grid.queue)
        while waiting:
            point = waiting.popleft()
            try:
                run_point(grid, point, data, prepare)
            except Exception as error:
                if attempts.again(point, run_error(error)):
                    waiting.append(point)
                    continue
            after(point)
    return attempts.failed


def run_point(
    grid: Grid,
    point: GridPoint,
    data: Dataset,
    prepare: Callable[[Ensemble], None] = lambda ensemble: None,
) -> None:
    """Train one run, or its remaining epochs, and evaluate it; its scores mark completion."""
    config, place = grid.config_of(point), grid.place(point)
    how = {"resume": True, "progress": False, "prepare": prepare, "build": grid.build}
    evaluate_run(train(config, data, place, **how), data)


def _slow(point: GridPoint) -> bool:
    """Whether the method needs eigenpairs, the slowest part of a small network's step."""
    method = METHODS.get(point.variant.method)
    flow = None if method is None or method.repulsion is None else method.repulsion.flow
    return isinstance(flow, Wasserstein) and needs_eigenpairs(flow.estimator)


def check_grid(grid: Grid, data: Dataset) -> None:
    """Refuse a grid with a run that cannot start, or whose folder holds another grid."""
    if data.test is None:
        raise DataError(
            f"the data set '{data.name}' has no test set to compare methods on; "
            f"in Python pass test=(x_test, y_test)"
        )
    custom = any(variant.method == "custom" for variant in grid.variants)
    if custom and isinstance(grid.config.method, str):
        raise ConfigError("the config defines no repulsion, so there is no method 'custom'")
    for point in grid.points:
        check_names(grid.config_of(point))
    _check_same(grid)


def _check_same(grid: Grid) -> None:
    """Refuse a folder whose runs have other shared settings."""
    path = grid.folder / "grid.toml"
    shared = _shared(grid.config)
    if not path.exists():
        write_text(path, to_toml(shared))
        return
    with storage_errors("read", path):
        known = parse_toml(read_plain(path).decode(), str(path))
    # settings that are newer than the file had their default values
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

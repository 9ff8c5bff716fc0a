"""Tensors in several files: each file has some rows, and all rows have an order.

A tensor is the concatenation of its pieces along the first axis, in the order of the shards
`NAME-00001-of-00003.safetensors`, .... A tensor that all processes have alike is in one shard only.
So the headers alone say which rows are where, and any split can be read for any other split.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, ConfigError
from shoal.core.exchange import Exchange
from shoal.core.storage.files import Layout, layout_in, opened, places_in, read_rows

__all__ = ["Rows", "Shard", "SplitTensors", "parts_in", "shard_name"]

Spans = Sequence[slice] | None
"""Ranges of rows, in the order in which they are read; None for all rows."""

Rows = Callable[[str, str, int], Spans]
"""Which rows to read, given a part, a tensor and its number of rows."""

_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})", re.ASCII)


@dataclass(frozen=True)
class Shard:
    """The share of one process in a checkpoint that several processes write.

    Every process gives its own rows of the tensors of `parts`, in the order of the shards. One
    process gives a tensor that all have alike, and the first process gives all other parts. A
    process without rows gives no parts.

    Attributes:
        exchange: reaches the other processes.
        parts: parts of which each process has rows.
        index: number of this process's shard, from 0.
        count: number of shards.
    """

    exchange: Exchange
    parts: tuple[str, ...] = ()
    index: int = 0
    count: int = 1

    @property
    def first(self) -> bool:
        """Whether this process writes what all processes have alike."""
        return self.exchange.rank == 0

    def file(self, part: str) -> str:
        """The name of this process's file of a part."""
        if part not in self.parts or self.count == 1:
            return f"{part}.safetensors"
        return f"{shard_name(part, self.index, self.count)}.safetensors"


def shard_name(part: str, index: int, count: int) -> str:
    """The name of the file with the rows of one process, without its ending.

    >>> shard_name("ensemble", 0, 2)
    'ensemble-00001-of-00002'
    """
    return f"{part}-{index + 1:05d}-of-{count:05d}"


def parts_in(names: Iterable[str], split: bool, folder: Path) -> dict[str, list[str]]:
    """Files of each part of a checkpoint, in the order of their rows.

    Args:
        names: of all files with tensors, without their ending.
        split: whether names may be those of shards.
        folder: the checkpoint, for an error message.
    """
    shards_of: dict[str, dict[int, str]] = {}
    counts: dict[str, int] = {}
    for name in names:
        match = _SHARD.fullmatch(name) if split else None
        part, index, world = (match[1], int(match[2]), int(match[3])) if match else (name, 1, 1)
        if counts.setdefault(part, world) != world or index in shards_of.get(part, {}):
            raise CheckpointCorrupt(f"{folder} has '{part}' in shards of two splits")
        shards_of.setdefault(part, {})[index] = name
    for part, shards in shards_of.items():
        if sorted(shards) != list(range(1, counts[part] + 1)):
            raise CheckpointCorrupt(
                f"{folder} has {len(shards)} of the {counts[part]} shards of '{part}'"
            )
    return {part: [shards[index] for index in sorted(shards)] for part, shards in shards_of.items()}


class _Piece(NamedTuple):
    """Rows `begin` to `end` of a tensor are the rows of one file."""

    file: int
    begin: int
    end: int


@dataclass
class SplitTensors:
    """The tensors of one part, open for reading.

    Attributes:
        part: name of the part.
        paths: its files, in the order of their rows.
        whole: shape and type of the whole tensors.
    """

    part: str
    paths: list[Path]
    whole: dict[str, tuple[tuple[int, ...], torch.dtype]] = field(default_factory=dict)
    _pieces: dict[str, list[_Piece]] = field(default_factory=dict)
    _files: list[Any] = field(default_factory=list)
    _places: list[dict[str, int]] = field(default_factory=list)

    @contextmanager
    def open(self) -> Iterator[Self]:
        """Read the headers, and keep the files open during a `with` block."""
        with ExitStack() as stack:
            for index, path in enumerate(self.paths):
                file = stack.enter_context(opened(path))
                self._files.append(file)
                self._places.append(places_in(path))
                self._add(index, layout_in(file, path), path)
            yield self

    def _add(self, index: int, tensors: Layout, path: Path) -> None:
        for name, (shape, dtype) in tensors.items():
            pieces = self._pieces.setdefault(name, [])
            begin, rows = pieces[-1].end if pieces else 0, shape[0] if shape else 0
            pieces.append(_Piece(index, begin, begin + rows))
            before, kind = self.whole.get(name, (shape, dtype))
            if pieces[1:] and (not shape or before[1:] != shape[1:] or kind != dtype):
                raise CheckpointCorrupt(f"{path} has other columns of '{name}' than other shards")
            self.whole[name] = (begin + rows, *shape[1:]) if shape else shape, dtype

    def wanted(self, rows: Rows | None) -> dict[str, Spans]:
        """Rows of every tensor to read."""
        spans: dict[str, Spans] = dict.fromkeys(self.whole)
        for name, (shape, _) in self.whole.items():
            if rows is not None and shape:
                spans[name] = rows(self.part, name, shape[0])
        return spans

    def bytes_of(self, wanted: Mapping[str, Spans]) -> int:
        """Bytes of the wanted rows."""
        total = 0
        for name, spans in wanted.items():
            shape, dtype = self.whole[name]
            count = shape if spans is None else (_length(spans), *shape[1:])
            total += torch.Size(count).numel() * dtype.itemsize
        return total

    def needed(self, wanted: Mapping[str, Spans]) -> list[Path]:
        """Files that have some of the wanted rows; a part in one file is always read."""
        if len(self.paths) == 1:
            return self.paths
        used: set[int] = set()
        for name, spans in wanted.items():
            if spans is None:
                used |= {piece.file for piece in self._pieces[name]}
            for span in spans or ():
                used |= {piece.file for piece, _, _ in self._overlaps(name, span)}
        return [path for index, path in enumerate(self.paths) if index in used]

    def _overlaps(self, name: str, span: slice) -> Iterator[tuple[_Piece, int, int]]:
        """Pieces of some rows, each with the first row in it and the first one after it."""
        for piece in self._pieces[name]:
            low, high = max(piece.begin, span.start), min(piece.end, span.stop)
            if low < high:
                yield piece, low, high

    def read(self, wanted: Mapping[str, Spans]) -> dict[str, Tensor]:
        """The wanted rows, each tensor in its own memory."""
        return {name: self._tensor(name, spans) for name, spans in wanted.items()}

    def _tensor(self, name: str, spans: Spans) -> Tensor:
        pieces = self._pieces[name]
        if spans is None and len(pieces) == 1:
            return self._files[pieces[0].file].get_tensor(name)
        shape, dtype = self.whole[name]
        spans = [slice(0, shape[0])] if spans is None else spans
        rows, done = torch.empty((_length(spans), *shape[1:]), dtype=dtype), 0
        wide = torch.Size(shape[1:]).numel() * dtype.itemsize
        for span in spans:
            if not 0 <= span.start <= span.stop <= shape[0]:
                raise ConfigError(f"'{name}' has {shape[0]} rows, not {span.start} to {span.stop}")
            for piece, low, high in self._overlaps(name, span):
                place = self._places[piece.file][name] + (low - piece.begin) * wide
                read_rows(self.paths[piece.file], place, rows[done : done + high - low])
                done += high - low
        return rows


def _length(spans: Sequence[slice]) -> int:
    return sum(span.stop - span.start for span in spans)

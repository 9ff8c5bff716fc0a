"""A prediction as one safetensors file that is written batch by batch and read as needed.

The file holds the tensor "members" [M, N, ..., C]. Its metadata describe the likelihood and the
weights of the members, and have a digest of the content. Any reader of safetensors opens the file.
The outputs of a batch are written to their places: the memory of one batch is enough, however long
the data are.
"""

import errno
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError, ShoalError
from shoal.core.storage.disk import (
    checked_path,
    flush,
    size_of,
    staging,
    storage_errors,
    sweep,
    sync,
)
from shoal.core.storage.files import MAX_HEADER, SEAL, check_content, content_sha256
from shoal.core.storage.formats import parse_json, to_json
from shoal.inference.likelihoods import Likelihood, known_likelihood, registry

__all__ = ["MemberFile", "StoredPrediction", "checked_out", "read_prediction", "writing"]

ENDING = ".safetensors"
_FORMAT = "shoal prediction 1"
_TYPES = {torch.float32: "F32", torch.float64: "F64"}
_ALIGNMENT = 64
_CHUNK = 1 << 23
_DESCRIBED = ("likelihood", "learned", "weights")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def checked_out(path: str | os.PathLike[str]) -> Path:
    """The path of a prediction file, if its name is valid."""
    out = checked_path(path, "out")
    if out.suffix.lower() != ENDING:
        raise ConfigError(
            f"predictions of all members are written to a file that ends in {ENDING}, "
            f"not to '{out.name}'"
        )
    return out


@contextmanager
def writing(
    path: Path, likelihood: Likelihood, count: int | None, target_ndim: int | None = None
) -> Iterator["MemberFile"]:
    """A file that appears under its name when the block ends, complete, or not at all.

    Args:
        path: the file to create or replace.
        likelihood: distribution of the targets, given the outputs.
        count: expected number of data points; None if unknown.
        target_ndim: number of axes of the targets; None if unknown.
    """
    with ExitStack() as stack:
        with storage_errors("write", path):
            sweep(path.parent)
            temporary = stack.enter_context(staging(path.parent)) / path.name
            file = stack.enter_context(open(temporary, "w+b", buffering=0))
        yield MemberFile(file, path, likelihood, count, target_ndim)
        with storage_errors("write", path):
            file.close()
            os.replace(temporary, path)
            sync(path.parent)


class MemberFile:
    """Outputs of members [M, N, ..., C] in a file that is being written.

    Every member has room for a number of data points. More room is made by moving the members
    apart; `finish` moves them together.
    """

    def __init__(
        self,
        file: FileIO,
        path: Path,
        likelihood: Likelihood,
        count: int | None,
        target_ndim: int | None = None,
    ) -> None:
        self.file, self.path, self.likelihood = file, path, likelihood
        self.target_ndim = target_ndim
        self.room, self.filled = count or 0, 0
        self.shape: tuple[int, ...] = ()
        self.dtype = torch.float32
        self.begin = 0

    def add(self, outputs: Tensor) -> None:
        """Write the outputs of the next batch [M, B, ..., C]."""
        if not self.begin:
            self._start(outputs)
        if outputs.shape[2:] != self.shape[2:]:
            raise DataError(
                "batches of objects with different numbers of rows do not fit into one file; "
                "leave `out` out, or give objects with as many rows"
            )
        members, batch = outputs.shape[:2]
        needed = self.filled + batch
        with storage_errors("write", self.path, self.begin + members * needed * self._point):
            if needed > self.room:
                self._make_room(max(needed, 2 * self.room))
            for member in range(members):
                values = outputs[member].to("cpu", self.dtype).contiguous()
                self._write(values, self._place(member, self.room) + self.filled * self._point)
        self.filled = needed

    def finish(self, kept: Sequence[int], weights: Tensor | None) -> None:
        """Keep some members, describe them and wait until the file is on the disk."""
        with storage_errors("write", self.path):
            size = self.filled * self._point
            for new, old in enumerate(kept):
                self._move(self._place(old, self.room), self._place(new, self.filled), size)
            end = len(kept) * size
            entry = {
                "dtype": _TYPES[self.dtype],
                "shape": [len(kept), self.filled, *self.shape[2:]],
                "data_offsets": [0, end],
            }
            self.file.truncate(self.begin + end)
            metadata = self._metadata(weights)
            self._write_header(metadata, entry)
            metadata[SEAL] = content_sha256(Path(os.fsdecode(self.file.name)), metadata)
            self._write_header(metadata, entry)
            flush(self.file.fileno())

    def _write_header(self, metadata: Mapping[str, str], entry: Mapping[str, Any]) -> None:
        header = to_json({"__metadata__": metadata, "members": entry}).encode()
        room = self.begin - 8
        self._write(room.to_bytes(8, "little") + header.ljust(room), 0)

    @property
    def _point(self) -> int:
        """Bytes of one data point of one member."""
        return torch.Size(self.shape[2:]).numel() * self.dtype.itemsize

    def _place(self, member: int, room: int) -> int:
        return self.begin + member * room * self._point

    def _start(self, outputs: Tensor) -> None:
        self.shape = tuple(outputs.shape)
        self.dtype = torch.float64 if outputs.dtype == torch.float64 else torch.float32
        # Weights of the members and the sizes follow when they are known.
        text = len(to_json(self._metadata(None))) + 32 * len(outputs) + 640
        self.begin = -(-(8 + text) // _ALIGNMENT) * _ALIGNMENT
        if self.begin > MAX_HEADER:
            raise ConfigError("the likelihood has too many numbers for the header of a file")
        whole = self._place(len(outputs), self.room)
        # A full disk is found before the first pass where the system can reserve the space.
        with storage_errors("write", self.path, whole):
            try:
                os.posix_fallocate(self.file.fileno(), 0, whole)
            except (AttributeError, OSError) as error:
                if getattr(error, "errno", None) in _FULL:
                    raise

    def _metadata(self, weights: Tensor | None) -> dict[str, str]:
        state = {name: t.detach().cpu() for name, t in self.likelihood.state.items()}
        learned = {
            name: {"dtype": str(t.dtype).removeprefix("torch."), "values": t.tolist()}
            for name, t in state.items()
        }
        return {
            "format": _FORMAT,
            "likelihood": to_json(_spec(self.likelihood)),
            "learned": to_json(learned),
            "weights": to_json(None if weights is None else weights.double().tolist()),
            "target_ndim": to_json(self.target_ndim),
        }

    def _make_room(self, room: int) -> None:
        for member in range(self.shape[0] - 1, 0, -1):
            old, new = self._place(member, self.room), self._place(member, room)
            self._move(old, new, self.filled * self._point)
        self.room = room

    def _move(self, source: int, target: int, size: int) -> None:
        """Move bytes within the file; the two places may overlap."""
        if source == target:
            return
        starts = range(0, size, _CHUNK)
        for start in reversed(starts) if target > source else starts:
            self.file.seek(source + start)
            self._write(self.file.read(min(_CHUNK, size - start)), target + start)

    def _write(self, data: Tensor | bytes, place: int) -> None:
        whole = memoryview(data if isinstance(data, bytes) else data.numpy().data).cast("B")
        self.file.seek(place)
        while len(whole):  # one call may write a part
            whole = whole[self.file.write(whole[: 1 << 30]) :]


class StoredPrediction(NamedTuple):
    """The content of a prediction file; outputs are read as needed."""

    members: Tensor
    likelihood: Likelihood
    weights: Tensor | None
    target_ndim: int | None


def read_prediction(path: Path, likelihood: Likelihood | None = None) -> StoredPrediction:
    """Open a prediction file; the system reads outputs from the disk when they are used.

    Args:
        path: a file that `writing` wrote.
        likelihood: the likelihood, if it is a user's own; a registered one is in the file.
    """
    size_of(path)
    try:
        with storage_errors("read", path):
            with open(path, "rb") as file:
                if int.from_bytes(file.read(8), "little") > MAX_HEADER:
                    raise SafetensorError("header too large")
            with safe_open(path, framework="pt") as file:
                facts, names = file.metadata() or {}, list(file.keys())
                if facts.get("format") != _FORMAT or names != ["members"]:
                    raise SafetensorError("it holds other tensors")
                check_content(path, facts)
                members = file.get_tensor("members")
        spec, learned, weights = (parse_json(facts[name]) for name in _DESCRIBED)
        own = None if likelihood is None else known_likelihood("likelihood", likelihood)
        meaning = own or _made(spec, path).restored(_learned(learned))
        shares = None if weights is None else torch.tensor(weights, dtype=torch.float64)
        target_ndim = parse_json(facts.get("target_ndim", "null"))  # older files do not say
        if target_ndim is not None and (type(target_ndim) is not int or target_ndim < 1):
            raise ValueError("target_ndim is no number of axes")
    except ShoalError:
        raise
    except (SafetensorError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointCorrupt(f"{path} is not a sound prediction file: {error}") from None
    return StoredPrediction(members, meaning, shares, target_ndim)


def _spec(likelihood: Likelihood) -> dict[str, Any]:
    try:
        return registry.spec(likelihood)
    except ConfigError:
        name = getattr(likelihood, "__qualname__", type(likelihood).__qualname__)
        return {"custom": name}


def _made(spec: Mapping[str, Any], path: Path) -> Likelihood:
    if "custom" in spec:
        raise ConfigError(
            f"{path} was predicted with the likelihood '{spec['custom']}' of your own; "
            f"type Predictive.load(FILE, likelihood=...)"
        )
    return registry.make(spec)


def _learned(table: Mapping[str, Any]) -> dict[str, Tensor]:
    return {
        name: torch.tensor(entry["values"], dtype=getattr(torch, entry["dtype"]))
        for name, entry in table.items()
    }

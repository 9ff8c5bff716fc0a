"""Writers of all files, and readers that trust no file.

A file appears under its name complete and on the disk, or not at all. Reading runs no code,
allocates no memory that a file merely claims, and reports an error in one sentence.
"""

import contextlib
import hashlib
import math
import os
import re
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, ConfigError, ShoalWarning
from shoal.core.storage.disk import flush, replacing, size_of, storage_errors, sweep, sync
from shoal.core.storage.formats import parse_json, to_json

__all__ = [
    "SEAL",
    "Layout",
    "bytes_in",
    "check_content",
    "compare_layouts",
    "content_sha256",
    "header_sha256",
    "layout",
    "layout_in",
    "opened",
    "places_in",
    "put_bytes",
    "put_tensors",
    "read_json",
    "read_rows",
    "read_sealed",
    "read_tensors",
    "sealed",
    "sha256",
    "sweep",
    "write_bytes",
    "write_json",
    "write_tensors",
    "write_text",
]

Layout = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""Shape and type of tensors, by name."""

MAX_JSON = 64 << 20
MAX_TABLE = 16 << 20
SEAL = "sha256"
MAX_HEADER = 4 << 20
MAX_AXES = 64

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}


def write_bytes(path: Path | str, data: bytes) -> None:
    """Writes a file atomically, and creates its folder if needed."""
    with replacing(Path(path), len(data)) as temporary:
        put_bytes(temporary, data)


def write_text(path: Path | str, text: str) -> None:
    """Writes UTF-8 text atomically."""
    write_bytes(path, text.encode())


def write_json(path: Path | str, value: object) -> None:
    """Writes strict JSON atomically; non-finite numbers become null."""
    write_text(path, to_json(value, indent=2) + "\n")


def write_tensors(
    path: Path | str, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes a safetensors file atomically; views and shared weights are copied."""
    with replacing(Path(path), bytes_in(tensors)) as temporary:
        put_tensors(temporary, tensors, metadata)


def bytes_in(tensors: Mapping[str, Tensor]) -> int:
    """Bytes that the elements of all tensors take.

    >>> bytes_in({"bias": torch.zeros(3), "step": torch.tensor(7)})
    20
    """
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors.values())


def put_bytes(path: Path, data: bytes) -> None:
    """Writes and synchronises a file in place; for temporary paths only."""
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        flush(file.fileno())


def put_tensors(
    path: Path, tensors: Mapping[str, Tensor], metadata: dict[str, str] | None = None
) -> None:
    """Writes and synchronises tensors in place; for temporary paths only."""
    try:
        save_file(_storable(tensors), path, metadata)
    except SafetensorError as error:
        raise _as_os_error(error) from error
    if _header_bytes(path) > MAX_HEADER:
        raise ConfigError(
            f"{len(tensors)} tensors are too many for one file; stack those of equal shape"
        )
    os.chmod(path, path.parent.stat().st_mode & 0o666)
    sync(path)


def _storable(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    stored: dict[str, Tensor] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        if name == "__metadata__" or tensor.layout != torch.strided:
            raise ConfigError(f"tensor '{name}' cannot be stored; rename it or make it dense")
        if tensor.dtype not in _DTYPES.values():
            raise ConfigError(f"tensor '{name}' is {tensor.dtype}, which cannot be stored")
        dense = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        storage = dense.untyped_storage().data_ptr()
        stored[name] = dense.clone() if storage in storages else dense
        storages.add(storage)
    return stored


def _as_os_error(error: SafetensorError) -> OSError:
    code = re.search(r"os error (\d+)", str(error))
    return OSError(int(code[1]), os.strerror(int(code[1]))) if code else OSError(str(error))


def _header_bytes(path: Path) -> int:
    with open(path, "rb") as file:
        return int.from_bytes(file.read(8), "little")


def sha256(path: Path | str) -> str:
    """Digest of a file in hexadecimal digits."""
    size_of(Path(path))
    with storage_errors("read", Path(path)), open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def header_sha256(path: Path) -> str:
    """Digest of the header of a safetensors file, which names its tensors and their places."""
    size_of(path)
    with storage_errors("read", path), open(path, "rb") as file:
        size = file.read(8)
        return hashlib.sha256(
            size + file.read(min(int.from_bytes(size, "little"), MAX_HEADER))
        ).hexdigest()


def content_sha256(path: Path, metadata: Mapping[str, str]) -> str:
    """Digest of the tensors of a safetensors file, their places and its metadata but the digest."""
    total = hashlib.sha256(to_json(dict(sorted(metadata.items()))).encode())
    with storage_errors("read", path), open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = parse_json(file.read(min(size, MAX_HEADER)).decode())
        header.pop("__metadata__", None)
        total.update(to_json(dict(sorted(header.items()))).encode())
        while data := file.read(1 << 20):
            total.update(data)
    return total.hexdigest()


def check_content(path: Path, metadata: Mapping[str, str]) -> None:
    """Refuse a safetensors file that differs from its digest; warn of a file without one."""
    plain = {key: value for key, value in metadata.items() if key != SEAL}
    if SEAL not in metadata:
        warnings.warn(
            f"{path} has no digest, so a damaged file would not be noticed; "
            f"save it again with Shoal",
            ShoalWarning,
            stacklevel=2,
        )
    elif metadata[SEAL] != content_sha256(path, plain):
        raise CheckpointCorrupt(f"{path} is not what was saved: its SHA-256 differs")


def read_json(path: Path | str, max_bytes: int = MAX_JSON) -> Any:
    """The value of a strict JSON file of at most `max_bytes`."""
    path = Path(path)
    size = size_of(path)
    if size > max_bytes:
        raise CheckpointCorrupt(f"{path} has {size} bytes, more than the limit of {max_bytes}")
    with storage_errors("read", path), open(path, "rb") as file:
        data = file.read(max_bytes)
    try:
        return parse_json(data.decode())
    except ValueError as error:
        raise CheckpointCorrupt(f"{path} is not sound JSON: {error}") from None


def sealed(table: Mapping[str, Any]) -> dict[str, Any]:
    """The table with the SHA-256 of its content, so that a changed byte is detected."""
    plain = {key: value for key, value in table.items() if key != SEAL}
    return {**plain, SEAL: _seal(plain)}


def _seal(table: Mapping[str, Any]) -> str:
    return hashlib.sha256(to_json(table).encode()).hexdigest()


def read_sealed(path: Path | str, max_bytes: int = MAX_TABLE, since: str = "") -> dict[str, Any]:
    """The table of a sealed JSON file, checked and without its seal.

    Args:
        path: the file; an old file without a seal is accepted.
        max_bytes: largest size of the file.
        since: a key that only sealed tables have.
    """
    table = read_json(path, max_bytes)
    if not isinstance(table, dict):
        raise CheckpointCorrupt(f"{path} does not contain a table")
    seal = table.pop(SEAL, None)
    if seal is None and since not in table:
        return table
    if seal != _seal(table):
        raise CheckpointCorrupt(f"{path} is not what was saved: its SHA-256 differs")
    return table


def layout(tensors: Mapping[str, Tensor]) -> Layout:
    """Shape and type of every tensor, as `read_tensors` expects them.

    >>> layout({"bias": torch.zeros(3)})
    {'bias': ((3,), torch.float32)}
    """
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}


def read_tensors(path: Path | str, expected: Layout | None = None) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in their own memory.

    Args:
        path: A file whose header must agree with its size before any tensor is allocated.
        expected: The exact tensors that the file must have.

    Raises:
        CheckpointCorrupt: The file is not a sound safetensors file.
        ConfigError: The file has other tensors than expected.
    """
    path = Path(path)
    with opened(path) as file:
        stored = layout_in(file, path)
        if expected is not None:
            compare_layouts(stored, expected, path)
        return {name: file.get_tensor(name) for name in expected or stored}


@contextlib.contextmanager
def opened(path: Path) -> Iterator[Any]:
    """A safetensors file for reading; whatever is wrong with the file is `CheckpointCorrupt`."""
    size_of(path)
    try:
        with storage_errors("read", path):
            if _header_bytes(path) > MAX_HEADER:
                raise SafetensorError("header too large")
            with safe_open(path, framework="pt", backend="pread") as file:
                yield file
    except SafetensorError as error:
        raise CheckpointCorrupt(f"{path} is not a sound safetensors file: {error}") from None


def layout_in(file: Any, path: Path) -> Layout:
    """Shape and type of every tensor in an open file, as its header says."""
    tensors: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name in file.keys():  # noqa: SIM118
        tensor = file.get_slice(name)
        shape, dtype = tuple(tensor.get_shape()), tensor.get_dtype()
        elements = math.prod(max(size, 1) for size in shape[:MAX_AXES])
        if dtype not in _DTYPES or len(shape) > MAX_AXES or elements >= 1 << 63:
            raise CheckpointCorrupt(f"{path} has a tensor '{name}' of unknown type or shape")
        tensors[name] = shape, _DTYPES[dtype]
    return tensors


def places_in(path: Path) -> dict[str, int]:
    """Where the bytes of every tensor begin in a file that `opened` accepts."""
    with storage_errors("read", path), open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        data = file.read(min(size, MAX_HEADER))
    try:
        header = parse_json(data.decode())
    except ValueError as error:
        raise CheckpointCorrupt(f"{path} has an unsound header: {error}") from None
    header.pop("__metadata__", None)
    return {name: 8 + size + entry["data_offsets"][0] for name, entry in header.items()}


def read_rows(path: Path, begin: int, rows: Tensor) -> None:
    """Fill a dense tensor with the bytes of a file from `begin`, in place.

    Safetensors reads a tensor whole before it cuts rows from it, unless the file is mapped; a
    mapped file that another process cuts short would end this process.
    """
    flat: Any = torch.empty(0, dtype=torch.uint8).set_(rows.untyped_storage()).numpy()
    start = rows.storage_offset() * rows.itemsize
    view = memoryview(flat)[start : start + rows.numel() * rows.itemsize]
    with storage_errors("read", path), open(path, "rb", buffering=0) as file:
        file.seek(begin)
        while view:
            count = file.readinto(view)
            if not count:
                raise CheckpointCorrupt(f"{path} is shorter than it was")
            view = view[count:]


def compare_layouts(stored: Layout, expected: Layout, path: Path) -> None:
    """Refuse other tensors than those expected.

    Raises:
        ConfigError: The first difference, in words.
    """
    for name in [*expected, *stored]:
        have, want = stored.get(name), expected.get(name)
        if have is None or want is None or (have[0], have[1]) != (tuple(want[0]), want[1]):
            raise ConfigError(
                f"this run has {_described(name, have)}, the model wants "
                f"{_described(name, want)} (in {path}); build the same model as in the run"
            )


def _described(name: str, facts: tuple[tuple[int, ...], torch.dtype] | None) -> str:
    if facts is None:
        return f"no weight {name}"
    shape, dtype = facts
    return f"weight {name} of shape {tuple(shape)} and type {str(dtype).removeprefix('torch.')}"

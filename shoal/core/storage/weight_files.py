"""Files with the weights of one network: safetensors, and what `torch.save` writes.

A pickled file is read by `torch.load(weights_only=True)` alone, which makes tensors and plain
containers and runs no code. Sizes are checked before anything is allocated.
"""

import os
import re
import warnings
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shoal.core.errors import DataError, StorageError
from shoal.core.registry import nearest
from shoal.core.storage.disk import checked_path, machine_memory, size_of, storage_errors
from shoal.core.storage.files import Layout, read_tensors

__all__ = ["difference", "read_weights", "renamed", "weight_files"]

PICKLED = (".pt", ".pth", ".bin", ".ckpt")
ENDINGS = (".safetensors", *PICKLED)
WHOLE = ("model.safetensors", "pytorch_model.bin")
"""Names of the one file with weights in the folder of a saved model."""

_INNER = ("state_dict", "model_state_dict", "model")
"""Keys of a training checkpoint under which the weights of the network are."""

_MOST_FILES = 10_000


def weight_files(paths: Iterable[str | os.PathLike[str]]) -> list[Path]:
    """One file per network: the given files, and the files in given folders in natural order."""
    files = [file for path in paths for file in _files_at(checked_path(path, "the path"))]
    if not files:
        raise DataError("no files with weights were given; name files or folders")
    known: set[Path] = set()
    for file in files:
        if (whole := file.resolve()) in known:
            raise DataError(f"{file} was given twice; name each file once")
        known.add(whole)
    return files


def _files_at(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        size_of(path)  # a missing file, a pipe or a device has its own sentence
        if path.suffix.lower() not in ENDINGS:
            raise DataError(f"{path} does not end in {', '.join(ENDINGS)}; these can be read")
        yield path
        return
    if (path / "config.toml").exists() and (path / "checkpoints").exists():
        raise DataError(f"{path} is already a run of Shoal; type: shoal evaluate {path}")
    whole = _whole_model(path)
    inside = [whole] if whole else _members_in(path)
    if not inside:
        raise DataError(f"{path} has no files that end in {', '.join(ENDINGS)}")
    yield from inside


def _members_in(folder: Path) -> list[Path]:
    with storage_errors("read", folder):
        names = sorted(folder.iterdir(), key=_natural)
    if len(names) > _MOST_FILES:
        raise DataError(f"{folder} has more than {_MOST_FILES:,} files; name the files")
    files = []
    for path in names:
        if path.is_file() and path.suffix.lower() in ENDINGS:
            files.append(path)
        elif path.is_dir() and (whole := _whole_model(path)):
            files.append(whole)
    return files


def _whole_model(folder: Path) -> Path | None:
    """The file of a folder that holds one saved model, with its optimiser and other files."""
    if any((folder / f"{name}.index.json").exists() for name in WHOLE):
        raise DataError(
            f"{folder} holds one model in several files; save it in one, "
            f"as safetensors.torch.save_file does"
        )
    return next((folder / name for name in WHOLE if (folder / name).is_file()), None)


def _natural(path: Path) -> list[tuple[int, str]]:
    """Sort key that orders numbers by size: net2 before net10."""
    words = re.split(r"(\d+)", path.name)
    return [(int(word), "") if word.isdecimal() else (-1, word) for word in words]


def read_weights(path: Path) -> dict[str, Tensor]:
    """The tensors of a file, by name; those of the network in a training checkpoint."""
    size, memory = size_of(path), machine_memory()
    if memory is not None and size > memory:
        raise DataError(f"{path} has {size:,} bytes, more than the memory of this machine")
    if path.suffix.lower() == ".safetensors":
        try:
            return read_tensors(path)
        except StorageError as error:
            raise DataError(str(error)) from error
    return _state_dict(_unpickled(path), path)


def _unpickled(path: Path) -> Any:
    _check_archive(path)
    try:
        with storage_errors("read", path), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about the pickle of a damaged file
            return torch.load(path, map_location="cpu", weights_only=True)
    except StorageError:
        raise
    except Exception as error:
        # Whatever a crafted or damaged file does to the reader is the file's fault.
        raise DataError(_refusal(path, str(error))) from error


def _refusal(path: Path, reason: str) -> str:
    name = re.search(r"GLOBAL ([\w.]+)", reason)
    if name or "Weights only load failed" in reason:
        held = f"'{name[1]}'" if name else "objects"
        return (
            f"{path} is not read, since it holds {held} besides tensors and could run code; "
            f"save the weights alone: torch.save(network.state_dict(), FILE)"
        )
    return f"{path} is damaged, or torch.save did not write it"


def _check_archive(path: Path) -> None:
    """Refuse compressed archives, which could unpack to any size; `torch.save` writes none."""
    try:
        if not zipfile.is_zipfile(path):
            return
        with zipfile.ZipFile(path) as archive:
            entries = archive.infolist()
    except (zipfile.BadZipFile, OSError, ValueError, RuntimeError) as error:
        raise DataError(_refusal(path, "")) from error
    if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
        raise DataError(f"{path} is compressed, so torch.save did not write it; save it again")


def _state_dict(value: Any, path: Path) -> dict[str, Tensor]:
    for key in _INNER:
        if isinstance(value, Mapping) and isinstance(value.get(key), Mapping):
            value = value[key]
            break
    if not isinstance(value, Mapping) or not value:
        raise DataError(
            f"{path} holds a {type(value).__name__}, not the weights of a network; "
            f"save them by torch.save(network.state_dict(), FILE)"
        )
    for name, tensor in value.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            raise DataError(
                f"{path} holds {str(name)!r} of type {type(tensor).__name__}, not a tensor; "
                f"save the weights alone: torch.save(network.state_dict(), FILE)"
            )
        if tensor.layout != torch.strided or tensor.is_quantized or tensor.is_meta:
            raise DataError(f"the tensor {name!r} in {path} is sparse, quantised or empty")
    return {name: tensor.detach() for name, tensor in value.items()}


def renamed(weights: Mapping[str, Tensor], wanted: Mapping[str, Any]) -> dict[str, Tensor]:
    """The weights without a prefix that all names have, if the names then are those wanted.

    Lightning writes "model.", `DataParallel` "module.", `torch.compile` "_orig_mod.".

    >>> list(renamed({"model.bias": torch.zeros(2)}, {"bias": None}))
    ['bias']
    """
    first = next(iter(wanted), "")
    for name in weights:
        prefix = name.removesuffix(first)
        if not prefix.endswith(".") or prefix + first != name:
            continue
        cut = {known.removeprefix(prefix): tensor for known, tensor in weights.items()}
        if cut.keys() == wanted.keys() and all(known.startswith(prefix) for known in weights):
            return cut
    return dict(weights)


def difference(weights: Mapping[str, Tensor], wanted: Layout) -> str | None:
    """The first difference between weights and a network in words; None without any."""
    for name, (shape, _) in wanted.items():
        if name not in weights:
            spare = [known for known in weights if known not in wanted]
            return f"there is no '{name}'" + (f"; {_near(name, spare)}" if spare else "")
        if (actual := tuple(weights[name].shape)) != shape:
            return f"'{name}' has shape {actual}, but the network has {shape}"
    for name in weights:
        if name not in wanted:
            return f"the network has no '{name}'; {_near(name, wanted)}"
    return None


def _near(name: str, names: Iterable[str]) -> str:
    few = sorted(names)
    close = nearest(name, few)
    return (
        close if close.startswith("did") or len(few) <= 5 else f"it has {', '.join(few[:5])}, ..."
    )

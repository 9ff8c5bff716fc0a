"""Provenance: versions, machine, commit and data digest of a run, to reproduce it."""

import hashlib
import math
import os
import platform
import secrets
import subprocess
import sys
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.caller import caller
from shoal.core.structure import Structured, form_of, form_table
from shoal.data.batches.arrays import add_to_digest, recalled, value_range
from shoal.data.batches.sources import ArrayBatches, LoaderBatches

__all__ = [
    "COMMAND",
    "about_data",
    "command",
    "digest",
    "drawn_inputs",
    "environment",
    "is_input_table",
    "provenance",
]

_FEW = 64
"""Inputs whose range is stored."""

_LARGEST, _WIDEST = 1 << 28, 2.0**62
"""Most numbers of an input, and largest end of a range, that a file may ask for."""

COMMAND = "SHOAL_COMMAND"
"""Environment variable with the command that the user typed."""


def provenance(batches: ArrayBatches | LoaderBatches, device: torch.device) -> dict[str, Any]:
    """The environment, a digest of the data, and the time of the training so far."""
    return {**environment(device), **about_data(batches), "seconds": 0.0}


def about_data(batches: ArrayBatches | LoaderBatches) -> dict[str, Any]:
    """Number, digest and range of the data, and what one input and its targets look like."""
    shape, inputs = batches.target_shape, _about_inputs(batches)
    return {
        "data": {"points": batches.n, "sha256": digest(batches)},
        "input_range": _input_range(batches),
        **({} if shape is None else {"target_shape": list(shape)}),
        **({} if inputs is None else {"inputs": inputs}),
    }


def _about_inputs(batches: ArrayBatches | LoaderBatches) -> dict[str, Any] | None:
    """Shape, type and range of each tensor of one input; None for an object of a library.

    The range is that of a few inputs. `drawn_inputs` makes inputs of this description.
    """
    x = batches.first()[0] if isinstance(batches, LoaderBatches) else batches.x[:_FEW]
    if isinstance(x, Tensor):
        table = {"tensors": {"x": _about_tensor(x)}}
    elif isinstance(x, Structured):
        tensors = {name: _about_tensor(tensor) for name, tensor in x.tensors.items()}
        table = {"tensors": tensors, "form": form_table(x.form)}
    else:
        return None
    return table if is_input_table(table) else None


def _about_tensor(tensor: Tensor) -> dict[str, Any]:
    known = tensor.detach()
    known = (known if known.is_floating_point() else known.double()).nan_to_num(0.0)
    ends = (float(end) for end in known.aminmax()) if known.numel() else (0.0, 0.0)
    low, high = (min(max(end, -_WIDEST), _WIDEST) for end in ends)
    return {
        "shape": list(tensor.shape[1:]) if tensor.ndim else None,  # a single number has no rows
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "range": [low, high],
    }


def is_input_table(value: Any) -> bool:
    """Whether a value is what `about_data` says of one input."""
    tensors = value.get("tensors") if isinstance(value, dict) else None
    if not isinstance(tensors, dict) or not tensors or value.keys() - {"tensors", "form"}:
        return False
    if "form" in value and not _is_form(value["form"], tensors):
        return False
    named = "form" in value or tensors.keys() == {"x"}
    return named and all(map(_is_tensor_table, tensors.values()))


def _is_tensor_table(value: Any) -> bool:
    if not isinstance(value, dict) or value.keys() != {"shape", "dtype", "range"}:
        return False
    shape, ends = value["shape"], value["range"]
    sizes = [] if shape is None else shape
    if not isinstance(sizes, list) or not all(type(n) is int and n >= 0 for n in sizes):
        return False
    if not isinstance(ends, list) or [type(end) for end in ends] != [float, float]:
        return False
    known = isinstance(getattr(torch, str(value["dtype"]), None), torch.dtype)
    return known and math.prod(sizes) <= _LARGEST and -_WIDEST <= ends[0] <= ends[1] <= _WIDEST


def _is_form(value: Any, tensors: Mapping[str, Any], depth: int = 0) -> bool:
    if not isinstance(value, dict) or len(value) != 1 or depth > 20:
        return False
    ((kind, content),) = value.items()
    if kind == "tensor":
        return isinstance(content, str) and content in tensors
    if kind == "dict" and isinstance(content, dict):
        return all(_is_form(each, tensors, depth + 1) for each in content.values())
    if kind in ("tuple", "list") and isinstance(content, list):
        return all(_is_form(each, tensors, depth + 1) for each in content)
    return kind == "value" and (content is None or isinstance(content, bool | int | float | str))


def drawn_inputs(table: Mapping[str, Any], count: int) -> Tensor | Structured:
    """Random inputs of the described shapes and types, in their ranges; masks are all ones."""
    random = torch.Generator().manual_seed(0)
    tensors = {name: _drawn(about, count, random) for name, about in table["tensors"].items()}
    return Structured(tensors, form_of(table["form"])) if "form" in table else tensors["x"]


def _drawn(about: Mapping[str, Any], count: int, random: torch.Generator) -> Tensor:
    shape = () if about["shape"] is None else (count, *about["shape"])
    dtype, (low, high) = getattr(torch, about["dtype"]), about["range"]
    if dtype.is_floating_point:
        return (low + (high - low) * torch.rand(shape, generator=random)).to(dtype)
    if dtype == torch.bool or (low, high) == (0, 1):
        return torch.ones(shape, dtype=dtype)
    return torch.randint(int(low), int(high) + 1, shape, generator=random).to(dtype)


def environment(device: torch.device) -> dict[str, Any]:
    """Versions, machine, command and commit, who started the run, and its unique name."""
    return {
        "run_id": secrets.token_hex(8),
        "versions": {
            "shoal": _shoal_version(),
            "torch": torch.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
        },
        "device": _device_name(device),
        "threads": torch.get_num_threads(),
        "command": command(),
        "commit": _commit(),
        **({} if (made_by := caller()) is None else {"made_by": made_by}),
    }


def command() -> str:
    """The command that the user typed; a worker process returns its parent's command."""
    return os.environ.get(COMMAND, " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]))


def digest(batches: ArrayBatches | LoaderBatches) -> str | None:
    """SHA-256 of the training tensors; None for a loader, whose data may change between passes."""
    if isinstance(batches, LoaderBatches):
        return None
    x, y = batches.x, batches.y
    first, *rest = [x] if isinstance(x, Tensor) else x.tensors.values()
    total = _hash_of(first).copy()
    for tensor in [*rest, *([y] if isinstance(y, Tensor) else y.tensors.values())]:
        add_to_digest(total, tensor)
    return total.hexdigest()


def _input_range(batches: ArrayBatches | LoaderBatches) -> list[float] | None:
    """Smallest and largest input value; for a loader, of its first batch."""
    if isinstance(batches, LoaderBatches):
        return batches.input_range
    return value_range(batches.x) if isinstance(batches.x, Tensor) else None


@recalled
def _hash_of(x: Tensor) -> Any:
    total = hashlib.sha256()
    add_to_digest(total, x)
    return total


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()})"


def _shoal_version() -> str | None:
    """Version of the package; None if it is not installed."""
    try:
        return version("shoal")
    except PackageNotFoundError:
        return None


def _commit() -> str | None:
    """Commit of the working folder; None outside a repository."""
    try:
        command = ["git", "rev-parse", "--short", "HEAD"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=2, check=False)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None

"""Provenance: versions, machine, commit and data digest of a run, to reproduce it."""

import hashlib
import os
import platform
import secrets
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.caller import caller
from shoal.data.batches.arrays import add_to_digest, recalled, value_range
from shoal.data.batches.sources import ArrayBatches, LoaderBatches

__all__ = [
    "COMMAND",
    "about_data",
    "command",
    "digest",
    "environment",
    "provenance",
]

COMMAND = "SHOAL_COMMAND"
"""Environment variable with the command that the user typed."""


def provenance(batches: ArrayBatches | LoaderBatches, device: torch.device) -> dict[str, Any]:
    """The environment, a digest of the data, and the time of the training so far."""
    return {**environment(device), **about_data(batches), "seconds": 0.0}


def about_data(batches: ArrayBatches | LoaderBatches) -> dict[str, Any]:
    """Number, digest and range of the data, and the shape of one data point's targets."""
    shape = batches.target_shape
    return {
        "data": {"points": batches.n, "sha256": digest(batches)},
        "input_range": _input_range(batches),
        **({} if shape is None else {"target_shape": list(shape)}),
    }


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

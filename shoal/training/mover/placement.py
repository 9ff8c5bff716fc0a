"""Where the members of a run live: all on the device, or on the host and some on the device."""

from pathlib import Path
from typing import Any

import torch

from shoal.core.errors import ConfigError
from shoal.engine.resources.footprint import bytes_of
from shoal.engine.resources.memory import MemoryLimit, free_memory
from shoal.engine.resources.offload import Offload
from shoal.inference.ensemble import Ensemble, move_to_host
from shoal.training.mover.memory import SHARE_OF_FREE, state_bytes
from shoal.training.options.settings import Settings

__all__ = ["place"]


def place(
    ensemble: Ensemble,
    device: torch.device,
    dtype: torch.dtype,
    settings: Settings,
    folder: Path | None,
    alone: bool = True,
) -> Ensemble:
    """The ensemble itself, in place on its device, or offloaded.

    Args:
        ensemble: the members.
        device: device of the computation.
        dtype: type of the weights.
        settings: the settings of the run.
        folder: folder of the run, for files of offloaded members; None for temporary files.
        alone: no other process trains members of this ensemble.
    """
    options = settings.options
    resident = options.resident
    if not alone:
        if resident is not None:
            raise ConfigError(
                "several processes keep their members on their devices; leave resident out, or "
                "start one process"
            )
        return ensemble.to(device, dtype)
    if resident is None and _overflows(ensemble, device, dtype, settings):
        resident = 1  # until the first batch has shown what a step takes
    if resident is None or resident >= ensemble.members:
        return ensemble.to(device, dtype)
    if options.cache:
        raise ConfigError("cache keeps all members on the device; leave resident or cache out")
    where = folder if folder is not None and folder.is_dir() else None
    move_to_host(ensemble, Offload(device, resident, options.offload, where), dtype)
    return ensemble


def _overflows(
    ensemble: Ensemble, device: torch.device, dtype: torch.dtype, settings: Settings
) -> bool:
    """Whether weights, optimiser states and gradients of all members exceed the memory.

    On a CPU only files are another place than the device's memory.
    """
    options = settings.options
    if ensemble.members == 1 or options.cache:
        return False
    if device.type != "cuda" and options.offload != "disk":
        return False
    room = _room(device, options.memory)
    if room is None:
        return False
    wide = {n: t.detach().to("meta", dtype) for n, t in ensemble.weights.items()}
    states = state_bytes(settings.optimizer, options.lr, wide)
    rest = bytes_of([*ensemble.buffers.values(), *ensemble.shared.values()])
    return rest + 2 * bytes_of(wide.values()) + states > room


def _room(device: torch.device, memory: Any) -> float | None:
    """Bytes that a run may take; None for any number."""
    if memory not in (None, "auto"):
        return MemoryLimit(memory, device, 0).bytes
    free = free_memory(device)
    return None if free is None else SHARE_OF_FREE * free

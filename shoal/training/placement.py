"""Where the members of a run live: all on the device, or on the host and some on the device."""

from pathlib import Path

import torch

from shoal.core.errors import ConfigError
from shoal.engine.offload import Offload
from shoal.inference.ensemble import Ensemble
from shoal.inference.offloaded import move_to_host
from shoal.training.settings import Settings

__all__ = ["place"]


def place(
    ensemble: Ensemble,
    device: torch.device,
    dtype: torch.dtype,
    settings: Settings,
    folder: Path | None,
) -> Ensemble:
    """The ensemble itself, in place on its device, or offloaded.

    Args:
        ensemble: the members.
        device: device of the computation.
        dtype: type of the weights.
        settings: the settings of the run.
        folder: folder of the run, for files of offloaded members; None for temporary files.
    """
    options = settings.options
    resident = options.resident
    if resident is None or resident >= ensemble.members:
        return ensemble.to(device, dtype)
    if options.cache:
        raise ConfigError("cache keeps features of members on the device; leave resident out")
    where = folder if folder is not None and folder.is_dir() else None
    move_to_host(ensemble, Offload(device, resident, options.offload, where), dtype)
    return ensemble

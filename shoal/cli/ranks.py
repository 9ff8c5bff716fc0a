"""Commands under `torchrun`: which processes run a command, and which of them speak.

Without torchrun there is one process, and it does both. This module imports torch only for a
command that divides its members.
"""

import os
from collections.abc import Callable
from typing import TypeVar

from shoal.core.errors import ConfigError, DataError, PeerLost

__all__ = ["own_device", "prepare", "speaks", "together", "waits"]

T = TypeVar("T")

_DIVIDED = ("fit", "grow", "predict")
_OWN_PROCESSES = ("bench", "compare", "demo", "fidelity")


def _rank() -> int:
    return int(os.environ.get("RANK") or 0) if _several() else 0


def _several() -> bool:
    started = "MASTER_ADDR" in os.environ and "RANK" in os.environ
    return started and int(os.environ.get("WORLD_SIZE") or 1) > 1


def waits(command: str) -> bool:
    """Whether this process has nothing to do: another one runs the command alone."""
    if _several() and command in _OWN_PROCESSES:
        raise ConfigError(f"shoal {command} starts its own processes; type it without torchrun")
    return _rank() > 0 and command not in _DIVIDED


def speaks(error: BaseException | None = None) -> bool:
    """Whether this process prints: the first, and any that has something of its own to say.

    What the user typed or gave, all processes find wrong alike.
    """
    alike = error is None or isinstance(error, ConfigError | DataError)
    return _rank() == 0 or not alike or isinstance(error, PeerLost)


def together() -> None:
    """Join the other processes, if torchrun started several."""
    if _several():
        from shoal.engine.processes.groups import join_processes

        join_processes()


def prepare(make: Callable[[], T]) -> T:
    """What `make` returns; the first process goes first, since it may write files for all."""
    if not _several():
        return make()
    import torch.distributed as dist

    from shoal.engine.processes.groups import peers_watched

    made = make() if _rank() == 0 else None
    with peers_watched():
        dist.barrier()
    made = make() if made is None else made
    with peers_watched():
        dist.barrier()
    return made


def own_device(device: str | None) -> str | None:
    """The device of this process: "cuda" is the card with the process's number on its machine."""
    if _several() and device == "cuda":
        return f"cuda:{os.environ.get('LOCAL_RANK', '0')}"
    return device

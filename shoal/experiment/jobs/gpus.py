"""One GPU for each job of a machine, in turn."""

import os
from collections.abc import Mapping, Sequence

import torch

__all__ = ["VISIBLE", "Gpus", "visible_gpus"]

VISIBLE = "CUDA_VISIBLE_DEVICES"


def visible_gpus(
    device: str | None, environment: Mapping[str, str] = os.environ, count: int | None = None
) -> tuple[str, ...]:
    """The GPUs that jobs share out; none if the config names another device, or one GPU.

    >>> visible_gpus("cuda", {"CUDA_VISIBLE_DEVICES": "2,5"})
    ('2', '5')
    >>> visible_gpus("cuda", {}, count=3)
    ('0', '1', '2')
    >>> visible_gpus("cuda:1", {}, count=3)
    ()

    Args:
        device: the device of the config.
        environment: environment variables of this process.
        count: number of GPUs of the machine; None counts them.
    """
    if device != "cuda":
        return ()
    if VISIBLE in environment:
        found = tuple(word.strip() for word in environment[VISIBLE].split(",") if word.strip())
    else:
        found = tuple(map(str, range(torch.cuda.device_count() if count is None else count)))
    return found if len(found) > 1 else ()


class Gpus:
    """Hands every new job the GPU with the fewest jobs, the first of equals.

    >>> gpus = Gpus(("0", "1"))
    >>> [gpus.take() for _ in range(3)]
    ['0', '1', '0']
    >>> gpus.give_back("1")
    >>> gpus.take()
    '1'

    Args:
        names: GPUs, as `CUDA_VISIBLE_DEVICES` names them; without any, jobs choose nothing.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._jobs = dict.fromkeys(names, 0)

    def take(self) -> str | None:
        """The GPU of one more job; None if the job keeps the devices of this process."""
        if not self._jobs:
            return None
        name = min(self._jobs, key=lambda each: self._jobs[each])
        self._jobs[name] += 1
        return name

    def give_back(self, name: str | None) -> None:
        """A job on this GPU has ended."""
        if name is not None:
            self._jobs[name] -= 1

"""Devices to compute on, and an error with the reason if one cannot be used."""

import torch

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.values import describe_value

__all__ = ["usable_device"]


def usable_device(device: torch.device | str | int) -> torch.device:
    """The device, if this machine and this build of torch have it.

    >>> usable_device("cpu")
    device(type='cpu')
    """
    try:
        if device is None:
            raise TypeError("it is None")
        usable = torch.zeros(1, device=device).device
    except (RuntimeError, AssertionError, TypeError, ValueError, NotImplementedError) as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = lines[0].rstrip(".")
        named = str(device) if isinstance(device, str | int | torch.device) else ""
        raise ConfigError(
            f"the device '{named or describe_value(device)}' cannot be used: {reason}; "
            f"{_advice(named)}"
        ) from error
    if usable.type == "meta":
        raise ConfigError(
            f"the device '{device}' cannot be used: it holds no numbers; {_advice('meta')}"
        )
    return usable


def _advice(device: str) -> str:
    cards = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    apple = ["mps"] if torch.backends.mps.is_available() else []
    return nearest(device, ["cpu", *cards, *apple])

"""The step of an elementwise optimiser inside the kernel that adds the push to the drives.

The weights are in registers there already, and the velocity is never written: a step reads and
writes as much as the optimiser alone. The formulas and the states are those of `torch.optim`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["KINDS", "Update", "moved", "scalar"]

KINDS = ("none", "sgd", "momentum", "nesterov", "adam", "adamw")
"""What becomes of a velocity: it is written, or moves the weight by one of these optimisers."""


class Update(NamedTuple):
    """One step of an optimiser.

    Attributes:
        kind: one of `KINDS`.
        rate: the learning rate, a scalar on the device.
        step: the number of the step, from 1, a scalar on the device; any for those without Adam.
        first: for each leaf, momentum or mean of the gradients; the weights where there is none.
        second: mean of the squared gradients; the weights where there is none.
        numbers: momentum and dampening, or logarithms of both factors of Adam; epsilon; decay.
    """

    kind: str
    rate: Tensor
    step: Tensor
    first: Sequence[Tensor]
    second: Sequence[Tensor]
    numbers: tuple[float, float, float, float]

    @classmethod
    def none(cls, like: Sequence[Tensor], scalar: Tensor) -> "Update":
        """No step: velocities are written."""
        return cls("none", scalar, scalar, like, like, (0.0, 0.0, 0.0, 0.0))


@triton.jit
def _less_one(x):
    """1 - exp(x) for x < 0, also where exp(x) is close to 1."""
    series = -x * (1.0 + x / 2.0 * (1.0 + x / 3.0 * (1.0 + x / 4.0 * (1.0 + x / 5.0))))
    return tl.where(x > -0.1, series, 1.0 - tl.exp(x))


@triton.jit
def moved(
    theta, velocity, first, second, place, inside, rate, step, a, b, eps, decay,
    UPDATE: tl.constexpr,
):  # fmt: skip
    """The weight after a step along its velocity; the optimiser descends along g = -velocity."""
    if UPDATE == "none":
        result = velocity
    else:
        g = -velocity
        if UPDATE == "adamw":
            theta -= rate * decay * theta
        else:
            g += decay * theta
        if UPDATE == "sgd":
            result = theta - rate * g
        else:
            mean = tl.load(first + place, mask=inside, other=0.0)
            if UPDATE == "momentum" or UPDATE == "nesterov":
                mean = a * mean + (1.0 - b) * g
                along = g + a * mean if UPDATE == "nesterov" else mean
                result = theta - rate * along
            else:
                mean += _less_one(a) * (g - mean)
                spread = tl.load(second + place, mask=inside, other=0.0)
                spread += _less_one(b) * (g * g - spread)
                tl.store(second + place, spread, mask=inside)
                scale = tl.sqrt(spread) / tl.sqrt(_less_one(b * step)) + eps
                result = theta - rate / _less_one(a * step) * mean / scale
            tl.store(first + place, mean, mask=inside)
    return result


def scalar(value: Any, like: Tensor) -> Tensor:
    """A number, or a scalar on the device, as the latter."""
    if isinstance(value, Tensor) and value.device == like.device:
        return value
    return torch.as_tensor(value, dtype=torch.float32).to(like.device)

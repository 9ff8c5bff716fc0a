"""Randomness as a pure function of a key: no shared generator, no order of calls, no state to save.

The numbers are hashed from what they belong to (seed, purpose, step, member, element), so they are
the same however the members run, after a resume, and inside a captured CUDA graph, where the step
is a tensor. Only `many_normal` depends on the device.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shoal.core.seeds import derive

__all__ = ["hashed", "key", "many_normal", "normal", "uniform"]

_GOLDEN = -7046029254386353131  # 2^64 / golden ratio, as a signed 64-bit integer
_MIX1, _MIX2 = -4658895280553007687, -7723592293110705685  # constants of the splitmix64 finaliser


def key(seed: int, purpose: str, step: int | Tensor, device: torch.device | None = None) -> Tensor:
    """A 64-bit key for one purpose at one step, a scalar on the device.

    >>> bool(key(0, "a", 1) == key(0, "a", torch.tensor(1)))
    True
    """
    step = step if isinstance(step, Tensor) else torch.tensor(step, device=device)
    return hashed(step * _GOLDEN + derive(seed, purpose))


def uniform(key: Tensor, shape: Sequence[int]) -> Tensor:
    """Numbers in [0, 1), in double precision.

    >>> uniform(key(0, "a", 1), (2, 3)).shape
    torch.Size([2, 3])
    """
    element = torch.arange(math.prod(shape), device=key.device)
    bits = hashed(hashed(element) + key).bitwise_right_shift(11) & ((1 << 53) - 1)
    return (bits.double() / (1 << 53)).reshape(tuple(shape))


def normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal numbers, by the method of Box & Muller (1958)."""
    count = math.prod(shape)
    u = uniform(key, (2, (count + 1) // 2))
    radius = (-2 * (1 - u[0]).log()).sqrt()
    angle = 2 * math.pi * u[1]
    pair = torch.cat([radius * angle.cos(), radius * angle.sin()])
    return pair[:count].reshape(tuple(shape)).to(dtype)


def many_normal(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Standard normal numbers by the million, in single precision whatever the type.

    Hashing them takes ten times as long on a CPU as drawing them. So there they come from a
    generator of their own that the key sets: still a function of the key alone, but other numbers
    than on a GPU.

    >>> kinds = torch.float32, torch.float64
    >>> single, double = (many_normal(key(0, "a", 1), (2, 3), kind) for kind in kinds)
    >>> bool((single == double).all())
    True
    """
    if key.device.type != "cpu":
        return normal(key, shape, dtype)
    generator = torch.Generator().manual_seed(int(key) & ((1 << 63) - 1))
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(dtype)


def hashed(x: Tensor) -> Tensor:
    """The splitmix64 finaliser, in wrapping signed arithmetic."""
    x = x + _GOLDEN
    x = (x ^ _shift(x, 30)) * _MIX1
    x = (x ^ _shift(x, 27)) * _MIX2
    return x ^ _shift(x, 31)


def _shift(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_right_shift(bits) & ((1 << (64 - bits)) - 1)

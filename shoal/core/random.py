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

__all__ = ["chance", "hashed", "key", "many_normal", "normal", "uniform"]

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


def chance(key: Tensor, shape: Sequence[int], p: float) -> Tensor:
    """True with probability p, for masks by the million: a third of the work of `uniform`.

    Element i is the i-th number of the generator splitmix64 that starts at the key. Its last step
    would change no leading bit and is left out; the number as it is, signed, tells above or below.

    >>> 450 < int(chance(key(0, "a", 1), (1000,), 0.5).sum()) < 550
    True
    """
    # The largest double below one still maps to a 64-bit integer.
    threshold = round(min(max(p, 0.0), 1 - 2**-53) * (1 << 64)) - (1 << 63)
    element = torch.arange(math.prod(shape), device=key.device)
    return (_stirred(element * _GOLDEN + key) < threshold).reshape(tuple(shape))


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
    x = _stirred(x + _GOLDEN)
    return x ^ _shift(x, 31)


def _stirred(x: Tensor) -> Tensor:
    # In place, into the caller's own sum: masks are large, and new memory is what costs most.
    x = x.bitwise_xor_(_shift(x, 30)).mul_(_MIX1)
    return x.bitwise_xor_(_shift(x, 27)).mul_(_MIX2)


def _shift(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)

"""Stateless randomness: seeds derived from names, and numbers derived from keys."""

import hashlib
import math
import operator
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.values import describe_value

__all__ = [
    "chance",
    "derive",
    "generator",
    "generators_restored",
    "hashed",
    "key",
    "many_normal",
    "many_uniform",
    "normal",
    "normal_stream",
    "seeded",
    "set_generators",
    "uniform",
]


def derive(seed: int, *purpose: str | int) -> int:
    """A seed of 63 bits for one purpose, the same on every machine and in every version.

    Two purposes, or two seeds, give independent streams; `derive(0, "a", 1)` and `derive(0, "a1")`
    differ too.

    >>> derive(0, "order", 3) == derive(0, "order", 3)
    True
    >>> derive(0, "order", 3) == derive(0, "order", 4)
    False
    """
    words = tuple(word if isinstance(word, str) else _whole(word) for word in purpose)
    text = repr((_whole(seed), *words))
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def generator(seed: int, *purpose: str | int) -> torch.Generator:
    """A generator on the CPU, set to `derive(seed, *purpose)`.

    >>> torch.rand(1, generator=generator(0, "a")) == torch.rand(1, generator=generator(0, "a"))
    tensor([True])
    """
    return torch.Generator().manual_seed(derive(seed, *purpose))


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The CPU generators of torch, numpy and Python set to `seed`, and restored at the end."""
    with generators_restored():
        set_generators(seed)
        yield


@contextmanager
def generators_restored() -> Iterator[None]:
    """The CPU generators of torch, numpy and Python are restored at the end."""
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])


def set_generators(seed: int) -> None:
    """Set the CPU generators of torch, numpy and Python to a seed of at most 63 bits."""
    torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def _whole(number: int) -> int:
    try:
        return operator.index(number)
    except TypeError:
        raise ConfigError(f"a seed must be a whole number, not {describe_value(number)}") from None


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


def chance(key: Tensor, shape: Sequence[int], p: float, first: int = 0) -> Tensor:
    """True with probability p, for large masks: a third of the work of `uniform`.

    Element i is the i-th number of the generator splitmix64 that starts at the key. Its last step
    changes no leading bit and is left out. The signed number is compared with a threshold. The
    result starts at element `first`.

    >>> 450 < int(chance(key(0, "a", 1), (1000,), 0.5).sum()) < 550
    True
    """
    # The largest double below one still maps to a 64-bit integer.
    threshold = round(min(max(p, 0.0), 1 - 2**-53) * (1 << 64)) - (1 << 63)
    element = torch.arange(first, first + math.prod(shape), device=key.device)
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
    """Many standard normal numbers, in single precision for every type.

    On a CPU hashing takes ten times as long as a generator. So the CPU uses a generator set by the
    key: the numbers depend on the key alone, but differ from those of a GPU.

    >>> kinds = torch.float32, torch.float64
    >>> single, double = (many_normal(key(0, "a", 1), (2, 3), kind) for kind in kinds)
    >>> bool((single == double).all())
    True
    """
    if key.device.type != "cpu":
        return normal(key, shape, dtype)
    return torch.randn(tuple(shape), generator=_keyed(key), dtype=torch.float32).to(dtype)


def many_uniform(key: Tensor, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Many numbers in [0, 1), as `many_normal` makes them.

    >>> many_uniform(key(0, "a", 1), (2, 3), torch.float64).shape
    torch.Size([2, 3])
    """
    if key.device.type != "cpu":
        return uniform(key, shape).to(dtype)
    return torch.rand(tuple(shape), generator=_keyed(key), dtype=torch.float32).to(dtype)


def _keyed(key: Tensor) -> torch.Generator:
    return torch.Generator().manual_seed(int(key) & ((1 << 63) - 1))


def normal_stream(keys: Tensor, first: int, pairs: int) -> Tensor:
    """Standard normal numbers [M, 2 pairs] of M streams, in single precision on every device.

    Stream i is the generator splitmix64 that starts at `keys[i]`. Its number k gives the pair of
    elements 2k and 2k + 1, by the method of Box & Muller (1958). Any part of a stream can be
    drawn alone: the result starts at pair `first`.

    >>> keys = key(0, "a", torch.arange(3))
    >>> whole, part = normal_stream(keys, 0, 5), normal_stream(keys[1:], 2, 3)
    >>> bool((whole[1:, 4:] == part).all())
    True
    """
    count = torch.arange(first, first + pairs, device=keys.device)
    bits = hashed(count * _GOLDEN + keys.unsqueeze(-1))
    # Half a unit keeps the logarithm finite.
    high = (_shift(bits, 32).float() + 0.5).mul_(2.0**-32)
    radius = high.log_().mul_(-2).sqrt_()
    angle = bits.bitwise_and_((1 << 32) - 1).float().mul_(2 * math.pi * 2.0**-32)
    return torch.stack([radius * angle.cos(), radius * angle.sin()], -1).flatten(-2)


def hashed(x: Tensor) -> Tensor:
    """The splitmix64 finaliser, in wrapping signed arithmetic."""
    x = _stirred(x + _GOLDEN)
    return x ^ _shift(x, 31)


def _stirred(x: Tensor) -> Tensor:
    # In place, in the caller's sum: masks are large, and new memory costs most.
    x = x.bitwise_xor_(_shift(x, 30)).mul_(_MIX1)
    return x.bitwise_xor_(_shift(x, 27)).mul_(_MIX2)


def _shift(x: Tensor, bits: int) -> Tensor:
    return x.bitwise_right_shift(bits).bitwise_and_((1 << (64 - bits)) - 1)

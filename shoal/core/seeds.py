"""Seeds: one number from the user, an independent stream for every purpose."""

import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from shoal.core.errors import ConfigError

__all__ = ["derive", "generator", "generators_restored", "seeded", "set_generators"]


def derive(seed: int, *purpose: str | int) -> int:
    """A seed of 63 bits for one purpose, the same on every machine and in every version.

    Two purposes, or two seeds, give streams that have nothing in common; `derive(0, "a", 1)` and
    `derive(0, "a1")` differ too.

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
    """The CPU generators of torch, numpy and Python set to `seed`, and put back at the end."""
    with generators_restored():
        set_generators(seed)
        yield


@contextmanager
def generators_restored() -> Iterator[None]:
    """The CPU generators of torch, numpy and Python are put back at the end."""
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
        raise ConfigError(f"a seed must be a whole number, not {number!r}") from None

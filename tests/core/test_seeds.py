"""Derived seeds: stable for ever, different for every purpose."""

import hashlib
import itertools

import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.core.random import derive, generator


@pytest.mark.parametrize(
    ("seed", "purpose", "text"),
    [
        (0, (), "(0,)"),
        (7, ("order", 3), "(7, 'order', 3)"),
        (-1, ("it's",), '(-1, "it\'s")'),
    ],
)
def test_is_the_leading_63_bits_of_the_hash_of_the_written_tuple(seed, purpose, text):
    digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    assert derive(seed, *purpose) == int(digest, 16) // 2
    assert 0 <= derive(seed, *purpose) < 2**63


def test_does_not_depend_on_the_type_of_integer():
    assert derive(np.int64(3), np.uint8(2)) == derive(3, 2) == derive(True + 2, 2)


def test_purposes_and_seeds_do_not_collide():
    words = ("", "a", "b", "1", 1, 0)
    purposes = [p for k in range(3) for p in itertools.product(words, repeat=k)]
    seeds = [derive(seed, *p) for seed in range(50) for p in purposes]
    assert len(set(seeds)) == len(seeds)


def test_bits_are_fair():
    numbers = torch.tensor([derive(0, "bits", k) for k in range(4000)])
    share = torch.stack([(numbers >> bit & 1).double().mean() for bit in range(63)])
    assert (share - 0.5).abs().max() < 5 * 0.5 / 4000**0.5


def test_neighbouring_streams_are_uncorrelated():
    draws = torch.stack([torch.randn(10_000, generator=generator(s, "x")) for s in range(6)])
    correlation = torch.corrcoef(draws) - torch.eye(6)
    assert correlation.abs().max() < 5 / 100


@pytest.mark.parametrize("seed", [1.0, "1", None])
def test_refuses_a_seed_that_is_not_whole(seed):
    with pytest.raises(ConfigError, match="a seed must be a whole number, not"):
        derive(seed)

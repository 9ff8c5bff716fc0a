"""Numbers hashed from keys, held against splitmix64 in whole numbers of any size."""

import pytest
import torch

from shoal.core.random import chance, hashed, key

WORD = 1 << 64


def splitmix(state: int) -> int:
    """One number of splitmix64, as its authors define it: Steele, Lea & Flood (2014)."""
    z = (state + 0x9E3779B97F4A7C15) % WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % WORD
    return z ^ (z >> 31)


def signed(z: int) -> int:
    return z - WORD if z >= WORD // 2 else z


@pytest.mark.parametrize("state", [0, 1, -1, 2**62, -(2**63)])
def test_hashed_is_splitmix64(state):
    assert int(hashed(torch.tensor(state))) == signed(splitmix(state % WORD))


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_chance_cuts_the_stream_of_splitmix64_at_p(p):
    start = key(3, "masks", 7)
    golden = 0x9E3779B97F4A7C15
    # The stream from i on: splitmix adds golden once before it mixes.
    stream = [splitmix((int(start) + (i - 1) * golden) % WORD) for i in range(500)]
    expected = [(signed(z) + WORD // 2) / WORD < p for z in stream]
    assert chance(start, (500,), p).tolist() == expected


def test_chance_of_members_is_uncorrelated_and_has_its_mean():
    keys = key(0, "masks", torch.arange(8))
    masks = torch.func.vmap(lambda k: chance(k, (20_000,), 0.3))(keys).double() - 0.3
    spread = (0.3 * 0.7 / 20_000) ** 0.5
    assert masks.mean(1).abs().max() < 5 * spread
    together = masks @ masks.T / 20_000 / 0.21
    assert (together - torch.eye(8)).abs().max() < 5 / 20_000**0.5 + 0.02


def test_chance_is_the_same_for_one_key_alone_or_among_others():
    keys = key(0, "masks", torch.arange(3))
    together = torch.func.vmap(lambda k: chance(k, (4, 5), 0.4))(keys)
    alone = torch.stack([chance(k, (4, 5), 0.4) for k in keys])
    assert together.equal(alone)


def test_chance_zero_never_happens_and_chance_one_always():
    start = key(0, "masks", 0)
    assert not chance(start, (1000,), 0.0).any()
    assert chance(start, (1000,), 1.0).all()


def test_a_key_is_not_changed_by_drawing_from_it():
    start = key(0, "masks", torch.arange(3))
    before = start.clone()
    hashed(start)
    chance(start[0], (10,), 0.5)
    assert start.equal(before)

"""Numbers hashed from keys, held against splitmix64 in whole numbers of any size."""

import math

import pytest
import torch

from shoal.core.random import chance, hashed, key, normal_stream

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


def test_normal_numbers_are_pairs_of_the_stream_of_splitmix64():
    """The upper half of a number is a radius, the lower half an angle: Box & Muller (1958)."""
    keys = key(3, "noise", torch.arange(2))
    found = normal_stream(keys, 5, 40)
    for row, start in enumerate(keys.tolist()):
        for place in range(40):
            bits = splitmix((start + (place + 5) * 0x9E3779B97F4A7C15) % WORD)
            radius = math.sqrt(-2 * math.log(((bits >> 32) + 0.5) / 2**32))
            angle = 2 * math.pi * (bits % 2**32) / 2**32
            pair = [radius * math.cos(angle), radius * math.sin(angle)]
            assert found[row, 2 * place : 2 * place + 2].tolist() == pytest.approx(pair, abs=2e-6)


def test_normal_numbers_have_the_moments_and_tails_of_a_normal_law():
    x = normal_stream(key(0, "noise", torch.arange(20)), 0, 10_000).double().flatten()
    count = len(x)
    for power, (moment, variance) in {1: (0, 1), 2: (1, 2), 3: (0, 15), 4: (3, 96)}.items():
        assert abs(x.pow(power).mean() - moment) < 4 * math.sqrt(variance / count)
    beyond = 1 - math.erf(3 / math.sqrt(2))
    assert abs((x.abs() > 3).double().mean() - beyond) < 4 * math.sqrt(beyond / count)


def test_one_normal_number_says_nothing_of_the_next_or_of_another_stream():
    x = normal_stream(key(0, "noise", torch.arange(6)), 0, 5_000).double()
    shifted = torch.cat([x[:, :-2], x[:, 1:-1], x[:, 2:]])
    together = torch.corrcoef(torch.cat([shifted, shifted.square()])) - torch.eye(36)
    assert together.abs().max() < 4.5 / x.shape[1] ** 0.5

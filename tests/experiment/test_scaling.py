"""The predicted time of a step on many processes, against closed forms."""

import math

import pytest

from shoal.core.errors import ConfigError
from shoal.experiment.bench.scaling import (
    AGREEMENT,
    SPACES,
    Exchange,
    Link,
    Workload,
    exchanges,
    flops,
    grid_of,
    step_time,
)

WORK = Workload(members=12, weights=1000, batch=50, outputs=10, inputs=64, seconds=0.5)
COUNTS = (2, 3, 4, 6, 12)


def simulated(kind, numbers, processes):
    """Bytes that process 0 receives when a ring of processes passes blocks around."""
    if kind == "all-gather":
        return sum(numbers for _ in range(processes - 1))
    blocks = numbers // processes
    passes = 2 if kind == "all-reduce" else 1  # reduce-scatter, then all-gather
    return sum(blocks for _ in range(passes * (processes - 1)))


@pytest.mark.parametrize("kind", ["all-gather", "all-to-all", "all-reduce"])
@pytest.mark.parametrize("processes", COUNTS)
def test_an_exchange_receives_what_a_ring_passes_around(kind, processes):
    exchange = Exchange(kind, 24 * processes)
    assert exchange.received(processes, 1) == simulated(kind, 24 * processes, processes)
    link = Link(bandwidth=10.0, latency=0.25)
    expected = exchange.received(processes, 8) / 10 + exchange.rounds(processes) / 4
    assert sum(exchange.cost(processes, link, 8)) == pytest.approx(expected)


@pytest.mark.parametrize("space", SPACES)
def test_one_process_sends_nothing_and_computes_every_member(space):
    found = step_time(WORK, Link(1.0, 1.0), 1, space)
    assert found.total == found.compute == 12 * 0.5
    assert exchanges(WORK, 1, space) == []


@pytest.mark.parametrize("processes", COUNTS)
def test_bytes_of_a_step_in_each_space(processes):
    """(P - 1) m (S + 1) numbers gathered; M D / P (P - 1) / P numbers moved there and back."""
    m, others = 12 // processes, (processes - 1) / processes
    share = 2 * others * AGREEMENT
    gathered = {"function": 500, "input-gradient": 50 * 64}
    expected = {s: (processes - 1) * m * (n + 1) + share for s, n in gathered.items()}
    moved, gram = others * m * 1000, 2 * others * 12**2
    expected |= {"plain": share, "weight": 2 * moved + gram + share}
    expected |= {"weight-stein": 4 * moved + gram + share}
    for space, numbers in expected.items():
        found = step_time(WORK, Link(1.0, 0.0), processes, space)
        assert found.traffic == pytest.approx(4 * numbers), space


def test_a_process_receives_less_at_weights_with_more_processes_and_more_at_outputs():
    """2 M D / P falls, while every process needs the outputs of all other members."""
    large = Workload(1024, 10**7, 128, 10, 3072, 0.0)
    times = {s: [step_time(large, Link(1.0, 0), p, s).traffic for p in (8, 64)] for s in SPACES}
    assert times["weight"][1] < times["weight"][0] / 7
    assert times["function"][1] > times["function"][0]


def test_processes_beyond_the_members_divide_the_batch():
    assert grid_of(4, 8) == (4, 2)
    work = Workload(4, 1000, 50, 10, 64, 0.5)
    assert step_time(work, Link(1.0, 0.0), 8, "plain").compute == 0.25
    assert (Exchange("all-reduce", 1000), 2) in exchanges(work, 8, "function")


def test_an_uneven_split_waits_for_the_larger_share():
    assert step_time(Workload(7, 10, 1, 1, 1, 1.0), Link(1.0, 0.0), 2, "plain").compute == 4.0


def test_operations_are_those_of_matrix_products():
    """A Gram matrix of [M, S] has M² S multiplications and additions, each."""
    assert flops(WORK, 1, "weight") == 2 * (12 * 12 * 1000) * 2
    assert flops(WORK, 4, "weight") == flops(WORK, 1, "weight") / 4
    assert flops(WORK, 4, "function") == 2 * 12 * 12 * 500 + 2 * 3 * 12 * 500
    assert step_time(WORK, Link(1, 0, rate=10.0), 4, "weight").interaction == pytest.approx(
        flops(WORK, 4, "weight") / 10
    )


def test_a_fraction_of_the_batch_repels_at_fewer_points():
    some = Workload(12, 1000, 50, 10, 64, 0.5, fraction=0.25)
    (gather, _), *_ = exchanges(some, 4, "input-gradient")
    assert gather.numbers == 3 * (math.ceil(12.5) * 64 + 1)


def test_a_short_sum_runs_in_a_tree_and_a_long_one_in_a_ring():
    """1,024 processes: 20 rounds of all numbers, or 2,046 rounds of a thousandth each."""
    link = Link(bandwidth=4.0, latency=1.0, trees=True)
    assert Exchange("all-reduce", 10).cost(1024, link) == (20.0, 20.0)
    assert Exchange("all-reduce", 10**8).cost(1024, link)[1] == 2 * 1023
    assert Exchange("all-gather", 10).cost(1024, link)[1] == 1023


def test_an_unknown_space_is_refused():
    with pytest.raises(ConfigError, match="function"):
        exchanges(WORK, 2, "functions")

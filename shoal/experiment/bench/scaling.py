"""The time of a training step on many processes: computing, interaction, traffic and latency.

M members lie on P processes, m = ceil(M / P) each. Processes beyond M become R = P / M replicas
along the batch. The time of a step without any overlap, an upper bound, is

    T(P) = m t / R  +  flops / F  +  sum over exchanges of [ bytes / b + rounds a ]

with t the seconds per member and batch on one device, F operations per second of the interaction,
b bytes per second of a process's link, and a seconds per round of messages. Bytes are those that a
process receives, of numbers with s bytes, in ring algorithms (Thakur, Rabenseifner & Gropp, 2005):

    exchange      own numbers n    bytes                rounds
    all-gather    m S              (P - 1) n s          P - 1
    all-to-all    m D              n s (P - 1) / P      P - 1
    all-reduce    M^2              2 n s (P - 1) / P    2 (P - 1)
    in a tree                      2 n s                2 ceil(log2 P)

Function space gathers S = B C outputs of each member, input gradients S = B I numbers. Weight space
never gathers D weights: a first all-to-all gives each process D / P weights of all members, an
all-reduce adds the Gram matrices of these shares, and a second all-to-all returns the push.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest

__all__ = ["SPACES", "Exchange", "Link", "StepTime", "Workload", "exchanges", "flops", "step_time"]

SPACES = ("plain", "function", "input-gradient", "weight", "weight-stein")
"""Where members repel: nowhere, at outputs, at input gradients, at weights, and by SVGD."""

AGREEMENT = 140
"""Numbers that all processes add up after a step: norms, losses, and whether to stop or save."""


@dataclass(frozen=True)
class Workload:
    """One ensemble and its batch.

    Attributes:
        members: M, over all processes.
        weights: D, per member.
        batch: B, data points of a step.
        outputs: C, per data point.
        inputs: I, per data point.
        seconds: t, of one member and one batch on one device.
        fraction: share of the batch at which input gradients repel.
        size: s, bytes of a number.
    """

    members: int
    weights: int
    batch: int
    outputs: int
    inputs: int
    seconds: float
    fraction: float = 1.0
    size: int = 4


@dataclass(frozen=True)
class Link:
    """What connects the processes, and how fast each computes the interaction.

    Attributes:
        bandwidth: b, bytes per second that a process receives.
        latency: a, seconds per round of messages.
        rate: F, operations per second of matrix products.
        trees: whether an all-reduce may run in a tree, as NCCL does for short messages.
    """

    bandwidth: float
    latency: float
    rate: float = math.inf
    trees: bool = False


class Exchange(NamedTuple):
    """One collective operation: "all-gather", "all-to-all" or "all-reduce" of own numbers.

    >>> Exchange("all-gather", 10).received(4, 4), Exchange("all-gather", 10).rounds(4)
    (120.0, 3)
    """

    kind: str
    numbers: int

    def received(self, processes: int, size: int) -> float:
        """Bytes that a process receives from others."""
        others = processes - 1
        shares = {"all-gather": others, "all-to-all": others / processes}
        return float(shares.get(self.kind, 2 * others / processes) * self.numbers * size)

    def rounds(self, processes: int) -> int:
        """Messages that wait for each other."""
        return (processes - 1) * (2 if self.kind == "all-reduce" else 1)

    def cost(self, processes: int, link: Link, size: int = 4) -> tuple[float, float]:
        """Seconds of traffic and of latency; an all-reduce takes the faster of ring and tree."""
        ring = (
            self.received(processes, size) / link.bandwidth,
            self.rounds(processes) * link.latency,
        )
        if not link.trees or self.kind != "all-reduce":
            return ring
        depth = (processes - 1).bit_length()
        tree = (2 * self.numbers * size / link.bandwidth, 2 * depth * link.latency)
        return min(ring, tree, key=sum)


class StepTime(NamedTuple):
    """Seconds of a step by cause."""

    compute: float
    interaction: float
    traffic: float
    latency: float

    @property
    def total(self) -> float:
        """Seconds of the step without overlap."""
        return sum(self)


def grid_of(members: int, processes: int) -> tuple[int, int]:
    """Processes along members and along the batch; members are divided first.

    >>> grid_of(100, 8), grid_of(4, 8), grid_of(7, 2)
    ((8, 1), (4, 2), (2, 1))
    """
    rows = max(r for r in range(1, min(members, processes) + 1) if processes % r == 0)
    return rows, processes // rows


def exchanges(workload: Workload, processes: int, space: str) -> list[tuple[Exchange, int]]:
    """The exchanges of a step, each with the number of processes that take part.

    Args:
        workload: the ensemble.
        processes: P.
        space: one of `SPACES`.
    """
    if space not in SPACES:
        raise ConfigError(f"there is no space {space!r}; {nearest(space, SPACES)}")
    rows, replicas = grid_of(workload.members, processes)
    local = math.ceil(workload.members / rows)
    along_members: list[Exchange] = []
    if space in ("function", "input-gradient"):
        along_members = [Exchange("all-gather", local * (_sites(workload, space) + 1))]
    elif space.startswith("weight"):
        move = Exchange("all-to-all", local * workload.weights)
        along_members = [move, Exchange("all-reduce", workload.members**2), move]
        along_members += [move, move] if space == "weight-stein" else []
    listed = [(each, rows) for each in along_members]
    listed += [(Exchange("all-reduce", local * workload.weights), replicas)]
    listed += [(Exchange("all-reduce", AGREEMENT), processes)]
    return [(each, count) for each, count in listed if count > 1]


def flops(workload: Workload, processes: int, space: str) -> float:
    """Operations of a process for the Gram matrix and its product with the coordinates.

    At outputs every process computes the whole Gram matrix and the push of its own members:
    2 M² S + 2 m M S. At weights it does both for its share of the weights: 4 M² D / P.
    """
    rows, _ = grid_of(workload.members, processes)
    members, local = workload.members, math.ceil(workload.members / rows)
    if space in ("function", "input-gradient"):
        return 2.0 * members * (members + local) * _sites(workload, space)
    if space.startswith("weight"):
        products = 3 if space == "weight-stein" else 2
        return 2.0 * products * members**2 * workload.weights / rows
    return 0.0


def step_time(workload: Workload, link: Link, processes: int, space: str) -> StepTime:
    """The predicted time of a step, by cause.

    >>> work = Workload(8, 1000, 100, 10, 784, seconds=0.01)
    >>> step_time(work, Link(1e9, 0.0), 4, "function").compute
    0.02
    """
    rows, replicas = grid_of(workload.members, processes)
    messages = exchanges(workload, processes, space)
    compute = math.ceil(workload.members / rows) * workload.seconds / replicas
    costs = [each.cost(count, link, workload.size) for each, count in messages]
    return StepTime(
        compute,
        flops(workload, processes, space) / link.rate,
        sum(traffic for traffic, _ in costs),
        sum(latency for _, latency in costs),
    )


def _sites(workload: Workload, space: str) -> int:
    """Coordinates of a member at outputs or at input gradients."""
    if space == "function":
        return workload.batch * workload.outputs
    return math.ceil(workload.fraction * workload.batch) * workload.inputs

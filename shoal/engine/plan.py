"""Which mapping suits an ensemble where it lies, when nobody has measured."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.engine.group import Group
from shoal.engine.member_runner import MemberRunner, parse_runner

__all__ = [
    "STREAMS",
    "EnginePlan",
    "default_runner",
    "has_batch_norm",
    "has_convolutions",
    "parse_engine",
]

STREAMS = 10
"""Members with convolutions that are under way at a time on a GPU."""


def default_runner(groups: Sequence[Group], device: torch.device) -> MemberRunner:
    """All members together; on a GPU those with convolutions one after another on several streams.

    There a convolution for each member is faster than a grouped one for all.
    """
    if device.type == "cuda" and has_convolutions(groups):
        return MemberRunner("loop", streams=STREAMS)
    return MemberRunner()


def has_convolutions(groups: Sequence[Group]) -> bool:
    """Any member convolves."""
    return _has(groups, nn.modules.conv._ConvNd)


def has_batch_norm(groups: Sequence[Group]) -> bool:
    """Any member couples the points of a batch by their statistics."""
    return _has(groups, nn.modules.batchnorm._BatchNorm)


def _has(groups: Sequence[Group], kinds: type[nn.Module]) -> bool:
    return any(isinstance(layer, kinds) for g in groups for layer in g.skeleton.modules())


LONG = {True: 20_000, False: 50_000}
"""Steps after which compiling has paid for itself, with convolutions and without.

On an H200 ten ResNet18 in bfloat16 took 19.3 ms a step compiled and 23.6 not; to compile them took
40 s. With fused layers they take 17.3.
"""


@dataclass(frozen=True)
class EnginePlan:
    """How a run is executed.

    Attributes:
        mapping: how the members run; None to follow the rule.
        graph: replay whole steps on a GPU.
        compiled: compile the arithmetic between the networks, and convolutional networks; None to
            follow the rule.
    """

    mapping: MemberRunner | None = None
    graph: bool = True
    compiled: bool | None = None

    def settled_for(
        self, groups: Sequence[Group], device: torch.device, steps: int, waits_for_host: bool
    ) -> "EnginePlan":
        """The plan with nothing left open.

        Args:
            groups: the members, by architecture.
            device: where they are.
            steps: how many the run has.
            waits_for_host: the mathematics of a step does, so that it cannot be captured.
        """
        on_gpu, convolves = device.type == "cuda", has_convolutions(groups)
        fused = convolves and groups[0].compute == torch.bfloat16
        mapping = self.mapping or default_runner(groups, device)
        compiled = self.compiled
        if compiled is None:
            pays = steps >= LONG[convolves] and not fused
            compiled = on_gpu and pays and not waits_for_host
        if mapping.kind == "loop" and on_gpu:
            mapping = replace(mapping, streams=STREAMS, compiled=compiled)
        return EnginePlan(mapping, self.graph and on_gpu and not waits_for_host, compiled)


def parse_engine(engine: str) -> EnginePlan:
    """The plan that an engine's name stands for.

    >>> plan = parse("loop+compile")
    >>> plan.mapping.kind, plan.graph, plan.compiled
    ('loop', True, True)
    """
    name, *words = str(engine).split("+")
    mapping = parse_runner(name)
    for word in words:
        if word not in ("eager", "compile"):
            raise ConfigError(f"an engine can be '+eager' or '+compile', not '+{word}'")
    chosen = None if name == "auto" else mapping
    compiled = True if "compile" in words else False if "eager" in words else None
    return EnginePlan(chosen, graph="eager" not in words, compiled=compiled)

"""The engine: how a run is executed, never what it computes.

The rule of `engine="auto"`:

* On a GPU every step is replayed as a CUDA graph, if the data lie on the device, the optimiser can
  be captured and eigenpairs, if the method needs them, come from a kernel of ours (up to 64
  members in single precision). Networks of matrix products run all members
  together by `vmap`; networks with convolutions one member after another on several streams, since
  a grouped convolution is slower. Runs that are long enough to pay for it are compiled, if their
  layers are not fused anyway, as those of convolutions in bfloat16 are.
* On a CPU, `vmap` or `loop`, whichever a short trial finds faster (see `shoal.training.trial`).
* Networks that `vmap` cannot batch always run in a loop.

It can be forced: "vmap", "loop" or "chunk:4", with "+eager" to launch every kernel from Python or
"+compile" to send the arithmetic between the networks, and convolutional networks, through
`torch.compile`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from shoal.core.errors import ConfigError
from shoal.inference.group import Group
from shoal.inference.mapping import Mapping
from shoal.inference.mapping import parse as parse_mapping
from shoal.inference.suited import STREAMS, has_convolutions, suited_mapping

__all__ = ["Plan", "parse"]

LONG = {True: 20_000, False: 50_000}
"""Steps after which compiling has paid for itself, with convolutions and without.

On an H200 ten ResNet18 in bfloat16 took 19.3 ms a step compiled and 23.6 not; to compile them took
40 s. With fused layers they take 17.3.
"""


@dataclass(frozen=True)
class Plan:
    """How a run is executed.

    Attributes:
        mapping: how the members run; None to follow the rule.
        graph: replay whole steps on a GPU.
        compiled: compile the arithmetic between the networks, and convolutional networks; None to
            follow the rule.
    """

    mapping: Mapping | None = None
    graph: bool = True
    compiled: bool | None = None

    def settled_for(
        self, groups: Sequence[Group], device: torch.device, steps: int, waits_for_host: bool
    ) -> "Plan":
        """The plan with nothing left open.

        Args:
            groups: the members, by architecture.
            device: where they are.
            steps: how many the run has.
            waits_for_host: the mathematics of a step does, so that it cannot be captured.
        """
        on_gpu, convolves = device.type == "cuda", has_convolutions(groups)
        fused = convolves and groups[0].compute == torch.bfloat16
        mapping = self.mapping or suited_mapping(groups, device)
        compiled = self.compiled
        if compiled is None:
            pays = steps >= LONG[convolves] and not fused
            compiled = on_gpu and pays and not waits_for_host
        if mapping.kind == "loop" and on_gpu:
            mapping = replace(mapping, streams=STREAMS, compiled=compiled)
        return Plan(mapping, self.graph and on_gpu and not waits_for_host, compiled)


def parse(engine: str) -> Plan:
    """The plan that an engine's name stands for.

    >>> plan = parse("loop+compile")
    >>> plan.mapping.kind, plan.graph, plan.compiled
    ('loop', True, True)
    """
    name, *words = str(engine).split("+")
    mapping = parse_mapping(name)
    for word in words:
        if word not in ("eager", "compile"):
            raise ConfigError(f"an engine can be '+eager' or '+compile', not '+{word}'")
    chosen = None if name == "auto" else mapping
    compiled = True if "compile" in words else False if "eager" in words else None
    return Plan(chosen, graph="eager" not in words, compiled=compiled)

"""The engine: how a run is executed, never what it computes.

The rule of `engine="auto"`:

* On a GPU every step is replayed as a CUDA graph, if the data lie on the device and the optimiser
  can be captured. Networks of matrix products run all members together by `vmap`; networks with
  convolutions one member after another on several streams, since a grouped convolution is slower.
* On a CPU, `vmap` or `loop`, and one thread or all, whichever a short trial finds faster; a machine
  remembers what it found, so that a run can be repeated bit for bit.
* Networks that `vmap` cannot batch always run in a loop.

It can be forced: "vmap", "loop" or "chunk:4", with "+eager" to launch every kernel from Python or
"+compile" to send the networks and the arithmetic between them through `torch.compile`.
"""

from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.inference.ensemble import Ensemble
from shoal.inference.mapping import Mapping
from shoal.inference.mapping import parse as parse_mapping

__all__ = ["Plan", "parse"]

STREAMS = 4
"""Members with convolutions that are under way at a time on a GPU."""


@dataclass(frozen=True)
class Plan:
    """How a run is executed.

    Attributes:
        mapping: how the members run; None to be found out.
        graph: replay whole steps on a GPU.
        compiled: compile the networks and the arithmetic between them.
    """

    mapping: Mapping | None = None
    graph: bool = True
    compiled: bool = False

    def mapping_for(self, ensemble: Ensemble) -> Mapping:
        """The mapping asked for, or the one that the rule gives without a trial."""
        mapping = self.mapping
        if mapping is None:
            on_gpu = ensemble.device.type == "cuda"
            mapping = Mapping("loop") if on_gpu and has_convolutions(ensemble) else Mapping()
        if mapping.kind == "loop" and ensemble.device.type == "cuda":
            mapping = replace(mapping, streams=STREAMS)
        return replace(mapping, compiled=self.compiled)


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
    return Plan(chosen, graph="eager" not in words, compiled="compile" in words)


def has_convolutions(ensemble: Ensemble) -> bool:
    """Any member convolves."""
    kinds = nn.modules.conv._ConvNd
    return any(isinstance(layer, kinds) for g in ensemble.groups for layer in g.skeleton.modules())


def can_capture(optimizer: torch.optim.Optimizer) -> bool:
    """The optimiser runs on the device alone."""
    settings = optimizer.param_groups[0]
    return bool(settings.get("fused") or settings.get("capturable"))

"""The engine plan of a run: member runner, graph and compilation.

`default_runner` chooses a member runner without timing, `fitted_to_cache` corrects it for a batch
on a CPU, `parse_engine` reads the `engine` option, and `EnginePlan.settled_for` fills in the
remaining choices for an ensemble on a device.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn

from shoal.core.errors import ConfigError
from shoal.core.structure import Inputs
from shoal.engine.members.group import Group
from shoal.engine.members.member_runner import STREAMS, MemberRunner, parse_runner
from shoal.engine.members.network_call import call_network
from shoal.engine.members.stack import evaluation_mode

__all__ = [
    "EnginePlan",
    "default_runner",
    "fitted_to_cache",
    "has_batch_norm",
    "has_convolutions",
    "has_overlapping_filters",
    "parse_engine",
]


def default_runner(groups: Sequence[Group], device: torch.device) -> MemberRunner:
    """vmap over all members; on a GPU, convolutional members run in a loop on several streams.

    On a GPU one convolution per member is faster than one grouped convolution. Filters that all
    members share need no groups: members are folded into the batch. A convolution that only cuts
    patches is a product.
    """
    if device.type == "cuda" and has_overlapping_filters(groups):
        return MemberRunner("loop", streams=STREAMS)
    return MemberRunner()


CACHE = 1 << 20
"""Bytes of one member's widest activations from which convolutions take turns on a CPU.

One grouped convolution of all members is a single call, and its activations are M times those of a
member. Training steps on one core (5 and 20 members, three networks): with activations of at most
0.8 MB a loop took 0.93 to 3.1 of the time of `vmap`, with 1 MB 0.97, with 3.2 and 6.4 MB 0.52 to
0.94.
"""


def fitted_to_cache(
    mapping: MemberRunner, groups: Sequence[Group], first: Callable[[], Inputs]
) -> MemberRunner:
    """The member runner on a CPU: a loop for large convolutions; `first` gives inputs [B, ...]."""
    if mapping.kind == "loop" or not has_overlapping_filters(groups):
        return mapping
    x = first()
    widest = max(_widest_convolution(group, x) for group in groups)
    return replace(mapping, kind="loop") if widest > CACHE else mapping


def _widest_convolution(group: Group, x: Inputs) -> int:
    """Bytes of the largest output of a convolution for a batch; 0 if the network fails on it."""
    sizes = [0]
    convolutions = [m for m in group.skeleton.modules() if isinstance(m, nn.modules.conv._ConvNd)]
    note = lambda layer, inputs, output: sizes.append(output.nbytes)  # noqa: E731
    hooks = [layer.register_forward_hook(note) for layer in convolutions]
    try:
        with torch.no_grad(), evaluation_mode(group.skeleton):
            call_network(group.skeleton, group.first_member(), group.as_computed(x))
    except Exception:  # the first step reports the error with its reason
        return 0
    finally:
        for hook in hooks:
            hook.remove()
    return max(sizes)


def has_overlapping_filters(groups: Sequence[Group]) -> bool:
    """Whether any member has private filters that do more than cut its input into patches."""
    return any(
        isinstance(layer, nn.modules.conv._ConvNd)
        and _is_private(group, name)
        and not _cuts_patches(layer)
        for group in groups
        for name, layer in group.skeleton.named_modules()
    )


def _cuts_patches(layer: nn.modules.conv._ConvNd) -> bool:
    """Whether every number of the input belongs to one patch at most, and to all filters."""
    plain = not layer.transposed and layer.groups == 1 and set(layer.dilation) == {1}
    return plain and layer.stride == layer.kernel_size and set(layer.padding) == {0}


def has_convolutions(groups: Sequence[Group]) -> bool:
    """Whether any member has convolutions."""
    return _has(groups, nn.modules.conv._ConvNd)


def has_batch_norm(groups: Sequence[Group]) -> bool:
    """Whether any member has batch normalisation."""
    return _has(groups, nn.modules.batchnorm._BatchNorm)


def _has(groups: Sequence[Group], kind: type[nn.Module]) -> bool:
    return any(isinstance(layer, kind) for group in groups for layer in group.skeleton.modules())


def _is_private(group: Group, layer: str) -> bool:
    start = f"{layer}." if layer else ""
    return any(name.startswith(start) for name in group.weights | group.buffers)


LONG = {True: 20_000, False: 50_000}
"""Number of steps from which compilation saves time, with convolutions and without.

On an H200 ten ResNet18 in bfloat16 took 19.3 ms per step compiled and 23.6 ms eager; compilation
took 40 s. With fused layers a step takes 17.3 ms.
"""


@dataclass(frozen=True)
class EnginePlan:
    """How a run is executed.

    Attributes:
        mapping: the member runner; None for the default.
        graph: replay whole steps on a GPU.
        compiled: compile the arithmetic stages and convolutional networks; None for the default.
    """

    mapping: MemberRunner | None = None
    graph: bool = True
    compiled: bool | None = None

    def settled_for(
        self, groups: Sequence[Group], device: torch.device, steps: int, waits_for_host: bool
    ) -> "EnginePlan":
        """The plan with all defaults filled in.

        Args:
            groups: the members, by architecture.
            device: device of the members.
            steps: number of steps of the run.
            waits_for_host: a step waits for the host and cannot be captured.
        """
        on_gpu, convolves = device.type == "cuda", has_overlapping_filters(groups)
        fused = convolves and groups[0].compute == torch.bfloat16
        mapping = self.mapping or default_runner(groups, device)
        if mapping.chunk is not None:  # "chunk:4" says how many members, not how they run
            mapping = replace(default_runner(groups, device), chunk=mapping.chunk)
        compiled = self.compiled
        if compiled is None:
            pays = steps >= LONG[convolves] and not fused
            compiled = on_gpu and pays and not waits_for_host
        if mapping.kind == "loop" and on_gpu:
            mapping = replace(mapping, streams=STREAMS, compiled=compiled)
        if mapping.kind == "vmap" and on_gpu and self.compiled and any(g.shared for g in groups):
            mapping = replace(mapping, compiled=True)
        return EnginePlan(mapping, self.graph and on_gpu and not waits_for_host, compiled)


def parse_engine(engine: str) -> EnginePlan:
    """The plan with this name.

    >>> plan = parse_engine("loop+compile")
    >>> plan.mapping.kind, plan.graph, plan.compiled
    ('loop', True, True)
    """
    name, *words = str(engine).split("+")
    mapping = parse_runner(name)
    for word in words:
        if word not in ("eager", "compile"):
            raise ConfigError(f"an engine may end in '+eager' or '+compile', not '+{word}'")
    chosen = None if name == "auto" else mapping
    compiled = True if "compile" in words else False if "eager" in words else None
    return EnginePlan(chosen, graph="eager" not in words, compiled=compiled)

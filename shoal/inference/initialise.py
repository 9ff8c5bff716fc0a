"""Independent members from a factory of modules, each with its own seed."""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.errors import ConfigError, ShoalWarning
from shoal.core.random import derive, generators_restored, set_generators
from shoal.core.storage.disk import machine_memory
from shoal.engine.members.group import Group
from shoal.engine.members.stack import merge_equal
from shoal.inference.adapting.peft import draw_zero_adapters, is_peft, shares_trained

__all__ = ["Build", "build_members", "drawn", "spread"]

Build = Callable[[], nn.Module]

_COMPARED = 16
"""Numbers of each parameter that are compared before two members are compared in full."""


def build_members(build: Build, indices: Sequence[int], seed: int) -> list[nn.Module]:
    """One module per index; member i has its own seed, and no two members are equal.

    A factory without random draws, or with a fixed seed, makes equal members. These are perturbed
    by a tenth of the size of their weights, and a warning reports them.
    """
    if isinstance(build, nn.Module):
        raise ConfigError(
            "build must be a function that makes a new network at each call, not a network; "
            "type: lambda: MyNetwork()"
        )
    modules = []
    gpus = range(torch.cuda.device_count())
    # Without a GPU, torch would store a stack trace at every call that seeds GPUs.
    set_all = torch.manual_seed if _has_gpu() else None
    with torch.random.fork_rng(gpus), generators_restored():
        for index in indices:
            member_seed = derive(seed, "member", index)
            set_generators(member_seed)
            if set_all is not None:
                set_all(member_seed)
            modules.append(_checked(build()))
            draw_zero_adapters(modules[-1])
            merge_equal(modules[-1], modules[0])
            if len(modules) <= 2:
                _check_memory(modules, len(indices))
    _check_alike(modules)
    _perturb_equal(modules, indices, seed)
    return modules


def drawn(members: range, made: slice | None) -> Sequence[int]:
    """Which members of an architecture a process draws: its own, and two to compare them with.

    Two networks show what all networks share, and which values shared tensors begin with.
    """
    if made is None:
        return members
    return [i for i in members if made.start <= i < made.stop or i < members.start + 2]


def spread(group: Group, places: Sequence[int], count: int) -> Group:
    """The group with `count` members: those of the group at `places`, and zeros.

    Memory that was never written takes no room on a CPU, so zeros cost nothing.
    """
    where = torch.tensor(places)

    def whole(tensor: Tensor) -> Tensor:
        size = count * tensor[0].numel() * tensor.element_size()
        flat = torch.from_numpy(np.zeros(size, dtype=np.uint8)).view(tensor.dtype)
        stacked = flat.view(count, *tensor.shape[1:])
        stacked[where] = tensor.detach()
        return stacked.requires_grad_(tensor.requires_grad)

    weights = {name: whole(tensor) for name, tensor in group.weights.items()}
    buffers = {name: whole(tensor) for name, tensor in group.buffers.items()}
    return replace(group, weights=weights, buffers=buffers)


def _has_gpu() -> bool:
    backends = torch.cuda, torch.backends.mps, torch.xpu
    return any(backend.is_available() for backend in backends)


def _checked(module: nn.Module) -> nn.Module:
    """The module itself, if its tensors can be stacked and trained."""
    if not isinstance(module, nn.Module):
        raise ConfigError(f"build() must return an nn.Module, not {type(module).__name__}")
    parameters = list(module.parameters())
    tensors = _tensors(module)
    if any(is_lazy(tensor) for tensor in tensors):
        raise ConfigError(
            "build() returned a network with lazy layers, whose shapes are unknown; "
            "in build, call the network once on a few inputs before returning it"
        )
    if any(tensor.is_meta for tensor in tensors):
        raise ConfigError(
            "build() returned a network on the device 'meta', which holds no numbers; "
            "make the network on the CPU"
        )
    if not parameters:
        raise ConfigError("build() returned a network without parameters: nothing can be trained")
    return module


def _check_memory(modules: list[nn.Module], members: int) -> None:
    """Refuse members that do not fit; the second shows what it shares with the first."""
    memory = machine_memory()
    sizes = [_bytes(module) for module in modules]
    if memory is None:
        return
    if len(modules) == 1:
        if sizes[0] > memory:
            raise ConfigError(f"a member needs {sizes[0]:,} bytes, and this machine has {memory:,}")
        return
    one = _bytes(modules[1], known=modules[0])
    if sizes[0] + one * (members - 1) > memory:
        raise ConfigError(
            f"each member needs {one:,} bytes, and this machine has {memory:,}; "
            f"use at most {(memory - sizes[0]) // one + 1:,} members"
        )


def _bytes(module: nn.Module, known: nn.Module | None = None) -> int:
    """Bytes of a network's tensors, without those that `known` holds as well."""
    held = set() if known is None else {t.data_ptr() for t in _tensors(known)}
    return sum(t.numel() * t.element_size() for t in _tensors(module) if t.data_ptr() not in held)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def _check_alike(modules: list[nn.Module]) -> None:
    shapes = [
        {name: getattr(value, "shape", None) for name, value in module.state_dict().items()}
        for module in modules
    ]
    if len({id(module) for module in modules}) < len(modules):
        raise ConfigError("build() returned the same module twice; make a new one at each call")
    if is_peft(modules[0]) and shares_trained(modules):
        raise ConfigError(
            "build() returned peft models of one network, so that members share adapters; "
            "type shoal.adapters.peft(model)"
        )
    if any(shape != shapes[0] for shape in shapes):
        raise ConfigError(
            "build() returned networks of different shapes; for mixed architectures pass a list of "
            "(build, count) pairs"
        )


def _perturb_equal(modules: list[nn.Module], indices: Sequence[int], seed: int) -> None:
    equal = _repeated(modules)
    if not equal:
        return
    for i in equal:
        generator = torch.Generator().manual_seed(derive(seed, "perturb", indices[i]))
        for parameter in modules[i].parameters():
            if parameter.requires_grad:
                parameter.data += _noise(parameter, generator)
    warnings.warn(
        f"build() made equal members (it draws nothing at random, or seeds itself); members "
        f"{_listed([indices[i] for i in equal])} were perturbed so that they differ",
        ShoalWarning,
        stacklevel=4,
    )


def _repeated(modules: Sequence[nn.Module]) -> list[int]:
    """Indices of modules that equal an earlier one; only similar modules are compared in full."""
    known: dict[tuple, list[nn.Module]] = {}
    repeated = []
    for i, module in enumerate(modules):
        alike = known.setdefault(_glimpse(module), [])
        if any(_same(module, other) for other in alike):
            repeated.append(i)
        else:
            alike.append(module)
    return repeated


def _glimpse(module: nn.Module) -> tuple:
    """A few numbers of every parameter; if they differ, the members differ."""
    flat = [parameter.detach().reshape(-1) for parameter in module.parameters()]
    return tuple(tuple(t[:: max(1, len(t) // _COMPARED)].tolist()) for t in flat)


def _same(a: nn.Module, b: nn.Module) -> bool:
    return all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))


def _noise(parameter: Tensor, generator: torch.Generator) -> Tensor:
    size = parameter.detach().float().square().mean().sqrt().item() or 1.0
    noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    return (0.1 * size * noise).to(parameter)


def _listed(numbers: Sequence[int]) -> str:
    few = ", ".join(map(str, numbers[:10]))
    return f"[{few}]" if len(numbers) <= 10 else f"[{few}, ... {len(numbers):,} in all]"

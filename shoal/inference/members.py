"""Networks that become members: new ones from a factory, each with its own seed, and trained ones.

Networks are checked, and trained networks are grouped by architecture and copied.
"""

import copy
import hashlib
import types
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from shoal.core.arguments import items
from shoal.core.errors import ConfigError, DataError, ShoalWarning, first_line
from shoal.core.random import derive, generators_restored, set_generators
from shoal.core.storage.disk import machine_memory
from shoal.engine.members.group import Group
from shoal.engine.members.stack import merge_equal
from shoal.inference.adapting.peft import draw_zero_adapters, is_peft, shares_trained

__all__ = [
    "Build",
    "adopted_groups",
    "as_saved",
    "build_members",
    "by_architecture",
    "checked_networks",
    "drawn",
    "spread",
    "unwrapped",
]

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


_LIGHTNING = {"_hparams", "_hparams_initial", "_hparams_name"}
_TRANSFORMERS = {"name_or_path", "warnings_issued", "_is_hf_initialized"}
_INTERNAL = {*vars(nn.Module()), "_is_torch_compile", *_LIGHTNING, *_TRANSFORMERS}
"""Attributes that do not change what a network computes."""


def unwrapped(module: nn.Module) -> nn.Module:
    """The network inside a wrapper for several devices or of `torch.compile`."""
    while True:
        if isinstance(module, nn.DataParallel | nn.parallel.DistributedDataParallel):
            module = module.module
        elif isinstance(inner := getattr(module, "_orig_mod", None), nn.Module):
            module = inner
        else:
            return module


def checked_networks(networks: Any) -> list[nn.Module]:
    """The networks without wrappers, if each can become a member of one ensemble."""
    if isinstance(networks, nn.Module) and not isinstance(networks, nn.ModuleList):
        raise ConfigError("wanted a list of networks, not one network; type: [network]")
    if isinstance(networks, str | bytes) or not isinstance(networks, Iterable):
        raise ConfigError(f"wanted a list of networks, not a {type(networks).__name__}")
    listed = items("networks", networks)
    if not listed:
        raise ConfigError("an ensemble needs at least one network, not an empty list")
    for index, module in enumerate(listed):
        if not isinstance(module, nn.Module):
            made = "; call the function first" if callable(module) else ""
            raise ConfigError(
                f"network {index} must be an nn.Module, not a {type(module).__name__}{made}"
            )
    modules = [unwrapped(module) for module in listed]
    places: dict[int, int] = {}
    for index, module in enumerate(modules):
        if (first := places.setdefault(id(module), index)) != index:
            raise ConfigError(
                f"networks {first} and {index} are the same object; pass each network once"
            )
        _check_tensors(module, index)
    _check_one_kind("device", {str(t.device) for m in modules for t in _named_tensors(m).values()})
    _check_one_kind("type", {str(_real_type(module)) for module in modules})
    return modules


def _check_tensors(module: nn.Module, index: int) -> None:
    if isinstance(module, torch.jit.ScriptModule):
        raise ConfigError(
            f"network {index} is a TorchScript module, whose tensors cannot be exchanged; "
            f"pass the original nn.Module"
        )
    tensors = [*module.parameters(), *module.buffers()]
    if any(is_lazy(tensor) for tensor in tensors):
        raise ConfigError(
            f"network {index} has lazy layers, whose shapes are unknown; "
            f"call the network once on a few inputs"
        )
    if any(tensor.is_meta for tensor in tensors):
        raise ConfigError(f"network {index} is on the device 'meta', which holds no numbers")
    if not any(p.is_floating_point() for p in module.parameters()):
        raise ConfigError(f"network {index} has no parameters of real numbers")


def _check_one_kind(what: str, kinds: set[str]) -> None:
    if len(kinds) > 1:
        names = " and ".join(sorted(kinds))
        raise ConfigError(f"the networks have more than one {what}, {names}; move them to one")


def _real_type(module: nn.Module) -> torch.dtype:
    return next(p.dtype for p in module.parameters() if p.is_floating_point())


def _named_tensors(module: nn.Module) -> dict[str, Tensor]:
    return dict(module.named_parameters()) | dict(module.named_buffers())


def by_architecture(modules: Sequence[nn.Module]) -> list[list[int]]:
    """Indices of the networks of each architecture, in the given order.

    Two networks have the same architecture if their layers, the layers' settings, and names, shapes
    and types of all tensors are equal. Then one network computes as the other if the tensors are
    exchanged.
    """
    groups: dict[tuple, list[int]] = {}
    for index, module in enumerate(modules):
        groups.setdefault(_architecture(module), []).append(index)
    shapes: dict[tuple, int] = {}
    for (_, tensors), (index, *_) in groups.items():
        first = shapes.setdefault(tensors, index)
        if first != index:
            warnings.warn(
                f"networks {first} and {index} have equal tensors, but their layers have different "
                f"settings; they count as different architectures",
                ShoalWarning,
                stacklevel=4,
            )
    return list(groups.values())


def _architecture(module: nn.Module) -> tuple:
    layers = tuple((name, *_settings(layer)) for name, layer in module.named_modules())
    tensors = tuple((name, tuple(t.shape), t.dtype) for name, t in _named_tensors(module).items())
    return layers, tensors


def _settings(layer: nn.Module) -> tuple:
    """Class and plain attributes of a layer, which its tensors do not show."""
    kind = f"{type(layer).__module__}.{type(layer).__qualname__}"
    computed = _computed_by_hooks(layer)
    settings = {k: v for k, v in vars(layer).items() if k not in _INTERNAL and k not in computed}
    return (
        kind,
        layer.extra_repr(),
        tuple((name, _plain(value)) for name, value in settings.items()),
    )


def _plain(value: Any) -> Any:
    """A value that is equal for equal settings; objects count by their class."""
    if value is None or isinstance(value, bool | int | float | str | torch.dtype | torch.device):
        return repr(value)
    if isinstance(value, Tensor):
        return tuple(value.shape), _digest([value])
    if isinstance(value, Mapping):
        return tuple((repr(key), _plain(each)) for key, each in value.items())
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, types.FunctionType):
        return id(value.__code__)
    return getattr(value, "__qualname__", type(value).__qualname__)


def _computed_by_hooks(layer: nn.Module) -> set[str]:
    """Names of the tensors that hooks such as `weight_norm` compute before every call."""
    hooks = layer._forward_pre_hooks.values()
    names = {getattr(hook, "name", getattr(hook, "_tensor_name", "")) for hook in hooks}
    return {str(name) for name in names if isinstance(vars(layer).get(str(name)), Tensor)}


def adopted_groups(networks: Iterable[nn.Module]) -> tuple[list[Group], Tensor]:
    """The networks as groups of members on their own memory, and which members are finite [M]."""
    modules = checked_networks(networks)
    places = by_architecture(modules)
    order = [index for group in places for index in group]
    if order != sorted(order):
        warnings.warn(
            f"members of one architecture stay together; the order of the networks is now {order}",
            ShoalWarning,
            stacklevel=3,
        )
    groups = [_group([modules[index] for index in group]) for group in places]
    _warn_equal(modules, order)
    return groups, _finite(groups)


def _group(modules: Sequence[nn.Module]) -> Group:
    trained: set[str] = set()
    for module in modules:
        real = {n: p for n, p in module.named_parameters() if p.is_floating_point()}
        # Networks for inference are often frozen as a whole; all their parameters were trained.
        trained |= {n for n, p in real.items() if p.requires_grad} or real.keys()
    prototype = _copied(modules[0])
    for name, parameter in prototype.named_parameters():
        parameter.requires_grad_(name in trained)
    if hasattr(prototype, "shared_tensors"):
        # networks that were trained apart share no trained tensor
        setattr(prototype, "shared_tensors", ())  # noqa: B010
    return Group.of([prototype, *modules[1:]])


def _copied(module: nn.Module) -> nn.Module:
    layers = [(layer, name) for layer in module.modules() for name in _computed_by_hooks(layer)]
    known = [vars(layer)[name] for layer, name in layers]  # torch copies no tensors with a history
    try:
        return copy.deepcopy(module, {id(tensor): tensor.detach().clone() for tensor in known})
    except Exception as error:
        raise ConfigError(
            f"the network cannot be copied by copy.deepcopy: {first_line(error)}"
        ) from error


def _warn_equal(modules: Sequence[nn.Module], order: Sequence[int]) -> None:
    digests = [_digest(_named_tensors(modules[index]).values()) for index in order]
    equal = [i for i, digest in enumerate(digests) if digest in digests[:i]]
    if equal:
        warnings.warn(
            f"members {equal} have the tensors of earlier members, so they are the same functions",
            ShoalWarning,
            stacklevel=4,
        )


def _digest(tensors: Iterable[Tensor]) -> str:
    total = hashlib.sha256()
    for tensor in tensors:
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        total.update(flat.view(torch.uint8).numpy().data)
    return total.hexdigest()


def _finite(groups: Sequence[Group]) -> Tensor:
    """Which members have finite weights only; a warning names the others."""
    finite = [
        torch.stack([t.detach().flatten(1).isfinite().all(1) for t in group.weights.values()])
        for group in groups
    ]
    alive = torch.cat([each.all(0) for each in finite])
    lost = (~alive).nonzero().flatten().tolist()
    if len(lost) == len(alive):
        raise DataError("the weights of all networks are not finite; nothing can be predicted")
    if lost:
        warnings.warn(
            f"members {lost} have weights that are not finite; they are left out",
            ShoalWarning,
            stacklevel=4,
        )
    return alive


def as_saved(
    build: Build | Sequence[tuple[Build, int]], state: Iterable[str], frozen: Iterable[str] = ()
) -> Build | list[tuple[Build, int]]:
    """Factories of the same networks, whose parameters are trained where those of `state` are.

    A function may freeze other parameters than the script that trained the networks.

    Args:
        build: makes the networks.
        state: names of the saved tensors.
        frozen: names of the shared ones that are not trained; others stay as `build` makes them.
    """
    trained = {name: name.startswith("weights/") for name in {*state} if name[:7] != "shared/"}
    trained |= dict.fromkeys(frozen, False)
    if callable(build):
        return build if isinstance(build, nn.Module) else _trained_as_in(trained, build, "")
    prefixes = [f"group{index}." if len(build) > 1 else "" for index in range(len(build))]
    return [
        (_trained_as_in(trained, make, prefix), count)
        for (make, count), prefix in zip(build, prefixes, strict=True)
    ]


def _trained_as_in(trained: Mapping[str, bool], build: Build, prefix: str) -> Build:
    def made() -> nn.Module:
        module = build()
        if not isinstance(module, nn.Module):
            return module  # refused with a sentence where members are made
        module = unwrapped(module)
        for name, parameter in module.named_parameters():
            names = (f"{kind}/{prefix}{name}" for kind in ("weights", "buffers", "shared"))
            known = [trained[each] for each in names if each in trained]
            if known and not is_lazy(parameter):
                parameter.requires_grad_(known[0])
        return module

    return made

"""Stacking: which tensors of the networks are private to a member, and which all members share.

A private tensor has a member axis, [m, ...]. A shared tensor is stored once, without a member axis.
Frozen tensors that are equal in all networks are shared. Names chosen by the user are shared too,
whether they are trained or not.
"""

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from fnmatch import fnmatchcase
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, first_line
from shoal.core.registry import nearest
from shoal.core.types import Tree

__all__ = [
    "MemberTensors",
    "copied",
    "detach_computed",
    "evaluation_mode",
    "filled",
    "forget_computed",
    "hollow",
    "merge_equal",
    "resting",
    "stacked",
    "written_buffers",
]


class MemberTensors(NamedTuple):
    """The tensors of all members of one architecture.

    Attributes:
        weights: private trained tensors [m, ...].
        buffers: private untrained tensors [m, ...].
        shared: tensors [...] of all members; those that require a gradient are trained.
    """

    weights: Tree
    buffers: Tree
    shared: Tree


def stacked(modules: Sequence[nn.Module], patterns: Sequence[str] = ()) -> MemberTensors:
    """The tensors of equal architectures.

    Args:
        modules: one network per member.
        patterns: names of more tensors to share, such as "trunk.*"; the first member's values
            count. A network may name some itself, in its attribute `shared_tensors`.
    """
    parameters = [dict(module.named_parameters()) for module in modules]
    everything = [
        own | dict(module.named_buffers()) for own, module in zip(parameters, modules, strict=True)
    ]
    named = _named(everything[0], [*patterns, *getattr(modules[0], "shared_tensors", ())])
    moving = _running_statistics(modules[0])
    trained = [name for name, p in parameters[0].items() if p.requires_grad]
    if not trained:
        raise ConfigError("every parameter of the network is frozen, so nothing can be trained")
    if named.issuperset(trained):
        raise ConfigError(
            "every trained tensor of the network is shared, so all members would be one function; "
            "leave at least one tensor out of shared"
        )
    tensors = MemberTensors({}, {}, {})
    for name, tensor in everything[0].items():
        values = [member[name].detach() for member in everything]
        frozen = name not in trained
        if name in named or (frozen and name not in moving and _equal(values)):
            tensors.shared[name] = tensor.detach().clone().requires_grad_(not frozen)
        elif frozen:
            tensors.buffers[name] = torch.stack(values)
        else:
            tensors.weights[name] = torch.stack(values).requires_grad_()
    return tensors


def _named(tensors: Iterable[str], patterns: Sequence[str]) -> set[str]:
    names, shared = list(tensors), set()
    for pattern in patterns:
        fits = [name for name in names if fnmatchcase(name, pattern)]
        if not fits:
            raise ConfigError(
                f"the network has no tensor '{pattern}' to share; {nearest(pattern, names)}"
            )
        shared.update(fits)
    return shared


def _running_statistics(module: nn.Module) -> set[str]:
    """Names of statistics that a layer updates in training."""
    kinds = nn.modules.batchnorm._NormBase
    return {
        f"{owner}.{name}" if owner else name
        for owner, layer in module.named_modules()
        if isinstance(layer, kinds) and layer.training and layer.track_running_stats
        for name, _ in layer.named_buffers(recurse=False)
    }


def _equal(tensors: Sequence[Tensor]) -> bool:
    first = tensors[0]
    return all(_same_memory(first, other) or torch.equal(first, other) for other in tensors[1:])


def _same_memory(a: Tensor, b: Tensor) -> bool:
    return a is b or (a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.numel() > 0)


def merge_equal(module: nn.Module, first: nn.Module) -> None:
    """Let a network use the frozen parameters of the first one where they are equal.

    A hundred networks with one pre-trained trunk then need the memory of one trunk.
    """
    known = dict(first.named_parameters())
    for name, parameter in module.named_parameters():
        other = known.get(name)
        if parameter.requires_grad or other is None or parameter.shape != other.shape:
            continue
        if not _same_memory(parameter.data, other.data) and torch.equal(parameter, other):
            parameter.data = other.data


def hollow(module: nn.Module) -> nn.Module:
    """A copy of a network without its numbers: every parameter and buffer is on "meta"."""
    empty: dict[int, object] = {}
    for tensor in [*module.parameters(), *module.buffers()]:
        blank = torch.empty_like(tensor, device="meta", requires_grad=False)
        if isinstance(tensor, nn.Parameter):
            blank = nn.Parameter(blank, requires_grad=tensor.requires_grad)
        empty[id(tensor)] = blank
    return copied(module, empty)


def filled(module: nn.Module, tensors: Tree) -> nn.Module:
    """A copy of a hollow network with these parameters and buffers.

    A value that is a parameter is used itself, so that several networks can hold it.
    """
    own: dict[int, object] = {}
    for name, blank in [*module.named_parameters(), *module.named_buffers()]:
        value: Tensor = tensors[name] if name in tensors else blank
        if isinstance(blank, nn.Parameter) and not isinstance(value, nn.Parameter):
            value = nn.Parameter(value, requires_grad=blank.requires_grad)
        own[id(blank)] = value
    return copied(module, own)


def copied(module: nn.Module, tensors: dict[int, object]) -> nn.Module:
    """A copy of a network in which other tensors stand for its own, by identity."""
    # Copying needs the originals alive, so that no other object gets their identity.
    try:
        return copy.deepcopy(module, dict(tensors))
    except Exception as error:
        raise ConfigError(
            f"the network cannot be copied by copy.deepcopy, as members need: {first_line(error)}"
        ) from error


def resting(module: nn.Module) -> frozenset[str]:
    """Names of layers in evaluation mode, inside a network in training mode.

    A factory that calls `trunk.eval()` asks for fixed statistics and no dropout in the trunk. They
    stay in evaluation mode during training.
    """
    if not module.training:
        return frozenset()
    return frozenset(name for name, layer in module.named_modules() if not layer.training)


@contextmanager
def evaluation_mode(module: nn.Module) -> Iterator[nn.Module]:
    """The module in evaluation mode; afterwards every layer is in its former mode."""
    before = [(layer, layer.training) for layer in module.modules()]
    try:
        yield module.eval()
    finally:
        for layer, training in before:
            layer.training = training


def written_buffers(
    shared: Tree, names: Sequence[str], call: Callable[[Tree], object]
) -> list[str]:
    """Names of shared buffers that one call of the network, in training mode, writes to.

    Args:
        shared: the shared tensors.
        names: names of the buffers among them.
        call: calls the network with a tree of shared tensors.
    """
    trial = {name: shared[name].clone() for name in names}
    with torch.no_grad():
        call(shared | trial)
    return [name for name in names if trial[name]._version > 0]


def detach_computed(module: nn.Module) -> list[tuple[str, str]]:
    """Layers and names of tensors that a hook computes from parameters before every call.

    `torch.nn.utils.weight_norm` and pruning use such hooks. The tensors computed so far are
    detached, since they could not be copied otherwise.
    """
    computed = []
    for owner, layer in module.named_modules():
        hooks = layer._forward_pre_hooks.values()
        known = {getattr(hook, "name", getattr(hook, "_tensor_name", None)) for hook in hooks}
        for name, value in list(vars(layer).items()):
            if not isinstance(value, Tensor):
                continue
            if name in known:
                computed.append((owner, name))
                vars(layer)[name] = value.detach()
            elif value.grad_fn is not None:
                raise ConfigError(
                    f"the network computed '{name}' from its weights in its constructor, so "
                    f"training would not change it; compute it in forward"
                )
    return computed


def forget_computed(module: nn.Module, computed: list[tuple[str, str]]) -> None:
    """Remove `vmap` tensors from the module, which could not be copied otherwise."""
    for owner, name in computed:
        layer = module.get_submodule(owner)
        vars(layer).pop(name)
        layer.register_forward_hook(functools.partial(_drop, name), always_call=True)


def _drop(name: str, layer: nn.Module, *_: object) -> None:
    vars(layer).pop(name, None)

"""An ensemble as one ordinary module: members one after another, shared tensors held once.

The module has no stacked tensors and no `vmap`, so that `torch.export` keeps the batch size free.
"""

import copy
from collections.abc import Iterable
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shoal.core.errors import ConfigError
from shoal.engine.members.group import Group
from shoal.engine.members.network_call import selected_output, set_output
from shoal.engine.members.once import Once, Spoiled
from shoal.engine.members.stack import filled
from shoal.inference.adapting.layers import Adapter

__all__ = ["UnrolledEnsemble", "merged"]


class UnrolledEnsemble(nn.Module):
    """The members as an `nn.ModuleList`, called with the arguments of one network.

    Tensors that all members share are one parameter in all members. What depends on inputs and
    shared tensors alone is computed once, for example a frozen trunk.

    Attributes:
        members: one ordinary network per member.
    """

    def __init__(
        self, groups: Iterable[Group], keep: Iterable[int] | None = None, merge: bool = False
    ) -> None:
        super().__init__()
        kept = None if keep is None else set(keep)
        self.members = nn.ModuleList()
        self._parts: list[tuple[range, tuple[str, ...]]] = []
        first = 0
        for group in groups:
            here = range(first, first + group.members)
            chosen = [i - first for i in here if kept is None or i in kept]
            networks = _networks(group, chosen)
            start = len(self.members)
            self.members.extend(merged(each) if merge else each for each in networks)
            if networks:
                self._parts.append((range(start, len(self.members)), tuple(group.shared)))
            first += group.members
        if not self.members:
            raise ConfigError("an ensemble needs at least one member, not an empty choice")
        self.eval()

    def forward(self, *positional: Any, **named: Any) -> Tensor:
        """Outputs of every member [M, B, C]; with tokens or places [M, B, ..., C]."""
        inputs = [t for t in (*positional, *named.values()) if isinstance(t, Tensor)]
        outputs: list[Tensor] = []
        for places, names in self._parts:
            networks = [self.members[i] for i in places]
            shared = _shared(networks, names) if inputs else []
            try:
                outputs += _called(networks, positional, named, [*shared, *inputs], bool(shared))
            except Spoiled:
                outputs += _called(networks, positional, named, [], False)
        return torch.stack(outputs)


def _called(
    networks: list[nn.Module],
    positional: tuple,
    named: dict[str, Any],
    shared: list[Tensor],
    share: bool,
) -> list[Tensor]:
    if share and torch.compiler.is_exporting():
        # tracing has no random numbers to watch
        random = vars(networks[0]).setdefault("_shoal_random", {})
        random.setdefault(networks[0].training, set())
    once = Once(networks[0], shared) if share and len(networks) > 1 else None
    outputs = []
    with nullcontext() if once is None else once:
        for network in networks:
            outputs.append(selected_output(network, network(*positional, **named)))
            if once is not None:
                once.next_member()
    return outputs


def _networks(group: Group, chosen: Iterable[int]) -> list[nn.Module]:
    """Members as ordinary networks that hold the very same shared tensors."""
    parameters = {name for name, _ in group.prototype.named_parameters()}
    shared = {}
    for name, tensor in group.shared.items():
        copied = tensor.detach().clone()
        trained = tensor.requires_grad
        shared[name] = nn.Parameter(copied, requires_grad=trained) if name in parameters else copied
    private, networks = group.weights | group.buffers, []
    for index in chosen:
        tensors = {name: stacked[index].detach().clone() for name, stacked in private.items()}
        module = filled(group.prototype, shared | tensors)
        set_output(module, group.skeleton.__dict__.get("_shoal_output"))
        networks.append(module.eval())
    return networks


def _shared(networks: list[nn.Module], names: Iterable[str]) -> list[Tensor]:
    """The tensors of these names that are one object in all networks."""
    tensors = []
    for name in names:
        try:
            each = [_tensor(network, name) for network in networks]
        except AttributeError:  # merged adapters have no tensors of the trunk
            continue
        if all(tensor is each[0] for tensor in each):
            tensors.append(each[0])
    return tensors


def _tensor(module: nn.Module, name: str) -> Tensor:
    owner, _, last = name.rpartition(".")
    tensor = getattr(module.get_submodule(owner), last)
    if not isinstance(tensor, Tensor):
        raise AttributeError(name)
    return tensor


def merged(module: nn.Module) -> nn.Module:
    """The network with adapters multiplied into the weights of its layers, in place.

    Merged members share no trunk: each has its own W + s B A.
    """
    if hasattr(module, "merge_and_unload"):
        output = module.__dict__.get("_shoal_output")
        module = module.merge_and_unload()  # pyright: ignore[reportCallIssue]
        set_output(module, output)
        return module
    for owner in list(module.modules()):
        if isinstance(owner, Adapter):
            continue
        if parametrize.is_parametrized(owner):
            _settle(owner)
        for name, layer in owner.named_children():
            if isinstance(layer, Adapter):
                setattr(owner, name, _plain(layer))
    return _plain(module) if isinstance(module, Adapter) else module


def _settle(owner: nn.Module) -> None:
    """Turn computed weights into parameters, in place.

    `remove_parametrizations` would change the class, which all members have in common.
    """
    names: Any = owner.parametrizations
    values = {name: getattr(owner, name).detach().clone() for name in names}
    del owner._modules["parametrizations"]
    owner.__class__ = type(owner).__bases__[0]
    for name, value in values.items():
        owner.register_parameter(name, nn.Parameter(value, requires_grad=False))


def _plain(layer: Adapter) -> nn.Module:
    """The layer of the trunk with the adapter's effective weight and bias."""
    plain = copy.copy(layer.base)
    plain._parameters = dict(plain._parameters)
    for name in ("weight", "bias"):
        if plain._parameters.get(name) is not None:
            value = getattr(layer, name)
            plain._parameters[name] = nn.Parameter(value.detach().clone(), requires_grad=False)
    return plain.eval()

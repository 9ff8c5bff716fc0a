"""Inputs of members, and the call of one member on them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from shoal.core.opaque import Opaque
from shoal.core.structure import Inputs, Structured
from shoal.core.types import Tree
from shoal.engine.derivatives import forward_with_rows
from shoal.engine.members.network_call import call_network, selected_output

__all__ = [
    "MemberCall",
    "MemberInputs",
    "Unpacked",
    "each_member",
    "kind_of",
    "names_of",
    "tensors_of",
    "unpacked",
]

MemberCall = Callable[..., tuple[Tensor, ...]]
"""Outputs from private tensors, shared tensors and inputs."""


class MemberInputs(NamedTuple):
    """Inputs of the members: [B, ...] for all, or [M, B, ...] with `own`, one batch per member."""

    x: Inputs
    own: bool


def kind_of(shown: MemberInputs) -> tuple[Any, Any]:
    """Shape and type of one input; for a structure, of each of its tensors."""
    x, own = shown
    if isinstance(x, Tensor):
        return x.shape[1 + own :], x.dtype
    if isinstance(x, Opaque):
        return (type(x.value).__name__,), None
    parts = x.tensors.items()
    return tuple((n, *t.shape[1 + own :]) for n, t in parts), tuple(t.dtype for _, t in parts)


def names_of(dtype: Any) -> str:
    """Names of the types of inputs, as `kind_of` gives them."""
    kinds = dtype if isinstance(dtype, tuple) else (dtype,)
    return ", ".join(str(kind).removeprefix("torch.") for kind in kinds)


class Unpacked(NamedTuple):
    """Inputs as `vmap` takes them: one tensor, a list of tensors, or None for an object."""

    x: "Tensor | list[Tensor] | None"
    own: bool


def unpacked(
    module: nn.Module, shown: Sequence[MemberInputs]
) -> tuple[MemberCall, Sequence[Unpacked]]:
    """The call of one member, and inputs that are tensors or lists of tensors."""
    first = shown[0].x
    if isinstance(first, Tensor):
        return functools.partial(_one, module), shown  # type: ignore[return-value]
    if not isinstance(first, Structured):
        return functools.partial(_one_object, module, first), [Unpacked(None, False)]
    names = list(first.tensors)
    one = functools.partial(_one_structure, module, first, names)
    return one, [Unpacked([each.x.tensors[n] for n in names], each.own) for each in shown]  # pyright: ignore


def tensors_of(x: "Tensor | list[Tensor] | None") -> list[Tensor]:
    """The tensors of unpacked inputs."""
    return [] if x is None else [x] if isinstance(x, Tensor) else x


def each_member(x: "Tensor | list[Tensor] | None", members: int) -> Sequence[Any]:
    """The inputs of each member, from tensors [M, B, ...]."""
    if isinstance(x, Tensor):
        return x.unbind(0)
    return [[tensor[i] for tensor in tensors_of(x)] for i in range(members)]


def _one(
    module: nn.Module, own: Tree, shared: Tree, x: Tensor, *part: Tensor
) -> tuple[Tensor, ...]:
    """Outputs [B, C] of one member for the batch, and for the rows if they are given."""
    tensors = shared | own
    if not part:
        return (selected_output(module, functional_call(module, tensors, (x,))),)
    outputs = forward_with_rows(module, tensors, x, *part)
    return tuple(selected_output(module, each) for each in outputs)


def _one_structure(
    module: nn.Module,
    like: Structured,
    names: list[str],
    own: Tree,
    shared: Tree,
    leaves: list[Tensor],
) -> tuple[Tensor, ...]:
    given = Structured(dict(zip(names, leaves, strict=True)), like.form)
    return (selected_output(module, call_network(module, shared | own, given)),)


def _one_object(module: nn.Module, x: Any, own: Tree, shared: Tree, _: None) -> tuple[Tensor, ...]:
    return (selected_output(module, call_network(module, shared | own, x)),)

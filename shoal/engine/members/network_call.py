"""The call of one member: its arguments from a batch, and the tensor among its outputs."""

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from shoal.core.errors import DataError
from shoal.core.opaque import Opaque
from shoal.core.structure import Inputs, Structured
from shoal.core.types import Tree
from shoal.engine.derivatives import forward_with_rows

__all__ = [
    "MemberCall",
    "MemberInputs",
    "Unpacked",
    "arguments",
    "call_network",
    "each_member",
    "kind_of",
    "member_call",
    "names_of",
    "required_inputs",
    "selected_output",
    "set_output",
    "tensors_of",
    "unpacked",
]


def call_network(module: nn.Module, state: Tree, x: Any) -> Any:
    """Whatever a network returns for a batch, with these tensors instead of its own."""
    positional, named = arguments(module, x)
    return functional_call(module, state, positional, named)


def member_call(module: nn.Module, x: Any) -> Tensor:
    """Outputs [B, ..., C] of an ordinary module for a batch."""
    positional, named = arguments(module, x)
    return selected_output(module, module(*positional, **named))


def arguments(module: nn.Module, x: Any) -> tuple[tuple, dict[str, Any]]:
    """Positional and named arguments of a network for a batch.

    A dict becomes named arguments if `forward` has parameters of these names, a tuple becomes
    positional arguments if `forward` takes so many. Anything else is one argument.
    """
    if isinstance(x, Tensor):
        return (x,), {}
    value = x.original() if isinstance(x, (Structured, Opaque)) else x
    if isinstance(value, dict) and _takes_names(module, value):
        return (), {str(name): each for name, each in value.items()}
    if isinstance(value, tuple) and _takes_positions(module, len(value)):
        return tuple(value), {}
    return (value,), {}


def _parameters(module: nn.Module) -> tuple[inspect.Parameter, ...]:
    """The parameters of `forward` without `self`, read once per class.

    A model of the library peft may pass all arguments on to its base model.
    """
    forward: Any = module.forward
    method = getattr(forward, "__func__", None)
    parameters = _signature(forward) if method is None else _signature(method)[1:]
    inner: Any = getattr(module, "get_base_model", None)
    if inner is not None and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return parameters if inner() is module else _parameters(inner())
    return parameters


@functools.lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()


def _takes_names(module: nn.Module, value: dict) -> bool:
    parameters = _parameters(module)
    named = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)
    matched = sum(name in named for name in value)
    return matched == len(value) or (open_ended and matched > 0)


def required_inputs(module: nn.Module) -> int:
    """Number of inputs that a network cannot do without."""
    parameters = _parameters(module)
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in parameters)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _takes_positions(module: nn.Module, count: int) -> bool:
    parameters = _parameters(module)
    most = sum(p.kind in _POSITIONAL for p in parameters)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    return required_inputs(module) <= count and (open_ended or count <= most)


def set_output(module: nn.Module, name: str | int | None) -> None:
    """Choose which of several outputs of a network is used; None for the default."""
    module.__dict__["_shoal_output"] = name


def selected_output(module: nn.Module, outputs: Any) -> Tensor:
    """The outputs of a network as one tensor [B, ..., C], with the class axis last.

    A network may return a tensor, or an object with `logits`, a dict or a tuple that holds one.
    Outputs are [B] or [B, C], [B, T, C] for the tokens of a sequence, or [B, C, H, W, ...] for the
    places of an image, whose axis C moves to the end.
    """
    name = module.__dict__.get("_shoal_output")
    tensor = _chosen_output(outputs, name)
    if not isinstance(tensor, Tensor) or tensor.ndim == 0:
        shape = tuple(tensor.shape) if isinstance(tensor, Tensor) else type(tensor).__name__
        raise DataError(
            f"a network must return outputs [B, C], [B, T, C] or [B, C, H, W] for a batch of B, "
            f"not {shape}"
        )
    if not tensor.is_floating_point():
        kind = str(tensor.dtype).removeprefix("torch.")
        raise DataError(f"a network must return real numbers, not outputs of type {kind}")
    if tensor.ndim == 2:
        return tensor
    if tensor.ndim == 1:
        return tensor.unsqueeze(-1)
    return tensor if tensor.ndim == 3 else tensor.movedim(1, -1)


def _chosen_output(outputs: Any, name: Any) -> Any:
    if isinstance(outputs, Tensor):
        return outputs
    if name is not None:
        try:
            inside = isinstance(outputs, (Mapping, tuple, list))
            return outputs[name] if inside else getattr(outputs, str(name))
        except (KeyError, IndexError, TypeError, AttributeError):
            raise DataError(
                f"the network returns no output {name!r}, but {_kinds(outputs)}"
            ) from None
    if getattr(outputs, "logits", None) is not None:
        return outputs.logits
    if isinstance(outputs, Mapping):
        tensors = [key for key, value in outputs.items() if isinstance(value, Tensor)]
        if "logits" in tensors or len(tensors) == 1:
            return outputs["logits" if "logits" in tensors else tensors[0]]
        raise DataError(f"the network returns {_kinds(outputs)}; type fit(outputs='NAME')")
    if isinstance(outputs, (tuple, list)) and outputs:
        return outputs[0]
    return outputs


def _kinds(outputs: Any) -> str:
    if isinstance(outputs, Mapping):
        return f"a dict of {', '.join(map(repr, outputs))}"
    if isinstance(outputs, (tuple, list)):
        return f"a {type(outputs).__name__} of {len(outputs)}"
    return f"a {type(outputs).__name__}"


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
    inputs = Structured(dict(zip(names, leaves, strict=True)), like.form)
    return (selected_output(module, call_network(module, shared | own, inputs)),)


def _one_object(module: nn.Module, x: Any, own: Tree, shared: Tree, _: None) -> tuple[Tensor, ...]:
    return (selected_output(module, call_network(module, shared | own, x)),)

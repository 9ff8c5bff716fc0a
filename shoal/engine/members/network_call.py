"""The call of one network: its arguments from a batch, and the tensor among its outputs."""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call

from shoal.core.errors import DataError
from shoal.core.opaque import Opaque
from shoal.core.structure import Structured
from shoal.core.types import Tree

__all__ = [
    "arguments",
    "call_network",
    "member_call",
    "required_inputs",
    "selected_output",
    "set_output",
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
    found = _signature(forward) if method is None else _signature(method)[1:]
    inner: Any = getattr(module, "get_base_model", None)
    if inner is not None and all(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in found):
        return found if inner() is module else _parameters(inner())
    return found


@functools.lru_cache(maxsize=256)
def _signature(function: Callable[..., Any]) -> tuple[inspect.Parameter, ...]:
    try:
        return tuple(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):
        return ()


def _takes_names(module: nn.Module, value: dict) -> bool:
    found = _parameters(module)
    named = {p.name for p in found if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in found)
    matched = sum(name in named for name in value)
    return matched == len(value) or (open_ended and matched > 0)


def required_inputs(module: nn.Module) -> int:
    """Number of inputs that a network cannot do without."""
    found = _parameters(module)
    return sum(p.kind in _POSITIONAL and p.default is p.empty for p in found)


_POSITIONAL = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)


def _takes_positions(module: nn.Module, count: int) -> bool:
    found = _parameters(module)
    most = sum(p.kind in _POSITIONAL for p in found)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in found)
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
    found = _found(outputs, name)
    if not isinstance(found, Tensor) or found.ndim == 0:
        shape = tuple(found.shape) if isinstance(found, Tensor) else type(found).__name__
        raise DataError(
            f"a network must return outputs [B, C], [B, T, C] or [B, C, H, W] for a batch of B, "
            f"not {shape}"
        )
    if not found.is_floating_point():
        kind = str(found.dtype).removeprefix("torch.")
        raise DataError(f"a network must return real numbers, not outputs of type {kind}")
    if found.ndim == 2:
        return found
    if found.ndim == 1:
        return found.unsqueeze(-1)
    return found if found.ndim == 3 else found.movedim(1, -1)


def _found(outputs: Any, name: Any) -> Any:
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

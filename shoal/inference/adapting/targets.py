"""Which layers of a network get adapters, and which are trained in full: names and patterns."""

import warnings
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.values import describe_value
from shoal.inference.adapting.layers import is_convolution, is_transposed

__all__ = [
    "Names",
    "adapter_targets",
    "layer_called",
    "matching",
    "parameters_of",
    "trained_parameters",
]

Names = str | Iterable[str] | None
"""Names of layers or parameters, as patterns; None for the default."""


def trained_parameters(
    module: nn.Module, train: Names, fresh: bool
) -> tuple[list[str], str | None]:
    """Names of the parameters to train in full, and the layer to draw anew."""
    patterns = None if train is None else _patterns_of("train", train)
    if patterns == ():
        return [], None
    last = _last_of(module)
    whole = parameters_of(module, last)
    names = whole if patterns is None else _trained_names(module, patterns)
    return names, last if fresh and set(whole) <= set(names) else None


def adapter_targets(
    adapter: str, module: nn.Module, targets: Names, trained: Sequence[str]
) -> tuple[str, ...]:
    """Names of the layers that get an adapter."""
    layers = {n: m for n, m in module.named_modules() if "parametrizations" not in n.split(".")}
    busy = {_owner_of_weight(name) for name in trained}
    usual = [n for n, layer in layers.items() if _is_usual(layer, adapter) and n not in busy]
    if targets is None:
        if not usual:
            raise ConfigError(
                f"{adapter} found no linear or convolutional layer besides those trained in full; "
                f"name targets, or use last_layer"
            )
        return tuple(usual)
    chosen: dict[str, None] = {}
    for names in matching("targets", _patterns_of("targets", targets), [*layers]).values():
        possible = [name for name in names if _is_possible(layers[name], adapter)]
        for name in [name for name in names if name in usual] or possible or names[:1]:
            _check_target(adapter, name, layers[name], name in busy)
            chosen[name] = None
    if not chosen:
        raise ConfigError(f"{adapter} needs at least one target; leave targets out for all layers")
    return tuple(chosen)


def _owner_of_weight(name: str) -> str | None:
    """The layer whose weight a parameter is, or whose weight is computed from it."""
    computed = name.find("parametrizations.")
    if computed >= 0:
        return name[:computed].rstrip(".")
    return name.rpartition(".")[0] if name.endswith("weight") else None


def _is_possible(layer: nn.Module, adapter: str) -> bool:
    return _is_usual(layer, adapter) or (adapter == "lora" and isinstance(layer, nn.Embedding))


def _is_usual(layer: nn.Module, adapter: str) -> bool:
    """Whether a layer gets an adapter unless others are named."""
    if is_convolution(layer):
        return adapter == "scale" or getattr(layer, "groups", 1) == 1
    return isinstance(layer, (nn.Linear, nn.MultiheadAttention)) or is_transposed(layer)


def _check_target(adapter: str, name: str, layer: nn.Module, busy: bool) -> None:
    if busy:
        raise ConfigError(
            f"layer '{name}' is trained in full already; "
            f"take it out of targets, or type train=() for adapters alone"
        )
    if is_convolution(layer) and not _is_usual(layer, adapter):
        raise ConfigError(
            f"layer '{name}' is a grouped convolution, which takes no low-rank adapter; "
            f"use scale, or train='{name}' to train it in full"
        )
    if not _is_possible(layer, adapter):
        raise ConfigError(
            f"layer '{name}' is a {type(layer).__name__}; {adapter} takes linear layers, "
            f"convolutions and nn.MultiheadAttention, so name such a layer"
        )


def layer_called(module: nn.Module, name: str | None) -> str:
    """Name of the layer that is asked for; by default of the last one."""
    if name is None:
        return _last_of(module)
    names = [each for each, _ in module.named_modules()]
    if not isinstance(name, str):
        raise ConfigError(
            f"layer must be the name of a layer such as 'head', not {describe_value(name)}"
        )
    if name not in names:
        found = matching("layer", [name], names)[name]
        if len(found) > 1:
            raise ConfigError(f"layer '{name}' names {len(found)} layers; name one")
        return found[0]
    return name


def _parameter_names(network: nn.Module, layers: Iterable[str]) -> list[str]:
    """Names of the parameters in these layers, in the order of the network."""
    starts = tuple(f"{layer}." if layer else "" for layer in layers)
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    return [name for name in names if name.startswith(starts)]


def _last_of(network: nn.Module) -> str:
    """Name of the last layer with a weight matrix or filter, in the order of registration."""
    found = None
    for name, layer in network.named_modules():
        # A weight that is computed from others counts for its layer.
        if name.rpartition(".")[2] == "parametrizations" or ".parametrizations." in name:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1:
            found = name
    if found is None:
        raise ConfigError(
            "the network has no layer with a weight matrix, so no last layer; "
            "name the layers to train"
        )
    return found


def _patterns_of(argument: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; one text is one pattern."""
    found = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    for pattern in found:
        if not isinstance(pattern, str):
            raise ConfigError(
                f"{argument} must hold names of layers such as 'encoder.*', not {pattern!r}"
            )
    return found


def matching(argument: str, patterns: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The names that each pattern matches; a pattern without a match is refused.

    >>> matching("targets", ["block.*"], ["block.0", "block.1", "last"])
    {'block.*': ['block.0', 'block.1']}
    """
    found = {}
    for pattern in patterns:
        found[pattern] = [name for name in names if fnmatchcase(name, pattern)]
        if not found[pattern]:
            few = nearest(pattern, [name for name in names if name][:20])
            raise ConfigError(f"{argument}: the network has nothing called '{pattern}'; {few}")
    return found


def _trained_names(network: nn.Module, train: Sequence[str]) -> list[str]:
    """Names of the parameters that patterns of layers and of parameters select."""
    layers = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    chosen: set[str] = set()
    for found in matching("train", train, [*layers, *parameters]).values():
        chosen.update(name for name in found if name in set(parameters))
        chosen.update(_parameter_names(network, [name for name in found if name in set(layers)]))
    return [name for name in parameters if name in chosen]


def parameters_of(network: nn.Module, layer: str) -> list[str]:
    """Names of the parameters of one layer."""
    return _parameter_names(network, [layer])

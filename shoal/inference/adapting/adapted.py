"""Copies of a network that share its frozen tensors and have a few private, trained ones.

Names and patterns choose which layers get adapters, and which are trained in full.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from shoal.core.arguments import list_of, text
from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.values import describe_value
from shoal.engine.members.stack import copied
from shoal.inference.adapting.layers import is_convolution, is_transposed, root_mean_square

__all__ = [
    "AdaptedBuild",
    "FrozenTensors",
    "Names",
    "adapter_targets",
    "keep_statistics",
    "layer_called",
    "matching",
    "parameters_of",
    "perturb_",
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
    if not name:
        raise ConfigError("layer is empty; name a layer such as 'head', or leave it out")
    if name not in names:
        matches = matching("layer", [name], names)[name]
        if len(matches) > 1:
            raise ConfigError(f"layer '{name}' names {len(matches)} layers; name one")
        return matches[0]
    return name


def _parameter_names(network: nn.Module, layers: Iterable[str]) -> list[str]:
    """Names of the parameters in these layers, in the order of the network."""
    starts = tuple(f"{layer}." if layer else "" for layer in layers)
    names = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    return [name for name in names if name.startswith(starts)]


def _last_of(network: nn.Module) -> str:
    """Name of the last layer with a weight matrix or filter, in the order of registration."""
    last = None
    for name, layer in network.named_modules():
        # A weight that is computed from others counts for its layer.
        if name.rpartition(".")[2] == "parametrizations" or ".parametrizations." in name:
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            weight = getattr(layer, "weight", None)
        if isinstance(weight, Tensor) and weight.ndim > 1:
            last = name
    if last is None:
        raise ConfigError(
            "the network has no layer with a weight matrix, so no last layer; "
            "name the layers to train"
        )
    return last


def _patterns_of(argument: str, patterns: str | Iterable[str]) -> tuple[str, ...]:
    """Patterns as a tuple; one text is one pattern."""
    if isinstance(patterns, str):
        return (patterns,)
    return tuple(list_of(text)(argument, patterns))


def matching(argument: str, patterns: Sequence[str], names: Sequence[str]) -> dict[str, list[str]]:
    """The names that each pattern matches; a pattern without a match is refused.

    >>> matching("targets", ["block.*"], ["block.0", "block.1", "last"])
    {'block.*': ['block.0', 'block.1']}
    """
    matches = {}
    for pattern in patterns:
        matches[pattern] = [name for name in names if fnmatchcase(name, pattern)]
        if not matches[pattern]:
            few = nearest(pattern, [name for name in names if name][:20])
            raise ConfigError(f"{argument}: the network has nothing called '{pattern}'; {few}")
    return matches


def _trained_names(network: nn.Module, train: Sequence[str]) -> list[str]:
    """Names of the parameters that patterns of layers and of parameters select."""
    layers = [name for name, _ in network.named_modules(remove_duplicate=False) if name]
    parameters = [name for name, _ in network.named_parameters(remove_duplicate=False)]
    chosen: set[str] = set()
    for matches in matching("train", train, [*layers, *parameters]).values():
        chosen.update(name for name in matches if name in set(parameters))
        chosen.update(_parameter_names(network, [name for name in matches if name in set(layers)]))
    return [name for name in parameters if name in chosen]


def parameters_of(network: nn.Module, layer: str) -> list[str]:
    """Names of the parameters of one layer."""
    return _parameter_names(network, [layer])


Wrap = Callable[[nn.Module, str], nn.Module]
"""From a layer of a copy of the network, and its name, to the layer with an adapter."""


class FrozenTensors:
    """The tensors of a network, frozen; every copy of the network holds the same tensors.

    The frozen tensors use the memory of the network's own tensors, which stay as they are.
    """

    def __init__(self, module: nn.Module) -> None:
        if not isinstance(module, nn.Module):
            raise ConfigError(
                f"adapters need a network (nn.Module), not {type(module).__name__}; "
                f"pass the network itself, for example lora(network)"
            )
        self.module = module
        self.frozen: dict[int, object] = {}
        for tensor in [*module.parameters(), *module.buffers()]:
            if is_lazy(tensor):
                raise ConfigError(
                    "adapters need a network whose shapes are known; "
                    "call the network once on a few inputs first"
                )
            trained = isinstance(tensor, nn.Parameter)
            frozen = nn.Parameter(tensor.detach(), requires_grad=False) if trained else tensor
            self.frozen[id(tensor)] = frozen

    def copied(self) -> nn.Module:
        """A copy in training mode, whose tensors are the frozen ones.

        Layers that the network keeps in evaluation mode while it trains stay in that mode.
        """
        network = copied(self.module, self.frozen)
        return network if network.training else network.train()


class AdaptedBuild:
    """A factory of members that share a trunk, for `Ensemble.init(build, members=100)`.

    Attributes:
        trunk: the frozen tensors.
        targets: names of the layers that get adapters.
        trained: names of the parameters that each member trains in full.
        drawn: name of the layer that is drawn anew; None if all start at their present values.
        words: the call that made the factory, for its `repr`.
        spread: relative size of the noise on trained tensors that are not drawn anew.
        quiet: whether the whole trunk is in evaluation mode.
    """

    def __init__(
        self,
        trunk: FrozenTensors,
        words: str,
        wrap: Wrap | None = None,
        targets: Sequence[str] = (),
        trained: Sequence[str] = (),
        drawn: str | None = None,
        spread: float = 0.02,
        quiet: bool = False,
    ) -> None:
        self.trunk, self.words, self.wrap = trunk, words, wrap
        self.targets, self.trained, self.drawn = tuple(targets), tuple(trained), drawn
        self.spread, self.quiet = spread, quiet
        if drawn is not None:
            _check_drawable(trunk.module.get_submodule(drawn), drawn)

    def __call__(self) -> nn.Module:
        """A new member; torch's current generator draws its private tensors."""
        network = self.trunk.copied()
        self._free(network)
        self._set_modes(network)
        if self.wrap is None:
            return network
        layers = {name: network.get_submodule(name) for name in self.targets}
        adapted = {id(layer): self.wrap(layer, name) for name, layer in layers.items()}
        # A layer may have several names.
        for name, layer in list(network.named_modules(remove_duplicate=False)):
            if adapted.get(id(layer), layer) is not layer:
                if not name:
                    return adapted[id(layer)]
                network.set_submodule(name, adapted[id(layer)])
        return network

    def _free(self, network: nn.Module) -> None:
        """Replace the tensors that are trained in full by private copies."""
        private: dict[int, nn.Parameter] = {}
        inside = set(self.trained)
        drawn = set() if self.drawn is None else set(parameters_of(network, self.drawn))
        for name, parameter in list(network.named_parameters(remove_duplicate=False)):
            if name not in inside:
                continue
            if id(parameter) not in private:
                copy = nn.Parameter(parameter.detach().clone())
                if name not in drawn:
                    perturb_(copy, self.spread)
                private[id(parameter)] = copy
            owner, _, last = name.rpartition(".")
            setattr(network.get_submodule(owner), last, private[id(parameter)])
        if self.drawn is not None:
            for layer in _own_parameters(network.get_submodule(self.drawn)):
                layer.reset_parameters()

    def _set_modes(self, network: nn.Module) -> None:
        """Evaluation mode where the trunk is frozen.

        The statistics of a pre-trained norm belong to its frozen weights. With `quiet`, the whole
        trunk is in evaluation mode: it drops nothing, so all members see the same features.
        """
        trained = {name.rpartition(".")[0] for name in self.trained}
        for name, layer in network.named_modules():
            above = any(f"{each}.".startswith(f"{name}." if name else "") for each in trained)
            if name in trained and _keeps_statistics(layer):
                for key, buffer in layer.named_buffers(recurse=False):
                    setattr(layer, key, buffer.clone())
            elif _keeps_statistics(layer) or (self.quiet and not above):
                layer.training = False

    def __repr__(self) -> str:
        network = type(self.trunk.module).__name__
        adapted = f"{len(self.targets)} adapted layers, " if self.wrap is not None else ""
        return f"{self.words.format(network=network)}: {adapted}{self._told()}"

    def _told(self) -> str:
        if not self.trained:
            return "nothing else trained"
        owners = dict.fromkeys(name.rpartition(".")[0] or "network" for name in self.trained)
        few = ", ".join(list(owners)[:3])
        return f"{few}{' ...' if len(owners) > 3 else ''} trained in full"


def _keeps_statistics(layer: nn.Module) -> bool:
    return getattr(layer, "running_mean", None) is not None


def keep_statistics(network: nn.Module) -> None:
    """Set norms that store statistics and have no trained parameter to evaluation mode."""
    for layer in network.modules():
        trained = any(p.requires_grad for p in layer.parameters(recurse=False))
        if _keeps_statistics(layer) and not trained:
            layer.training = False


def _own_parameters(layer: nn.Module) -> Iterator[Any]:
    """The layers inside `layer` that have parameters of their own."""
    return (m for m in layer.modules() if next(m.parameters(recurse=False), None) is not None)


def _check_drawable(layer: nn.Module, name: str) -> None:
    for inner in _own_parameters(layer):
        if not hasattr(inner, "reset_parameters") or parametrize.is_parametrized(inner):
            raise ConfigError(
                f"layer '{name}' ({type(inner).__name__}) cannot be drawn anew, since it has no "
                f"reset_parameters of its weights; type fresh=False to start at present values"
            )
    if any(parametrize.is_parametrized(inner) for inner in layer.modules()):
        raise ConfigError(
            f"layer '{name}' computes its weights from others, so it cannot be drawn anew; "
            f"type fresh=False to start at present values"
        )


def perturb_(tensor: Tensor, spread: float) -> None:
    """Add normal noise of `spread` times the size of the tensor, in place.

    Zeros, as of many biases, get noise of size `spread`.
    """
    if spread and tensor.is_floating_point():
        with torch.no_grad():
            tensor += spread * (root_mean_square(tensor) or 1.0) * torch.randn_like(tensor)

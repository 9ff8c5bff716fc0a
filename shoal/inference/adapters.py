"""Adapters: a hundred members on one pre-trained network, each with a few tensors of its own.

    build    = shoal.adapters.lora(network, rank=4)
    ensemble = shoal.Ensemble.init(build, members=100)

All members hold the same frozen tensors of the network, the trunk. Private and trained are the
adapters and, by default, the last layer. Methods in weight space act on these tensors alone.

*Initialisation.* The usual B = 0 of LoRA makes all members the same function. Then outputs and
input gradients of the members coincide, and repulsion between them is exactly zero: L z = 0 for
equal rows z. No repulsive force would ever separate members that differ only in A. Here
each member draws its own A and B, such that s B A has `spread` times the root mean square of W.

*Statistics.* Norms that store statistics, such as batch normalisation, run in evaluation mode: the
statistics of pre-training belong to the frozen weights.

LoRA: Hu et al. (2021), arXiv 2106.09685. Ensembles of LoRA members: Mühlematter et al. (2024),
arXiv 2405.14438. Factors: Liu et al. (2022), arXiv 2205.05638.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from shoal.core.errors import ConfigError
from shoal.core.values import came
from shoal.inference.adapted import (
    AdaptedBuild,
    Trunk,
    last_of,
    matching,
    parameters_of,
    patterns_of,
    trained_names,
)
from shoal.inference.adapter_layers import (
    LoRAConv,
    LoRAEmbedding,
    LoRALinear,
    LowRankWeight,
    Scaled,
    ScaledRows,
    draw_apart,
    is_convolution,
    is_transposed,
    size_of_weight,
)

__all__ = ["last_layer", "lora", "scale"]

Names = str | Iterable[str] | None
PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of `nn.MultiheadAttention` that are not those of a layer."""


def lora(
    module: nn.Module,
    rank: int = 4,
    targets: Names = None,
    alpha: float | None = None,
    train: Names = None,
    spread: float = 0.02,
    fresh: bool = True,
) -> AdaptedBuild:
    """Members W x + s B A x with private A [rank, in] and B [out, rank], and s = alpha / rank.

    >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> build = lora(network, rank=2)
    >>> build
    lora(Sequential, rank=2): 1 adapted layers, 2 trained in full
    >>> [name for name, p in build().named_parameters() if p.requires_grad]
    ['0.lora_A.weight', '0.lora_B.weight', '2.weight', '2.bias']

    Args:
        module: the pre-trained network; it is not changed, and its memory is shared.
        rank: rank of the adapters.
        targets: names of layers, or patterns such as `"encoder.*.query"`. By default all linear
            layers, ungrouped convolutions and projections of `nn.MultiheadAttention`, except those
            that are trained in full. `nn.Embedding` must be named.
        alpha: s = alpha / rank; `rank` by default, so that s = 1.
        train: layers or parameters that each member trains in full: by default the last layer,
            `()` for adapters alone, or patterns.
        spread: size of s B A in relation to W, and of the noise on layers trained in full.
        fresh: draw the last layer anew, if it is trained; otherwise add noise to its values.
    """
    _check_number("rank", rank, whole=True)
    _check_spread(spread)
    scaling = 1.0 if alpha is None else _check_number("alpha", alpha) / rank
    trunk = Trunk(module)
    trained, drawn = _trained(module, train, fresh)
    chosen = _targets("lora", module, targets, trained)
    sizes = {name: _sizes(module.get_submodule(name)) for name in chosen}

    def wrap(layer: nn.Module, name: str) -> nn.Module:
        if isinstance(layer, nn.MultiheadAttention):
            for weight, size in sizes[name].items():
                change = LowRankWeight(getattr(layer, weight), rank, scaling)
                draw_apart(*change.factors, scaling, spread * size)
                parametrize.register_parametrization(layer, weight, change)
            return layer
        adapter = _low_rank(layer)(layer, rank, scaling)
        draw_apart(*adapter.factors, scaling, spread * sizes[name]["weight"])
        return adapter

    words = f"lora({{network}}, rank={rank})"
    return AdaptedBuild(
        trunk, words, wrap, chosen, trained, drawn, spread, kind="lora", rank=rank, scaling=scaling
    )


def last_layer(
    module: nn.Module, layer: str | None = None, fresh: bool = True, spread: float = 0.02
) -> AdaptedBuild:
    """Members with private last layers on one trunk, which is computed once for all of them.

    The trunk is in evaluation mode also in training: it drops nothing and keeps its statistics, so
    that all members see the same features.

    >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> last_layer(network)
    last_layer(Sequential): 2 trained in full

    Args:
        module: the pre-trained network; it is not changed, and its memory is shared.
        layer: name of the layer; by default the last one with a weight matrix.
        fresh: draw the layer anew; otherwise add noise to its values.
        spread: relative size of this noise.
    """
    _check_spread(spread)
    trunk = Trunk(module)
    name = last_of(module) if layer is None else _layer_called(module, layer)
    drawn = name if fresh else None
    trained = parameters_of(module, name)
    if not trained:
        raise ConfigError(f"layer '{name}' has no parameters; name a layer with a weight")
    return AdaptedBuild(
        trunk, "last_layer({network})", None, (), trained, drawn, spread, quiet=True, kind="last"
    )


def scale(
    module: nn.Module, targets: Names = None, train: Names = None, spread: float = 0.05
) -> AdaptedBuild:
    """Members c * (W x + b) with a private factor c per output channel, drawn from N(1, spread²).

    >>> network = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> [name for name, p in scale(network, train=())().named_parameters() if p.requires_grad]
    ['0.scale', '2.scale']

    Args:
        module: the pre-trained network; it is not changed, and its memory is shared.
        targets: names of layers, as of `lora`; by default also grouped convolutions. Projections
            of `nn.MultiheadAttention` get a factor per row of their weights.
        train: layers or parameters that each member trains in full, as of `lora`.
        spread: standard deviation of the factors, and relative noise on layers trained in full.
    """
    _check_spread(spread)
    trunk = Trunk(module)
    trained, drawn = _trained(module, train, fresh=True)
    chosen = _targets("scale", module, targets, trained)

    def wrap(layer: nn.Module, name: str) -> nn.Module:
        if not isinstance(layer, nn.MultiheadAttention):
            return Scaled(layer, spread)
        for weight in _sizes(layer):
            change = ScaledRows(getattr(layer, weight), spread)
            parametrize.register_parametrization(layer, weight, change)
        return layer

    return AdaptedBuild(
        trunk, "scale({network})", wrap, chosen, trained, drawn, spread, kind="scale"
    )


def _low_rank(layer: nn.Module) -> Any:
    if isinstance(layer, nn.Embedding):
        return LoRAEmbedding
    return LoRAConv if is_convolution(layer) else LoRALinear


def _sizes(layer: nn.Module) -> dict[str, float]:
    """Sizes of a layer's weights."""
    names = PROJECTIONS if isinstance(layer, nn.MultiheadAttention) else ("weight",)
    weights = {name: getattr(layer, name, None) for name in names}
    return {
        name: size_of_weight(weight)
        for name, weight in weights.items()
        if weight is not None
    }


def _trained(module: nn.Module, train: Names, fresh: bool) -> tuple[list[str], str | None]:
    """Names of the parameters to train in full, and the layer to draw anew."""
    if train is not None and not patterns_of("train", train):
        return [], None
    last = last_of(module)
    whole = parameters_of(module, last)
    names = whole if train is None else trained_names(module, patterns_of("train", train))
    return names, last if fresh and set(whole) <= set(names) else None


def _targets(
    adapter: str, module: nn.Module, targets: Names, trained: Sequence[str]
) -> tuple[str, ...]:
    """Names of the layers that get an adapter."""
    layers = {n: m for n, m in module.named_modules() if "parametrizations" not in n.split(".")}
    busy = {name.rpartition(".")[0] for name in trained if name.endswith("weight")}
    usual = [n for n, layer in layers.items() if _is_usual(layer, adapter) and n not in busy]
    if targets is None:
        if not usual:
            raise ConfigError(
                f"{adapter} found no linear or convolutional layer besides those trained in full; "
                f"name targets, or use last_layer"
            )
        return tuple(usual)
    chosen: dict[str, None] = {}
    for pattern, names in matching("targets", patterns_of("targets", targets), [*layers]).items():
        found = [name for name in names if name in usual] or names
        if len(names) > 1 and found is names:
            found = [n for n in names if _is_possible(layers[n], adapter)] or names[:1]
        for name in found:
            _check_target(adapter, name, layers[name], name in busy)
            chosen[name] = None
        if not found:
            raise ConfigError(f"targets: '{pattern}' names no layer that takes an adapter")
    if not chosen:
        raise ConfigError(f"{adapter} needs at least one target; leave targets out for all layers")
    return tuple(chosen)


def _is_possible(layer: nn.Module, adapter: str) -> bool:
    return _is_usual(layer, adapter) or (adapter == "lora" and isinstance(layer, nn.Embedding))


def _is_usual(layer: nn.Module, adapter: str) -> bool:
    """Whether a layer gets an adapter unless others are named."""
    if is_convolution(layer):
        return adapter == "scale" or layer.get_parameter("weight").ndim > 2 and layer.groups == 1
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


def _layer_called(module: nn.Module, name: str) -> str:
    names = [each for each, _ in module.named_modules()]
    if not isinstance(name, str):
        raise ConfigError(f"layer must be the name of a layer such as 'head', not {came(name)}")
    if name not in names:
        found = matching("layer", [name], names)[name]
        if len(found) > 1:
            raise ConfigError(f"layer '{name}' names {len(found)} layers; name one")
        return found[0]
    return name


def _check_number(name: str, value: Any, whole: bool = False) -> Any:
    kind = int if whole else (int, float)
    if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value < 1e6:
        wanted = "a whole number of at least 1" if whole else "a positive number"
        raise ConfigError(f"{name} must be {wanted}, not {came(value)}")
    return value


def _check_spread(spread: Any) -> None:
    number = isinstance(spread, (int, float)) and not isinstance(spread, bool)
    if not number or not 0 <= spread < 1e6:
        raise ConfigError(f"spread must be a number of at least 0, not {came(spread)}")

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

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from torch import nn
from torch.nn.utils import parametrize

from shoal.core.arguments import anything, checked, not_negative, positive, whole_from
from shoal.core.errors import ConfigError
from shoal.core.storage.disk import checked_path
from shoal.core.values import describe_value
from shoal.inference.adapting.adapted import (
    AdaptedBuild,
    FrozenTensors,
    Names,
    adapter_targets,
    layer_called,
    parameters_of,
    trained_parameters,
)
from shoal.inference.adapting.layers import (
    LoRAConv,
    LoRAEmbedding,
    LoRALinear,
    LowRankWeight,
    Scaled,
    ScaledRows,
    draw_apart,
    is_convolution,
    size_of_weight,
)
from shoal.inference.adapting.peft import (
    SPREAD,
    PeftBuild,
    fill_,
    member_folders,
    read_folder,
    same_layout,
    write_folder,
)
from shoal.inference.ensemble import Ensemble

__all__ = ["last_layer", "load_peft", "lora", "peft", "save_peft", "scale"]

PROJECTIONS = ("in_proj_weight", "q_proj_weight", "k_proj_weight", "v_proj_weight")
"""Weights of `nn.MultiheadAttention` that are not those of a layer."""


@checked(rank=whole_from(1, 1_000_000), alpha=positive, spread=not_negative)
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
    scaling = 1.0 if alpha is None else alpha / rank
    trunk = FrozenTensors(module)
    trained, drawn = trained_parameters(module, train, fresh)
    chosen = adapter_targets("lora", module, targets, trained)
    sizes = {name: _sizes(module.get_submodule(name)) for name in chosen}

    def wrap(layer: nn.Module, name: str) -> nn.Module:
        if isinstance(layer, nn.MultiheadAttention):
            for weight, size in sizes[name].items():
                change = LowRankWeight(getattr(layer, weight), rank, scaling)
                draw_apart(*change.factors, scaling, spread * size)
                parametrize.register_parametrization(layer, weight, change)
            return layer
        adapter = _low_rank(layer)(layer, rank, scaling)
        narrow, wide = adapter.factors
        draw_apart(narrow, wide, scaling, spread * sizes[name]["weight"])
        return adapter

    words = f"lora({{network}}, rank={rank})"
    return AdaptedBuild(trunk, words, wrap, chosen, trained, drawn, spread)


@checked(spread=not_negative, layer=anything)
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
    trunk = FrozenTensors(module)
    name = layer_called(module, layer)
    drawn = name if fresh else None
    trained = parameters_of(module, name)
    if not trained:
        raise ConfigError(f"layer '{name}' has no parameters; name a layer with a weight")
    return AdaptedBuild(
        trunk, "last_layer({network})", None, (), trained, drawn, spread, quiet=True
    )


@checked(spread=not_negative)
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
    trunk = FrozenTensors(module)
    trained, drawn = trained_parameters(module, train, fresh=True)
    chosen = adapter_targets("scale", module, targets, trained)

    def wrap(layer: nn.Module, name: str) -> nn.Module:
        if not isinstance(layer, nn.MultiheadAttention):
            return Scaled(layer, spread)
        for weight in _sizes(layer):
            change = ScaledRows(getattr(layer, weight), spread)
            parametrize.register_parametrization(layer, weight, change)
        return layer

    return AdaptedBuild(trunk, "scale({network})", wrap, chosen, trained, drawn, spread)


def _low_rank(layer: nn.Module) -> Any:
    if isinstance(layer, nn.Embedding):
        return LoRAEmbedding
    return LoRAConv if is_convolution(layer) else LoRALinear


def _sizes(layer: nn.Module) -> dict[str, float]:
    """Sizes of a layer's weights."""
    names = PROJECTIONS if isinstance(layer, nn.MultiheadAttention) else ("weight",)
    weights = {name: getattr(layer, name, None) for name in names}
    return {name: size_of_weight(weight) for name, weight in weights.items() if weight is not None}


@checked(spread=not_negative)
def peft(model: nn.Module, spread: float = SPREAD) -> PeftBuild:
    """Members from a model of the library peft: its trained tensors are private.

    Adapters that change nothing (B A = 0, as the library starts them) are drawn anew per member,
    as by `lora`. Other trained tensors, of `modules_to_save` too, get noise of `spread` times
    their size. A factory that returns a new peft model at each call needs no such help:
    `Ensemble.init(factory, members)` treats its adapters in the same way.

    Args:
        model: the peft model; it is not changed, and its memory is shared.
        spread: size of s B A in relation to W, and relative size of the noise.
    """
    return PeftBuild(model, spread)


def save_peft(ensemble: Any, folder: str | Path) -> list[Path]:
    """Write each member as an adapter folder of the library peft; returns the folders.

    `PeftModel.from_pretrained(network, folder / "member-000")` then makes member 0.

    Args:
        ensemble: an ensemble or a run, with members of `lora` or of peft models.
        folder: a folder without adapters; it is made if needed.
    """
    members = getattr(ensemble, "ensemble", ensemble)
    if not isinstance(members, Ensemble):
        raise ConfigError(f"save_peft needs an ensemble or a run, not {describe_value(ensemble)}")
    folder = checked_path(folder, "folder")
    if any(folder.glob("member-*")):
        raise ConfigError(f"{folder} holds members already; choose a new folder")
    written, index = [], 0
    for group in members.groups:
        for _ in range(group.members):
            path = folder / f"member-{index:03d}"
            write_folder(path, members.member(index), group.weights)
            written.append(path)
            index += 1
    return written


def load_peft(module: nn.Module, folders: str | Path | Iterable[str | Path]) -> Ensemble:
    """An ensemble from adapter folders of the library peft, one member per folder.

    Args:
        module: the network that the adapters were trained on.
        folders: adapter folders, or one folder that holds them. All need the same layers, rank
            and alpha.
    """
    adapters = [read_folder(folder) for folder in member_folders(folders)]
    first = same_layout(adapters)
    known = FrozenTensors(module).module.state_dict()
    for name in first.full:
        if name not in known:
            raise ConfigError(
                f"{first.path} has '{name}', which the network does not have; "
                f"pass the network that the adapters were trained on"
            )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    train = [name for name in first.full if name in parameters]
    build = lora(module, first.rank, list(first.factors), first.alpha, train, fresh=False)
    ensemble = Ensemble.init(build, members=len(adapters))
    stacked = ensemble.weights | ensemble.buffers
    for index, each in enumerate(adapters):
        for name, pair in each.factors.items():
            for key, values in zip(_factor_names(module, name), pair, strict=True):
                fill_(stacked[key][index], values, key, each.path)
        for name, values in each.full.items():
            fill_(stacked[name][index], values, name, each.path)
    return ensemble


def _factor_names(module: nn.Module, name: str) -> tuple[str, str]:
    """Names of A and B of a layer in a member."""
    layer = module.get_submodule(name)
    if isinstance(layer, nn.MultiheadAttention):
        start = f"{name}.parametrizations.in_proj_weight.0."
        return f"{start}lora_A", f"{start}lora_B"
    if isinstance(layer, nn.Embedding):
        return f"{name}.lora_embedding_A", f"{name}.lora_embedding_B"
    return f"{name}.lora_A.weight", f"{name}.lora_B.weight"

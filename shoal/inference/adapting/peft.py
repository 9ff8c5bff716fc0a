"""Models of the library `peft` as members: their adapters are private, their trunk is shared.

A model is recognised by its attribute `peft_config`; the library itself is not imported.

Adapters are saved in folders of the library's format:

    folder/member-000/adapter_config.json, adapter_model.safetensors
    folder/member-001/...

`PeftModel.from_pretrained(base, folder/member-000)` makes member 0. Folders are read without the
library, and nothing in them is trusted.
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from shoal.core.arguments import list_of, path
from shoal.core.errors import CheckpointCorrupt, ConfigError, StorageError
from shoal.core.optional import require
from shoal.core.storage.files import (
    SEAL,
    check_content,
    content_sha256,
    opened,
    read_json,
    read_tensors,
    sha256,
    write_json,
    write_tensors,
)
from shoal.engine.members.stack import copied
from shoal.inference.adapting.adapted import keep_statistics, perturb_
from shoal.inference.adapting.layers import (
    Adapter,
    LoRAConv,
    LoRAEmbedding,
    LoRALinear,
    LowRankWeight,
    draw_apart,
    is_transposed,
    size_of_weight,
)

__all__ = [
    "AdapterFolder",
    "PeftBuild",
    "active_config",
    "draw_zero_adapters",
    "fill_",
    "is_peft",
    "member_folders",
    "read_folder",
    "same_layout",
    "shares_trained",
    "write_folder",
]

SPREAD = 0.02


def is_peft(module: object) -> bool:
    """Whether a network is a model of the library `peft`."""
    return isinstance(module, nn.Module) and isinstance(getattr(module, "peft_config", None), dict)


class PeftBuild:
    """A factory of members from a peft model, for `Ensemble.init(build, members=100)`.

    Attributes:
        model: the peft model; it is not changed.
        spread: size of the adapters in relation to the weights, and of the noise on other tensors.
    """

    def __init__(self, model: nn.Module, spread: float = SPREAD) -> None:
        if not is_peft(model):
            raise ConfigError(
                f"adapters.peft needs a model of the library peft, not {type(model).__name__}; "
                f"use adapters.lora for other networks"
            )
        self.model, self.spread = model, spread
        self.trained = [name for name, p in model.named_parameters() if p.requires_grad]
        if not self.trained:
            raise ConfigError(
                "no tensor of the peft model is trained; load it with is_trainable=True"
            )

    def __call__(self) -> nn.Module:
        """A new member; torch's current generator draws its private tensors."""
        tensors = [*self.model.parameters(), *self.model.buffers()]
        network = copied(self.model, {id(t): t for t in tensors if not t.requires_grad})
        network = network if network.training else network.train()
        keep_statistics(network)
        drawn = draw_zero_adapters(network, self.spread)
        for parameter in network.parameters():
            if parameter.requires_grad and id(parameter) not in drawn:
                perturb_(parameter, self.spread)
        return network

    def __repr__(self) -> str:
        kinds = {str(getattr(c, "peft_type", "?")) for c in _configs(self.model).values()}
        kind = ", ".join(sorted(each.rpartition(".")[2] for each in kinds))
        return f"peft({type(self.model).__name__}): {kind}, {len(self.trained)} trained tensors"


def draw_zero_adapters(module: nn.Module, spread: float = SPREAD) -> set[int]:
    """Draw the low-rank adapters of a peft model anew where they change nothing, in place.

    The library starts at B A = 0, where all members are the same function and do not repel each
    other. Returns the identities of the tensors that were drawn.
    """
    drawn: set[int] = set()
    for layer in module.modules() if is_peft(module) else ():
        for narrow, wide, scaling in _low_rank(layer):
            if not (narrow.requires_grad and wide.requires_grad):
                continue
            if bool(narrow.any()) and bool(wide.any()):
                continue
            for factor in (narrow, wide):
                nn.init.kaiming_uniform_(factor, a=5**0.5)
            base: Any = layer.get_base_layer()  # pyright: ignore
            draw_apart(narrow, wide, scaling, spread * size_of_weight(_weight(base)))
            drawn |= {id(narrow), id(wide)}
    return drawn


def _low_rank(layer: Any) -> Iterator[tuple[Tensor, Tensor, float]]:
    """A, B and s of every low-rank adapter of a layer of the library."""
    scalings = getattr(layer, "scaling", None)
    if not isinstance(scalings, dict) or not hasattr(layer, "get_base_layer"):
        return
    for name, scaling in scalings.items():
        for a, b in (("lora_A", "lora_B"), ("lora_embedding_A", "lora_embedding_B")):
            narrow, wide = getattr(layer, a, {}), getattr(layer, b, {})
            if name in narrow and name in wide:
                yield _tensor(narrow[name]), _tensor(wide[name]), float(scaling)


def _tensor(factor: Any) -> Tensor:
    return factor if isinstance(factor, Tensor) else factor.weight


def _weight(base: Any) -> Tensor:
    if isinstance(base, nn.MultiheadAttention):
        return base.in_proj_weight
    return base.weight


def _configs(model: nn.Module) -> dict[str, Any]:
    configs: Any = getattr(model, "peft_config", {})
    return configs


def active_config(model: nn.Module) -> tuple[str, Any]:
    """Name and config of the adapter that a peft model uses."""
    configs = _configs(model)
    active: Any = getattr(model, "active_adapter", None)
    name = active if isinstance(active, str) and active in configs else next(iter(configs))
    return name, configs[name]


def shares_trained(modules: list[nn.Module]) -> bool:
    """Whether some trained tensor belongs to two networks."""
    seen: set[int] = set()
    for module in modules:
        trained = {id(p) for p in module.parameters() if p.requires_grad}
        if trained & seen:
            return True
        seen |= trained
    return False


CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
_CONFIG_SEAL = "config_sha256"
PREFIX = "base_model.model."
_MAX_CONFIG = 1 << 20
_LOW_RANK = (LoRALinear, LoRAConv, LoRAEmbedding)
_REFUSED = (
    "use_dora", "lora_bias", "rank_pattern", "alpha_pattern", "bias", "layer_replication",
    "trainable_token_indices", "target_parameters", "use_qalora", "alora_invocation_tokens",
)  # fmt: skip
"""Settings that change what the tensors mean."""


@dataclass(frozen=True)
class AdapterFolder:
    """What one adapter folder holds.

    Attributes:
        path: the folder.
        rank: rank of the adapters.
        alpha: s = alpha / rank.
        factors: A and B [rank, ...], [..., rank] by the name of their layer.
        full: tensors of the layers that were trained in full, by their names in the network.
    """

    path: Path
    rank: int
    alpha: float
    factors: dict[str, tuple[Tensor, Tensor]]
    full: dict[str, Tensor]


def write_folder(folder: Path, member: nn.Module, trained: Iterable[str]) -> None:
    """Write one member; `trained` are the names of its private tensors."""
    config, tensors = _of_peft(member) if is_peft(member) else _of_lora(member, trained)
    write_json(folder / CONFIG, config)
    facts = {"format": "pt", _CONFIG_SEAL: sha256(folder / CONFIG)}
    write_tensors(folder / TENSORS, tensors, facts)
    seal = content_sha256(folder / TENSORS, facts)
    write_tensors(folder / TENSORS, tensors, facts | {SEAL: seal})


def _of_peft(member: nn.Module) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Config and tensors of a peft model, as the library itself stores them."""
    name, config = active_config(member)
    library = require("peft", extra="adapters")
    tensors = library.get_peft_model_state_dict(
        member, adapter_name=name, save_embedding_layers=False
    )
    table = {
        key: sorted(value) if isinstance(value, set) else value
        for key, value in config.to_dict().items()
    }
    return table | {"inference_mode": True}, tensors


def _of_lora(member: nn.Module, trained: Iterable[str]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    layers = dict(member.named_modules())
    adapters = {name: layer for name, layer in layers.items() if isinstance(layer, _LOW_RANK)}
    attention = {name: layer for name, layer in layers.items() if _projections(layer) is not None}
    if not adapters and not attention:
        raise ConfigError(
            "the members have no low-rank adapters, which a folder of peft stores; "
            "make them with shoal.adapters.lora, or use Ensemble.save"
        )
    if "" in adapters:
        raise ConfigError(
            "peft cannot adapt a network that is a single layer; put it in an nn.Sequential"
        )
    tensors: dict[str, Tensor] = {}
    for name, layer in adapters.items():
        _check_layer(name, layer)
        tensors |= _named_factors(name, layer, *_stored(layer))
    for name, layer in attention.items():
        tensors |= _of_attention(name, layer)
    saved = _saved_layers(member, trained)
    for name in saved:
        state = layers[name].state_dict()
        tensors |= {f"{PREFIX}{name}.{key}": value for key, value in state.items()}
    bases = [getattr(layer, "base", layer) for layer in adapters.values()]
    first = [*adapters.values(), *map(_projections, attention.values())][0]
    rank = first.factors[0].shape[0]
    named = getattr(getattr(member, "config", None), "_name_or_path", None)
    inner = tuple(f"{name}." for name in adapters)
    names = [name for name in layers if not name.startswith(inner)]
    return {
        "base_model_name_or_path": named if isinstance(named, str) and named else None,
        "bias": "none",
        "fan_in_fan_out": any(map(is_transposed, bases)),
        "inference_mode": True,
        "lora_alpha": _whole(first.scaling * rank),
        "lora_dropout": 0.0,
        "modules_to_save": [_suffix(name, names) for name in saved] or None,
        "peft_type": "LORA",
        "r": rank,
        "target_modules": _target_modules([*adapters, *attention], names),
        "task_type": None,
    }, {name: tensor.detach() for name, tensor in tensors.items()}


def _projections(layer: Any) -> LowRankWeight | None:
    """The low-rank change of the projections of `nn.MultiheadAttention`."""
    if not isinstance(layer, nn.MultiheadAttention):
        return None
    for changes in getattr(layer, "parametrizations", {}).values():
        for change in changes:
            if isinstance(change, LowRankWeight):
                return change
    return None


def _check_layer(name: str, layer: Any) -> None:
    base = layer.base
    if isinstance(layer, LoRAConv):
        plain = set(base.dilation) == {1} and base.padding_mode == "zeros"
        if not plain:
            raise ConfigError(
                f"peft cannot adapt layer '{name}', a convolution with dilation or padding_mode; "
                f"leave it out of targets to exchange folders with peft"
            )
    if isinstance(base, NonDynamicallyQuantizableLinear):
        raise ConfigError(
            f"peft adds the adapter of '{name}' in nn.MultiheadAttention twice; "
            f"leave it out of targets to exchange folders with peft"
        )


def _stored(layer: Any) -> tuple[Tensor, Tensor]:
    if isinstance(layer, LoRAConv):
        return layer.lora_A.weight, layer.lora_B.weight
    return layer.factors


def _named_factors(name: str, layer: Any, narrow: Tensor, wide: Tensor) -> dict[str, Tensor]:
    if isinstance(layer, LoRAEmbedding):
        start = f"{PREFIX}{name}.lora_embedding_"
        return {f"{start}A": narrow, f"{start}B": wide}
    return {f"{PREFIX}{name}.lora_A.weight": narrow, f"{PREFIX}{name}.lora_B.weight": wide}


def _of_attention(name: str, layer: Any) -> dict[str, Tensor]:
    """The library always adapts the last projection too; its change is zero here."""
    change, out = _projections(layer), layer.out_proj
    if change is None or not layer._qkv_same_embed_dim:
        raise ConfigError(
            f"peft cannot adapt '{name}', whose keys or values have another width; "
            f"leave it out of targets to exchange folders with peft"
        )
    narrow, wide = change.factors
    rank = len(narrow)
    nothing = narrow.new_zeros(rank, out.in_features), narrow.new_zeros(out.out_features, rank)
    last = _named_factors(f"{name}.base_layer.out_proj", out, *nothing)
    return _named_factors(name, layer, narrow, wide) | last


def _saved_layers(member: nn.Module, trained: Iterable[str]) -> list[str]:
    """Names of the layers that are trained in full, in part or as a whole."""
    owners: dict[str, None] = {}
    for name in trained:
        parts = name.split(".")[:-1]
        above = [(k, member.get_submodule(".".join(parts[:k]))) for k in range(1, len(parts) + 1)]
        adapters = [k for k, layer in above if isinstance(layer, Adapter)]
        if adapters and parts[adapters[0] :][:1] == ["base"]:
            raise ConfigError(
                f"peft cannot train '{name}' of a layer with an adapter; "
                f"leave it out of train to exchange folders with peft"
            )
        if not adapters and not any(isinstance(layer, LowRankWeight) for _, layer in above):
            owners[".".join(parts)] = None
    if "" in owners:
        raise ConfigError(
            "peft stores layers by name, and this network has trained parameters of its own; "
            "leave them out of train to exchange folders with peft"
        )
    return list(owners)


def _suffix(name: str, names: Sequence[str]) -> str:
    """A name that the library matches at most once: it compares the ends of names.

    Tensors of a full name that it does not match are loaded into the base model itself.
    """
    return name if sum(each.endswith(name) for each in names) == 1 else f"{PREFIX}{name}"


def _target_modules(targets: list[str], names: Sequence[str]) -> list[str] | str:
    others = set(names) - set(targets)
    if not any(each.endswith(f".{name}") for each in others for name in targets):
        return sorted(targets)
    return "|".join(re.escape(name) for name in targets)


def _whole(number: float) -> float | int:
    near = round(number)
    return near if abs(number - near) < 1e-12 * abs(number) else number


def member_folders(folders: str | Path | Iterable[str | Path]) -> list[Path]:
    """The adapter folders in a folder of members, or those that are given."""
    if not isinstance(folders, (str, Path)):
        paths = list_of(path)("folders", folders)
    elif (path("folders", folders) / CONFIG).exists():
        paths = [Path(folders)]
    else:
        paths = sorted(config.parent for config in Path(folders).glob(f"*/{CONFIG}"))
    if not paths:
        raise StorageError(
            f"there is no adapter in {folders}; wanted: folders that hold {CONFIG} and {TENSORS}"
        )
    return paths


def read_folder(folder: Path) -> AdapterFolder:
    """The checked content of one adapter folder."""
    if not (folder / TENSORS).exists():
        raise StorageError(f"{folder} has no {TENSORS}; other formats are not read")
    config = read_json(folder / CONFIG, _MAX_CONFIG)
    rank, alpha = _checked_config(folder, config)
    tensors = read_tensors(folder / TENSORS)
    with opened(folder / TENSORS) as file:
        facts = file.metadata() or {}
    check_content(folder / TENSORS, facts)
    if facts.get(_CONFIG_SEAL, seal := sha256(folder / CONFIG)) != seal:
        raise CheckpointCorrupt(f"{folder / CONFIG} is not what was saved: its SHA-256 differs")
    sides: dict[str, dict[str, Tensor]] = {}
    full: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        name = key.removeprefix(PREFIX).replace(".modules_to_save.", ".")
        low = re.fullmatch(r"(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?", name)
        if low is None:
            if "lora_" in name:
                raise ConfigError(f"{folder} has a tensor '{key}' that cannot be read")
            full[name] = tensor
            continue
        sides.setdefault(low[1], {})[low[2]] = tensor
    for name in [name for name in sides if name.endswith(".base_layer.out_proj")]:
        _check_nothing(folder, name, sides.pop(name))
    factors = {name: _checked_factors(folder, name, pair, rank) for name, pair in sides.items()}
    if not factors:
        raise CheckpointCorrupt(f"{folder} has no low-rank tensors lora_A and lora_B")
    return AdapterFolder(folder, rank, alpha, factors, full)


def _check_nothing(folder: Path, name: str, pair: dict[str, Tensor]) -> None:
    """Refuse a change of the last projection of attention, which the library adds twice."""
    if all(bool(tensor.any()) for tensor in pair.values()):
        raise ConfigError(
            f"{folder} adapts '{name}' of nn.MultiheadAttention, which peft adds twice; "
            f"load it with the library peft, then use adapters.peft"
        )


def _checked_config(folder: Path, config: Any) -> tuple[int, float]:
    """Rank and alpha of a config."""
    if not isinstance(config, dict):
        raise CheckpointCorrupt(f"{folder / CONFIG} does not contain a table")
    if config.get("peft_type") != "LORA":
        raise ConfigError(
            f"{folder} has adapters of type {config.get('peft_type')!r}, and only 'LORA' is read; "
            f"load them with the library peft, then use adapters.peft"
        )
    for key in _REFUSED:
        if config.get(key) and config[key] != "none":
            raise ConfigError(
                f"{folder} has the setting {key} = {config[key]!r}, which is not read; "
                f"load it with the library peft, then use adapters.peft"
            )
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or not 1 <= rank < 1 << 20:
        raise CheckpointCorrupt(f"{folder / CONFIG} has no rank r of at least 1, but {rank!r}")
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)) or not 0 < alpha < 1e6:
        raise CheckpointCorrupt(f"{folder / CONFIG} has no lora_alpha above 0, but {alpha!r}")
    return rank, alpha * rank**0.5 if config.get("use_rslora") else float(alpha)


def _checked_factors(
    folder: Path, name: str, pair: dict[str, Tensor], rank: int
) -> tuple[Tensor, Tensor]:
    if set(pair) != {"A", "B"}:
        raise CheckpointCorrupt(f"{folder} has only lora_{min(pair)} of layer '{name}', not both")
    narrow, wide = pair["A"], pair["B"]
    sound = narrow.ndim > 1 and wide.ndim > 1 and narrow.shape[0] == wide.shape[1] == rank
    if not sound or not (narrow.is_floating_point() and wide.is_floating_point()):
        raise CheckpointCorrupt(
            f"{folder} has tensors of layer '{name}' with shapes {tuple(narrow.shape)} and "
            f"{tuple(wide.shape)}, which do not fit the rank {rank}"
        )
    return narrow, wide


def same_layout(folders: Sequence[AdapterFolder]) -> AdapterFolder:
    """The first folder, if all have the same rank, scale and tensors."""
    first = folders[0]
    for other in folders[1:]:
        if (other.rank, other.alpha) != (first.rank, first.alpha):
            raise ConfigError(
                f"{other.path} has rank {other.rank} and alpha {other.alpha:g}, {first.path} has "
                f"{first.rank} and {first.alpha:g}; members of an ensemble need equal ones"
            )
        if other.factors.keys() != first.factors.keys() or other.full.keys() != first.full.keys():
            odd = sorted((other.factors.keys() | other.full) ^ (first.factors.keys() | first.full))
            raise ConfigError(f"{other.path} and {first.path} adapt other layers, such as {odd[0]}")
    return first


def fill_(tensor: Tensor, values: Tensor, name: str, folder: Path) -> None:
    """Copy a tensor of a folder into a member, in place."""
    if tensor.shape != values.shape:
        raise ConfigError(
            f"{folder} has '{name}' of shape {tuple(values.shape)}, the network wants "
            f"{tuple(tensor.shape)}; pass the network that the adapters were trained on"
        )
    with torch.no_grad():
        tensor.copy_(values)

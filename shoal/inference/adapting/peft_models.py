"""Models of the library `peft` as members: their adapters are private, their trunk is shared.

A model is recognised by its attribute `peft_config`; the library itself is not imported.
"""

from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.engine.members.stack import copied
from shoal.inference.adapting.adapted import keep_statistics, perturb_
from shoal.inference.adapting.layers import draw_apart, size_of_weight

__all__ = ["PeftBuild", "active_config", "draw_zero_adapters", "is_peft", "shares_trained"]

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
        own = {id(p) for p in module.parameters() if p.requires_grad}
        if own & seen:
            return True
        seen |= own
    return False

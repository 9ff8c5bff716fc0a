"""Copies of a network that share its frozen tensors and have a few private, trained ones."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import parametrize

from shoal.core.errors import ConfigError
from shoal.engine.members.stack import copied
from shoal.inference.adapting.layers import root_mean_square
from shoal.inference.adapting.targets import parameters_of

__all__ = [
    "AdaptedBuild",
    "FrozenTensors",
    "keep_statistics",
    "perturb_",
]

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
                own = nn.Parameter(parameter.detach().clone())
                if name not in drawn:
                    perturb_(own, self.spread)
                private[id(parameter)] = own
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

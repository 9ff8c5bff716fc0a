"""Hidden units have no order: put those of one network in the order of another's.

Two networks that differ by the order of their units are one function at two places, with a barrier
of loss between them. Matching units removes it. Ainsworth et al. (2022), arXiv 2209.04836.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.analysis.landscape.points import only_group, with_weights
from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.seeds import generator
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble

__all__ = ["Layer", "align", "hidden_layers", "permuted"]

_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Layer:
    """One hidden layer of a chain, and everything that knows the order of its units.

    Attributes:
        units: how many.
        inner: names of the tensors whose first axis counts the units.
        outer: the weight of the next map, whose second axis counts them, perhaps once a pixel.
    """

    units: int
    inner: tuple[str, ...]
    outer: str


def hidden_layers(module: nn.Module) -> list[Layer]:
    """The hidden layers of an MLP or a plain convolutional network, in order."""
    if not isinstance(module, nn.Sequential):
        raise ConfigError(
            f"units are matched in networks that are one chain of layers (nn.Sequential), such as "
            f"mlp and small-cnn, not in {type(module).__name__}"
        )
    found: list[tuple[str, nn.Module, list[str]]] = []
    for name, layer in module.named_children():
        own = [f"{name}.{key}" for key, t in layer.state_dict().items() if t.ndim]
        if isinstance(layer, _MAPS):
            found.append((name, layer, own))
        elif own and isinstance(layer, _NORMS) and found:
            found[-1][2].extend(own)
        elif own:
            raise ConfigError(f"units cannot be matched across a layer {type(layer).__name__}")
    return [
        Layer(len(layer.get_parameter("weight")), tuple(inner), f"{after}.weight")
        for (_, layer, inner), (after, _, _) in zip(found[:-1], found[1:], strict=True)
    ]


def permuted(network: Tree, layer: Layer, order: Tensor) -> Tree:
    """One network [...] with the units of one layer in another order: the same function."""
    changed = {name: network[name][order] for name in layer.inner if name in network}
    outer = network[layer.outer]
    blocks = outer.reshape(len(outer), layer.units, -1)[:, order]
    return network | changed | {layer.outer: blocks.reshape(outer.shape)}


def align(pair: Ensemble, rounds: int = 20, seed: int = 0) -> Ensemble:
    r"""The two networks, the units of the second in the order that fits the first best.

    Maximises $\langle\theta_1, P\theta_2\rangle$ layer by layer, each an assignment problem with
    the other layers fixed, in random order until none changes.

    Args:
        pair: two members of one architecture.
        rounds: most sweeps over the layers.
        seed: decides the order of the layers.
    """
    solve = require("scipy.optimize", extra="report").linear_sum_assignment
    group = only_group(pair)
    layers = hidden_layers(group.prototype)
    state = {name: t.detach() for name, t in (group.weights | group.buffers).items()}
    first, second = ({name: t[i] for name, t in state.items()} for i in (0, 1))
    trained, random = set(group.weights), generator(seed, "align")
    for _ in range(rounds):
        moved = False
        for index in torch.randperm(len(layers), generator=random).tolist():
            layer = layers[index]
            gain = _gain(layer, first, second, trained)
            _, columns = solve(gain.cpu().numpy(), maximize=True)
            order = torch.as_tensor(columns, device=pair.device)
            better = float(
                gain[torch.arange(layer.units, device=order.device), order].sum() - gain.trace()
            )
            if better > 1e-9 * float(gain.abs().sum()):
                second, moved = permuted(second, layer, order), True
        if not moved:
            break
    both = {name: torch.stack([first[name], second[name]]) for name in state}
    buffers = {name: both[name] for name in group.buffers}
    return with_weights(pair, {name: both[name] for name in group.weights}, buffers)


def _gain(layer: Layer, first: Tree, second: Tree, trained: set[str]) -> Tensor:
    """What unit j of the second adds to the inner product in the place of unit i of the first."""
    total = torch.zeros(layer.units, layer.units, dtype=torch.float64)
    for name in layer.inner:
        if name in trained:
            a, b = (net[name].double().reshape(layer.units, -1) for net in (first, second))
            total = total.to(a.device) + a @ b.T
    a, b = (
        net[layer.outer].double().reshape(len(net[layer.outer]), layer.units, -1)
        for net in (first, second)
    )
    return total.to(a.device) + torch.einsum("oip,ojp->ij", a, b)

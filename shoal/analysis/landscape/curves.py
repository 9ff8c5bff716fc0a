"""Curves of low loss between two members: their forms, matching of hidden units, and training.

A curve is a sum of fixed functions of t times pivots, theta(t) = sum_r c_r(t) P_r. The first and
the last pivot are the members; the pivots between them are trained on the loss at random t.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shoal.analysis.landscape.planes import line
from shoal.analysis.landscape.points import (
    combined,
    only_group,
    using_batch_statistics,
    with_weights,
)
from shoal.core.errors import ConfigError, DataError
from shoal.core.optional import require
from shoal.core.random import generator
from shoal.core.registry import Registry
from shoal.core.tree import mixed, per_member, rows
from shoal.core.types import Tree
from shoal.data.dataset import Split
from shoal.engine.resources.plan import default_runner
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.inference.posterior import as_points

__all__ = [
    "Bezier",
    "Curve",
    "Layer",
    "Polygon",
    "Tunnel",
    "align",
    "connect",
    "hidden_layers",
    "permuted",
    "registry",
]


registry = Registry("curve")


class Curve(Protocol):
    """A curve as a function of its pivots."""

    @property
    def pivots(self) -> int:
        """Number of pivots between the ends."""
        ...

    @property
    def constrained(self) -> bool:
        """Whether pivots stay in their initial hyperplanes."""
        ...

    def coefficients(self, t: Tensor) -> Tensor:
        """c [K, pivots + 2] at t [K] in [0, 1]."""
        ...


@registry.register("bezier", cite=("garipov2018loss",))
@dataclass(frozen=True)
class Bezier:
    r"""A Bezier curve, $c_r(t) = {n \choose r} t^r (1 - t)^{n - r}$.

    Attributes:
        pivots: number of pivots between the ends; one pivot gives a parabola.
    """

    pivots: int = 1
    constrained: bool = False

    def coefficients(self, t: Tensor) -> Tensor:
        """Bernstein polynomials."""
        n = self.pivots + 1
        return torch.stack([math.comb(n, r) * t**r * (1 - t) ** (n - r) for r in range(n + 1)], -1)


@registry.register("polygon", cite=("garipov2018loss",))
@dataclass(frozen=True)
class Polygon:
    """Line segments between neighbouring pivots, c_r(t) = max(0, 1 - |n t - r|).

    Attributes:
        pivots: number of pivots between the ends.
    """

    pivots: int = 3
    constrained: bool = False

    def coefficients(self, t: Tensor) -> Tensor:
        """Hat functions."""
        n = self.pivots + 1
        return (1 - (n * t[:, None] - torch.arange(n + 1).to(t)).abs()).clamp_min(0)


@registry.register("tunnel", cite=("fort2019large",))
@dataclass(frozen=True)
class Tunnel(Bezier):
    """A Bezier curve whose pivots move only orthogonally to the straight line.

    Each pivot moves in its own hyperplane, theta . (theta_2 - theta_1) fixed, so t remains the
    share of the distance between the members. The result is a valley; `levelled` raises it to the
    loss of the ends.
    """

    constrained: bool = True


_MAPS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)

_NORMS = (_BatchNorm, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class Layer:
    """One hidden layer of a chain, and all tensors that depend on the order of its units.

    Attributes:
        units: number of units.
        inner: names of the tensors whose first axis runs over the units.
        outer: the weight of the next layer; its second axis runs over the units (times pixels).
    """

    units: int
    inner: tuple[str, ...]
    outer: str


def hidden_layers(module: nn.Module) -> list[Layer]:
    """The hidden layers of an MLP or a plain convolutional network, in order."""
    if not isinstance(module, nn.Sequential):
        raise ConfigError(
            f"matching of units needs a network that is one nn.Sequential, such as mlp and "
            f"small-cnn, not {type(module).__name__}"
        )
    chain: list[tuple[str, nn.Module, list[str]]] = []
    for name, layer in module.named_children():
        tensors = [f"{name}.{key}" for key, t in layer.state_dict().items() if t.ndim]
        if isinstance(layer, _MAPS) and "weight" not in dict(layer.named_parameters()):
            raise ConfigError(f"units cannot be matched, since '{name}.weight' is parametrised")
        if isinstance(layer, _MAPS) and not {f"{name}.weight", f"{name}.bias"}.issuperset(tensors):
            raise ConfigError(f"units cannot be matched in a layer {type(layer).__name__}")
        if isinstance(layer, _MAPS):
            chain.append((name, layer, tensors))
        elif tensors and isinstance(layer, _NORMS) and chain:
            chain[-1][2].extend(tensors)
        elif tensors:
            raise ConfigError(f"units cannot be matched across a layer {type(layer).__name__}")
    return [
        Layer(len(layer.get_parameter("weight")), tuple(inner), f"{after}.weight")
        for (_, layer, inner), (after, _, _) in zip(chain[:-1], chain[1:], strict=True)
    ]


def permuted(network: Tree, layer: Layer, order: Tensor) -> Tree:
    """One network [...] with the units of one layer permuted; the function is the same."""
    changed = {name: network[name][order] for name in layer.inner if name in network}
    outer = network[layer.outer]
    blocks = outer.reshape(len(outer), layer.units, -1)[:, order]
    return network | changed | {layer.outer: blocks.reshape(outer.shape)}


def align(pair: Ensemble, rounds: int = 20, seed: int = 0) -> Ensemble:
    r"""The two networks, with the units of the second permuted to match the first best.

    Maximises $\langle\theta_1, P\theta_2\rangle$ layer by layer, each an assignment problem with
    the other layers fixed, in random order until none changes.

    Args:
        pair: two members of one architecture.
        rounds: largest number of sweeps over the layers.
        seed: fixes the order of the layers.
    """
    solve = require("scipy.optimize", extra="report").linear_sum_assignment
    group = only_group(pair)
    layers = hidden_layers(group.prototype)
    for name in [name for layer in layers for name in (*layer.inner, layer.outer)]:
        if name in group.shared:
            raise ConfigError(f"units cannot be matched, since all members share '{name}'")
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
    """Inner product of unit i of the first network and unit j of the second."""
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


def connect(
    pair: Ensemble,
    curve: Curve,
    train: Split,
    *,
    likelihood: Likelihood | None = None,
    steps: int = 300,
    lr: float = 0.01,
    places: int = 12,
    batch_size: int = 512,
    seed: int = 0,
    tick: Callable[[int], None] = lambda count: None,
) -> Ensemble:
    """The pivots of a curve of low loss between two members, ends included.

    Adam minimises the mean of the loss over t. On a constrained curve every pivot is projected back
    to its initial hyperplane after each step. Garipov et al. (2018), arXiv 1802.10026; Fort &
    Jastrzebski (2019), arXiv 1906.04724.

    Args:
        pair: the two members.
        curve: the type of curve.
        train: data of the loss.
        likelihood: likelihood of the outputs; Categorical by default.
        steps: number of steps.
        lr: initial learning rate of a cosine schedule.
        places: points of the curve per step, one random point in each of `places` equal intervals.
        batch_size: inputs per step.
        seed: fixes points and batches.
        tick: called with the number of networks evaluated in a step.
    """
    if pair.members != 2:
        raise ConfigError(f"a curve connects two members, not {pair.members}")
    if train.y is None:
        raise DataError("a curve needs labelled data, but these data have no targets")
    t = torch.linspace(0, 1, curve.pivots + 2, dtype=torch.float64)
    pivots = combined(pair, line(curve.pivots + 2)).weights
    inner = {name: tensor[1:-1].clone().requires_grad_() for name, tensor in pivots.items()}
    ends = {name: tensor.detach() for name, tensor in only_group(pair).weights.items()}
    # A short moving average of gradient size, which falls by orders of magnitude in training.
    optimizer = torch.optim.Adam(list(inner.values()), lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    random = generator(seed, "connect")
    for _ in range(steps):
        at = (torch.arange(places) + torch.rand(places, generator=random).double()) / places
        batch = train.random_batch(batch_size, random)
        coefficients = curve.coefficients(at).to(pair.device)
        losses = _losses(pair, _whole(ends, inner), coefficients, batch, likelihood)
        optimizer.zero_grad()
        losses.mean().backward()
        optimizer.step()
        schedule.step()
        if curve.constrained:
            _project(inner, ends, t[1:-1])
        tick(places)
    return with_weights(pair, {n: w.detach() for n, w in _whole(ends, inner).items()})


def _losses(
    pair: Ensemble,
    pivots: Tree,
    coefficients: Tensor,
    batch: Split,
    likelihood: Likelihood | None,
) -> Tensor:
    """NLL at the points coefficients @ pivots."""
    points = with_weights(pair, mixed(coefficients, pivots))
    meaning = likelihood or Categorical()
    x = batch.x.to(pair.device, pair.dtype if batch.x.is_floating_point() else None)
    with using_batch_statistics(points):
        predicted = points(x, default_runner(points.groups, points.device))
    predicted, y = as_points(meaning, predicted, batch.y.to(pair.device))
    return -meaning.log_prob(predicted, y).mean(-1)


def _whole(ends: Tree, inner: Tree) -> Tree:
    return {name: torch.cat([t[:1], inner[name], t[1:]]) for name, t in ends.items()}


def _project(inner: Tree, ends: Tree, t: Tensor) -> None:
    """Project pivots to their hyperplanes, (theta - theta_1) . e = t |e|², e the segment."""
    with torch.no_grad():
        along = {name: rows(tensor[1:] - tensor[:1])[0] for name, tensor in ends.items()}
        square = sum(float(e.double().square().sum()) for e in along.values())
        dots = sum(
            ((rows(p) - rows(ends[name][:1])) @ along[name]).double() for name, p in inner.items()
        )
        excess = dots / square - t.to(dots)  # pyright: ignore
        for name, pivot in inner.items():
            shift = per_member(excess.to(pivot), pivot) * along[name].reshape(pivot.shape[1:])
            pivot.sub_(shift)

r"""A whole network on a subspace of its weights, as a problem with a posterior that can be sampled.

A member θ_0 and k directions span an affine subspace of the weights. With the standard deviations S
of the weights under the prior and orthonormal directions Q [D, k],

$$ θ = c + S Q z, \qquad c = θ_0 - S Q Q^T S^{-1} θ_0. $$

c is the point of the subspace that is nearest to the prior's mean, S^-1 c is orthogonal to Q, and
so |S^-1 θ|² = |S^-1 c|² + |z|². The prior on θ restricted to the subspace is thus exactly N(0, 1)
on z. The restricted posterior is the conditional of the posterior, given all other directions
(subspaces of Izmailov et al. 2019, arXiv 1907.07504, at temperature 1).

The directions of a run of draws are the principal components of the draws of its first chain, in
units of S: there the posterior is wide. Those of trained members are random, since the line between
two members leaves the region of low loss.
"""

import copy
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap

from shoal.analysis.evidence.curvature import output_curvature
from shoal.analysis.fidelity.last_layer_problem import Restricted, setting_of
from shoal.analysis.fidelity.problems import Problem
from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.core.tree import rows
from shoal.core.types import Tree
from shoal.data.dataset import Dataset
from shoal.engine.members.member_runner import without_fallback_warnings
from shoal.engine.members.network_call import call_network, selected_output
from shoal.inference.priors import Gaussian as GaussianPrior
from shoal.models.mlp import MLP
from shoal.training.folder.run_folder import DRAWS

__all__ = ["SubspaceProblem", "subspace_problem"]

_ROOM = 1 << 17
"""Members times data points of one pass."""


@dataclass(frozen=True)
class SubspaceProblem(Problem):
    """A network whose weights are c + P z; the members are vectors z [k].

    Attributes:
        module: the network.
        centre: c [D].
        directions: P = S Q [D, k].
        start: z of the member that the subspace passes through [k].
    """

    module: nn.Module
    centre: Tensor
    directions: Tensor
    start: Tensor

    in_jax: ClassVar[bool] = False

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """See `Problem`."""
        return [tuple(self.start.shape)]

    def build(self) -> nn.Module:
        """See `Problem`; its first weights are a draw from the prior."""
        return _Member(_Network(self.module), self.centre.float(), self.directions.float())

    def apply(self, flat: Tensor, x: Tensor) -> Tensor:
        """See `Problem`."""
        x = x.to(flat) if x.is_floating_point() else x
        network = _Network(self.module)
        weights = self.centre.to(flat) + flat @ self.directions.to(flat).mT
        room = max(_ROOM // max(len(x), 1), 1)

        def one(row: Tensor) -> Tensor:
            return network(row, x)

        try:
            with without_fallback_warnings():
                return vmap(one, chunk_size=room)(weights)
        except RuntimeError:  # a layer that cannot be batched
            return torch.stack([one(row) for row in weights])

    def gauss_newton(self, z: Tensor) -> Tensor:
        """H = sum_n J_n^T Λ_n J_n [k, k] of the log-likelihood, as in `evidence.curvature`."""
        total = torch.zeros(len(z), len(z), dtype=z.dtype)
        y = self.y.double() if self.y.is_floating_point() else self.y
        for x, targets in zip(self.x.split(1024), y.split(1024), strict=True):
            outputs, back, *_ = vjp(lambda w, x=x: self.apply(w[None], x)[0], z)
            # The pullback of the pullback, which is linear in its cotangent, has the columns of J.
            _, push, *_ = vjp(lambda c, back=back: back(c)[0], torch.zeros_like(outputs))
            jacobian = torch.stack([push(axis)[0] for axis in torch.eye(len(z)).to(z)], -1)
            curvature = output_curvature(self.likelihood, outputs.detach(), targets)
            total += torch.einsum("nci,ncd,ndj->ij", jacobian, curvature, jacobian)
        return total


class _Network:
    """The outputs of a network at a vector of all its trained weights."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.shapes = {name: p.shape for name, p in _trained(module).items()}
        self.fixed = {n: p for n, p in module.named_parameters() if n not in self.shapes}
        self.fixed |= dict(module.named_buffers())

    def __call__(self, weights: Tensor, x: Any) -> Tensor:
        fixed = {n: t.to(weights) if t.is_floating_point() else t for n, t in self.fixed.items()}
        sizes = [math.prod(shape) for shape in self.shapes.values()]
        parts = zip(self.shapes.items(), weights.split(sizes), strict=True)
        tree = {name: part.view(shape) for (name, shape), part in parts}
        return selected_output(self.module, call_network(self.module, tree | fixed, x))


class _Member(nn.Module):
    """A member of an ensemble on the subspace: its weights are z, the rest is common to all."""

    def __init__(self, network: _Network, centre: Tensor, directions: Tensor) -> None:
        super().__init__()
        self.z = nn.Parameter(torch.randn(directions.shape[1]))
        self.centre = nn.Parameter(centre, requires_grad=False)
        self.directions = nn.Parameter(directions, requires_grad=False)
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(self.centre + self.directions @ self.z, x)


def _trained(module: nn.Module) -> Tree:
    return {name: p.detach() for name, p in module.named_parameters() if p.requires_grad}


def subspace_problem(
    run: Any, data: Dataset, size: int, points: int | None = None, inputs: int = 200, seed: int = 0
) -> Restricted:
    """The network of a run on a subspace of `size` directions through its first finite member.

    The other arguments are those of `last_layer_problem`.
    """
    setting = setting_of(run, data, points, inputs, seed)
    if not isinstance(setting.train.x, Tensor):
        raise ConfigError("a subspace needs inputs as one tensor; leave subspace out")
    module = copy.deepcopy(setting.module)
    weights = _trained(module)
    member = torch.cat([weight.flatten() for weight in weights.values()]).double()
    if not 1 <= size <= len(member):
        raise ConfigError(
            f"a subspace of these networks has 1 to {len(member):,} directions, not {size}"
        )
    prior = setting.prior
    widths = [torch.full((w.numel(),), float(prior.width(w[None]))) for w in weights.values()]
    unit = torch.cat(widths).double()
    found = _principal(run, [*weights], unit, size)
    directions, axes = found if found is not None else _random(len(member), size, seed)
    z = axes.mT @ (member / unit)
    places = setting.places
    empty = places["on"][:0]
    with torch.no_grad():
        outputs = selected_output(module, module(places["on"][:1]))
    if outputs.ndim != 2:
        raise ConfigError("fidelity needs one target per data point, not tokens or places")
    problem = SubspaceProblem(
        "subspace", setting.train.x, setting.y, places["on"], places.get("off", empty), MLP(()),
        setting.likelihood, GaussianPrior(1.0), outputs.shape[1], setting.truth, module,
        member - unit * (axes @ z), unit.unsqueeze(1) * axes, z,
    )  # fmt: skip
    return Restricted(
        problem, setting.outputs, None, directions, len(setting.train), len(data.train),
        setting.off, all_weights=len(member),
    )  # fmt: skip


def _random(width: int, size: int, seed: int) -> tuple[str, Tensor]:
    noise = torch.randn(width, size, generator=generator(seed, "subspace"), dtype=torch.float64)
    return "random directions", torch.linalg.qr(noise).Q


def _principal(run: Any, names: list[str], unit: Tensor, size: int) -> tuple[str, Tensor] | None:
    """Principal components of the draws of the first chain [D, size]; None for trained members."""
    about = run.config.get(DRAWS)
    if about is None:
        return None
    group = run.ensemble.groups[0]
    chain = group.members // int(about["draws"])
    flat = torch.cat([rows(group.weights[name].detach()) for name in names], 1)[::chain]
    flat = flat[flat.isfinite().all(1)].cpu().double()
    if len(flat) <= size:
        raise ConfigError(
            f"{size} principal components need more than {size} draws of a chain, and the first "
            f"chain has {len(flat)}; take fewer directions, or draw more"
        )
    away = (flat - flat.mean(0)) / unit
    return "principal components of the first chain", torch.linalg.svd(away, False).Vh[:size].mT

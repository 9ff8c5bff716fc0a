"""Priors on the weights of a member, and on its outputs."""

import math
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.random import hashed, many_normal
from shoal.core.registry import Registry, nested_field
from shoal.core.tree import rows
from shoal.core.types import Tree
from shoal.core.values import describe_value
from shoal.interaction import bandwidths, estimators
from shoal.interaction.bandwidths import Median, masked_median
from shoal.interaction.estimators import SSGE
from shoal.interaction.flows import Stein
from shoal.interaction.kernels import RBF
from shoal.interaction.repulsion import Repulsion, interact
from shoal.interaction.spaces import Outputs

__all__ = [
    "FanIn",
    "Flat",
    "FunctionSpace",
    "FunctionalPrior",
    "Gaussian",
    "GaussianProcess",
    "WeightPrior",
    "known_prior",
    "registry",
]

registry = Registry("prior")


@runtime_checkable
class WeightPrior(Protocol):
    """A density on the weights of one member, up to a constant."""

    def log_prob(self, weights: Tree) -> Tensor:
        """Log density of each member [M]."""
        ...

    def score(self, weights: Tree) -> Tree:
        """Gradient of the log density with respect to the weights."""
        ...

    def draw(self, weights: Tree, count: int, key: Tensor) -> Tree:
        """`count` draws [count, ...] with the shapes of one member's weights."""
        ...


def known_prior(name: str, value: Any) -> "WeightPrior | FunctionalPrior":
    """The check of an argument that is a prior: its name, a table or an object."""
    made = registry.make(value)
    if hasattr(made, "draw") or hasattr(made, "score_outputs"):
        return made
    raise ConfigError(
        f"{name} must be a prior, such as 'gaussian' or shoal.priors.FanIn(), "
        f"not {describe_value(value)}"
    )


@runtime_checkable
class FunctionalPrior(Protocol):
    """A density on the outputs, estimated from networks drawn from a weight prior."""

    @property
    def weights(self) -> WeightPrior:
        """The weight prior of the drawn networks."""
        ...

    @property
    def draws(self) -> int | None:
        """Number of draws per step; None for the ensemble size."""
        ...

    def score_outputs(self, outputs: Tensor, draws: Tensor, alive: Tensor | None = None) -> Tensor:
        """Gradient of the log prior with respect to outputs [M, B, C], from draws [P, B, C]."""
        ...


class _Wide(Protocol):
    """Independent normal weights; each tensor has its own standard deviation."""

    def width(self, tensor: Tensor) -> float: ...


def _normal_log_prob(self: _Wide, weights: Tree) -> Tensor:
    """Log density of each member [M]."""
    terms = []
    for tensor in weights.values():
        std, matrix = self.width(tensor), rows(tensor)
        constant = matrix.shape[1] * math.log(std * math.sqrt(2 * math.pi))
        terms.append(-0.5 * matrix.square().sum(1) / std**2 - constant)
    return torch.stack(terms).sum(0)


def _normal_score(self: _Wide, weights: Tree) -> Tree:
    """-theta / std²."""
    return {name: tensor * (-1 / self.width(tensor) ** 2) for name, tensor in weights.items()}


def _normal_draw(self: _Wide, weights: Tree, count: int, key: Tensor) -> Tree:
    """Independent normal numbers [count, ...] with the shapes of one member's weights."""
    return {
        name: many_normal(hashed(key + index), (count, *t.shape[1:]), t.dtype).mul_(self.width(t))
        for index, (name, t) in enumerate(weights.items())
    }


@registry.register("gaussian")
@dataclass(frozen=True)
class Gaussian:
    """Independent normal weights, theta ~ N(0, std²).

    Attributes:
        std: standard deviation of every weight and bias.
    """

    std: float = 1.0

    def __post_init__(self) -> None:
        if not self.std > 0:
            raise ConfigError(f"a prior's std must be positive, not {self.std}")

    def width(self, tensor: Tensor) -> float:
        """Standard deviation, the same for every tensor."""
        return self.std

    log_prob = _normal_log_prob
    score = _normal_score
    draw = _normal_draw


@registry.register("fan-in")
@dataclass(frozen=True)
class FanIn:
    """Normal weights with std = scale / √fan_in, and std = scale for biases.

    Attributes:
        scale: standard deviation of a layer's outputs for inputs of unit size.
    """

    scale: float = 1.0

    def __post_init__(self) -> None:
        if not self.scale > 0:
            raise ConfigError(f"a prior's scale must be positive, not {self.scale}")

    def width(self, tensor: Tensor) -> float:
        """Standard deviation from the number of inputs per unit, tensors [M, out, in, ...]."""
        fan_in = math.prod(tensor.shape[2:]) if tensor.ndim > 2 else 1
        return self.scale / math.sqrt(fan_in)

    log_prob = _normal_log_prob
    score = _normal_score
    draw = _normal_draw


@registry.register("flat")
@dataclass(frozen=True)
class Flat:
    """No prior: a constant density."""

    def log_prob(self, weights: Tree) -> Tensor:
        """Zero."""
        tensor = next(iter(weights.values()))
        return torch.zeros(len(tensor), dtype=tensor.dtype, device=tensor.device)

    def score(self, weights: Tree) -> Tree:
        """Zero."""
        return {name: torch.zeros_like(tensor) for name, tensor in weights.items()}

    def draw(self, weights: Tree, count: int, key: Tensor) -> Tree:
        """Always raises: a flat prior has no draws."""
        raise ConfigError("a flat prior has no draws; use a Gaussian or fan-in prior")


@registry.register("function-space", cite=("dangelo2021repulsive", "shi2018spectral"))
@dataclass(frozen=True)
class FunctionSpace:
    """A prior on the outputs, estimated from the outputs of networks drawn from a weight prior.

    Its score at the members' outputs f is the spectral Stein estimate of the draws F, evaluated off
    the sample: K(f, F) U (Λ + eta)^-2 U^T L F. Every step has new draws. With few draws in many
    dimensions the estimate almost vanishes, as in published code.

    Attributes:
        weights: the weight prior of the drawn networks.
        draws: number of draws; None for the ensemble size.
        estimator: the spectral estimator.
        bandwidth: bandwidth of the draws' kernel.
        legacy: the kernel between members and draws has a median of its own.
    """

    weights: WeightPrior = nested_field(registry, Gaussian)
    draws: int | None = None
    estimator: SSGE = nested_field(estimators.registry, SSGE)
    bandwidth: Median = nested_field(bandwidths.registry, lambda: Median(scale="unit"))
    legacy: bool = False

    def __post_init__(self) -> None:
        _check_draws(self)

    def score_outputs(self, outputs: Tensor, draws: Tensor, alive: Tensor | None = None) -> Tensor:
        """Gradient of the log prior with respect to outputs [M, B, C], from draws [P, B, C]."""
        f, F = outputs.detach().flatten(1), draws.detach().flatten(1)
        centre = F.mean(0)
        f, F = f - centre, F - centre
        everyone = torch.ones(len(F), dtype=torch.bool, device=F.device)
        # The Stein flow's B is L / P: its push is the summed kernel gradient of the draws.
        kernel = Repulsion(Outputs(), RBF(), self.bandwidth, Stein())
        inner = interact(kernel, [F.unsqueeze(1)], everyone)
        summed = len(F) * inner.B[0] @ F
        across = self._across(f, F, inner.h2, alive)
        return (across @ self.estimator.inverse_square(inner.K, summed)).reshape(outputs.shape)

    def _across(self, f: Tensor, F: Tensor, h2: Tensor, alive: Tensor | None) -> Tensor:
        d2 = f.square().sum(1)[:, None] + F.square().sum(1) - 2 * f @ F.mT
        if self.legacy:
            sound = d2.isfinite().all(-1)
            living = (sound if alive is None else sound & alive)[:, None].expand_as(d2)
            h2 = masked_median(d2.flatten()[None], living.flatten()) / (2 * math.log(len(F) + 1))
        return RBF().value(d2.clamp(min=0) / h2.squeeze())


@registry.register("gaussian-process", cite=("wang2019function",))
@dataclass(frozen=True)
class GaussianProcess:
    """The Gaussian process with the moments of networks drawn from a weight prior.

    The output columns are independent and identically distributed, as for every prior whose last
    layer is: f_c ~ N(0, S) with S = mean over draws and columns of f_c f_c^T, plus a ridge. The
    score is -S^-1 f. Infinitely wide networks have this prior. For batches of B data points, draws
    times columns should be several times B. Wang et al. (2019), arXiv 1902.09754.

    Attributes:
        weights: the weight prior of the drawn networks.
        draws: number of draws per step.
        ridge: added to the diagonal of S, as a share of its mean.
    """

    weights: WeightPrior = nested_field(registry, Gaussian)
    draws: int = 500
    ridge: float = 1e-3

    def __post_init__(self) -> None:
        _check_draws(self)
        if not self.ridge > 0:
            raise ConfigError(f"the ridge of a covariance must be positive, not {self.ridge}")

    def score_outputs(self, outputs: Tensor, draws: Tensor, alive: Tensor | None = None) -> Tensor:
        """-S^-1 f for outputs [M, B, C], with S from draws [P, B, C]."""
        f, F = outputs.detach(), draws.detach()
        S = torch.einsum("pbc,pac->ba", F, F) / (F.shape[0] * F.shape[2])
        S = S + self.ridge * S.diagonal().mean() * torch.eye(len(S), dtype=S.dtype, device=S.device)
        columns = f.permute(1, 0, 2).reshape(len(S), -1)
        score = torch.linalg.solve_ex(S, -columns).result
        return score.reshape(len(S), len(f), -1).permute(1, 0, 2)


def _check_draws(prior: "FunctionSpace | GaussianProcess") -> None:
    if isinstance(prior.weights, Flat):
        raise ConfigError(
            "a functional prior needs draws, and a flat prior has none; use 'gaussian'"
        )
    if prior.draws is not None and prior.draws < 2:
        raise ConfigError(f"a functional prior needs at least two draws, not {prior.draws}")

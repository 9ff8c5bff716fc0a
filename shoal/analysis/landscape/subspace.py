"""Functions near one member: samplers of the weights around it.

A mode is one member and the last snapshots of its training. A sampler turns a mode into weights.
`reach` [K] is the distance of each sample, as a share of the sampler's scale. One call covers the
range from the member itself to functions of low accuracy.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from shoal.analysis.landscape.points import gram, only_group, refresh, with_weights
from shoal.analysis.landscape.survey import chunk_size, outputs
from shoal.core.errors import ConfigError
from shoal.core.random import key, normal, uniform
from shoal.core.registry import Registry
from shoal.core.structure import Inputs
from shoal.core.tree import member_norms, mixed, per_member
from shoal.core.types import Tree
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, Likelihood
from shoal.prediction.predictive import Predictive

__all__ = [
    "SWAG",
    "DiagonalGaussian",
    "Dropout",
    "LowRankGaussian",
    "Mode",
    "RandomDirections",
    "Sampler",
    "draw",
    "registry",
    "sample_mode",
]

registry = Registry("sampler")


class Mode(NamedTuple):
    """One member and its neighbourhood.

    Attributes:
        solution: an ensemble of one member.
        path: the last snapshots of its training; None if the run kept no snapshots.
    """

    solution: Ensemble
    path: Ensemble | None = None

    @property
    def centre(self) -> Tree:
        """The member's weights [1, ...]."""
        return _weights(self.solution)

    def deviations(self) -> tuple[Tree, Tree]:
        """Mean of the snapshots [1, ...], and their deviations from the mean [n, ...]."""
        if self.path is None or self.path.members < 2:
            raise ConfigError(
                "this sampler needs at least two snapshots along training; train the run with "
                "keep_every=1"
            )
        tree = _weights(self.path)
        mean = {name: tensor.mean(0, keepdim=True) for name, tensor in tree.items()}
        return mean, {name: tensor - mean[name] for name, tensor in tree.items()}


class Sampler(Protocol):
    """Weights around a mode."""

    def __call__(self, mode: Mode, reach: Tensor, keys: Tensor) -> Tree:
        """Weights [K, ...], one sample per reach and key [K]."""
        ...


def draw(sampler: Sampler, mode: Mode, reach: Tensor, seed: int = 0, first: int = 0) -> Ensemble:
    """Samples `first`, `first + 1` and so on, one per reach, independent of their number."""
    device = mode.solution.device
    index = torch.arange(first, first + len(reach), device=device)
    keys = key(seed, type(sampler).__name__, index)
    with torch.no_grad():
        tree = sampler(mode, reach.to(device), keys)
    return with_weights(mode.solution, tree)


def sample_mode(
    sampler: Sampler,
    mode: Mode,
    reach: Tensor,
    x: Inputs,
    *,
    likelihood: Likelihood | None = None,
    train: Inputs | None = None,
    seed: int = 0,
) -> Predictive:
    """The prediction of samples of a mode for `x`; weights are drawn and discarded in chunks.

    Args:
        sampler: draws the weights.
        mode: centre of the samples.
        reach: distance of each sample [K]; 1 is the sampler's scale.
        x: inputs [B, ...].
        likelihood: likelihood of the outputs; Categorical by default.
        train: inputs for the batch normalisation statistics of each sample.
        seed: fixes the samples.
    """
    chunks, first = [], 0
    for part in reach.split(chunk_size(mode.solution, x)):
        samples = draw(sampler, mode, part, seed, first)
        if train is not None:
            refresh(samples, train)
        chunks.append(outputs(samples, x).cpu())
        first += len(part)
    return Predictive(torch.cat(chunks), likelihood or Categorical())


@registry.register("random", cite=("fort2019deep",))
@dataclass(frozen=True)
class RandomDirections:
    r"""A random direction: $\theta_0 + t\, \hat u\, |\theta_0|$, with u a unit Gaussian direction.

    Attributes:
        radius: largest t, in units of the norm of the member's weights.
    """

    radius: float = 1.0

    def __call__(self, mode: Mode, reach: Tensor, keys: Tensor) -> Tree:
        """One direction per sample."""
        noise = _noise(mode.centre, keys)
        length = self.radius * member_norms(mode.centre) * reach / member_norms(noise)
        return {n: t + per_member(length, noise[n]) * noise[n] for n, t in mode.centre.items()}


@registry.register("dropout", cite=("gal2016dropout", "fort2019deep"))
@dataclass(frozen=True)
class Dropout:
    """Drop weights and biases with probability p, and divide the others by 1 - p.

    Attributes:
        rate: largest p.
    """

    rate: float = 0.1

    def __call__(self, mode: Mode, reach: Tensor, keys: Tensor) -> Tree:
        """One mask per sample."""
        weights = {}
        for place, (name, tensor) in enumerate(mode.centre.items()):
            drops = [uniform(k + place, tensor.shape[1:]) for k in keys]
            p = per_member(self.rate * reach, tensor)
            weights[name] = tensor * (torch.stack(drops) >= p) / (1 - p).to(tensor.dtype)
        return weights


@registry.register("diagonal", cite=("fort2019deep",))
@dataclass(frozen=True)
class DiagonalGaussian:
    r"""Independent weights, $N(\mu, c^2 \sigma^2)$ with the last snapshots' mean and deviation.

    Attributes:
        scale: c.
    """

    scale: float = 10.0

    def __call__(self, mode: Mode, reach: Tensor, keys: Tensor) -> Tree:
        """One normal number per weight."""
        mean, deviations = mode.deviations()
        noise = _noise(mean, keys)
        return {
            name: mean[name] + per_member(self.scale * reach, t) * _spread(t) * noise[name]
            for name, t in deviations.items()
        }


@registry.register("low-rank", cite=("fort2019deep",))
@dataclass(frozen=True)
class LowRankGaussian:
    r"""Along the principal components of the last snapshots, $\mu + \sum_r z_r s_r v_r$.

    Attributes:
        rank: number of components, at most the number of snapshots - 1.
        scale: standard deviation of z.
        scaled: s_r is the snapshots' standard deviation along v_r; otherwise 1, as published.
    """

    rank: int = 5
    scale: float = 6.0
    scaled: bool = False

    def __call__(self, mode: Mode, reach: Tensor, keys: Tensor) -> Tree:
        """`rank` normal numbers per sample."""
        mean, deviations = mode.deviations()
        values, vectors = torch.linalg.eigh(gram(deviations))
        # n centred snapshots span at most n - 1 dimensions.
        rank = min(self.rank, int((values > 1e-10 * values[-1]).sum()))
        values, vectors = values[len(values) - rank :], vectors[:, len(values) - rank :]
        z = torch.stack([normal(k, (rank,), torch.float64) for k in keys])
        # A unit component is deviations @ vector / sqrt(value); the deviation along it, over n.
        size = 1 / len(vectors) ** 0.5 if self.scaled else values.rsqrt()
        coefficients = (self.scale * reach[:, None].double() * z * size) @ vectors.T
        shift = mixed(coefficients, deviations)
        return {name: tensor + shift[name] for name, tensor in mean.items()}


@registry.register("low-rank-scaled", cite=("fort2019deep",))
def _scaled_low_rank(rank: int = 5, scale: float = 6.0) -> LowRankGaussian:
    """Low-rank Gaussian with the snapshots' standard deviation along each component."""
    return LowRankGaussian(rank, scale, scaled=True)


@registry.register("swag", cite=("maddox2019simple",))
@dataclass(frozen=True)
class SWAG:
    r"""Half the variance from each weight alone, half along the snapshots.

    $\theta = \mu + c\,(\sigma z_1 / \sqrt 2 + \sum_i z_{2i} (\theta_i - \mu) / \sqrt{2 (n - 1)})$,
    with the final mean instead of the running mean. Maddox et al. (2019), arXiv 1902.02476.

    Attributes:
        scale: c.
    """

    scale: float = 1.0

    def __call__(self, mode: Mode, reach: Tensor, keys: Tensor) -> Tree:
        """Normal numbers for the weights, and for the snapshots."""
        mean, deviations = mode.deviations()
        noise, n = _noise(mean, keys), len(next(iter(deviations.values())))
        z = torch.stack([normal(k - 1, (n,), torch.float64) for k in keys])
        along = mixed(z / math.sqrt(2 * (n - 1)), deviations)
        return {
            name: mean[name]
            + per_member(self.scale * reach, t)
            * (_spread(t) * noise[name] / math.sqrt(2) + along[name])
            for name, t in deviations.items()
        }


def _weights(ensemble: Ensemble) -> Tree:
    return {name: tensor.detach() for name, tensor in only_group(ensemble).weights.items()}


def _spread(deviations: Tensor) -> Tensor:
    return deviations.square().mean(0, keepdim=True).sqrt()


def _noise(like: Tree, keys: Tensor) -> Tree:
    """Standard normal numbers for every weight of every sample."""
    return {
        name: torch.stack([normal(k + place, t.shape[1:], t.dtype) for k in keys])
        for place, (name, t) in enumerate(like.items())
    }

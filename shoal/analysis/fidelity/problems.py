"""Problems whose posterior is known in closed form, or from long Markov chains.

Each network is small enough for Hamiltonian Monte Carlo. Inputs *on* the data are new inputs like
the training inputs. Inputs *off* the data lie between and beyond the training inputs, or are images
without a digit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import torch
from torch import Tensor, nn

from shoal.core.random import generator
from shoal.core.registry import Registry
from shoal.data.sets.builtin import digits as load_digits
from shoal.inference.likelihoods import Categorical, Gaussian, Likelihood
from shoal.inference.priors import FanIn, WeightPrior
from shoal.models.mlp import MLP

__all__ = ["Problem", "make", "registry"]

registry = Registry("problem")


@dataclass(frozen=True)
class Problem:
    """Data, network, likelihood and prior, which define a posterior.

    Attributes:
        name: name of the problem, as users type it.
        x: training inputs [N, D].
        y: training targets [N].
        on: inputs like the training inputs [A, D].
        off: inputs away from the training data [B, D].
        network: layers of every member.
        likelihood: likelihood of the targets.
        prior: prior on the weights.
        outputs: number of outputs of a member.
        truth: targets at `on`, for the accuracy of predictions [A].
        in_jax: whether `reference.potential` has the density as a function of JAX.
    """

    name: str
    x: Tensor
    y: Tensor
    on: Tensor
    off: Tensor
    network: MLP
    likelihood: Likelihood
    prior: WeightPrior
    outputs: int
    truth: Tensor

    in_jax: ClassVar[bool] = True

    @property
    def classes(self) -> bool:
        """Whether the problem is a classification."""
        return self.likelihood.about.has_classes

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """Shapes of the parameter tensors, in the order of the flat vector."""
        with torch.device("meta"):
            return [tuple(p.shape) for p in self.build().parameters()]

    def build(self) -> nn.Module:
        """A new member."""
        return self.network.build((self.x.shape[1],), self.outputs)

    def apply(self, flat: Tensor, x: Tensor) -> Tensor:
        """Outputs [M, B, C] of members given as flat vectors [M, D]."""
        shapes, last = self.shapes, len(self.shapes) - 2
        sizes = [math.prod(shape) for shape in shapes]
        parts = [
            part.reshape(len(flat), *shape)
            for part, shape in zip(flat.split(sizes, 1), shapes, strict=True)
        ]
        h = x.to(flat).expand(len(flat), *x.shape)
        for layer in range(0, len(parts), 2):
            h = torch.baddbmm(parts[layer + 1].unsqueeze(1), h, parts[layer].mT)
            h = h if layer == last else h.tanh()
        return h

    def log_density(self, flat: Tensor) -> Tensor:
        """log p(y | x, θ) + log p(θ) of members given as flat vectors [M, D], to [M]."""
        outputs = self.apply(flat, self.x)
        return self.likelihood.log_prob(outputs, self.y).sum(-1) + self.log_prior(flat)

    def log_prior(self, flat: Tensor) -> Tensor:
        """log p(θ) [M]."""
        shapes = self.shapes
        parts = flat.split([math.prod(shape) for shape in shapes], 1)
        pairs = zip(parts, shapes, strict=True)
        tree = {str(i): part.reshape(-1, *shape) for i, (part, shape) in enumerate(pairs)}
        return self.prior.log_prob(tree)


def make(name: str) -> Problem:
    """The problem with this name.

    >>> make("linear").shapes
    [(1, 4), (1,)]
    """
    build: Callable[[], Problem] = registry[name]
    return build()


@registry.register("linear")
def linear() -> Problem:
    """Linear regression with correlated inputs: the posterior is Gaussian, in closed form."""
    random = generator(0, "fidelity", "linear")
    mixing = torch.eye(4) + 0.6 * torch.randn(4, 4, generator=random)
    inputs = torch.randn(60, 4, generator=random) @ mixing
    weights = torch.tensor([1.0, -0.5, 0.25, 0.0])

    def observed(x: Tensor) -> Tensor:
        return x @ weights + 0.5 + 0.5 * torch.randn(len(x), generator=random)

    x, on, off = inputs[:20], inputs[20:], 4 * torch.randn(40, 4, generator=random)
    y, truth = observed(x), observed(on)
    likelihood, prior = Gaussian(0.5), FanIn(2.0)
    return Problem("linear", x, y, on, off, MLP(()), likelihood, prior, 1, truth)


@registry.register("regression")
def regression() -> Problem:
    """A curve with training data in two intervals; networks of sixteen units."""
    random = generator(0, "fidelity", "regression")

    def curve(x: Tensor) -> Tensor:
        return (2 * x).sin() + 0.3 * x + 0.15 * torch.randn(x.shape, generator=random)

    def places(count: int) -> Tensor:
        left, right = torch.rand(2, count, generator=random)
        return torch.cat([-2 + 1.2 * left, 0.6 + 1.2 * right]).sort().values

    x, on = places(12), places(20)
    off = torch.cat(
        [
            torch.linspace(-3, -2.05, 13),
            torch.linspace(-0.75, 0.55, 14),
            torch.linspace(1.85, 3, 13),
        ]
    )
    y, truth = curve(x), curve(on)
    network = MLP((16,), "tanh")
    return Problem(
        "regression", x[:, None], y, on[:, None], off[:, None], network, Gaussian(0.15), FanIn(2.0),
        1, truth,
    )  # fmt: skip


@registry.register("classification")
def classification() -> Problem:
    """Two interlocking arcs in the plane; networks of sixteen units."""
    random = generator(0, "fidelity", "classification")

    def arcs(count: int) -> tuple[Tensor, Tensor]:
        turn = math.pi * torch.rand(2, count, generator=random)
        upper = torch.stack([turn[0].cos(), turn[0].sin()], -1)
        lower = torch.stack([1 - turn[1].cos(), 0.4 - turn[1].sin()], -1)
        points = torch.cat([upper, lower]) - torch.tensor([0.5, 0.2])
        labels = torch.arange(2).repeat_interleave(count)
        return points + 0.2 * torch.randn(points.shape, generator=random), labels

    (x, y), (on, truth) = arcs(20), arcs(20)
    turn = 2 * math.pi * torch.arange(40) / 40
    off = torch.stack([3.5 * turn.cos(), 2.5 * turn.sin()], -1)
    network = MLP((16,), "tanh")
    return Problem(
        "classification", x, y, on, off, network, Categorical(), FanIn(2.0), 2, truth
    )  # fmt: skip


@registry.register("digits")
def digits() -> Problem:
    """Handwritten digits as eight principal components; networks of eight units."""
    data = load_digits()
    pixels = data.train.x.flatten(1)
    centre = pixels.mean(0)
    _, scales, axes = torch.linalg.svd(pixels - centre, full_matrices=False)
    axes = axes[:8].mT / (scales[:8] / math.sqrt(len(pixels)))
    axes = axes * axes[axes.abs().argmax(0), torch.arange(8)].sign()

    def features(images: Tensor) -> Tensor:
        return (images.flatten(1) - centre) @ axes

    assert data.train.y is not None and data.test is not None and data.test.y is not None
    x, y = features(data.train.x[:200]), data.train.y[:200]
    on, truth = features(data.test.x[:60]), data.test.y[:60]
    off = features(data.ood["photographs"].x[:60])
    network = MLP((8,), "tanh")
    return Problem("digits", x, y, on, off, network, Categorical(), FanIn(2.0), 10, truth)

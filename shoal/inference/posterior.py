r"""The posterior: the one place where the scaling by N is decided.

Everything that moves a member is measured per data point:

$$ \frac1N \log p(θ | D) = \frac1B \sum_{b} \log p(y_b | x_b, θ) + \frac1N \log p(θ) + const, $$

and the repulsion carries T / N. At T = 1 members settle in the posterior; at T = 0 repulsion
vanishes and what is left is an ensemble of maximum a posteriori estimates. `docs/scaling.md` tells
how published code relates to it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.foreach import add_into, mul_each
from shoal.core.tree import add_scaled
from shoal.core.types import Tree
from shoal.inference.likelihoods import Likelihood
from shoal.inference.priors import FanIn, Flat, FunctionalPrior, Gaussian, WeightPrior

__all__ = ["Posterior"]


@dataclass(frozen=True)
class Posterior:
    """Likelihood and prior for N data points.

    Attributes:
        likelihood: what the outputs say of the targets.
        prior: on the weights, or on the outputs (`priors.FunctionalPrior`).
        n: number of training data points.
        temperature: T; the members sample p(theta | D)^(1/T).
    """

    likelihood: Likelihood
    prior: WeightPrior | FunctionalPrior
    n: int
    temperature: float = 1.0

    def __post_init__(self) -> None:
        if self.n < 1:
            raise ConfigError(f"a posterior needs at least one data point, not {self.n}")
        if not self.temperature >= 0:
            raise ConfigError(f"temperature must be zero or positive, not {self.temperature}")

    def push_scale(self, points: int | None = None) -> float:
        """T / N, the weight of the repulsion beside log p(theta | D) / N; or T over `points`."""
        return self.temperature / (self.n if points is None else points)

    def log_likelihood(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Mean over the batch [M]: an unbiased estimate of the whole data's over N."""
        return self.likelihood.log_prob(outputs, y).mean(-1)

    def add_prior(
        self,
        drive: Tree,
        weights: Tree,
        factor: Tensor | float,
        spans: Sequence[slice] | None = None,
    ) -> Tree:
        """drive + factor * gradient of log p(theta) / N; functional and flat priors have none here.

        The drive is used up: the result may lie in its memory.
        """
        prior = self.prior
        if isinstance(prior, (Flat, FunctionalPrior)):
            return drive
        if isinstance(prior, (Gaussian, FanIn)) and not isinstance(factor, Tensor):
            # The score is a multiple of the weights: one pass over them is enough.
            scales = [-factor / (self.n * prior.width(t) ** 2) for t in drive.values()]
            return _add_multiples(drive, weights, scales)
        return add_scaled(drive, prior.score(weights), factor / self.n, spans)


def _add_multiples(drive: Tree, weights: Tree, scales: list[float]) -> Tree:
    drives, thetas = list(drive.values()), [weights[name] for name in drive]
    if len(set(scales)) > 1:
        thetas, scales = list(mul_each(thetas, scales)), [1.0]
    return dict(zip(drive, add_into(drives, thetas, scales[0]), strict=True))

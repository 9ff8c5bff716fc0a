"""The posterior of an ensemble's members as a density of flat weights [M, D]."""

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from shoal.core.differentiate import pull_back
from shoal.core.errors import ConfigError
from shoal.core.tree import rows
from shoal.core.types import Tree
from shoal.data.batches.sources import ArrayBatches, LoaderBatches
from shoal.engine.resources.plan import default_runner
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior, total_weight
from shoal.training.loop.cached_features import behind_features

__all__ = ["FlatWeights", "PosteriorDensity"]


class FlatWeights:
    """The weights of every member as one row [M, D]; rows of smaller networks end with zeros.

    Weights that need no gradient stay as they are and have no column.

    Attributes:
        numbers: number of weights of each member [M].
        used: 1 for the columns that a member uses, 0 for the others [M, D].
    """

    def __init__(self, ensemble: Ensemble) -> None:
        self.ensemble = ensemble
        self._moving_weights = [
            {name: tensor for name, tensor in group.weights.items() if tensor.requires_grad}
            for group in ensemble.groups
        ]
        counts = [sum(t[0].numel() for t in moving.values()) for moving in self._moving_weights]
        each = [torch.full((g.members,), c) for g, c in zip(ensemble.groups, counts, strict=True)]
        self.numbers = torch.cat(each).to(ensemble.device)
        self.width = max(counts)
        columns = torch.arange(self.width, device=self.numbers.device)
        self.used = (columns < self.numbers.unsqueeze(1)).to(ensemble.dtype)

    def read(self, tree: Tree | None = None) -> Tensor:
        """The weights, or other tensors like them, as rows."""
        tree = self.ensemble.weights if tree is None else tree
        parts = []
        for group, moving in zip(self.ensemble.groups, self._moving_weights, strict=True):
            names = [f"{group.prefix}{name}" for name in moving]
            flat = torch.cat([rows(tree[name].detach()) for name in names], 1)
            parts.append(torch.nn.functional.pad(flat, (0, self.width - flat.shape[1])))
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def named(self, x: Tensor) -> Tree:
        """Rows [M, D], or draws of them [K, M, D], by the names of the weights; views."""
        tree, first = {}, 0
        for group, moving in zip(self.ensemble.groups, self._moving_weights, strict=True):
            mine, place = x[..., first : first + group.members, :], 0
            for name, tensor in moving.items():
                count, shape = tensor[0].numel(), tensor.shape[1:]
                part = mine[..., place : place + count]
                tree[f"{group.prefix}{name}"] = part.reshape(*part.shape[:-1], *shape)
                place += count
            first += group.members
        return tree

    @torch.no_grad()
    def write(self, x: Tensor) -> None:
        """Set the weights."""
        weights = self.ensemble.weights
        named = self.named(x)
        for name, tensor in named.items():
            weights[name].copy_(tensor)


class PosteriorDensity(FlatWeights):
    """log p(θ | D) / T of every member, with gradients of all data or of mini-batches.

    The networks run in evaluation mode: without dropout, and with the running statistics of their
    training. So the log density is a function of the weights alone.

    Attributes:
        points: number of training targets N.
    """

    def __init__(
        self,
        ensemble: Ensemble,
        posterior: Posterior,
        batches: ArrayBatches | LoaderBatches,
        whole: bool,
        sites: torch.Size,
    ) -> None:
        super().__init__(ensemble)
        self.posterior, self.batches, self.whole = posterior, batches, whole
        self.sites, self.points = sites, float(posterior.n)
        self._heat, self._moving = posterior.temperature, ensemble.train(False)
        self.mapping = default_runner(ensemble.groups, ensemble.device)
        self._precision = self._precisions()
        self._pieces: list[tuple[Any, float]] = []
        self._place = -1
        self._waiting: Iterator[Any] = iter(())

    def __call__(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """See `samplers.Density`."""
        self.write(x)
        weights = {n: t for n, t in self._moving.weights.items() if t.requires_grad}
        likelihood, gradient = x.new_zeros(len(x)), None
        for (inputs, targets), share in self._batches(step):
            outputs = self._moving(inputs, self.mapping)
            each = self.posterior.log_likelihood(outputs, targets)
            likelihood = likelihood.add(each.detach(), alpha=share)
            flat = self.read(pull_back(each, torch.full_like(each, share), weights))
            gradient = flat if gradient is None else gradient.add_(flat)
        assert gradient is not None, "training data have at least one batch"
        prior, score = self._prior(x)
        log_density = self.points * likelihood + prior
        gradient = gradient.mul_(self.points).add_(score)
        if self._heat == 1:
            return log_density, gradient
        return log_density / self._heat, gradient / self._heat

    def cache(self, size: int) -> None:
        """Compute what all members have in common once, and go on behind these features."""
        if len(self.ensemble.groups) > 1:
            raise ConfigError(
                "features cannot be cached: the members have several architectures; leave cache out"
            )
        seed = self.batches.seed
        moving, self.batches = behind_features(self.ensemble, self.batches, size, seed, mode=False)
        self._moving, self._pieces = moving.train(False), []

    @torch.no_grad()
    def _prior(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Log density of the prior [M], up to a constant, and its gradient [M, D]."""
        prior: Any = self.posterior.prior
        if self._precision is not None:
            score = -self._precision * x
            return 0.5 * (score * x).sum(1), score
        groups = self.ensemble.groups
        values = torch.cat([prior.log_prob(group.weights) for group in groups])
        return values, self.read(prior.score(self.ensemble.weights))

    def _precisions(self) -> Tensor | None:
        """1 / std² of every weight under a normal prior [M, D]; None for other priors."""
        width = getattr(self.posterior.prior, "width", None)
        if width is None:
            return None
        weights = self.ensemble.weights
        return self.read({n: torch.full_like(t, width(t) ** -2) for n, t in weights.items()})

    def _batches(self, step: int) -> Iterator[tuple[Any, float]]:
        """The batches of a step, each with its share of all targets."""
        if not self.whole:
            yield self._batch(step), 1.0
            return
        if isinstance(self.batches, LoaderBatches):
            yield from ((batch, self._share(batch)) for batch in self.batches.sweep())
            return
        if not self._pieces:
            x, y, size = self.batches.x, self.batches.y, self.batches.batch_size
            parts = [slice(i, i + size) for i in range(0, self.batches.n, size)]
            self._pieces = [((x[part], y[part]), self._share((x[part], y[part]))) for part in parts]
        yield from self._pieces

    def _share(self, batch: Any) -> float:
        _, y = batch
        return total_weight(self.posterior.likelihood, y, self.sites) / self.points

    def _batch(self, step: int) -> Any:
        """The mini-batch of a step; the order of the data depends on seed and epoch alone."""
        epoch, place = divmod(step, self.batches.steps_per_epoch)
        if place == 0 or step != self._place:
            self._waiting = self.batches.batches(epoch, place)
        self._place = step + 1
        return next(self._waiting)

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
from shoal.engine.kernels import fused
from shoal.engine.members.perceptron import Perceptrons
from shoal.engine.resources.plan import default_runner
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior, total_weight
from shoal.training.loop.cached_features import behind_features
from shoal.training.step.stage_kernels import takes_outputs

__all__ = ["FlatWeights", "PosteriorDensity"]


class FlatWeights:
    """The weights of every member as one row [M, D]; rows of smaller networks end with zeros.

    The weights of the ensemble become views of these rows. Weights that need no gradient stay as
    they are and have no column.

    Attributes:
        flat: the rows.
        numbers: number of weights of each member [M].
        used: 1 for the columns that a member uses, 0 for the others [M, D]; see `Density`.
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
        if len(set(counts)) == 1:
            self.used = self.used[:1, :1]
        self.flat = self.read()
        views = self.named(self.flat)
        for group, moving in zip(ensemble.groups, self._moving_weights, strict=True):
            for name in moving:
                view = views[f"{group.prefix}{name}"].detach()
                group.weights[name] = view.requires_grad_()

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
            mine = x if len(self.ensemble.groups) == 1 else x.narrow(-2, first, group.members)
            sizes = [tensor[0].numel() for tensor in moving.values()]
            parts = mine.narrow(-1, 0, sum(sizes)).split(sizes, -1)
            for (name, tensor), part in zip(moving.items(), parts, strict=True):
                tree[f"{group.prefix}{name}"] = part.unflatten(-1, tensor.shape[1:])
            first += group.members
        return tree


class PosteriorDensity(FlatWeights):
    """log p(θ | D) / T of every member, with gradients of all data or of mini-batches.

    The networks run in evaluation mode: without dropout, and with the running statistics of their
    training. So the log density is a function of the weights alone. With mini-batches it may lack
    the prior: samplers then ask only whether it is finite.

    Attributes:
        points: number of training targets N.
        rows: the data points of the next mini-batch; None to find them by the number of the step.
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
        self._alive = torch.ones_like(ensemble.alive)
        self._perceptrons = self._formulas()
        self._precision = self._precisions()
        self._pieces: list[tuple[Any, float]] = []
        self._place = -1
        self._waiting: Iterator[Any] = iter(())
        self.rows: Tensor | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """See `samplers.Density`."""
        self.flat.copy_(x)
        log_density, gradient = None, None
        for (inputs, targets), share in self._batches(step):
            value, flat = self._of_batch(inputs, targets, share * self.points / self._heat)
            log_density = value if log_density is None else log_density.add_(value)
            gradient = flat if gradient is None else gradient.add_(flat)
        assert log_density is not None and gradient is not None, "training data have a batch"
        self._add_prior(log_density, gradient, x, 1 / self._heat)
        return log_density, gradient

    def _of_batch(self, inputs: Any, targets: Any, factor: float) -> tuple[Tensor, Tensor]:
        """The mean log-likelihood [M] of a batch times a factor, and its gradient [M, D]."""
        if self._perceptrons is None or not self._perceptrons.takes(inputs):
            with torch.enable_grad():
                outputs = self._moving(inputs, self.mapping)
            value, cotangent = self._of_outputs(outputs.detach(), targets)
            moving = {n: t for n, t in self._moving.weights.items() if t.requires_grad}
            pulled = pull_back(outputs, cotangent.mul_(factor), moving)
            return value.mul_(factor), self.read(pulled)
        weights = self._views
        passed = self._perceptrons.forward(weights, inputs)
        value, cotangent = self._of_outputs(passed.outputs, targets)
        gradient = torch.empty_like(self.flat)
        into = {  # views of the gradient, laid out like those of the rows
            name: gradient.as_strided(view.shape, view.stride(), view.storage_offset())
            for name, view in weights.items()
        }
        self._perceptrons.backward(weights, passed, cotangent.mul_(factor), into)
        return value.mul_(factor), gradient

    def _of_outputs(self, outputs: Tensor, targets: Any) -> tuple[Tensor, Tensor]:
        """The mean log-likelihood [M], and its gradient at the outputs [M, B, ..., C]."""
        if not takes_outputs(self.posterior, outputs, targets):
            return self.posterior.with_gradient(outputs, targets)
        found = fused.likelihood_kernels.categorical(outputs, targets, self._alive, 1.0, False)
        return -found.loss, found.gradient

    def _formulas(self) -> Perceptrons | None:
        """The formulas of members that are perceptrons, and move as a whole."""
        groups = self._moving.groups
        self._views = {name: tensor.detach() for name, tensor in groups[0].weights.items()}
        some = any(not tensor.requires_grad for tensor in groups[0].weights.values())
        return None if len(groups) > 1 or some else Perceptrons.of(groups[0])

    def cache(self, size: int) -> None:
        """Compute what all members have in common once, and go on behind these features."""
        if len(self.ensemble.groups) > 1:
            raise ConfigError(
                "features cannot be cached: the members have several architectures; leave cache out"
            )
        seed = self.batches.seed
        moving, self.batches = behind_features(self.ensemble, self.batches, size, seed, mode=False)
        self._moving, self._pieces = moving.train(False), []
        self._perceptrons = self._formulas()

    def _add_prior(self, log_density: Tensor, gradient: Tensor, x: Tensor, factor: float) -> None:
        """Add the log density of the prior [M], up to a constant, and its gradient [M, D]."""
        prior: Any = self.posterior.prior
        if self._precision is not None:
            gradient.addcmul_(self._precision, x, value=-factor)
            if self.whole:
                log_density.sub_((self._precision * x * x).sum(1), alpha=0.5 * factor)
            return
        groups = self.ensemble.groups
        values = torch.cat([prior.log_prob(group.weights) for group in groups])
        log_density.add_(values, alpha=factor)
        gradient.add_(self.read(prior.score(self.ensemble.weights)), alpha=factor)

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
        if self.rows is not None:
            assert isinstance(self.batches, ArrayBatches)
            return self.batches.at(self.rows)
        epoch, place = divmod(step, self.batches.steps_per_epoch)
        if place == 0 or step != self._place:
            self._waiting = self.batches.batches(epoch, place)
        self._place = step + 1
        return next(self._waiting)

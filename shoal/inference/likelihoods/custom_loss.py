"""Any loss of one's own in place of a likelihood."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.core.structure import Structured
from shoal.core.values import describe_value
from shoal.inference.likelihoods.likelihood import Likelihood, Task

__all__ = ["Custom"]


@dataclass(frozen=True)
class Custom(Likelihood):
    """A loss of one's own: members minimise loss(outputs, y).

    Members are trained, compared and saved as with a likelihood. A loss is not a density, so there
    are no NLL, no calibration and no intervals. A run folder stores the name of the loss; give the
    loss again when you load the run.

    Attributes:
        loss: from the outputs [B, *S, C] of one member and the targets to a loss per target
            [B, *S], or to the mean loss of the batch.

    >>> pinball = Custom(lambda f, y: torch.maximum(0.9 * (y - f[:, 0]), 0.1 * (f[:, 0] - y)))
    >>> pinball.log_prob(torch.zeros(3, 1, 1), torch.tensor([2.0])).flatten()
    tensor([-1.8000, -1.8000, -1.8000])
    """

    loss: Callable[[Tensor, Tensor], Tensor]
    about: ClassVar[Task] = Task(
        "custom loss",
        kinds=("loss",),
        measures=("loss", "disagreement", "effective_functions"),
        under_shift=("loss",),
        uncertainty="disagreement",
    )
    _loops: list[bool] = field(default_factory=list, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not callable(self.loss):
            raise ConfigError(
                f"a custom loss must be a function of (outputs, y), "
                f"not {describe_value(self.loss)}; type likelihoods.Custom(loss)"
            )
        # the name under which a run folder stores an object that it cannot rebuild
        name = getattr(self.loss, "__qualname__", type(self.loss).__qualname__)
        object.__setattr__(self, "__qualname__", name)

    def __repr__(self) -> str:
        return f"Custom({vars(self)['__qualname__']})"

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Minus the loss of every member, outputs [M, B, *S, C] to [M, B, *S]; not a density."""
        each = self._each(outputs, y)
        if each.ndim == 1:
            each = each.unsqueeze(-1).expand(-1, outputs.shape[1])
        if each.ndim < 2 or each.shape != outputs.shape[: each.ndim]:
            raise ConfigError(
                f"the loss '{vars(self)['__qualname__']}' returned shape {tuple(each.shape[1:])} "
                f"for outputs {tuple(outputs.shape[1:])}; return one number per target, or the mean"
            )
        return -each

    def _each(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The losses by one call under `vmap`, or member by member where `vmap` fails."""
        if isinstance(y, Structured):
            y = y.original()
        if not self._loops:
            try:
                return torch.vmap(self.loss, in_dims=(0, None))(outputs, y)
            except (RuntimeError, ValueError, TypeError, NotImplementedError):
                losses = self._looped(outputs, y)
                self._loops.append(True)
                return losses
        return self._looped(outputs, y)

    def _looped(self, outputs: Tensor, y: Tensor) -> Tensor:
        return torch.stack([self.loss(member, y) for member in outputs])

    def check_weighable(self, outputs: Tensor, y: Tensor) -> None:
        """Refuse a loss that returns the mean of a batch, which data points cannot weigh in."""
        if self._each(outputs, y).ndim == 1:
            raise ConfigError(
                f"the loss '{vars(self)['__qualname__']}' returns the mean of a batch, but data "
                f"points have weights; return one number per target"
            )

    def mean(self, outputs: Tensor) -> Tensor:
        """The outputs themselves."""
        return outputs

    def variance(self, outputs: Tensor) -> Tensor:
        """Not known for a loss."""
        raise ConfigError("a custom loss has no variance; use the disagreement of the members")

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Not known for a loss."""
        raise ConfigError("a custom loss has no entropy; use the disagreement of the members")

    def mixture_log_prob(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """Not known for a loss."""
        raise ConfigError("a custom loss has no log density; use the metric 'loss'")

    def affinity(self, outputs: Tensor) -> Tensor:
        r"""$\frac1B \sum_b \exp(-\sum_c (f_i - f_j)^2 / 8 s_c^2)$, with s over the inputs.

        Members count as different where they differ by more than their outputs vary.
        """
        flat = outputs.double().flatten(1, -2)
        scale = flat.var(1, correction=0).mean(0).clamp_min(torch.finfo(flat.dtype).tiny).sqrt()
        flat = flat / scale
        return torch.stack([(-(flat - f).square().sum(-1) / 8).exp().mean(-1) for f in flat])

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The sum of the outputs."""
        return outputs.sum(-1)

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Every target is allowed; the loss knows what fits."""

    def prepared(self, y: Tensor, outputs: int, sites: int = 0) -> Tensor:
        """The targets as they are."""
        return y

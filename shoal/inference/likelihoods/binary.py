"""The likelihood of yes or no, for one label or several at once."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import DataError
from shoal.inference.likelihoods.likelihood import Likelihood, Task, as_columns, registry

__all__ = ["Bernoulli"]


@registry.register("bernoulli")
@dataclass(frozen=True)
class Bernoulli(Likelihood):
    """Yes or no, in one or several columns: P(y = 1 | f) = sigmoid(f), independent columns.

    The network returns one logit per column. Targets are 0 and 1, or probabilities in between.
    Accuracy, Brier score and ECE are means over all columns; NLL is the sum over the columns of a
    data point.

    >>> Bernoulli().probs(torch.zeros(1, 1))
    tensor([[0.5000, 0.5000]])
    """

    about: ClassVar[Task] = Task(
        "binary classification",
        kinds=("any", "classes", "binary"),
        measures=("accuracy", "nll", "brier", "ece", "label_auroc", "effective_functions"),
        under_shift=("accuracy", "ece"),
        uncertainty="entropy",
    )

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability of all columns of y [B, *S] or [B, *S, K]."""
        return self._each(outputs, y).sum(-1)

    def _each(self, outputs: Tensor, y: Tensor) -> Tensor:
        y = as_columns(y, outputs, outputs.shape[-1]).to(outputs.dtype)
        return y * outputs - F.softplus(outputs)

    def mixture_log_prob(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """Log probability under the mixture; for soft labels, the expectation column by column."""
        joint = super().mixture_log_prob(outputs, y, weights)
        if not y.is_floating_point():
            return joint
        y = as_columns(y, outputs, outputs.shape[-1])
        mixed, ones = super().mixture_log_prob, torch.ones_like(y)
        yes, no = (mixed(sign * outputs.unsqueeze(-1), ones, weights) for sign in (1, -1))
        columns = torch.where(y > 0, y * yes, 0.0) + torch.where(y < 1, (1 - y) * no, 0.0)
        hard = ((y == 0) | (y == 1)).all(-1)
        return torch.where(hard, joint, columns.sum(-1))

    def probs(self, outputs: Tensor) -> Tensor:
        """Probabilities of 0 and 1 [..., K, 2]; [..., 2] for one column."""
        both = torch.stack([(-outputs).sigmoid(), outputs.sigmoid()], -1)
        return both.squeeze(-2) if outputs.shape[-1] == 1 else both

    def mean(self, outputs: Tensor) -> Tensor:
        """Probability of 1 [..., K]."""
        return outputs.sigmoid()

    def variance(self, outputs: Tensor) -> Tensor:
        """p (1 - p) [..., K]."""
        return outputs.sigmoid() * (-outputs).sigmoid()

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy of independent columns."""
        return (torch.special.entr(mean) + torch.special.entr(1 - mean)).sum(-1)

    def affinity(self, outputs: Tensor) -> Tensor:
        """Mean over the inputs of the product over columns of sum sqrt(p_i p_j)."""
        flat = outputs.double().flatten(1, -2)
        roots = torch.stack([(-flat).sigmoid(), flat.sigmoid()], -1).sqrt()
        return torch.stack([(roots * row).sum(-1).prod(-1).mean(-1) for row in roots])

    def labels(self, y: Tensor) -> Tensor:
        """0 or 1, whichever is more probable."""
        return (y > 0.5).long() if y.is_floating_point() else y

    def target_probs(self, y: Tensor, classes: int) -> Tensor:
        """Probabilities of 0 and 1 [..., 2]."""
        return torch.stack([1 - y, y], -1)

    def width_for(self, y: Tensor, classes: int) -> int:
        """One output per column."""
        return 1 if y.ndim == 1 else y.shape[-1]

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse targets outside 0 to 1."""
        wrong = ((y < 0) | (y > 1)).flatten()
        if wrong.any():
            first = float(y.flatten()[int(wrong.nonzero()[0])])
            raise DataError(
                f"a Bernoulli target is 0, 1 or a probability, but y holds {first:g}; "
                f"type likelihood='categorical' for more than two classes"
            )
        super().check(y, outputs, sites)

    def prepared(self, y: Tensor, outputs: int, sites: int = 0) -> Tensor:
        """Labels [B, *S] for one column, else [B, *S, K]; floats only for soft labels."""
        self.check(y, outputs, sites)
        y = super().prepared(y, outputs, sites)
        y = y.squeeze(-1) if outputs == 1 else y
        soft = y.is_floating_point() and bool(((y != 0) & (y != 1)).any())
        return y if soft else y.long()

"""Cost-sensitive choice: the decision of least expected cost, with abstention."""

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.core.errors import ConfigError
from shoal.prediction.decisions.binomial import class_probs
from shoal.prediction.predictive import ArrayLike, Predictive

__all__ = ["ABSTAIN", "Choice", "cheapest"]

ABSTAIN = -1
"""The choice that leaves a data point to somebody else."""


class Choice(NamedTuple):
    """The chosen decision of each data point [B], -1 for abstention, and its expected cost [B]."""

    decision: Tensor
    cost: Tensor


def cheapest(pred: Predictive, costs: ArrayLike, abstain: float | None = None) -> Choice:
    r"""The decision with the least expected cost, $\arg\min_a \sum_c p_c\, \mathrm{cost}_{ca}$.

    With cost 1 for every error and abstention at cost d, a data point is answered where its
    confidence is at least 1 - d (Chow 1970, doi 10.1109/TIT.1970.1054406). Calibrate the
    probabilities first, for example by `temperature`: expected costs are as good as they are.

    Args:
        pred: a prediction of classes.
        costs: cost [C, A] of decision a where class c is true; the decisions may be the classes.
        abstain: cost of no decision; None if every data point needs one.

    >>> from shoal.inference.likelihoods import Categorical
    >>> pred = Predictive(torch.tensor([[[0.0, 0.0], [9.0, 0.0]]]), Categorical())
    >>> cheapest(pred, [[0, 1], [1, 0]], abstain=0.2).decision
    tensor([-1,  0])
    """
    _, probs = class_probs(pred)
    table = torch.as_tensor(costs).to(probs)
    if table.ndim != 2 or len(table) != probs.shape[-1] or not bool(table.isfinite().all()):
        raise ConfigError(
            f"costs must be finite numbers [classes, decisions] with {probs.shape[-1]} rows, "
            f"not {list(table.shape)}"
        )
    cost, decision = (probs @ table).min(-1)
    if abstain is not None:
        decision = torch.where(cost > abstain, ABSTAIN, decision)
        cost = cost.clamp_max(abstain)
    return Choice(decision, cost)

r"""Stacking: the weights of the members that predict held-out data best.

$$ w^* = \arg\max_{w \in Δ} \frac1B \sum_b \log \sum_m w_m \, p(y_b | x_b, θ_m), $$

a concave problem on the simplex. Unlike posterior weights, which ask which single member is right,
stacking weights ask which average is. Yao et al. (2018), arXiv 1704.02030.
"""

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.core.optional import require

__all__ = ["stacking_weights"]


def stacking_weights(log_probs: Tensor) -> Tensor:
    """The weights [M] that maximise the mean log score of held-out data.

    Args:
        log_probs: log density of each held-out target under each member [M, B].
    """
    table = log_probs.double().cpu()
    if table.ndim != 2 or table.numel() == 0 or not bool((table < torch.inf).all()):
        raise DataError(
            f"stacking needs log probabilities [members, points], not of shape {list(table.shape)}"
        )
    best = table.amax(0)
    possible = best > -torch.inf  # a point that no member allows says nothing about their weights
    if not bool(possible.any()):
        raise DataError("every member finds every held-out point impossible; nothing can be fitted")
    # in units of the best member at each point, so that nothing underflows
    return _solved((table - best)[:, possible].exp().numpy())


def _solved(p: np.ndarray) -> Tensor:
    """Maximise mean log p^T w on the simplex by sequential quadratic programming."""
    optimize = require("scipy.optimize", extra="evidence")
    members, points = p.shape

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        mixture = np.maximum(p.T @ w, 1e-300)
        return -float(np.log(mixture).mean()), -(p @ (1 / mixture)) / points

    found = optimize.minimize(
        loss,
        np.full(members, 1 / members),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * members,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    weights = torch.from_numpy(np.clip(found.x, 0, None))
    return weights / weights.sum()

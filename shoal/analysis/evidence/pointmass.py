r"""The learned prior as point masses at the members: closed forms in their log-likelihoods.

For members $θ_m$ with likelihoods $L_m = p(D | θ_m)$ and a prior $π = \sum_m a_m δ_{θ_m}$ the
marginal likelihood is $\sum_m a_m L_m$ and the posterior weights are $w_m ∝ a_m L_m$, exactly. With
equal prior masses

$$ \max_m \log L_m - \log M \;\le\; \log p(D) \;\le\; \max_m \log L_m, $$

and uniform averaging is exact if all likelihoods are equal, or under the prior $a_m ∝ 1 / L_m$.
Loaiza-Ganem, Villecroze & Wang (2025), arXiv 2501.17917.
"""

import math

from torch import Tensor

from shoal.core.errors import DataError

__all__ = [
    "bounds",
    "effective_number",
    "half_temperature",
    "implied_prior",
    "log_evidence",
    "posterior_weights",
    "spread",
    "ties",
]


def log_evidence(log_likelihoods: Tensor, prior: Tensor | None = None) -> float:
    """log sum_m a_m L_m for prior masses a [M], by default 1 / M each.

    >>> import torch
    >>> log_evidence(torch.tensor([0.0, 0.0])) == 0.0
    True
    """
    log_L = _checked(log_likelihoods)
    masses = -math.log(len(log_L)) if prior is None else prior.double().log()
    return float((log_L + masses).logsumexp(0))


def bounds(log_likelihoods: Tensor) -> tuple[float, float]:
    """Lower and upper bound of the log evidence with equal masses, for any members."""
    best = float(_checked(log_likelihoods).max())
    return best - math.log(len(log_likelihoods)), best


def posterior_weights(
    log_likelihoods: Tensor, prior: Tensor | None = None, temperature: float = 1.0
) -> Tensor:
    """w_m proportional to a_m L_m^(1/T) [M].

    >>> import torch
    >>> posterior_weights(torch.tensor([1.0, 3.0]).log())
    tensor([0.2500, 0.7500], dtype=torch.float64)
    """
    log_L = _checked(log_likelihoods) / temperature
    return (log_L if prior is None else log_L + prior.double().log()).softmax(0)


def implied_prior(log_likelihoods: Tensor) -> Tensor:
    """The prior masses under which equal posterior weights are exact, a_m proportional to 1 / L_m.

    >>> import torch
    >>> implied_prior(torch.tensor([1.0, 3.0]).log())
    tensor([0.7500, 0.2500], dtype=torch.float64)
    """
    return (-_checked(log_likelihoods)).softmax(0)


def effective_number(weights: Tensor) -> float:
    """1 / sum_m w_m²: M for equal weights, 1 if one member has weight 1."""
    return 1 / float(weights.double().square().sum())


def spread(log_likelihoods: Tensor) -> float:
    """Largest minus smallest log-likelihood, in nats for all data."""
    log_L = _checked(log_likelihoods)
    return float(log_L.max() - log_L.min())


def ties(log_likelihoods: Tensor, tolerance: float = 1.0) -> int:
    """Number of members within `tolerance` nats of the best member, the best included."""
    log_L = _checked(log_likelihoods)
    return int((log_L >= log_L.max() - tolerance).sum())


def half_temperature(log_likelihoods: Tensor, share: float = 0.5) -> float:
    """The lowest T at which the weights L^(1/T) have an effective number of `share` M.

    The effective number grows with T, since d log sum w² / dT has the sign of a difference of mean
    log-likelihoods at T and at T / 2. Bisection finds T; the result is 0 if every T suffices.
    """
    log_L = _checked(log_likelihoods)
    wanted = share * len(log_L)
    if ties(log_L, 0.0) >= wanted:
        return 0.0
    low, high = -60.0, math.log(max(spread(log_L), 1e-12)) + 60.0
    for _ in range(200):
        middle = (low + high) / 2
        enough = effective_number(posterior_weights(log_L, temperature=math.exp(middle))) >= wanted
        low, high = (low, middle) if enough else (middle, high)
    return math.exp(high)


def _checked(log_likelihoods: Tensor) -> Tensor:
    log_L = log_likelihoods.double()
    if log_L.ndim != 1 or len(log_L) == 0 or not bool((log_L < math.inf).all()):
        raise DataError(f"evidence needs one log-likelihood per member, [M], not {log_likelihoods}")
    if not bool((log_L > -math.inf).any()):
        raise DataError(
            "all members give the data probability 0, so no member has weight; "
            "check that the labels match the training"
        )
    return log_L

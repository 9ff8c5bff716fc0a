"""The prediction of an ensemble as a graph of torch operations, for files of every format."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError
from shoal.core.structure import Structured
from shoal.engine.members.network_call import arguments
from shoal.inference.likelihoods import Likelihood, LogNormal, MixtureDensity, StudentT
from shoal.inference.likelihoods.incomplete_beta import student_quadrature
from shoal.inference.unrolled import UnrolledEnsemble
from shoal.prediction.mixture import deviation
from shoal.prediction.predictive import Predictive

__all__ = [
    "MEANINGS",
    "ExportedModule",
    "TracedPrediction",
    "has_quantiles",
    "output_names",
    "values_of",
]

MEANINGS = {
    "probs": "class probabilities of the ensemble",
    "mean": "mean of the target; the probability of 1 for columns of 0 and 1",
    "stddev": "standard deviation of the target, noise and disagreement together",
    "entropy": "total uncertainty in nats; for numbers, of the Gaussian with this mean and stddev",
    "aleatoric": "mean entropy of the members in nats",
    "mutual_information": "epistemic uncertainty in nats, entropy - aleatoric",
    "disagreement": "standard deviation over the members, averaged over the outputs",
    "members": "outputs of every member before the likelihood",
}
_QUANTILE = "quantile_"
_PARTS, _ROUNDS = 16, 7
"""A quantile lies in one of 16 parts of its range, then in one of 16 parts of the part."""


def output_names(
    likelihood: Likelihood, quantiles: Sequence[float] = (), members: bool = False
) -> list[str]:
    """The outputs of a file for this likelihood, in order.

    >>> from shoal.inference.likelihoods import Gaussian
    >>> output_names(Gaussian(), quantiles=(0.05,))[-1]
    'quantile_0.05'
    """
    kinds = likelihood.about.kinds
    uncertain = ["entropy", "aleatoric", "mutual_information", "disagreement"]
    if "binary" in kinds:
        names = ["mean", "probs", *uncertain]
    elif "classes" in kinds:
        names = ["probs", *uncertain]
    elif "numbers" in kinds:
        names = ["mean", "stddev", *uncertain]
    else:
        names = ["mean", "disagreement"]
    for level in quantiles:
        if not has_quantiles(likelihood):
            raise ConfigError(
                f"a file has no quantiles for {likelihood}; leave quantiles out, and use stddev"
            )
        if not 0 < level < 1:
            raise ConfigError(f"the level of a quantile must be between 0 and 1, not {level}")
        names.append(f"{_QUANTILE}{level:g}")
    return [*names, "members"] if members else names


def has_quantiles(likelihood: Likelihood) -> bool:
    """Whether the distribution function is made of operations that every format computes."""
    known = MixtureDensity | StudentT | LogNormal
    return "gaussian" in likelihood.about.kinds or isinstance(likelihood, known)


class _Parts(NamedTuple):
    """The distributions of each member: weights, locations and scales, each [M, ..., K, J].

    Quantiles are those of the variable that has this location and scale: of log y for `logs`.
    """

    weights: Tensor
    locations: Tensor
    scales: Tensor
    df: float | None = None
    logs: bool = False


def _parts(likelihood: Likelihood, outputs: Tensor) -> _Parts:
    if isinstance(likelihood, MixtureDensity):
        weights, means, variances = likelihood.normal_components(outputs)
        return _Parts(weights, means, variances.sqrt())
    df = getattr(likelihood, "df", None)
    logs = isinstance(likelihood, LogNormal)
    moments = likelihood.log_moments if isinstance(likelihood, LogNormal) else likelihood.moments
    mean, square = moments(outputs)
    square = square if df is None else square * ((df - 2) / df)
    location, scale = mean.unsqueeze(-1), square.sqrt().unsqueeze(-1)
    return _Parts(torch.ones_like(location), location, scale, df, logs)


def _normal_cdf(z: Tensor) -> Tensor:
    r"""$\Phi(z)$; onnxruntime has erf in single precision only.

    In double precision $\Phi(z) = \frac12 + \frac{z}{\sqrt{2\pi}} \int_0^1 e^{-(zt)^2/2} dt$,
    to 1e-14 by the quadrature of Gauss and Legendre with 20 nodes.
    """
    if z.dtype != torch.float64:
        return (1 + (z / math.sqrt(2)).erf()) / 2
    places, weights = np.polynomial.legendre.leggauss(20)
    t = torch.from_numpy((places + 1) / 2)
    w = torch.from_numpy(weights / 2 / math.sqrt(2 * math.pi))
    z = z.clamp(-7.7, 7.7)
    return 0.5 + z * ((-0.5 * (z.unsqueeze(-1) * t).square()).exp() @ w)


def values_of(pred: Predictive, names: Sequence[str]) -> dict[str, Tensor]:
    """The named quantities of a prediction, in the type of its outputs."""
    values = {}
    for name in names:
        if name.startswith(_QUANTILE):
            value = pred.quantile(float(name.removeprefix(_QUANTILE)))
        else:
            value = getattr(pred, name)
            value = value if isinstance(value, Tensor) else value()
        values[name] = value.to(pred.members.dtype)
    return values


@dataclass(frozen=True, eq=False, repr=False)
class TracedPrediction(Predictive):
    """A prediction of any number of data points: no step depends on values or on their number."""

    share: float = 0.0

    @classmethod
    def of(
        cls,
        members: Tensor,
        likelihood: Likelihood,
        weights: Tensor | None,
        target_ndim: int | None,
        share: float,
    ) -> "TracedPrediction":
        traced = object.__new__(cls)
        vars(traced).update(members=members, likelihood=likelihood, weights=weights)
        vars(traced).update(target_ndim=target_ndim, share=share)
        return traced

    def by_blocks(self, compute: Callable[..., Tensor], *along: Tensor) -> Tensor:
        return compute(self.columns, *along)

    def disagreement(self) -> Tensor:
        return deviation(self.columns, self.share)

    def quantile(self, level: float) -> Tensor:
        """As `Predictive.quantile`."""
        levels = torch.tensor([level], dtype=self.members.dtype)
        return self.as_targets(self.columns._quantiles(levels).squeeze(-1))

    def interval(self, level: float | Tensor = 0.9) -> tuple[Tensor, Tensor]:
        """As `Predictive.interval`; the level may be an input of the graph."""
        share = torch.as_tensor(level).to(self.members.dtype)
        levels = torch.stack([(1 - share) / 2, (1 + share) / 2])
        low, high = self.columns._quantiles(levels).unbind(-1)
        return self.as_targets(low), self.as_targets(high)

    def _quantiles(self, levels: Tensor) -> Tensor:
        """As `mixture.bisected_quantile` for all levels [L], in few wide steps, [..., K, L]."""
        parts = _parts(self.likelihood, self.members)
        weights, means, scales = (t[..., None, None] for t in parts[:3])
        middle, stddev = self.mean, self.stddev
        if parts.logs:
            mean, variance = parts.locations.squeeze(-1), parts.scales.squeeze(-1).square()
            middle = self.average(mean)
            stddev = self.average(variance + (mean - middle).square()).sqrt()
        reach = stddev.unsqueeze(-1) / (torch.minimum(levels, 1 - levels) / 2).sqrt()
        low, width = middle.unsqueeze(-1) - reach, 2 * reach
        inner = torch.arange(1, _PARTS, dtype=low.dtype) / _PARTS
        for _ in range(_ROUNDS):
            places = low.unsqueeze(-1) + width.unsqueeze(-1) * inner
            z = (places.unsqueeze(-3) - means) / scales
            each = _normal_cdf(z) if parts.df is None else student_quadrature(z, parts.df)
            below = self.average((weights * each).sum(-3)) < levels.unsqueeze(-1)
            width = width / _PARTS
            low = low + width * below.sum(-1)
        return (low + width).exp() if parts.logs else low + width


class ExportedModule(nn.Module):
    """Input tensors, in order, to the named quantities of the ensemble's prediction.

    Args:
        ensemble: the members that count.
        pred: a prediction of these members; gives likelihood and weights.
        example: inputs, whose structure is that of all inputs.
        names: the outputs.
    """

    weights: Tensor | None

    def __init__(
        self,
        ensemble: UnrolledEnsemble,
        pred: Predictive,
        example: Tensor | Structured,
        names: Sequence[str],
    ) -> None:
        super().__init__()
        self.ensemble, self.likelihood, self.names = ensemble, pred.likelihood, list(names)
        weights = pred.weights
        self.register_buffer("weights", None if weights is None else weights.clone())
        self.share = 1 / pred.size if weights is None else float(weights.square().sum())
        self.target_ndim = pred.target_ndim
        self._form = None
        if isinstance(example, Structured):
            self._form = tuple(example.tensors), example.form
        self.eval()

    def forward(self, *tensors: Tensor) -> dict[str, Tensor]:
        """The quantities by name."""
        return values_of(self.prediction(*tensors), self.names)

    def prediction(self, *tensors: Tensor) -> TracedPrediction:
        """The prediction, whose quantities are computed on demand."""
        if self._form is None:
            outputs = self.ensemble(*tensors)
        else:
            names, form = self._form
            inputs = Structured(dict(zip(names, tensors, strict=True)), form)
            positional, named = arguments(self.ensemble.members[0], inputs)
            outputs = self.ensemble(*positional, **named)
        known = self.likelihood, self.weights, self.target_ndim, self.share
        return TracedPrediction.of(outputs, *known)

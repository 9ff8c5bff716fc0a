"""An alarm for OOD inputs: a threshold of uncertainty from validation data."""

import math
import warnings
from dataclasses import dataclass

import torch
from torch import Tensor

from shoal.core.arguments import checked, share
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.inference.likelihoods.incomplete_beta import incomplete_beta
from shoal.prediction.decisions.binomial import beta_quantile, conformal_rank
from shoal.prediction.metrics.detection import scores
from shoal.prediction.predictive import Predictive, prediction

__all__ = ["Alarm", "ood_alarm"]


@dataclass(frozen=True)
class Alarm:
    """A fitted threshold; call it with a prediction to get the alarms [B].

    Attributes:
        threshold: uncertainty above which an input raises an alarm; infinite with too few data.
        rate: wished false-alarm rate.
        low, high: 95 % interval of the false-alarm rate that this threshold has.
        score: name of the uncertainty, such as "entropy".
        validation_points: number of validation points.
        confidence: probability that the rate holds; None if it holds on average.
    """

    threshold: float
    rate: float
    low: float
    high: float
    score: str
    validation_points: int
    confidence: float | None = None

    @property
    def guarantee(self) -> str:
        """What holds for new data, and on which condition."""
        sure = self.confidence
        if math.isinf(self.threshold):
            return (
                f"No input raises an alarm, since {self.validation_points} validation points are "
                f"too few for a rate of {self.rate:.4g}; give more points, or a larger rate."
            )
        how = "on average" if sure is None else f"with confidence {sure:.4g}"
        return (
            f"At most {self.rate:.4g} of inputs like the validation data raise an alarm, {how}, if "
            f"new data are exchangeable with the {self.validation_points} validation points; "
            f"nothing is promised about the share of OOD inputs that is detected."
        )

    @checked(pred=prediction)
    def __call__(self, pred: Predictive) -> Tensor:
        """Which data points raise an alarm [B]."""
        return _uncertainty(pred, self.score) > self.threshold


@checked(pred=prediction, rate=share, confidence=share)
def ood_alarm(
    pred: Predictive,
    rate: float = 0.05,
    *,
    score: str | None = None,
    confidence: float | None = None,
) -> Alarm:
    r"""A threshold of uncertainty that inputs like the validation data exceed at a wished rate.

    The threshold is the k-th smallest of the n uncertainties. For continuous scores its own
    false-alarm rate has the distribution Beta(n + 1 - k, k), whatever the data (Wilks 1941, doi
    10.1214/aoms/1177731788); `low` and `high` are its quantiles 0.025 and 0.975. With ties, the
    rate is smaller. By default $k = \lceil (n + 1)(1 - rate) \rceil$, so that the mean is at most
    `rate`: a conformal test of OOD inputs. With `confidence`, k is the smallest rank whose rate is
    at most `rate` with this probability. New data must be *exchangeable* with the validation data.

    Args:
        pred: prediction for validation data; no labels are needed.
        rate: wished false-alarm rate.
        score: uncertainty, as in `metrics.scores`; None for the usual one of the task.
        confidence: probability with which the rate holds for this threshold.
    """
    score = pred.likelihood.about.uncertainty if score is None else score
    values = _uncertainty(pred, score)
    n = len(values)
    rank = conformal_rank(n, 1 - rate)
    if confidence is not None:
        ranks = torch.arange(rank, n + 1, dtype=torch.float64)
        holds = incomplete_beta(n + 1 - ranks, ranks, torch.tensor(rate, dtype=torch.float64))
        fits = (holds >= confidence).nonzero()
        rank = rank + int(fits[0]) if len(fits) else n + 1
    threshold = math.inf if rank > n else float(values.kthvalue(rank).values)
    low, high = (beta_quantile(p, n + 1 - rank, rank) for p in (0.025, 0.975))
    alarm = Alarm(threshold, rate, low, high, score, n, confidence)
    if rank > n:
        warnings.warn(alarm.guarantee, ShoalWarning, stacklevel=3)
    return alarm


def _uncertainty(pred: Predictive, score: str) -> Tensor:
    by_name = scores(pred)
    if score not in by_name:
        raise ConfigError(f"{pred.task} has no score {score!r}; use one of {', '.join(by_name)}")
    values = by_name[score].double()
    if not bool(torch.isfinite(values).all()):
        raise DataError(f"{score} is not finite for every input, so it gives no threshold")
    return values

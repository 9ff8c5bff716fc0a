"""Log-likelihoods and log priors of the members, the splits for evidence, stacking weights."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from shoal.core.errors import ConfigError, DataError
from shoal.core.opaque import Opaque
from shoal.core.optional import require
from shoal.core.structure import parted
from shoal.data.batches.sources import as_split
from shoal.data.dataset import Dataset, Split
from shoal.inference import priors
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import as_points
from shoal.inference.priors import FunctionalPrior, WeightPrior
from shoal.prediction.predict import member_outputs
from shoal.training.folder.run import is_adopted

__all__ = [
    "EvidenceSplits",
    "log_likelihoods",
    "log_priors",
    "log_probs",
    "modules_of",
    "parts_of",
    "prior_of",
    "sites_of",
    "stacking_weights",
]


@dataclass(frozen=True)
class EvidenceSplits:
    """The splits of a data set by their purpose.

    Attributes:
        train: data of the evidence.
        held_out: data that fit the stacking weights; None without any.
        test: data that evaluate predictions, disjoint from `held_out`; None without any.
        held_out_words: description of `held_out`.
        test_words: description of `test`.
    """

    train: Split
    held_out: Split | None
    test: Split | None
    held_out_words: str
    test_words: str


def parts_of(data: Any) -> EvidenceSplits:
    """The splits of a `Dataset`, or of a pair (x, y), which is training data only.

    Stacking weights are fitted on the validation split. Without a validation split they are fitted
    on every second test point, and the other test points evaluate.
    """
    train = as_split(data)
    if train.y is None:
        raise DataError("the evidence needs the targets of the training data; pass a pair (x, y)")
    validation = _labelled(getattr(data, "validation", None))
    test = _labelled(data.test if isinstance(data, Dataset) else None)
    if validation is not None:
        return EvidenceSplits(train, validation, test, "the validation data", "the test data")
    if test is None or len(test) < 2 or isinstance(test.x, Opaque):
        return EvidenceSplits(train, None, test, "", "the test data")
    return EvidenceSplits(
        train,
        held_out=_every_second(test, 0),
        test=_every_second(test, 1),
        held_out_words="every second test point",
        test_words="the other half of the test data",
    )


def _labelled(split: Split | None) -> Split | None:
    return None if split is None or split.y is None or len(split) == 0 else as_split(split)


def _every_second(split: Split, start: int) -> Split:
    assert split.y is not None
    index = torch.arange(start, len(split), 2)
    return Split(split.x[index], split.y[index])


def stacking_weights(log_probs: Tensor) -> Tensor:
    """The weights [M] that maximise the mean log score on held-out data.

    Args:
        log_probs: log density of each held-out target under each member [M, B].
    """
    table = log_probs.double().cpu()
    if table.ndim != 2 or table.numel() == 0 or not bool((table < torch.inf).all()):
        raise DataError(
            f"stacking needs log probabilities [members, points], not of shape {list(table.shape)}"
        )
    best = table.amax(0)
    possible = best > -torch.inf  # points of zero probability give no weights
    if not bool(possible.any()):
        raise DataError("all members give held-out data probability 0; stacking is not possible")
    # relative to the best member at each data point, to avoid underflow
    return _solved((table - best)[:, possible].exp().numpy())


def _solved(p: np.ndarray) -> Tensor:
    """Maximise mean log p^T w on the simplex by sequential quadratic programming."""
    optimize = require("scipy.optimize", extra="evidence")
    members, points = p.shape

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        mixture = np.maximum(p.T @ w, 1e-300)
        return -float(np.log(mixture).mean()), -(p @ (1 / mixture)) / points

    solution = optimize.minimize(
        loss,
        np.full(members, 1 / members),
        jac=True,
        method="SLSQP",
        bounds=[(0.0, 1.0)] * members,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"maxiter": 1000, "ftol": 1e-12},
    )
    weights = torch.from_numpy(np.clip(solution.x, 0, None))
    return weights / weights.sum()


def log_probs(run: Any, data: Split) -> Tensor:
    """log p(y_b | x_b, theta_m) [M, B] in evaluation mode; -inf for diverged members.

    Every token or place is a data point, and ignored targets are left out.
    """
    outputs = member_outputs(run.ensemble, data).double()
    y, _ = parted(data.y)
    assert y is not None, "there is no likelihood of data without targets"
    points, y = as_points(run.likelihood, outputs, y)
    values = run.likelihood.log_prob(points, y.double() if y.is_floating_point() else y)
    finite = run.ensemble.alive.cpu() & outputs.isfinite().flatten(1).all(1)
    if not bool(finite.any()):
        raise DataError("all members diverged, so there is no evidence; train again")
    return torch.where(finite[:, None], values, -math.inf)


def sites_of(ensemble: Ensemble, data: Split) -> torch.Size:
    """The tokens or places of a data point: (T,) or (H, W); empty for one target per point."""
    return member_outputs(ensemble, data.x[:1]).shape[2:-1]


def log_likelihoods(run: Any, data: Split) -> Tensor:
    """log L_m = sum_b w_b log p(y_b | x_b, theta_m) [M], without augmentation or dropout."""
    values, (y, weight) = log_probs(run, data), parted(data.y)
    if weight is None:
        return values.sum(-1)
    sites = sites_of(run.ensemble, data)
    each = weight.reshape(1, -1, *(1,) * (len(sites) + 1)).expand(1, -1, *sites, 1)
    weights = as_points(run.likelihood, each, y)[0][0, :, 0].to(values)
    return torch.where(weights > 0, weights * values, 0.0).sum(-1)


def prior_of(config: dict[str, Any]) -> WeightPrior | FunctionalPrior | None:
    """The prior of a run's training; None for the user's own prior, and if it is not known."""
    if is_adopted(config):
        return None
    try:
        return priors.registry.make(config.get("prior", "gaussian"))
    except ConfigError:
        return None


def log_priors(run: Any) -> Tensor | None:
    """Log density of the weight prior at each member [M]; None for several architectures."""
    prior = prior_of(run.config)
    if prior is None or isinstance(prior, FunctionalPrior) or len(run.ensemble.groups) > 1:
        return None
    weights = {name: t.detach().double().cpu() for name, t in run.ensemble.weights.items()}
    return prior.log_prob(weights)


def modules_of(ensemble: Ensemble, finite: Sequence[int]) -> list[nn.Module]:
    """Members as ordinary modules, on the CPU in double precision."""
    return [ensemble.member(index).cpu().double() for index in finite]

r"""Scores of ensembles of m of the M members, and what more members would add.

The expected score of m members is the average over all subsets S of size m, a U-statistic. For a
score that is quadratic in the mixture (Brier, squared error, CRPS) it is known for every m from
pairs of members, $f(m) = a + b / m$. NLL, accuracy and AUROC are averaged over all subsets, or over
balanced random ones where there are too many. Beyond M, $f(m) = a + b / m + c / m^2$ is fitted.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.prediction.metrics import point_weights, registry
from shoal.prediction.metrics.detection import check_pair
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.prediction.statistics import t_quantile

__all__ = ["FEWEST", "Gain", "SizeCurve", "can_tell", "detection_curve", "size_curves"]

FEWEST = 3
"""Members from which a curve can be continued: two sizes remain when one member is left out."""

SUBSETS, CYCLES = 256, 8
"""Random subsets of one size: 256, or 8 cycles of all members if that is more."""

SIZES = 12
"""Most sizes of a curve; of more members, sizes in equal ratios."""

_WORK = 1 << 26
"""Numbers that one score computes in all; for large data fewer subsets are drawn."""

_BLOCK, _SORTED = 1 << 22, 20
"""Numbers that are computed at a time; and to how many the place of a point in an order equals."""

_CURVED = 5
"""Members from which the term c / m² is fitted."""


@dataclass(frozen=True)
class Gain:
    """What more members are expected to add to one score; positive is better.

    Attributes:
        more: number of new members.
        value: the expected gain.
        error: its standard error, over data points and members.
        low: lower end of the interval that holds what growing by these members brings.
        high: upper end.
    """

    more: float
    value: float
    error: float
    low: float
    high: float


@dataclass(frozen=True, eq=False)
class SizeCurve:
    r"""The expected score of ensembles of m members, and its continuation.

    `gain` compares the fit at M and at M + k. Its standard error has three parts: the data points
    (the curve is a mean over them, and the fit is linear in the curve), the members (a jackknife:
    the same from M - 1 members), and the drawing of subsets. One growth differs from its
    expectation, too: to first order the score is $f(m) + \frac1m \sum_i h_i$, so the realised gain
    varies by $\frac{k}{M + k} \frac1M \sum_{old} h_i$ and $\frac1{M + k} \sum_{new} h_i$. The
    interval has all of them, with Student's t of the degrees of freedom by Welch and Satterthwaite.

    Attributes:
        score: name of the score: "nll", "accuracy", "brier", "rmse", "crps", or "auroc NAME".
        sizes: the numbers of members m, from 1 to M [K].
        values: mean over subsets of each size [K]; of "rmse" the mean square.
        left_out: the same without member i, for the sizes up to M - 1 [M, K - 1].
        cov: covariance of `values` over data points [K, K].
        drawn: standard error of `values` by the drawing of subsets [K]; 0 if all were averaged.
        subsets: number of subsets of all sizes; 0 for a closed form.
        points: number of data points.
    """

    score: str
    sizes: np.ndarray
    values: np.ndarray
    left_out: np.ndarray
    cov: np.ndarray
    drawn: np.ndarray
    subsets: int
    points: int

    @property
    def members(self) -> int:
        """M."""
        return int(self.sizes[-1])

    @property
    def shown(self) -> np.ndarray:
        """The score of each size [K]; of "rmse" the root of the expected mean square."""
        return self._scored(self.values)

    def at(self, size: float) -> float:
        """The expected score of ensembles of this size; between sizes linear in 1 / m, then fitted.

        Args:
            size: number of members m, also beyond M.
        """
        if size > self.members:
            return float(
                self._scored(_functional(self.sizes, [size], self.members) @ self.values)[0]
            )
        places = 1 / self.sizes[::-1]
        return float(self._scored(np.interp(1 / size, places, self.values[::-1])))

    def gain(self, more: float = 1, level: float = 0.95) -> Gain:
        """The expected gain of `more` new members, which may be `math.inf`, with its interval."""
        M, sign = self.members, -1.0 if self.better == "higher" else 1.0
        targets, share = [M, M + more], 1.0 if math.isinf(more) else more / (M + more)
        rows = _functional(self.sizes, targets, M)
        ends = rows @ self.values
        value = sign * float(-np.diff(self._scored(ends))[0])
        slope = self._slopes(ends)[:, None] * rows
        slope = slope[0] - slope[1]
        others = self.left_out @ _functional(self.sizes[:-1], targets, M).T
        others = -sign * np.diff(self._scored(others), axis=1)[:, 0]
        alone = sign * self._scored(self.left_out[:, -1])
        by_points = max(float(slope @ self.cov @ slope), 0.0)  # rounding may make 0 negative
        by_drawing = float((slope**2) @ self.drawn**2)
        expected = by_points + by_drawing + _jackknife(others)
        new = 0.0 if math.isinf(more) else M * more / (M + more) ** 2 * _jackknife(alone)
        by_members = _jackknife(others - share * alone) + new
        total = by_points + by_drawing + by_members
        reach = math.nan
        if math.isfinite(total) and self.points > 1:
            known = by_points**2 / (self.points - 1) + by_members**2 / (M - 1)
            degrees = min(total**2 / known, 1e6) if known > 0 else 1e6
            reach = t_quantile(0.5 + level / 2, max(int(degrees), 1)) * math.sqrt(total)
        return Gain(more, value, math.sqrt(expected), value - reach, value + reach)

    def members_worth(self, price: float, most: int) -> int:
        """How many new members are worth a price, at most `most`.

        Each, after those before it, is expected to make the score better by at least `price`.
        """
        gains = [0.0, *(self.gain(more).value for more in range(1, most + 1))]
        dear = (k for k in range(most) if not gains[k + 1] - gains[k] >= price)
        return next(dear, most)

    @property
    def better(self) -> str:
        """Whether "lower" or "higher" scores are better."""
        name = self.score.partition(" ")[0]
        return "higher" if name == "auroc" else registry[name].better

    def _scored(self, values: Any) -> Any:
        return np.sqrt(np.maximum(values, 0)) if self.score == "rmse" else values

    def _slopes(self, values: np.ndarray) -> np.ndarray:
        if self.score != "rmse":
            return np.ones_like(values)
        return 0.5 / np.sqrt(np.maximum(values, np.finfo(float).tiny))

    @property
    def tensors(self) -> dict[str, Tensor]:
        """The curve as tensors by name, for a file; `SizeCurve.read` takes them."""
        arrays = {name: torch.from_numpy(getattr(self, name).astype(float)) for name in _ARRAYS}
        return arrays | {"counts": torch.tensor([self.subsets, self.points])}

    @classmethod
    def read(cls, score: str, tensors: Mapping[str, Tensor]) -> "SizeCurve":
        """The curve of a score that `tensors` describes."""
        arrays = {name: tensors[name].numpy() for name in _ARRAYS}
        subsets, points = tensors["counts"].tolist()
        return cls(score, **arrays, subsets=subsets, points=points)


_ARRAYS = ("sizes", "values", "left_out", "cov", "drawn")


def _jackknife(values: np.ndarray) -> float:
    """Variance of a statistic, from its values with one of M members left out."""
    return (len(values) - 1) * float(values.var())


def _functional(sizes: np.ndarray, targets: list[float], members: int) -> np.ndarray:
    """Weights [T, K] that turn the values of a curve into those of its fit at other sizes.

    Least squares with weights m²: terms that the fit leaves out matter at small sizes.
    """
    powers = np.arange(3 if members >= _CURVED else 2)
    design, wanted = (np.asarray(m, float)[:, None] ** -powers for m in (sizes, targets))
    return wanted @ np.linalg.pinv(design * sizes[:, None]) * sizes


def size_curves(
    pred: Predictive,
    y: ArrayLike,
    *,
    ood: Mapping[str, Predictive] | None = None,
    weight: ArrayLike | None = None,
    scores: Collection[str] | None = None,
    draws: int = 1,
    seed: int = 0,
) -> dict[str, SizeCurve]:
    """The curves of all scores that fit the task, by name: "nll", "accuracy", "auroc letters".

    Args:
        pred: the prediction for labelled data, of at least three members.
        y: labels or targets.
        ood: predictions of the same members for OOD data, by name. Test and OOD data are told apart
            by the task's uncertainty, such as the entropy.
        weight: weights of the data points [B].
        scores: some of "nll", "accuracy", "brier", "rmse" and "crps"; None for all.
        draws: members of the prediction that are draws of one chain: k M + c is draw k of chain c.
            Then chains are counted as members. CRPS is left out.
        seed: fixes the random subsets.
    """
    _check(pred, draws)
    targets = pred.check(y)
    shares = None if weight is None else point_weights(pred, targets, weight)
    points = _Points(_groups(pred, targets), shares)
    pred, targets = pred.points(targets)
    curves: dict[str, SizeCurve] = {}
    for name, terms in _SCORES.items():
        wanted = (scores is None or name in scores) and (draws == 1 or name != "crps")
        if not wanted or not registry[name].fits(pred):
            continue
        if name in ("nll", "accuracy"):
            curves[name] = _drawn_curve(
                name, pred, points, terms(pred, targets, draws), draws, seed
            )
        else:
            curves[name] = _quadratic_curve(name, pred, targets, points, draws, terms)
    for name, other in (ood or {}).items():
        score, other = f"auroc {name}", other.points()[0]
        curves[score] = detection_curve(score, pred, other, draws, seed)
    return curves


def can_tell(pred: Predictive, draws: int = 1) -> bool:
    """Whether a prediction has enough members of equal weight, and a distribution of targets."""
    whole = pred.size >= FEWEST * draws and pred.size % draws == 0 and pred.weights is None
    return whole and "loss" not in pred.likelihood.about.kinds


def _check(pred: Predictive, draws: int) -> None:
    if pred.size % draws:
        raise DataError(f"{pred.size} members are not chains of {draws} draws, since some diverged")
    if draws > 1 and pred.size < FEWEST * draws:
        raise ConfigError(
            f"what one more chain is worth can be told from {FEWEST} chains on, not from "
            f"{pred.size // draws}; draw from a run of more members"
        )
    if "loss" in pred.likelihood.about.kinds:
        raise ConfigError(
            "a custom loss has no distribution, so members cannot be averaged; "
            "train with a likelihood to see what more members are worth"
        )
    if pred.size < FEWEST:
        raise ConfigError(
            f"what one more member is worth can be told from {FEWEST} finite members on, not from "
            f"{pred.size}; train more, or type shoal.grow(run, {FEWEST - pred.size})"
        )
    if pred.weights is not None:
        raise ConfigError("subsets of members have equal weights; predict with weights='uniform'")


def _groups(pred: Predictive, y: Tensor) -> Tensor:
    """The data point of every target that counts: the sites of one data point are not alone."""
    sites, counted = pred.members.shape[2:-1].numel(), pred.likelihood.counted(y)
    groups = torch.arange(len(pred), device=pred.members.device).repeat_interleave(sites)
    return (groups if counted is None else groups[counted.flatten()]).cpu()


class _Points:
    """The data points of a mean: their weights, and which of them belong together."""

    def __init__(self, groups: Tensor, weight: Tensor | None = None) -> None:
        weight = torch.ones(len(groups)) if weight is None else weight.cpu()
        self.shares = (weight.double() / weight.double().sum()).numpy()
        self.groups = groups.unique(return_inverse=True)[1].numpy()
        self.count = int(self.groups.max()) + 1

    def mean_and_cov(self, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The mean of values [K, N] and its covariance [K, K]."""
        mean = values @ self.shares
        centred = (values - mean[:, None]) * self.shares
        if self.count < centred.shape[1]:
            centred = np.stack([np.bincount(self.groups, row) for row in centred])
        correction = self.count / max(self.count - 1, 1)
        return mean, correction * centred @ centred.T


def _sizes(members: int) -> np.ndarray:
    if members <= SIZES:
        return np.arange(1, members + 1)
    ratios = np.unique(np.round(np.geomspace(1, members - 1, SIZES - 1)).astype(int))
    return np.append(ratios, members)


def _subsets(members: int, size: int, most: int, random: np.random.Generator) -> np.ndarray:
    """All subsets of this size [S, size] if they are at most 4 `most`, or random ones in cycles.

    A cycle is a random order with its M rotations, whose first `size` members are the subsets. They
    differ, and all members are equally often in them: the first-order effect of a member cancels.
    """
    if math.comb(members, size) <= 4 * most:
        return np.array(list(combinations(range(members), size)))
    windows = (np.arange(members)[:, None] + np.arange(size)) % members
    return np.concatenate([random.permutation(members)[windows] for _ in range(most // members)])


def _all_subsets(
    members: int, draws: int, cost: int, seed: int
) -> Iterator[tuple[np.ndarray, Tensor]]:
    """For each size its subsets, and the matrix [S, K M] that averages them and their draws.

    Args:
        members: M.
        draws: K, draws of each member.
        cost: numbers that one subset computes.
        seed: fixes the subsets.
    """
    sizes, random = _sizes(members), np.random.default_rng([seed, members])
    most = max(SUBSETS, CYCLES * members)
    most = max(min(most, _WORK // (len(sizes) * cost)), 4 * members)
    for size in sizes.tolist():
        sets = _subsets(members, size, most, random)
        average = torch.zeros(len(sets), members, dtype=torch.float64)
        average.scatter_(1, torch.from_numpy(sets), 1 / (size * draws))
        yield sets, average.repeat(1, draws)


Scores = Callable[[Tensor, slice], Tensor]
"""From averages of members [S, M], to the score of each subset at some data points [S, n]."""


def _drawn_curve(
    score: str,
    pred: Predictive,
    points: _Points,
    scores_and_width: tuple[Scores, int],
    draws: int,
    seed: int,
) -> SizeCurve:
    """The curve of a score that is a mean over data points, by averages over subsets."""
    N, (scores, width) = len(pred), scores_and_width
    each, subsets = [], []
    for sets, average in _all_subsets(pred.size // draws, draws, N * width, seed):
        of_points, of_sets = np.zeros(N), np.zeros(len(sets))
        rows = max(_BLOCK // (max(len(sets), pred.size) * width), 1)
        for start in range(0, N, rows):
            some = slice(start, min(start + rows, N))
            values = scores(average, some).double().cpu().numpy()
            of_points[some] = values.mean(0)
            of_sets += values @ points.shares[some]
        each.append(of_points)
        subsets.append((sets, of_sets))
    _, cov = points.mean_and_cov(np.stack(each))
    return _curve(score, subsets, cov, points.count)


def _curve(
    score: str, subsets: list[tuple[np.ndarray, np.ndarray]], cov: np.ndarray, points: int
) -> SizeCurve:
    """A curve from the score of every subset, by size."""
    M = subsets[-1][0].shape[1]
    pairs = [(_left_out(*pair, M), _drawing_error(*pair, M)) for pair in subsets]
    return SizeCurve(
        score,
        sizes=np.array([sets.shape[1] for sets, _ in subsets]),
        values=np.array([values.mean() for _, values in subsets]),
        left_out=np.stack([left for left, _ in pairs[:-1]], 1),
        cov=cov,
        drawn=np.array([error for _, error in pairs]),
        subsets=sum(len(sets) for sets, _ in subsets),
        points=points,
    )


def _left_out(sets: np.ndarray, values: np.ndarray, members: int) -> np.ndarray:
    r"""Mean over subsets without member i [M].

    By least squares, values = mean + sum of the effects of its members: then the mean without i is
    $\bar v - m \beta_i / (M - 1)$. With all subsets it is exact. Random subsets give it with the
    noise of second-order effects alone.
    """
    size = sets.shape[1]
    mean = values.mean()
    if size == members or not np.isfinite(mean):
        return np.full(members, mean)
    inside = np.full((len(sets), members), -size / members)
    inside[np.arange(len(sets))[:, None], sets] += 1
    effects = np.linalg.lstsq(inside, values - mean, rcond=None)[0]
    return mean - size / (members - 1) * effects


def _drawing_error(sets: np.ndarray, values: np.ndarray, members: int) -> float:
    """Standard error of the mean over random cycles; 0 where all subsets were averaged."""
    if len(sets) == math.comb(members, sets.shape[1]):
        return 0.0
    cycles = values.reshape(-1, members).mean(1)
    return float(cycles.std(ddof=1)) / math.sqrt(len(cycles))


def _nll(pred: Predictive, y: Tensor, draws: int) -> tuple[Scores, int]:
    likelihood = pred.likelihood

    def of_block(part: Predictive, y: Tensor) -> Tensor:
        each = likelihood.log_prob(part.members, y).double().unflatten(0, (draws, -1))
        mixed = likelihood.mixture_log_prob(part.members, y, None).double()
        return torch.cat([each.logsumexp(0) - math.log(draws), mixed[None]]).T

    each, mixed = pred.by_blocks(of_block, y).T.split([pred.size // draws, 1])
    top = each.amax(0).clamp_min(torch.finfo(torch.float64).min)
    density = (each - top).exp()
    usual = torch.allclose(density.mean(0).log() + top, mixed[0], rtol=1e-4, atol=1e-5)

    def scores(average: Tensor, rows: slice) -> Tensor:
        if usual:
            chains = draws * average[:, : len(density)].to(density.device)
            return -((chains @ density[:, rows]).log() + top[rows])
        sets = [row.nonzero().flatten() for row in average]  # soft labels: an expectation of logs
        parts = [pred.members[chosen.to(pred.members.device)][:, rows] for chosen in sets]
        return -torch.stack([likelihood.mixture_log_prob(part, y[rows], None) for part in parts])

    return scores, 1


def _accuracy(pred: Predictive, y: Tensor, draws: int) -> tuple[Scores, int]:
    labels = pred.likelihood.labels(y)

    def scores(average: Tensor, rows: slice) -> Tensor:
        right = _mixed(average, pred.block(rows).member_probs()).argmax(-1) == labels[rows]
        return right.double().flatten(2).mean(-1) if right.ndim > 2 else right.double()

    return scores, pred.members.shape[-1]


def _mixed(average: Tensor, values: Tensor) -> Tensor:
    """Means [S, ...] of values [M, ...] over subsets."""
    return torch.tensordot(average.to(values), values, 1)


def detection_curve(
    score: str, test: Predictive, ood: Predictive, draws: int = 1, seed: int = 0
) -> SizeCurve:
    """The curve of AUROC: the mean over pairs of a test and an OOD point.

    Its covariance has a part of either set: of the share of the other set beyond each point.
    DeLong et al. (1988), doi 10.2307/2531595.

    Args:
        score: name of the curve.
        test: prediction for test data, every site a data point.
        ood: prediction of the same members for OOD data.
        draws: as in `size_curves`.
        seed: fixes the random subsets.
    """
    check_pair(test, ood)
    if ood.size != test.size:
        raise DataError(f"test and OOD predictions have {test.size} and {ood.size} members")
    splits, parts, subsets = (test, ood), ([], []), []
    cost = (len(test) + len(ood)) * (test.members.shape[-1] + _SORTED)
    for sets, average in _all_subsets(test.size // draws, draws, cost, seed):
        places = [np.zeros(len(split)) for split in splits]
        of_sets, rows = [], max(_BLOCK // cost, 1)
        for start in range(0, len(sets), rows):
            some = average[start : start + rows]
            low, high = (_uncertainty(split, some) for split in splits)
            above, below = 1 - _below(high, low), _below(low, high)
            for total, values in zip(places, (above, below), strict=True):
                total += values.sum(0).cpu().numpy() / len(sets)
            of_sets.append(below.mean(1).cpu().numpy())
        for part, place in zip(parts, places, strict=True):
            part.append(place)
        subsets.append((sets, np.concatenate(of_sets)))
    cov = sum(_Points(torch.arange(len(part[0]))).mean_and_cov(np.stack(part))[1] for part in parts)
    return _curve(score, subsets, np.asarray(cov), min(len(test), len(ood)))


def _uncertainty(pred: Predictive, average: Tensor) -> Tensor:
    """The task's uncertainty of every subset [S, N]: entropy, or the mean variance of columns."""

    def of_block(part: Predictive) -> Tensor:
        mean = _mixed(average, part.member_means)
        if part.likelihood.about.uncertainty == "entropy":
            return part.likelihood.entropy(mean, lambda: mean).T
        squares = part.likelihood.variance(part.members) + part.member_means.square()
        return (_mixed(average, squares) - mean.square()).mean(-1).T

    return pred.by_blocks(of_block).T.double()


def _below(values: Tensor, others: Tensor) -> Tensor:
    """Share of values [S, N] below each of the others [S, B]; ties count one half."""
    ordered, others = values.sort(-1).values, others.contiguous()
    sides = (torch.searchsorted(ordered, others, right=right) for right in (False, True))
    return sum(side.double() for side in sides) / (2 * values.shape[1])  # pyright: ignore


Terms = tuple[Tensor, Tensor, Tensor]


def _quadratic_curve(
    score: str,
    pred: Predictive,
    y: Tensor,
    points: _Points,
    draws: int,
    terms: Callable[[Predictive, Tensor, int], Terms],
) -> SizeCurve:
    r"""The curve of $s(S) = \frac1m \sum_{i \in S} e_i + \frac1{m^2} \sum_{ij \in S} d_{ij}$.

    $f(m) = \bar e + \frac1m \bar d_{ii} + (1 - \frac1m) \bar d_{i \ne j}$, exact for every m.

    Args:
        score: name of the score.
        pred: the prediction.
        y: targets.
        points: the data points.
        draws: draws of each member.
        terms: from some data points to e, the diagonal of d, and the sums of its rows, [M, N] each.
    """
    parts = pred.by_blocks(lambda part, y: torch.stack(terms(part, y, draws)).movedim(-1, 0), y)
    fixed, own, rows = parts.double().cpu().movedim(0, -1)
    M, sizes = len(own), _sizes(len(own))
    sums = [part.sum(0).numpy() for part in (fixed, own, rows - own)]
    each = np.stack([_quadratic(M, m, *sums) for m in sizes.tolist()])
    values, cov = points.mean_and_cov(each)
    e, d, pairs = (part.numpy() @ points.shares for part in (fixed, own, rows - own))
    # without member i the pairs lose its row and its column
    rest = [total.sum() - part for total, part in ((e, e), (d, d), (pairs, 2 * pairs))]
    left = np.stack([_quadratic(M - 1, m, *rest) for m in sizes[:-1].tolist()], 1)
    nothing = np.zeros(len(sizes))
    return SizeCurve(score, sizes, values, left, cov, nothing, 0, points.count)


def _quadratic(members: int, size: int, fixed: Any, own: Any, pairs: Any) -> Any:
    mean = own / members / size + (1 - 1 / size) * pairs / (members * (members - 1))
    return fixed / members + mean


def _products(errors: Tensor, draws: int) -> Terms:
    """The terms of the squared length of a mean of errors [M, N, K, C], the mean over K."""
    errors = errors.unflatten(0, (draws, -1)).mean(0)
    own = errors.square().sum(-1).mean(-1)
    rows = (errors * errors.sum(0)).sum(-1).mean(-1)
    return torch.zeros_like(own), own, rows


def _brier_terms(pred: Predictive, y: Tensor, draws: int) -> Terms:
    probs = pred.member_probs().double()
    errors = probs - pred.likelihood.target_probs(y, probs.shape[-1])
    return _products(errors.flatten(2, -2) if errors.ndim > 3 else errors.unsqueeze(2), draws)


def _square_terms(pred: Predictive, y: Tensor, draws: int) -> Terms:
    return _products((pred.member_means.double() - y).unsqueeze(-1), draws)


def _ranked_terms(pred: Predictive, y: Tensor, draws: int) -> Terms:
    """CRPS = mean E|Y_i - y| - half the mean of E|Y_i - Y_j| over all pairs."""
    likelihood, M = pred.likelihood, pred.size
    error = likelihood.distance(pred.members, y).mean(-1)
    own = likelihood.own_distance(pred.members).mean(-1)
    rows = M * likelihood.distances_to_mixture(pred.members, None).mean(-1)
    return error, -0.5 * own, -0.5 * rows


_SCORES: dict[str, Callable[..., Any]] = {
    "nll": _nll,
    "accuracy": _accuracy,
    "brier": _brier_terms,
    "rmse": _square_terms,
    "crps": _ranked_terms,
}
"""Scores of subsets at data points and their cost, or the terms of a closed form."""

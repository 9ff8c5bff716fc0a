"""The prediction of an ensemble for a batch of inputs, with its uncertainty."""

import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor

from shoal.core.arguments import (
    checked,
    instance_of,
    items,
    list_of,
    one_or_more,
    share,
    whole_from,
)
from shoal.core.display.notebook import Curve, bars_svg, curves_svg, facts_html
from shoal.core.display.text import number, percent
from shoal.core.errors import ConfigError, DataError
from shoal.core.optional import require
from shoal.core.storage.disk import checked_path
from shoal.core.structure import Structured, is_structure
from shoal.core.values import describe_value
from shoal.data.batches.arrays import as_targets
from shoal.data.batches.batch import targets_of
from shoal.inference.likelihoods import Likelihood, WithDerivatives, known_likelihood
from shoal.prediction.mixture import (
    bisected_quantile,
    blocks,
    checked_shares,
    chosen_rows,
    counted_points,
    deviation,
    drawn_targets,
    mean_entropy,
    mixture_cdf,
    mixture_log_prob,
    real_targets,
    same_shares,
    total_variance,
)
from shoal.prediction.prediction_file import checked_out, read_prediction, writing

__all__ = ["ArrayLike", "Predictive", "frame_columns", "main_columns", "prediction", "summary"]

DRAWS = 1_000_000_000
"""Most draws of one call."""

ArrayLike = Tensor | np.ndarray | Sequence[Any]
"""A tensor, an array, or nested sequences of numbers."""


@dataclass(frozen=True, eq=False, repr=False)
class Predictive:
    r"""The mixture $p(y|x) = \sum_m w_m\, p(y \,|\, f_m(x))$ over the members of an ensemble.

    The class follows `torch.distributions`: `mean`, `variance` and `stddev` are properties,
    `log_prob` and `entropy` are methods. Probabilities are averaged, never logits. All entropies
    are in nats.

    Quantities of the targets have the shape of the targets: [B] if the ensemble was trained on
    targets [B], and [B, K] for K columns, also for one column [B, 1].

    Attributes:
        members: outputs of the members [M, B, C], before the likelihood's softmax or softplus;
            [M, B, *S, C] for outputs at the sites S of a data point, such as tokens.
        likelihood: distribution of the targets, given the outputs.
        weights: weights of the members [M] with sum 1; None for equal weights. Equal weights become
            None, so that results are the same bit for bit.
        target_ndim: number of axes of the targets, such as 1 for [B] and 2 for [B, K]. None if it
            is not known: then there is an axis of columns.

    >>> from shoal.inference.likelihoods import Categorical
    >>> pred = Predictive(torch.tensor([[[9.0, -9.0]], [[-9.0, 9.0]]]), Categorical())
    >>> pred
    Predictive(2 members, 1 point, 2 outputs, Categorical())
    >>> pred.probs, pred.mutual_information() > 0.69
    (tensor([[0.5000, 0.5000]]), tensor([True]))
    """

    members: Tensor
    likelihood: Likelihood
    weights: Tensor | None = None
    target_ndim: int | None = None

    def __post_init__(self) -> None:
        outputs = self.members
        if not isinstance(outputs, Tensor) or outputs.ndim < 3 or outputs.numel() == 0:
            received = (
                list(outputs.shape) if isinstance(outputs, Tensor) else type(outputs).__name__
            )
            raise DataError(
                f"members must be a non-empty tensor [members, points, outputs], not {received}"
            )
        object.__setattr__(self, "likelihood", known_likelihood("likelihood", self.likelihood))
        if outputs.is_complex():
            raise DataError("members must be real numbers, not complex ones")
        if outputs.dtype not in (torch.float32, torch.float64):
            object.__setattr__(self, "members", outputs.float())
        if self.weights is not None:
            object.__setattr__(self, "weights", checked_shares(self.weights, self.members))

    def __repr__(self) -> str:
        M, B, *S, C = self.members.shape
        sites = {"site": math.prod(S)} if S else {}
        counts = {"member": M, "point": B, **sites, "output": C}
        sizes = ", ".join(f"{n} {word}{'' if n == 1 else 's'}" for word, n in counts.items())
        return f"Predictive({sizes}, {self.likelihood})"

    def _repr_html_(self) -> str:
        M, B, *_, C = self.members.shape
        facts = {"members": M, "points": B, "outputs": C, "likelihood": self.likelihood}
        weights = "equal" if self.weights is None else "not equal"
        means, figure = summary(self)
        return facts_html("Predictive", {**facts, "weights": weights, **means}, figure)

    def __len__(self) -> int:
        return self.members.shape[1]

    def __getitem__(self, index: Any) -> "Predictive":
        """The prediction for chosen data points: a number, a slice, numbers, or a mask [B]."""
        members = self.members[:, chosen_rows(index, len(self))]
        return replace(self, members=members)

    @property
    def size(self) -> int:
        """Number of members."""
        return self.members.shape[0]

    @property
    def task(self) -> str:
        """Name of the likelihood's task, such as "classification"."""
        return self.likelihood.task

    @classmethod
    def concat(cls, parts: Sequence["Predictive"]) -> "Predictive":
        """Join predictions of the same members for several sets of data points, in order.

        >>> from shoal.inference.likelihoods import Gaussian
        >>> len(Predictive.concat([Predictive(torch.zeros(5, 3, 1), Gaussian())] * 2))
        6
        """
        parts = list_of(prediction)("parts", parts)
        if not parts:
            raise DataError("concat needs at least one prediction, not an empty list")
        first = parts[0]
        for part in parts[1:]:
            same = part.size == first.size and part.members.shape[2:] == first.members.shape[2:]
            if not (
                same
                and part.likelihood == first.likelihood
                and same_shares(part.weights, first.weights)
            ):
                raise DataError(
                    f"concat needs predictions of the same members, not {first} and {part}"
                )
        members = torch.cat([part.members for part in parts], dim=1)
        return replace(first, members=members)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the prediction to a .safetensors file, which `load` opens."""
        with writing(checked_out(path), self.likelihood, len(self), self.target_ndim) as file:
            for rows in blocks(self):
                file.add(self.members[:, rows])
            file.finish(range(self.size), self.weights)

    @classmethod
    def load(
        cls, path: str | os.PathLike[str], likelihood: Likelihood | None = None
    ) -> "Predictive":
        """Open the file of a prediction; outputs are read from the disk as they are needed.

        Args:
            path: a file of `save` or of `predict(..., out=FILE)`.
            likelihood: the likelihood, if it is your own; a registered one is in the file.
        """
        return cls(*read_prediction(checked_path(path, "the path"), likelihood))

    def by_blocks(self, compute: Callable[..., Tensor], *along: Tensor) -> Tensor:
        """A quantity of each data point [B, ...], with memory for one block of data points.

        Args:
            compute: from the prediction of some data points with `columns`, and the rows of
                `along` that belong to them, to a tensor with one row per data point.
            along: tensors with one row per data point.
        """
        parts = [compute(self.block(rows), *(t[rows] for t in along)) for rows in blocks(self)]
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def block(self, rows: slice) -> "Predictive":
        """The prediction for some data points with columns, on the same memory."""
        if rows == slice(0, len(self)):
            return self.columns
        return self._unchecked(members=self.members[:, rows], target_ndim=None)

    @cached_property
    def columns(self) -> Self:
        """The same prediction, with an axis of columns in every quantity of the targets."""
        return self if self._has_column_axis else self._unchecked(target_ndim=None)

    @property
    def _has_column_axis(self) -> bool:
        return self.target_ndim is None or self.target_ndim > self.members.ndim - 2

    def _unchecked(self, **changes: Any) -> Self:
        """The prediction with some changes that need no check."""
        other = object.__new__(type(self))
        vars(other).update({each.name: getattr(self, each.name) for each in fields(self)} | changes)
        return other

    def as_targets(self, values: Tensor) -> Tensor:
        """Values [..., B, *S, K] of all columns in the shape of the targets."""
        return values if self._has_column_axis else values.squeeze(-1)

    @cached_property
    def probs(self) -> Tensor:
        """Class probabilities of the mixture [B, C]."""
        return self.by_blocks(lambda part: part.average(part.member_probs()).clamp_max(1))

    @property
    def mean(self) -> Tensor:
        """Mean of the mixture: `probs` for classes, or numbers in the shape of the targets."""
        if self._one_hot:
            return self.probs
        return self.as_targets(self.by_blocks(lambda part: part.average(part.member_means)))

    @property
    def variance(self) -> Tensor:
        r"""Variance of the mixture: p(1 - p) of the one-hot label, or the law of total variance.

        For regression $\sigma^2 = \sum_m w_m \sigma_m^2 + \sum_m w_m (\mu_m - \mu)^2$.
        """
        if self._has_classes:
            return self.mean * (1 - self.mean)
        return self.as_targets(self.by_blocks(total_variance))

    @property
    def stddev(self) -> Tensor:
        """Square root of the variance."""
        return self.variance.sqrt()

    def log_prob(self, y: ArrayLike) -> Tensor:
        r"""$\log \sum_m w_m\, p(y \,|\, f_m)$ for labels [B] or targets [B] or [B, K], to [B]."""
        return self.by_blocks(mixture_log_prob, self.check(y))

    def cdf(self, y: ArrayLike) -> Tensor:
        """P(Y <= y) of each target, in the shape of the targets and in double precision."""
        return self.as_targets(self.by_blocks(mixture_cdf, self.check(y)))

    @checked(level=one_or_more(share))
    def quantile(self, level: float | Sequence[float]) -> Tensor:
        """The smallest y with P(Y <= y) >= level, in the shape of the targets, by bisection.

        Args:
            level: a number between 0 and 1; or several, for one more axis in front, one row a
                level.
        """
        if isinstance(level, Sequence):
            return torch.stack([self.quantile(each) for each in level])
        self._only("numbers", "quantiles", "probs")
        return self.as_targets(self.by_blocks(lambda part: bisected_quantile(part, level)))

    @checked(level=share)
    def interval(self, level: float = 0.9) -> tuple[Tensor, Tensor]:
        """Ends of the central interval of probability `level`, each in the shape of the targets."""
        return self.quantile((1 - level) / 2), self.quantile((1 + level) / 2)

    @checked(n=whole_from(1, DRAWS))
    def sample(self, n: int, *, seed: int | None = None, joint: bool = False) -> Tensor:
        """Draw targets [n, B] or [n, B, K], as the targets are; a member first, then its target.

        Args:
            n: number of draws.
            seed: fixes the draws; None for other draws at every call.
            joint: each draw takes one member for all data points, as a drawn function. By default
                every data point has its own member.
        """
        drawn = drawn_targets(self, n, seed, joint)
        if self._one_hot:
            return drawn
        one_label = drawn.ndim < self.members.ndim
        if one_label:  # Bernoulli labels of one column come without an axis of columns
            return drawn if self.target_ndim is None else self.as_targets(drawn.unsqueeze(-1))
        return self.as_targets(drawn)

    @checked(level=share, classes=items)
    def to_frame(self, level: float = 0.9, classes: Sequence[str] | None = None) -> Any:
        """A pandas table: one row per data point, with the prediction and its uncertainty.

        Args:
            level: probability of the interval `low` to `high` of numbers.
            classes: names of the classes.
        """
        return require("pandas", extra="frames").DataFrame(frame_columns(self, level, classes))

    def entropy(self) -> Tensor:
        """Predictive entropy [B]: the total uncertainty.

        For classes, the entropy of the mean probabilities. The entropy of a Gaussian mixture has no
        closed form: for regression the entropy is that of the Gaussian with the same mean and
        variance in each column, an upper bound.
        """
        return self._entropy

    def aleatoric(self) -> Tensor:
        """Aleatoric uncertainty [B]: mean entropy of the members."""
        return self._aleatoric

    def mutual_information(self) -> Tensor:
        """Epistemic uncertainty `entropy() - aleatoric()` [B], at least 0.

        For regression an upper bound, because `entropy` is an upper bound.
        """
        return (self.entropy() - self.aleatoric()).clamp_min(0)

    def disagreement(self) -> Tensor:
        r"""Disagreement [B]: standard deviation over members, averaged over outputs.

        The standard deviation is of the probabilities for classes, of the means for regression. It
        is unbiased, $\sum_m w_m (p_m - p)^2 / (1 - \sum_m w_m^2)$ under the root, which divides by
        M - 1 for equal weights. A single member has disagreement 0.
        D'Angelo & Fortuin (2021), arXiv 2106.11642.
        """
        return self._disagreement

    def confidence(self) -> Tensor:
        """Confidence: largest class probability [B]."""
        return self.probs.amax(-1)

    def labels(self) -> Tensor:
        """Most probable class [B]."""
        return self.probs.argmax(-1)

    def check(self, y: ArrayLike) -> Tensor:
        """`y` as a tensor that fits this prediction: labels [B], or targets with columns [B, K].

        Targets [B] and [B, 1] are the same. A shape that would only broadcast is refused.
        """
        if self.takes_pair(y):
            pair: Any = targets_of(y, len(self), self.members.dtype)
            return self.likelihood.prepared(pair, self.members.shape[-1]).to(self.members.device)
        any_target = "loss" in self.likelihood.about.kinds
        y = y if self._has_classes or any_target else real_targets(y)
        targets = as_targets(y, len(self), self.members.dtype)
        wanted = self.members.shape[1:-1]
        sites = self.members.ndim - 3
        shape = (self.members.shape[-1], sites) if sites else self.members.shape[-1:]
        fits = targets.shape[: 1 + sites] == wanted and targets.ndim <= 2 + sites
        if not fits and not any_target:
            sizes = ", ".join(map(str, wanted))
            raise DataError(
                f"y has shape {tuple(targets.shape)}, but the prediction is for targets "
                f"{tuple(wanted)} or ({sizes}, columns); reshape y"
            )
        return self.likelihood.prepared(targets, *shape).to(self.members.device)

    def points(self, y: ArrayLike | None = None) -> "tuple[Predictive, Any]":
        """The prediction with every site as a data point, and its targets; no ignored targets.

        Both have columns: targets [B] become [B, 1], and so does the mean.
        """
        members, targets = counted_points(self, y)
        if members is self.members:
            return self.columns, targets
        return replace(self, members=members, target_ndim=None), targets

    def member_probs(self) -> Tensor:
        """Class probabilities of each member [M, B, C]."""
        self._only("classes", "class probabilities", "mean, variance or log_prob")
        return self._member_probs

    def member_labels(self) -> Tensor:
        """Most probable class of each member [M, B]."""
        each = self.by_blocks(lambda part: part.member_probs().argmax(-1).movedim(0, 1))
        return each.movedim(1, 0).contiguous()

    def moments(self) -> tuple[Tensor, Tensor]:
        """Mean and variance of the target under each member: [M, B] or [M, B, K]."""
        self._only("numbers", "member means and variances", "probs, mean or variance")
        mean, variance = self.likelihood.moments(self.members)
        return self.as_targets(mean), self.as_targets(variance)

    def average(self, values: Tensor) -> Tensor:
        """Weighted mean over members, [M, ...] to [...]."""
        if not isinstance(values, Tensor) or values.ndim < 1 or len(values) != self.size:
            came = describe_value(values)
            raise DataError(f"values must be a tensor [{self.size}, ...], not {came}")
        if self.weights is None:
            return values.mean(0)
        return torch.tensordot(self.weights.to(values.dtype), values, 1)

    # Derivatives by an input: `shoal.predict(run, x, derivatives_of=...)`, or targets of training.

    @cached_property
    def derivatives(self) -> Tensor:
        """Derivatives of each member's prediction by an input [M, B, *x]; [M, B, K, *x] for K > 1.

        They are in the unit of the targets over that of the input. Those of classes are of their
        probabilities. Data points of a batch object may have fewer rows than others: zeros follow.
        """
        part, sites = self.of_derivatives, self.members.ndim - 3
        means = part.member_means
        return means.movedim(-1, 2 + sites) if part._has_column_axis else means

    @cached_property
    def of_derivatives(self) -> "Predictive":
        """The prediction of the derivatives, with mean, standard deviation and noise, if known.

        Its targets are [B, *x], or [B, *x, K] for K > 1 columns. Without targets in training its
        noise is 0, so that `stddev` is the standard deviation over members.
        """
        likelihood = self.likelihood
        if not isinstance(likelihood, WithDerivatives):
            raise ConfigError(
                "the prediction has no derivatives; type shoal.predict(run, x, derivatives_of=...)"
            )
        members, noise = likelihood.derivative_part(self.members)
        ndim = members.ndim - 2 if members.shape[-1] == 1 else None
        return Predictive(members, noise, self.weights, ndim)

    def derivative_deviation(self) -> Tensor:
        r"""Largest deviation of the members' derivatives in one row of an input, as an atom [B].

        $\max_i \sqrt{\sum_m w_m \|g_{mi} - g_i\|^2}$ with the mean $g_i$ of row i over members. For
        forces, members that disagree say that a structure is unlike the training data.
        Zhang et al. (2019), arXiv 1810.11890.
        """
        each = self.of_derivatives.columns.member_means
        rows = self.average((each - self.average(each)).square())
        return rows.flatten(2).sum(-1).amax(1).sqrt()

    @cached_property
    def of_values(self) -> "Predictive":
        """The prediction without derivatives; itself if it has none."""
        likelihood = self.likelihood
        if not isinstance(likelihood, WithDerivatives):
            return self
        values = likelihood.value_outputs(self.members)
        return replace(self, members=values, likelihood=likelihood.values)

    def takes_pair(self, y: Any) -> bool:
        """Whether targets are a pair (values, derivatives) of a prediction of both."""
        pair = isinstance(y, Structured) or is_structure(y)
        return pair and isinstance(self.likelihood, WithDerivatives)

    def pair_parts(
        self, y: Any, weight: Tensor | None = None
    ) -> "Iterator[tuple[str, Predictive, Tensor, Tensor | None]]":
        """Values, then derivatives: prefix of their scores, prediction, targets and weights.

        Every known target is a data point of its own.

        Args:
            y: a pair (values, derivatives).
            weight: weight of each data point [B].
        """
        likelihood, pair = self.likelihood, self.check(y)
        assert isinstance(likelihood, WithDerivatives) and isinstance(pair, Structured)
        parts = likelihood.parts(self.members, pair)
        for prefix, part in zip(("", "derivatives_"), parts, strict=True):
            members, kept = part.outputs.flatten(1, -2), part.known.flatten()
            shares = None
            if weight is not None:
                shares = weight.repeat_interleave(len(kept) // len(weight))[kept]
            if bool(kept.any()):
                pred = Predictive(members[:, kept], part.likelihood, self.weights)
                yield prefix, pred, part.y.flatten(0, -2)[kept], shares

    def values_alone(
        self, y: Any, weight: Tensor | None = None
    ) -> "tuple[Predictive, Any, Tensor | None]":
        """Prediction, targets and weights of the known values, without derivatives."""
        if not self.takes_pair(y):
            return self, y, weight
        known = [each[1:] for each in self.pair_parts(y, weight) if not each[0]]
        if not known:
            raise DataError("no value is known, only derivatives; give targets of the values")
        return known[0]

    @property
    def _has_classes(self) -> bool:
        return self.likelihood.about.has_classes

    @property
    def _one_hot(self) -> bool:
        """Whether the mean is a probability of each class, and not one number per column."""
        return self._has_classes and "binary" not in self.likelihood.about.kinds

    @cached_property
    def member_means(self) -> Tensor:
        """Mean of the target under each member, [M, B] or [M, B, K]; for classes, probabilities."""
        means = self.likelihood.mean(self.members)
        return means if self._one_hot else self.as_targets(means)

    @cached_property
    def _member_probs(self) -> Tensor:
        binary = "binary" in self.likelihood.about.kinds
        return self.likelihood.probs(self.members) if binary else self.member_means

    @cached_property
    def _entropy(self) -> Tensor:
        return self.likelihood.entropy(self.columns.mean, lambda: self.columns.variance)

    @cached_property
    def _aleatoric(self) -> Tensor:
        return self.by_blocks(mean_entropy)

    @cached_property
    def _disagreement(self) -> Tensor:
        return self.by_blocks(deviation)

    def _only(self, kind: str, what: str, instead: str) -> None:
        if kind not in self.likelihood.about.kinds:
            raise ConfigError(f"{self.task} has no {what}; use {instead}")


prediction = instance_of(Predictive, "a prediction, such as shoal.predict(run, x)")
"""The check of an argument that is a prediction."""

Columns = dict[str, np.ndarray]


def main_columns(pred: Any) -> Columns:
    """The prediction in few columns, as `shoal predict` writes them."""
    pred = pred.columns
    if not pred.likelihood.about.has_classes:
        return _numbered({"mean": pred.mean, "stddev": pred.stddev})
    if pred.probs.ndim > 2:
        return {f"probability_{k}": _array(column) for k, column in enumerate(pred.mean.T)}
    return {
        "class": _array(pred.labels()),
        "probability": _array(pred.confidence()),
        "entropy": _array(pred.entropy()),
        "disagreement": _array(pred.disagreement()),
    }


def frame_columns(pred: Any, level: float, classes: Sequence[str] | None) -> Columns:
    """All columns of `Predictive.to_frame`; sites of a data point have rows of their own."""
    pred = pred.columns
    points, sites = len(pred), pred.members.shape[2:-1].numel()
    place = {}
    if pred.members.ndim > 3:
        place = {
            "point": np.repeat(np.arange(points), sites),
            "site": np.tile(np.arange(sites), points),
        }
        pred = pred.points()[0]
    if "loss" in pred.likelihood.about.kinds:
        return (
            place | _numbered({"mean": pred.mean}) | {"disagreement": _array(pred.disagreement())}
        )
    columns = main_columns(pred)
    if pred.likelihood.about.has_classes:
        columns |= _class_columns(pred, columns, classes)
    elif {"intervals", "gaussian"} & {*pred.likelihood.about.kinds}:
        low, high = pred.interval(level)
        columns |= _numbered({"low": low, "high": high})
    return place | columns


def _class_columns(pred: Any, columns: Columns, classes: Sequence[str] | None) -> Columns:
    parts = {
        "entropy": pred.entropy(),
        "aleatoric": pred.aleatoric(),
        "mutual_information": pred.mutual_information(),
        "disagreement": pred.disagreement(),
    }
    more = {name: _array(values) for name, values in parts.items()}
    if pred.probs.ndim > 2:  # several labels at once
        return more
    count = pred.probs.shape[-1]
    if classes is not None and len(classes) != count:
        raise ConfigError(f"the prediction has {count} classes, but {len(classes)} names came")
    names = np.arange(count) if classes is None else np.asarray(list(classes), dtype=object)
    each = {f"p({name})": _array(pred.probs[:, k]) for k, name in enumerate(names)}
    return {"class": names[columns["class"]], **more, **each}


def _numbered(values: dict[str, Tensor]) -> Columns:
    """Columns [B, K] side by side: `mean` and `stddev`, or `mean_0`, `stddev_0`, `mean_1`, ..."""
    width = next(iter(values.values())).shape[-1]
    return {
        name if width == 1 else f"{name}_{k}": _array(columns[:, k])
        for k in range(width)
        for name, columns in values.items()
    }


def _array(values: Tensor) -> np.ndarray:
    return torch.as_tensor(values).detach().cpu().numpy()


POINTS, NUMBERS = 500, 4_000_000
"""Most data points, and most outputs of all members together."""

BINS = 10


def summary(pred: Any) -> tuple[dict[str, str], str]:
    """Facts about a `Predictive`, and its figure as SVG; an empty text if it has none."""
    kinds = pred.likelihood.about.kinds
    if "classes" not in kinds and "numbers" not in kinds:
        return {}, ""
    some = _some(pred)
    note = "" if len(some) == _points(pred) else f" (of {len(some)} points)"
    facts, figure = _class_summary(some) if "classes" in kinds else _number_summary(some)
    return {f"{name}{note}": fact for name, fact in facts.items()}, figure


def _points(pred: Any) -> int:
    """Number of data points, each site of a data point counted."""
    return math.prod(pred.members.shape[1:-1])


def _some(pred: Any) -> Any:
    """The prediction for evenly spaced data points, every site a data point."""
    each = max(pred.members[:, :1].numel(), 1)
    count = max(1, min(len(pred), POINTS, NUMBERS // each))
    chosen = torch.linspace(0, len(pred) - 1, count).round().long()
    some, _ = pred[chosen].points()
    if len(some) > POINTS:
        some = some[torch.linspace(0, len(some) - 1, POINTS).round().long()]
    return some


def _class_summary(pred: Any) -> tuple[dict[str, str], str]:
    """Mean confidence and entropy; how many data points have which confidence."""
    confidence = pred.confidence().flatten().double()
    entropy, epistemic = pred.entropy().mean(), pred.mutual_information().mean()
    facts = {"mean confidence": percent(float(confidence.mean()))}
    facts["mean predictive entropy"] = _parted(float(entropy), float(epistemic))
    finite = confidence[confidence.isfinite()]
    if finite.numel() == 0:
        return facts, ""
    shares = torch.histc(finite, BINS, 0, 1) / finite.numel()
    return facts, bars_svg(shares.tolist(), "confidence", (0, 1), "share of points")


def _parted(entropy: float, epistemic: float) -> str:
    share = percent(epistemic / entropy) if entropy > 0 and math.isfinite(epistemic) else "0 %"
    return f"{number(entropy)} nats, {share} epistemic"


def _number_summary(pred: Any) -> tuple[dict[str, str], str]:
    """Mean standard deviations, and the predictions in order with both uncertainties."""
    mean, deviation = pred.mean, pred.stddev
    spread = (deviation.square() - pred.average(pred.likelihood.variance(pred.members))).clamp(0)
    among = spread.sqrt()
    facts = {
        "mean standard deviation": number(float(deviation.mean())),
        "its epistemic part": number(float(among.mean())),
    }
    first = mean[:, 0].double()
    if not first.isfinite().any():
        return facts, ""
    order = first.argsort()
    middle, total, epistemic = (t[order, 0].double() for t in (mean, deviation, among))
    curves = {
        "": _banded(middle, 2 * total),
        "mean, ± 2 standard deviations (darker: epistemic)": _banded(middle, 2 * epistemic),
    }
    column = "" if mean.shape[-1] == 1 else " of the first column"
    ends = (1, len(middle))
    return facts, curves_svg(curves, "points, by prediction", ends, f"prediction{column}")


def _banded(middle: Tensor, reach: Tensor) -> Curve:
    low, high = (middle - reach).tolist(), (middle + reach).tolist()
    return Curve(middle.tolist(), low=low, high=high)

"""Likelihoods of labels: one of several classes, classes in order, and yes or no."""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor
from torch.nn import functional as F

from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError
from shoal.core.registry import later_field
from shoal.data.batches.arrays import check_labels
from shoal.inference.likelihoods.likelihood import Likelihood, Task, as_columns, registry

__all__ = ["Bernoulli", "Categorical", "Classes", "Labels", "Ordinal"]


@dataclass(frozen=True, repr=False)
class Labels(Likelihood):
    """Labels with logits f: a calibration divides them by one temperature T, p(y | f / T).

    Attributes:
        temperature: T; None before a calibration.
    """

    temperature: float | None = field(default=None, init=False, repr=False)

    def _tempered(self, logits: Tensor) -> Tensor:
        return logits if self.temperature is None else logits / self.temperature

    @property
    def calibration(self) -> dict[str, list[float]]:
        """The temperature of the logits."""
        return {} if self.temperature is None else {"temperature": [self.temperature]}

    def calibrated(self, values: Tensor) -> Self:
        """The likelihood whose logits are divided by the one number in `values`."""
        other = copy.copy(self)
        object.__setattr__(other, "temperature", float(values))
        return other

    @property
    def uncalibrated(self) -> Self:
        """The likelihood at temperature 1, as it trains members."""
        if self.temperature is None:
            return self
        other = copy.copy(self)
        object.__setattr__(other, "temperature", None)
        return other

    @property
    def state(self) -> dict[str, Tensor]:
        """The temperature, if there is one."""
        return {n: torch.tensor(v, dtype=torch.float64) for n, v in self.calibration.items()}

    def restored(self, state: Mapping[str, Tensor]) -> Self:
        """The likelihood with the temperature of a file; most files have none."""
        if not state:
            return self
        value = state.get("temperature")
        if len(state) > 1 or value is None or value.numel() != 1 or not 0 < value < math.inf:
            raise CheckpointCorrupt(
                f"the file has no temperature for a {type(self).__name__}; use another"
            )
        return self.calibrated(value)


@dataclass(frozen=True, repr=False)
class Classes(Labels):
    """One of C classes per target: labels [B, *S], or soft labels [B, *S, C] that sum to 1.

    A subclass gives the log probabilities of the classes.
    """

    about: ClassVar[Task] = Task(
        "classification",
        kinds=("any", "classes"),
        measures=("accuracy", "nll", "brier", "ece", "effective_functions"),
        under_shift=("accuracy", "ece"),
        uncertainty="entropy",
    )

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log probabilities of all classes [..., C]."""
        raise NotImplementedError

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability of the labels y; for soft labels, its expectation."""
        logs = self.log_probs(outputs)
        if y.is_floating_point():
            return _expected(y, logs)
        return logs.gather(-1, y.expand(logs.shape[:-1]).unsqueeze(-1)).squeeze(-1)

    def mixture_log_prob(self, outputs: Tensor, y: Tensor, weights: Tensor | None) -> Tensor:
        """Log probability under the mixture; for soft labels, its expectation."""
        if not y.is_floating_point():
            return super().mixture_log_prob(outputs, y, weights)
        logs = self.log_probs(outputs)
        shares = math.log(1 / len(logs)) if weights is None else weights.log()
        shares = torch.as_tensor(shares).to(logs).view(-1, *[1] * (logs.ndim - 1))
        return _expected(y, (logs + shares).logsumexp(0))

    def probs(self, outputs: Tensor) -> Tensor:
        """Class probabilities [..., C]."""
        return self.log_probs(outputs).exp()

    def mean(self, outputs: Tensor) -> Tensor:
        """Class probabilities [..., C], the mean of the one-hot label."""
        return self.probs(outputs)

    def variance(self, outputs: Tensor) -> Tensor:
        """p (1 - p) of the one-hot label [..., C]."""
        probs = self.probs(outputs)
        return probs * (1 - probs)

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy of the probabilities."""
        return torch.special.entr(mean).sum(-1)

    def affinity(self, outputs: Tensor) -> Tensor:
        """Mean over the inputs of the sum over classes of sqrt(p_i p_j)."""
        root = self.probs(outputs).double().sqrt().flatten(1)
        return root @ root.T / outputs.shape[1:-1].numel()

    def labels(self, y: Tensor) -> Tensor:
        """The class of each target; for soft labels, the most probable class."""
        return y.argmax(-1) if y.is_floating_point() else y

    def target_probs(self, y: Tensor, classes: int) -> Tensor:
        """One-hot rows [..., C], or the soft labels."""
        return y if y.is_floating_point() else F.one_hot(y, classes)

    def classes(self, outputs: int) -> int:
        """Number of classes of a network with this many outputs."""
        return outputs

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse labels that are not integers below the number of classes, or soft labels."""
        classes = self.classes(outputs)
        if y.is_floating_point() and y.ndim == 2 + sites and y.shape[-1] == classes:
            _check_soft(y)
            return
        counted = self.counted(y)
        check_labels((y if counted is None else y.where(counted, 0)).flatten(), classes)
        if y.ndim < 1 + sites:
            wanted = "[B, T]" if sites == 1 else "[B, H, W]"
            raise DataError(
                f"labels have shape {tuple(y.shape)}, but the network predicts a label for each "
                f"token or place; give labels of shape {wanted}"
            )
        if y.ndim != 1 + sites:
            raise DataError(
                f"labels have shape {tuple(y.shape)}, but the network predicts one label for each "
                f"of {1 + sites} axes; type y.argmax(-1) for one-hot rows"
            )

    def prepared(self, y: Tensor, outputs: int, sites: int = 0) -> Tensor:
        """Labels [B, *S], or soft labels [B, *S, C]."""
        self.check(y, outputs, sites)
        return y


def _expected(y: Tensor, logs: Tensor) -> Tensor:
    """The mean of log probabilities under soft labels; a class of share 0 may be impossible."""
    return torch.where(y > 0, y.to(logs.dtype) * logs, 0.0).sum(-1)


def _check_soft(y: Tensor) -> None:
    wrong = ((y < 0).any(-1) | ((y.sum(-1) - 1).abs() > 1e-3)).flatten()
    if wrong.any():
        first = int(wrong.nonzero()[0])
        row = ", ".join(f"{value:g}" for value in y.reshape(-1, y.shape[-1])[first, :4].tolist())
        raise DataError(
            f"soft labels must be at least 0 with sum 1, but row {first} is {row}"
            f"{', ...' if y.shape[-1] > 4 else ''}; divide each row by its sum"
        )


@registry.register("categorical")
@dataclass(frozen=True, repr=False)
class Categorical(Classes):
    """Classes by softmax: log p(y | f) = f_y - log sum_c exp f_c.

    Training with weights, smoothing and ignored labels equals `torch.nn.functional.cross_entropy`.
    Metrics use the plain probabilities and leave ignored labels out.

    Attributes:
        smoothing: share eps of each training label that is spread evenly over the classes.
        class_weights: how much a label of each class counts in training; empty for 1.
        ignore_index: label that counts nothing, such as padding; None if there is none.

    >>> Categorical().log_prob(torch.zeros(1, 4), torch.tensor([2])).exp()
    tensor([0.2500])
    """

    smoothing: float = later_field(0.0)
    class_weights: tuple[float, ...] | None = later_field(None)
    ignore_index: int | None = later_field(None)
    _weights: Tensor | None = field(default=None, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if not 0 <= self.smoothing < 1:
            raise ConfigError(f"smoothing must be at least 0 and below 1, not {self.smoothing}")
        if self.class_weights is None:
            return
        values = tuple(float(value) for value in self.class_weights)
        object.__setattr__(self, "class_weights", values)
        least = min(values, default=-1.0)
        if not all(map(math.isfinite, values)) or least < 0 or not any(values):
            raise ConfigError(f"class_weights must be numbers of at least 0, not {list(values)}")
        if self.smoothing and least == 0:
            raise ConfigError("class_weights of 0 need smoothing=0; give every class some weight")

    @property
    def unweighted(self) -> bool:
        """Whether the objective is the log probability and every label counts 1."""
        plain = not self.smoothing and self.class_weights is None and self.temperature is None
        return plain and self.ignore_index is None

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log softmax [..., C]."""
        return self._tempered(outputs).log_softmax(-1)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log probability of the labels y [B, *S]; 0 for ignored labels."""
        if y.is_floating_point():
            return super().log_prob(outputs, y)
        y, ignored = self._known(y)
        # Matrix products put data points next to each other; this layout is fast for few classes.
        labels = y.expand(outputs.shape[:-1]).unsqueeze(-2)
        log_probs = F.log_softmax(self._tempered(outputs).mT, -2).gather(-2, labels).squeeze(-2)
        return log_probs if ignored is None else log_probs.masked_fill(ignored, 0.0)

    def objective(self, outputs: Tensor, y: Tensor) -> Tensor:
        r"""$(1 - ε) \log p_y + \frac{ε}{C} \sum_c \frac{w_c}{w_y} \log p_c$; `weight` has the w_y.

        For soft labels q, $\sum_c w_c ((1 - ε) q_c + ε / C) \log p_c$.
        """
        soft, eps = y.is_floating_point(), self.smoothing
        if not eps and (self.class_weights is None or not soft):
            return self.log_prob(outputs, y)
        logs, w, C = self.log_probs(outputs), self._class_weights(outputs), outputs.shape[-1]
        if soft:
            shares = (1 - eps) * y.to(logs.dtype) + eps / C
            return _expected(shares if w is None else w * shares, logs)
        y, ignored = self._known(y)
        even = logs.mean(-1) if w is None else (w * logs).mean(-1) / w[y]
        labels = y.expand(logs.shape[:-1]).unsqueeze(-1)
        smoothed = (1 - eps) * logs.gather(-1, labels).squeeze(-1) + eps * even
        return smoothed if ignored is None else smoothed.masked_fill(ignored, 0.0)

    def weight(self, y: Tensor) -> Tensor | None:
        """The weight of each label's class, 0 for ignored labels; None if all count 1."""
        if y.is_floating_point() or (self.class_weights is None and self.ignore_index is None):
            return None
        y, ignored = self._known(y)
        w = self._class_weights(y)
        weights = torch.ones_like(y, dtype=torch.get_default_dtype()) if w is None else w[y]
        return weights if ignored is None else weights.masked_fill(ignored, 0.0)

    def counted(self, y: Tensor) -> Tensor | None:
        """Which labels are not ignored; None if none can be."""
        if self.ignore_index is None or y.is_floating_point():
            return None
        return y != self.ignore_index

    def probs(self, outputs: Tensor) -> Tensor:
        """Class probabilities [..., C]."""
        return self._tempered(outputs).softmax(-1)

    def predicted(self, outputs: Tensor) -> Tensor:
        """The class of the largest logit [...]."""
        return outputs.argmax(-1)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The logit of the label; 0 for ignored labels."""
        if y.is_floating_point():
            return (y.to(outputs.dtype) * outputs).sum(-1)
        y, ignored = self._known(y)
        logits = outputs.gather(-1, y.expand(outputs.shape[:-1]).unsqueeze(-1)).squeeze(-1)
        return logits if ignored is None else logits.masked_fill(ignored, 0.0)

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse labels that are no classes, and another number of class weights."""
        if self.class_weights is not None and len(self.class_weights) != outputs:
            raise ConfigError(
                f"class_weights has {len(self.class_weights)} numbers, but the network has "
                f"{outputs} outputs; give one weight per class"
            )
        super().check(y, outputs, sites)

    def initialised_from(self, y: Tensor, sites: int = 0, weight: Tensor | None = None) -> Self:
        """The likelihood with its class weights on the device of the targets."""
        if self.class_weights is None:
            return self.uncalibrated
        other = copy.copy(self.uncalibrated)
        object.__setattr__(other, "_weights", self._class_weights(y))
        return other

    def _known(self, y: Tensor) -> tuple[Tensor, Tensor | None]:
        """Labels that can be looked up, and which of them are ignored."""
        if self.ignore_index is None:
            return y, None
        ignored = y == self.ignore_index
        return y.masked_fill(ignored, 0), ignored

    def _class_weights(self, like: Tensor) -> Tensor | None:
        """The class weights [C]; a copy to a device would stop the capture of a graph."""
        if self.class_weights is None:
            return None
        exact = torch.float32 if like.device.type == "mps" else torch.float64
        dtype = like.dtype if like.is_floating_point() else exact
        if self._weights is not None:
            return self._weights.to(like.device, dtype)
        return torch.tensor(self.class_weights, device=like.device, dtype=dtype)


@registry.register("ordinal", cite=("mccullagh1980regression",))
@dataclass(frozen=True, repr=False)
class Ordinal(Classes):
    r"""Classes in order, by thresholds: P(y <= k | f) = sigmoid(t_k).

    The network returns C - 1 outputs for C classes: t_0 = f_0 and t_k = t_(k-1) + softplus(f_k), so
    that the thresholds increase. Then $p_k = σ(t_k)\, σ(-t_{k-1})\, σ(f_k)$, without a difference.
    A calibration divides the thresholds t_k by its temperature.
    McCullagh (1980), doi 10.1111/j.2517-6161.1980.tb01109.x.

    >>> Ordinal().probs(torch.zeros(1, 1))
    tensor([[0.5000, 0.5000]])
    """

    about: ClassVar[Task] = Task(
        "ordinal classification",
        kinds=("any", "classes", "ordinal"),
        measures=("accuracy", "label_mae", "nll", "rps", "ece", "effective_functions"),
        under_shift=("accuracy", "label_mae"),
        uncertainty="entropy",
    )

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Log probabilities of all classes [..., C]."""
        first, rest = outputs[..., :1], outputs[..., 1:]
        steps = F.softplus(rest)
        thresholds = self._tempered(torch.cat([first, first + steps.cumsum(-1)], -1))
        below, above = F.logsigmoid(thresholds), F.logsigmoid(-thresholds)
        # log(1 - exp(-step)), which is log sigmoid(f) at temperature 1
        between = F.logsigmoid(rest)
        if self.temperature is not None:
            between = (-torch.expm1(-self._tempered(steps))).log()
        return F.pad(below, (0, 1)) + F.pad(above, (1, 0)) + F.pad(between, (1, 1))

    def width(self, targets: int) -> int:
        """One threshold between neighbouring classes."""
        return targets - 1

    def classes(self, outputs: int) -> int:
        """One class more than outputs."""
        return outputs + 1

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The log probability of the label."""
        return self.log_prob(outputs, y)

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse labels above the number of outputs."""
        if not y.is_floating_point() and y.numel() and int(y.max()) > outputs:
            raise DataError(
                f"y holds the class {int(y.max())}, but {outputs} outputs are thresholds of the "
                f"classes 0 to {outputs}; give the network one output less than classes"
            )
        super().check(y, outputs, sites)


@registry.register("bernoulli")
@dataclass(frozen=True, repr=False)
class Bernoulli(Labels):
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
        logits = self._tempered(outputs)
        return y * logits - F.softplus(logits)

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
        logits = self._tempered(outputs)
        both = torch.stack([(-logits).sigmoid(), logits.sigmoid()], -1)
        return both.squeeze(-2) if outputs.shape[-1] == 1 else both

    def mean(self, outputs: Tensor) -> Tensor:
        """Probability of 1 [..., K]."""
        return self._tempered(outputs).sigmoid()

    def variance(self, outputs: Tensor) -> Tensor:
        """p (1 - p) [..., K]."""
        logits = self._tempered(outputs)
        return logits.sigmoid() * (-logits).sigmoid()

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy of independent columns."""
        return (torch.special.entr(mean) + torch.special.entr(1 - mean)).sum(-1)

    def affinity(self, outputs: Tensor) -> Tensor:
        """Mean over the inputs of the product over columns of sum sqrt(p_i p_j)."""
        flat = self._tempered(outputs.double().flatten(1, -2))
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

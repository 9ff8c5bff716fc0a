"""Targets that are derivatives of the outputs by an input, beside the targets of the outputs.

The outputs of a member end in the derivatives (`shoal.engine.members.input_derivatives`), so a step
sees values and derivatives as one tensor: `[..., C + D K]` for K columns and D numbers of an input.
"""

import copy
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple, Self

import torch
from torch import Tensor

from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError
from shoal.core.registry import nested_field
from shoal.core.structure import Structured
from shoal.engine.members.input_derivatives import InputDerivatives
from shoal.inference.likelihoods.likelihood import Likelihood, Task, registry
from shoal.inference.likelihoods.real_targets import (
    Gaussian,
    HomoscedasticGaussian,
    Normal,
    RealTargets,
    Standardising,
    StudentT,
)

__all__ = ["Layout", "Noiseless", "PairPart", "WithDerivatives"]


class Layout(NamedTuple):
    """Where values and derivatives are in the outputs of a member.

    Attributes:
        width: number of outputs C before the derivatives.
        columns: number of columns K that are differentiated.
        value_ndim: number of axes of the values' targets; 0 if it is not known.
        rows: shape of one row of the input, without its first axis.
    """

    width: int
    columns: int
    value_ndim: int
    rows: tuple[int, ...]


class PairPart(NamedTuple):
    """Outputs [..., K] of a part, its targets, which of them are known, and its likelihood."""

    likelihood: Likelihood
    outputs: Tensor
    y: Tensor
    known: Tensor


class Noiseless(Likelihood):
    """Members predict numbers without noise: the variance of each is 0."""

    about: ClassVar[Task] = Task("derivatives", kinds=("numbers",))

    def mean(self, outputs: Tensor) -> Tensor:
        """The outputs."""
        return outputs

    def variance(self, outputs: Tensor) -> Tensor:
        """Zero."""
        return torch.zeros_like(outputs)

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self)

    __hash__ = object.__hash__


@registry.register("with-derivatives", cite=("czarnecki2017sobolev",))
@dataclass(frozen=True, repr=False)
class WithDerivatives(Likelihood):
    r"""Real targets together with their derivatives by an input, such as energies and forces.

    With outputs f of a member, targets y and targets g of the derivatives,
    $\log p(y \mid f) + w \sum_d \log p(g_d \mid s\, b\, \partial f / \partial x_d)$. Here b is the
    standard deviation of the training targets if `values` standardises them, and 1 otherwise. A
    target that is NaN is not known and does not count. Targets come as a pair (values,
    derivatives), or as a dict of the two in this order: [N] and [N, *x], or [N, K] and
    [N, K, *x]. Czarnecki et al. (2017), arXiv 1706.04859.

    Attributes:
        values: likelihood of the values: "homoscedastic", "gaussian", "heteroscedastic" or
            "student-t".
        of: name of the input; None for the only real input.
        weight: factor w of the derivatives' log density.
        sign: 1, or -1 for forces, which are minus the derivatives of an energy.
        derivatives: likelihood of the derivatives, "homoscedastic" or "gaussian". By default their
            noise is learned if that of the values is.
    """

    values: Likelihood = nested_field(registry, HomoscedasticGaussian)
    of: str | None = None
    weight: float = 1.0  # pyright: ignore[reportIncompatibleMethodOverride, reportAssignmentType]
    sign: int = 1
    derivatives: Likelihood | None = nested_field(registry, lambda: None)
    layout: Layout | None = field(default=None, init=False, repr=False)

    about: ClassVar[Task] = RealTargets.about

    def __post_init__(self) -> None:
        if self.sign not in (1, -1):
            raise ConfigError(f"sign must be 1 or -1, not {self.sign}")
        if not 0 <= self.weight < math.inf:
            raise ConfigError(f"weight must be a number from 0 on, not {self.weight}")
        if self.weight and not isinstance(self.values, Normal | StudentT):
            raise ConfigError(
                f"derivatives need values with a Gaussian or Student-t likelihood, "
                f"not {self.values}; type values='homoscedastic'"
            )
        if self.derivatives is None:
            learned = isinstance(self.values, Standardising)
            same = self.values if isinstance(self.values, Gaussian) else Gaussian()
            object.__setattr__(self, "derivatives", HomoscedasticGaussian() if learned else same)
        if not isinstance(self.derivatives, Gaussian | HomoscedasticGaussian):
            raise ConfigError(
                f"derivatives have the likelihood 'homoscedastic' or 'gaussian', "
                f"not {self.derivatives}"
            )
        object.__setattr__(self, "about", self.values.about)

    def __repr__(self) -> str:
        of = "" if self.of is None else f", of={self.of!r}"
        if not self.weight:
            return f"WithDerivatives({self.values}{of})"
        sign = "" if self.sign == 1 else ", sign=-1"
        weight = "" if self.weight == 1 else f", weight={self.weight:g}"
        return f"WithDerivatives({self.values}{of}{weight}{sign}, derivatives={self._noise})"

    @classmethod
    def for_prediction(cls, values: Likelihood, of: str | None) -> "WithDerivatives":
        """Derivatives of the mean under a likelihood, for predictions without their targets."""
        return cls(values, of, weight=0.0)

    def with_parts(self, **changes: Any) -> Self:
        """The same with other `values`, `derivatives` or another `layout`."""
        other = copy.copy(self)
        for name, value in changes.items():
            object.__setattr__(other, name, value)
        return other

    def with_layout(self, width: int, columns: int, rows: tuple[int, ...]) -> Self:
        """The likelihood of outputs whose places are known, for predictions."""
        ndim = 0 if self.layout is None else self.layout.value_ndim
        return self.with_parts(layout=Layout(width, columns, ndim, rows))

    # What the passes of the networks differentiate, and where it is in their outputs.

    @property
    def derivatives_by(self) -> InputDerivatives:  # pyright: ignore
        """What the outputs of members end in."""
        return InputDerivatives(self.of, self.differentiated, float(self.sign))

    @property
    def standardises(self) -> bool:  # pyright: ignore
        """Whether the values are standardised."""
        return self.values.standardises

    def differentiated(self, outputs: Tensor) -> Tensor:
        """The numbers [..., K] of outputs [..., C] whose derivatives the outputs end in."""
        if not self.weight:
            return self.values.mean(outputs)
        return outputs[..., : outputs.shape[-1] // self.values.width(1)]

    def value_outputs(self, outputs: Tensor) -> Tensor:
        """The outputs [..., C] without the derivatives."""
        return outputs if self.layout is None else outputs[..., : self.layout.width]

    def derivative_part(self, outputs: Tensor) -> tuple[Tensor, Likelihood]:
        """Derivatives [..., *x, K] in the unit of their likelihood, and this likelihood."""
        layout = self.layout
        if layout is None or outputs.shape[-1] == layout.width:
            raise ConfigError(
                "the prediction has no derivatives; type shoal.predict(run, x, derivatives_of=...)"
            )
        shape = (-1, *layout.rows, layout.columns)
        members = outputs[..., layout.width :].unflatten(-1, shape)
        if not self.weight:
            return members, Noiseless()
        return members * self._ratio(members), self._noise

    @property
    def _noise(self) -> Gaussian | HomoscedasticGaussian:
        assert isinstance(self.derivatives, Gaussian | HomoscedasticGaussian)
        return self.derivatives

    def _ratio(self, like: Tensor) -> Tensor | float:
        """Unit of the values over unit of the derivatives [K]."""
        units = self.values.unit, self._noise.unit
        value, slope = (u.to(like) if isinstance(u, Tensor) else u for u in units)
        return value / slope

    # Targets are pairs.

    def pair(self, y: Structured) -> tuple[Tensor, Tensor]:
        """Targets of the values [..., B, K] and of the derivatives [..., B, D, K]."""
        if not isinstance(y, Structured) or len(y.tensors) != 2:
            raise DataError(
                "targets with derivatives are a pair (values, derivatives), such as "
                "fit(ensemble, (x, (energy, forces)), ...)"
            )
        values, slopes = y.tensors.values()
        known, axes = self.layout, 1  # axes before the columns: [B], or [M, B] of own batches
        columns = 1 if values.ndim == 1 else values.shape[-1]
        if known is not None:
            columns = known.columns
            axes = 2 if slopes.ndim - len(known.rows) - (columns > 1) == 3 else 1
        if values.ndim == axes:
            values = values.unsqueeze(-1)
        lead = values.shape[:-1]
        fits = values.shape[-1] == columns and slopes.shape[: len(lead)] == lead
        if not fits or slopes[0].numel() % columns:
            raise DataError(
                f"derivatives have shape {tuple(slopes.shape)}, values {tuple(values.shape)}; "
                f"wanted the derivatives of every value"
            )
        return values, slopes.reshape(*lead, columns, -1).mT

    def parts(self, outputs: Tensor, y: Structured) -> tuple[PairPart, PairPart]:
        """Values [..., B, K] and derivatives [..., B, D, K], with zeros for unknown targets."""
        values, slopes = self.pair(y)
        columns = values.shape[-1]
        width = self.values.width(columns)
        found = outputs[..., width:].unflatten(-1, (-1, columns))
        if found.shape[-2] != slopes.shape[-2]:
            raise DataError(
                f"a data point has {slopes.shape[-2]} targets of derivatives, but its input has "
                f"{found.shape[-2]} numbers"
            )
        both = (
            (self.values, outputs[..., :width], values),
            (self._noise, found * self._ratio(found), slopes),
        )
        known = [~targets.isnan().any(-1) for *_, targets in both]
        return tuple(  # pyright: ignore[reportReturnType]
            PairPart(likelihood, out, torch.where(k.unsqueeze(-1), targets, 0.0), k)
            for (likelihood, out, targets), k in zip(both, known, strict=True)
        )

    def _joint(self, outputs: Tensor, y: Structured, term: str) -> Tensor:
        values, slopes = (
            torch.where(part.known, getattr(part.likelihood, term)(part.outputs, part.y), 0.0)
            for part in self.parts(outputs, y)
        )
        return values + self.weight * slopes.sum(-1)

    def log_prob(self, outputs: Tensor, y: Tensor) -> Tensor:
        """Log density of pairs, with the derivatives' factor; or that of values alone."""
        if isinstance(y, Structured):
            return self._joint(outputs, y, "log_prob")
        return self.values.log_prob(self.value_outputs(outputs), y)

    def objective(self, outputs: Tensor, y: Tensor) -> Tensor:
        """What training maximises for each pair [..., B]."""
        if isinstance(y, Structured):
            return self._joint(outputs, y, "objective")
        return self.values.objective(self.value_outputs(outputs), y)

    def ranked_score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """CRPS of the values [..., K]; 0 where a pair has no value."""
        if not isinstance(y, Structured):
            return self.values.ranked_score(self.value_outputs(outputs), y)
        part = self.parts(outputs, y)[0]
        found = part.likelihood.ranked_score(part.outputs, part.y)
        return torch.where(part.known.unsqueeze(-1), found, 0.0)

    def score(self, outputs: Tensor, y: Tensor) -> Tensor:
        """The output of each member for its values; the source of input gradients."""
        values = self.pair(y)[0] if isinstance(y, Structured) else y
        return self.values.score(self.value_outputs(outputs), values)

    def counted(self, y: Tensor) -> Tensor | None:
        """All pairs count; unknown parts of a pair are left out by their likelihood."""
        return None if isinstance(y, Structured) else self.values.counted(y)

    def width(self, targets: int) -> int:
        """Number of outputs of a network for this many columns."""
        return self.values.width(targets)

    def entropy(self, mean: Tensor, variance: Callable[[], Tensor]) -> Tensor:
        """Entropy of the values."""
        return self.values.entropy(mean, variance)

    def labels(self, y: Tensor) -> Tensor:
        """The class of each target of the values."""
        return self.values.labels(y)

    def target_probs(self, y: Tensor, classes: int) -> Tensor:
        """The class probabilities of the values' targets."""
        return self.values.target_probs(y, classes)

    @property
    def unit(self) -> Tensor | float:
        """Unit of the values."""
        return self.values.unit

    def check(self, y: Tensor, outputs: int, sites: int = 0) -> None:
        """Refuse targets that are no pair, or whose derivatives do not fit the input."""
        if not self.weight:
            raise ConfigError("derivatives with weight=0 are not trained; give a positive weight")
        values, slopes = self.pair(y)  # pyright: ignore[reportArgumentType]
        columns = values.shape[-1]
        known = ~values.isnan().any(-1)
        width = self.values.width(columns)
        if sites or outputs <= width:
            raise DataError(
                f"a network with derivatives gives {width} outputs for every data point, not one "
                f"for each of its sites; let the network return their sum"
            )
        if bool(known.any()):
            self.values.check(values[known], width)
        if outputs - width != slopes.shape[-1] * slopes.shape[-2]:
            raise DataError(
                f"the targets of the derivatives have {slopes[0].numel()} numbers for a data "
                f"point, but the outputs have {outputs - width} derivatives by this input"
            )

    def prepared(self, y: Tensor, outputs: int, sites: int = 0) -> Tensor:
        """Pairs as they are; values alone as their likelihood takes them."""
        if isinstance(y, Structured):
            self.pair(y)
            return y  # pyright: ignore[reportReturnType]
        return self.values.prepared(y, *self._width(outputs), *((sites,) if sites else ()))

    def _width(self, outputs: int) -> tuple[int]:
        return (outputs if self.layout is None else self.layout.width,)

    # Learned numbers are those of both likelihoods.

    def initialised_from(self, y: Tensor, sites: int = 0, weight: Tensor | None = None) -> Self:
        """Standardise values by their deviation, and derivatives by their root mean square."""
        raw = list(y.tensors.values()) if isinstance(y, Structured) else []
        values, slopes = self.pair(y)  # pyright: ignore[reportArgumentType]
        columns, known = values.shape[-1], ~values.isnan().any(-1)
        found = slopes[~slopes.isnan().any(-1)]
        if not bool(known.any()) or not len(found):
            raise DataError("no value or no derivative is known; leave out the likelihood of both")
        shares = None if weight is None else weight[known]
        mine = self.values.initialised_from(values[known], 0, shares)
        # numbers and their opposites have mean 0, and their root mean square as deviation
        noise = self._noise.initialised_from(torch.cat([found, -found]))
        rows = tuple(raw[1].shape[2 + (columns > 1) :])
        layout = Layout(self.values.width(columns), columns, raw[0].ndim, rows)
        return self.with_parts(values=mine, derivatives=noise, layout=layout)

    @property
    def state(self) -> dict[str, Tensor]:
        """Learned numbers of both likelihoods, and the layout of the outputs."""
        if self.layout is None:
            return {}
        width, columns, ndim, rows = self.layout
        numbers = torch.tensor([width, columns, ndim, *rows], dtype=torch.float64)
        both = {"values": self.values, "derivatives": self._noise}
        states = {f"{k}.{n}": t for k, each in both.items() for n, t in each.state.items()}
        return {"layout": numbers, **states}

    def restored(self, state: Mapping[str, Tensor]) -> Self:
        """The likelihood with the learned numbers of a checkpoint."""
        if not state:
            return self
        parts: dict[str, dict[str, Tensor]] = {"values": {}, "derivatives": {}, "layout": {}}
        for name, tensor in state.items():
            part, _, inner = name.partition(".")
            parts.setdefault(part, {})[inner] = tensor
        numbers = parts["layout"].get("", torch.zeros(0)).flatten().tolist()
        if len(parts) > 3 or len(numbers) < 3 or not all(n >= 0 and n % 1 == 0 for n in numbers):
            raise CheckpointCorrupt(
                f"the checkpoint has no numbers for {type(self).__name__}; use another"
            )
        width, columns, ndim, *rows = map(int, numbers)
        return self.with_parts(
            values=self.values.restored(parts["values"]),
            derivatives=self._noise.restored(parts["derivatives"]),
            layout=Layout(width, columns, ndim, tuple(rows)),
        )

    @property
    def calibration(self) -> dict[str, list[float]]:
        """The numbers of both likelihoods."""
        slopes = {f"derivatives_{n}": v for n, v in self._noise.calibration.items()}
        return self.values.calibration | slopes

    def calibrated(self, values: Tensor) -> Self:
        """The likelihood with another noise of the values; see `decisions.scaling.calibrated`."""
        return self.with_parts(values=self.values.calibrated(values))

    @property
    def uncalibrated(self) -> Self:
        """The likelihood as it trains members."""
        if not self.calibration:
            return self
        return self.with_parts(
            values=self.values.uncalibrated, derivatives=self._noise.uncalibrated
        )

    def statistics(
        self, outputs: Tensor, y: Tensor, alive: Tensor, weight: Tensor | None = None
    ) -> Tensor | None:
        """What both likelihoods learn from, one after the other."""
        found = []
        for part in self.parts(outputs, y):  # pyright: ignore[reportArgumentType]
            known = part.known.to(outputs.dtype)
            if weight is not None:
                known = known * weight.reshape(*weight.shape, *(1,) * (part.outputs.ndim - 3))
            found.append(part.likelihood.statistics(part.outputs, part.y, alive, known))
        both = [each for each in found if each is not None]
        return torch.cat(both) if both else None

    def learn(self, statistics: Tensor, points: float, n: float) -> None:
        """Both likelihoods learn their noise."""
        start = 0
        for likelihood in (self.values, self._noise):
            if isinstance(likelihood, RealTargets) and likelihood.learns_noise:
                end = start + (self.layout.columns if self.layout else len(statistics))
                likelihood.learn(statistics[start:end], points, n)
                start = end


def _of_values(name: str) -> Callable[..., Any]:
    """A quantity of the values, from outputs that end in derivatives."""

    def of_values(self: WithDerivatives, outputs: Tensor, *rest: Any) -> Any:
        return getattr(self.values, name)(self.value_outputs(outputs), *rest)

    of_values.__doc__ = f"`{name}` of the values."
    return of_values


for _name in ("mean", "variance", "moments", "cdf", "distance", "own_distance", "mixture_distance",
              "affinity", "probs", "predicted"):  # fmt: skip
    setattr(WithDerivatives, _name, _of_values(_name))

"""`run.worth`: what more members would add to a run, beside what they and alternatives cost."""

import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from shoal.core.arguments import checked, whole_from
from shoal.core.arguments import device as usable
from shoal.core.display.notebook import BLUE, Curve, curves_svg, facts_html
from shoal.core.display.text import counted, number, plus_minus, table
from shoal.core.display.text import seconds as duration
from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.structure import parted
from shoal.data.dataset import Dataset, Split
from shoal.engine.members.precision import full_precision
from shoal.evaluation.data_arguments import Inputs, Labelled, evaluation_data, placed
from shoal.evaluation.evaluate import draws_of, labelled_test, split_prediction
from shoal.prediction.metrics import point_weights
from shoal.prediction.predictive import Predictive
from shoal.prediction.worth import Gain, SizeCurve, size_curves
from shoal.training.folder.history import held_out_loss
from shoal.training.folder.run import Run, opened
from shoal.training.folder.run_folder import DRAWS

__all__ = [
    "Alternative",
    "Worth",
    "cost",
    "interval",
    "last_epochs",
    "member_seconds",
    "titled",
    "unit_of",
    "worth",
]

STEPS = (1, 2, 5)
"""Numbers of new members that are always shown, beside as many again and all there could be."""

_TITLES = {"nll": "NLL", "brier": "Brier score", "rmse": "RMSE", "crps": "CRPS"}


def titled(score: str) -> str:
    """The name of a score in text: "NLL", or "AUROC of letters"."""
    kind, _, of = score.partition(" ")
    return f"AUROC of {of}" if of else _TITLES.get(kind, kind)


@dataclass(frozen=True)
class Alternative:
    """Another use of time, measured: its gain in NLL over the run, and its further seconds.

    Attributes:
        name: what was done.
        gain: how much lower the NLL is, in nats.
        error: standard error of the gain over data points; NaN if it is not known.
        seconds: training time beyond that of the run; NaN if it is not known.
    """

    name: str
    gain: float
    error: float
    seconds: float


@dataclass(frozen=True, eq=False, repr=False)
class Worth:
    """What more members of a run are worth, and what they cost.

        found = run.worth((x_test, y_test))
        found.gain(2)              # Gain(more=2, value=0.004, error=0.001, low=-0.002, high=0.01)
        print(found.sentence(2))   # 2 more members: NLL lower by 0.004 ± 0.001 nats, for 31 s

    Attributes:
        data: name of the data.
        curves: expected scores by ensemble size: "nll", then those of the task, such as "accuracy"
            or "rmse", and "auroc NAME" of each OOD set.
        seconds: measured training time of one member; NaN if it is not known.
        beside: alternatives that were measured.
        unit: what is counted: "member", or "chain" for a run of draws.
    """

    data: str
    curves: Mapping[str, SizeCurve]
    seconds: float = math.nan
    beside: tuple[Alternative, ...] = ()
    unit: str = "member"

    @property
    def members(self) -> int:
        """Number of finite members, or chains, at hand."""
        return self.curves["nll"].members

    @property
    def points(self) -> int:
        """Number of data points."""
        return self.curves["nll"].points

    @property
    def steps(self) -> list[float]:
        """The numbers of new members in the table: a few, as many again, and infinitely many."""
        return [*sorted({*STEPS, self.members}), math.inf]

    @checked()
    def gain(self, more: int | float = 1, score: str = "nll") -> Gain:
        """What `more` new members add to a score, positive if they make it better.

        Args:
            more: number of new members; `math.inf` for as many as there could be.
            score: name of a curve.
        """
        if score not in self.curves:
            raise ConfigError(f"score must be one of {', '.join(self.curves)}, not {score!r}")
        more = more if more == math.inf else whole_from(1)("more", more)
        return self.curves[score].gain(more)

    def sentence(self, more: int | float = 1) -> str:
        """What `more` new members add to the NLL, and how long they train."""
        gain = self.gain(more)
        limit = f"infinitely many {self.unit}s"
        members = limit if math.isinf(more) else counted(int(more), f"more {self.unit}")
        price = more * self.seconds
        spent = f", for {cost(price)}" if math.isfinite(price) else ""
        change = f"lower by {plus_minus(gain.value, gain.error)}"
        if gain.value < 0:
            change = f"higher by {plus_minus(-gain.value, gain.error)}"
        return f"{members}: NLL {change} nats{spent}"

    @property
    def how(self) -> str:
        """How the averages over subsets were made."""
        curve, total = self.curves["nll"], 2**self.members - 1
        if curve.subsets == total:
            return f"Averages are over all {total:,} subsets of the {self.unit}s."
        error = number(float(curve.drawn.max()))
        drawn = f"{curve.subsets:,} subsets of the {self.unit}s: all of a size, or random ones"
        return f"Averages are over {drawn}. Drawing adds an error of {error} nats at most."

    @property
    def plain(self) -> dict[str, Any]:
        """Plain values: what `to_pandas` has in its rows, and the alternatives."""
        about = {"data": self.data, "points": self.points, "seconds_per_member": self.seconds}
        return about | {"sizes": self._rows(), "beside": [vars(each) for each in self.beside]}

    def to_pandas(self) -> Any:
        """A table with one row per score and ensemble size; sizes beyond the members are fitted."""
        return require("pandas", extra="frames").DataFrame(self._rows())

    def _rows(self) -> list[dict[str, Any]]:
        rows = []
        for score, curve in self.curves.items():
            for size, value in zip(curve.sizes, curve.shown, strict=True):
                rows.append({"score": score, "members": int(size), "value": float(value)})
            for more in self.steps[:-1]:
                size, gain = curve.members + int(more), curve.gain(more)
                fields = {"gain": gain.value, "error": gain.error, "low": gain.low}
                fields |= {"high": gain.high, "seconds": more * self.seconds}
                rows.append({"score": score, "members": size, "value": curve.at(size), **fields})
        return rows

    def __repr__(self) -> str:
        about = f"{counted(self.members, self.unit)}, {self.points} points of {self.data}"
        parts = [f"Worth of more {self.unit}s: {about}", self._sizes_table(), self._gains_table()]
        parts += [self._beside_table()] if self.beside else []
        return "\n\n".join([*parts, self.how])

    def _sizes_table(self) -> str:
        shown = [curve.shown for curve in self.curves.values()]
        sizes = self.curves["nll"].sizes
        chosen = np.unique(np.linspace(0, len(sizes) - 1, min(len(sizes), 8)).round().astype(int))
        rows = [[str(int(sizes[k])), *(number(float(v[k]), 5e-4) for v in shown)] for k in chosen]
        return table(rows, [f"{self.unit}s", *map(titled, self.curves)])

    def _gains_table(self) -> str:
        rows = []
        for more in self.steps:
            gain, price = self.gain(more), more * self.seconds
            name = "all" if math.isinf(more) else f"+{int(more)}"
            known = [plus_minus(gain.value, gain.error), interval(gain.low, gain.high)]
            rows.append([name, *known, cost(price) if math.isfinite(price) else "–"])
        return table(rows, ["more", "NLL lower by", "one growth, 95 %", "time"])

    def _beside_table(self) -> str:
        rows = [
            [each.name, plus_minus(each.gain, each.error), cost(each.seconds)]
            for each in self.beside
        ]
        return table(rows, ["beside", "NLL lower by", "time"])

    def _repr_html_(self) -> str:
        facts = {f"+{more}": self.sentence(more) for more in STEPS}
        facts |= {each.name: _told(each) for each in self.beside}
        title = f"What is one more {self.unit} worth? ({self.points} points of {self.data})"
        return facts_html(title, facts | {"averages": self.how}, self._figure())

    def _figure(self) -> str:
        curve, M = self.curves["nll"], self.members
        gains = [curve.gain(more) for more in range(1, M + 1)]
        now = [curve.at(size) for size in range(1, M + 1)]
        blank, then = [None] * (M - 1), [curve.at(M), *(curve.at(M + g.more) for g in gains)]
        low, high = ([now[-1], *(now[-1] - end for end in ends)] for ends in _ends(gains))
        curves = {
            "expected NLL": Curve([*now, *[None] * M]),
            "continued (area: one growth)": Curve(
                [*blank, *then], BLUE, dashed=True, low=[*blank, *low], high=[*blank, *high]
            ),
        }
        return curves_svg(curves, f"{self.unit}s", (1, 2 * M), "nats per data point")


def _ends(gains: Sequence[Gain]) -> tuple[list[float], list[float]]:
    return [gain.high for gain in gains], [gain.low for gain in gains]


def cost(seconds: float) -> str:
    """A training time, also a negative one."""
    if seconds < 0:
        return f"−{cost(-seconds)}"
    return duration(seconds) if seconds >= 1 else f"{seconds:.1g} s"


def interval(low: float, high: float) -> str:
    """Both ends of an interval.

    >>> interval(-0.0123, 0.0456)
    '−0.012 to 0.046'
    """
    return f"{number(low, (high - low) / 10)} to {number(high, (high - low) / 10)}"


def _told(each: Alternative) -> str:
    spent = f", for {cost(each.seconds)}" if math.isfinite(each.seconds) else ""
    return f"NLL lower by {plus_minus(each.gain, each.error)} nats{spent}"


@checked(device=usable)
@full_precision()
def worth(
    run: Run | str | os.PathLike[str],
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    *,
    ood: Mapping[str, Inputs] | None = None,
    beside: Mapping[str, Run | str | os.PathLike[str]] | None = None,
    device: torch.device | str | None = None,
    seed: int = 0,
) -> Worth:
    """What more members of a run are worth; see `Run.worth`."""
    run = placed(opened(run), device)
    dataset = evaluation_data(run, data, ood, verb="worth")
    test = labelled_test(dataset)
    pred = split_prediction(run, test, dataset.scaling)
    others = {
        name: split_prediction(run, Split(split.x), dataset.scaling).of_values
        for name, split in dataset.ood.items()
    }
    pred, y, weight = pred.values_alone(*parted(test.y))
    draws = draws_of(run)
    curves = size_curves(pred, y, ood=others, weight=weight, draws=draws, seed=seed)
    longer = last_epochs(run.history)
    measured = [] if longer is None else [longer]
    for name, other in _named(beside):
        theirs = split_prediction(placed(other, device), test, dataset.scaling)
        theirs = theirs.values_alone(parted(test.y)[0])[0]
        measured.append(_compared(name, run, other, pred, theirs, y, weight))
    seconds = member_seconds(run.config, run.provenance)
    return Worth(dataset.name, curves, seconds, tuple(measured), unit_of(run.config))


def _named(beside: Any) -> Iterator[tuple[str, Run]]:
    if beside is None:
        return
    if not isinstance(beside, Mapping):
        raise ConfigError(
            "beside is a dict of names to runs; type beside={'wider networks': other_run}"
        )
    for name, run in beside.items():
        yield str(name), opened(run)


def _compared(
    name: str, run: Run, other: Run, pred: Predictive, theirs: Predictive, y: Any, weight: Any
) -> Alternative:
    """How much lower the NLL of another run is, and its further training time."""
    if theirs.likelihood.about.kinds != pred.likelihood.about.kinds:
        raise ConfigError(
            f"the run '{name}' has another task ({theirs.task}) than this one ({pred.task})"
        )
    share = None if weight is None else point_weights(pred, pred.check(y), weight)
    (pred, targets), (theirs, _) = pred.points(y), theirs.points(y)
    gain = (theirs.log_prob(targets) - pred.log_prob(targets)).double()
    share = torch.ones_like(gain) if share is None else share
    share = share / share.sum()
    mean = (share * gain).sum()
    error = (share * (gain - mean)).norm() * math.sqrt(len(gain) / max(len(gain) - 1, 1))
    times = [each.provenance.get("seconds") or math.nan for each in (other, run)]
    return Alternative(name, float(mean), float(error), times[0] - times[1])


def member_seconds(config: Mapping[str, Any], provenance: Mapping[str, Any]) -> float:
    """Measured training time of one member or chain; NaN if the training is not known."""
    draws = (config.get(DRAWS) or {}).get("draws", 1)
    trained = int(config.get("members") or 0) // draws - int(config.get("frozen") or 0)
    spent = provenance.get("seconds") or math.nan
    return float(spent) / trained if trained > 0 else math.nan


def unit_of(config: Mapping[str, Any]) -> str:
    """What subsets are made of: members, or the chains of a run of draws."""
    return "chain" if config.get(DRAWS) else "member"


def last_epochs(history: Sequence[Mapping[str, Any]]) -> Alternative | None:
    """What the last quarter of the epochs gained on validation data; None without any."""
    count = len(history) // 4
    if count < 1:
        return None
    before, after = held_out_loss(history[-1 - count]), held_out_loss(history[-1])
    spent = [row.get("seconds") for row in history[-count:]]
    if not math.isfinite(before - after) or None in spent:
        return None
    name = f"last {counted(count, 'epoch')} (validation)"
    return Alternative(name, before - after, math.nan, float(sum(spent)))  # pyright: ignore

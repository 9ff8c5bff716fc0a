r"""Can draws be trusted? Diagnostics of the chains of `shoal.draw`, in predictions.

The weights of a network have symmetries: chains that differ in every weight may be the same
function. So R-hat and effective draws are those of *predictions* at some data points, and of the
log-likelihoods of these points.

Chains of networks stay near the mode where their member was trained, so R-hat *between* chains
exceeds the usual limit of 1.01 and is reported, not judged. Judged is each chain *within* itself,
its first half against its second.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from torch import Tensor

from shoal.core.display.notebook import Curve, curves_svg, facts_html
from shoal.core.display.text import counted, joined, number, percent, table
from shoal.core.errors import ConfigError
from shoal.core.optional import require
from shoal.core.random import generator
from shoal.core.structure import parted
from shoal.data.dataset import Scaling, Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.samplers import known_sampler
from shoal.inference.samplers.convergence import autocorrelation, effective_draws, split_rhat
from shoal.prediction.metrics.regression import in_units
from shoal.prediction.predict import member_outputs, training_of
from shoal.prediction.predictive import Predictive
from shoal.training.draw import REFUSED
from shoal.training.folder.run_folder import DRAWS

__all__ = ["FEWEST", "ChainDiagnostics", "Convergence", "Finding", "diagnose", "is_drawn"]

FEWEST = 12
"""Draws of a chain from which it can be judged: its thirds have four draws."""

POINTS = 200
"""Data points whose predictions are followed."""

RHAT = 1.2
"""Limit of R-hat within a chain. Of a sound chain with n effective draws, R-hat² - 1 is about 2 / n
on average, and below 7.7 / n for 95 % of predictions (chi-square). So 1.2 is what 17 effective
draws give by chance; beyond it the halves differ by more, or effective draws are fewer."""

EFFECTIVE = 10
"""Fewest effective draws of a chain. Its mean is then known to a third of a standard deviation."""

MOST = 0.95
"""Share of the predictions that must keep the limits: of many, a few exceed them by chance."""

DRIFT = 4.0
"""Limit of the drift of the NLL, in standard errors. Errors from short thirds are rough: 3 would
accuse one sound chain in twenty, 4 one in a hundred."""

AGREE = 1.05
"""R-hat between chains below which chains are said to agree."""

ENERGY = 10.0
"""Limit of the energy error, as a multiple of what the sampler was asked for. The error grows with
the sixth power of the step size, so such steps are 1.5 times too long."""

ACCEPTED = 0.5
"""Least mean acceptance of trajectories: samplers aim at 0.8, so the step size was not found."""

STUCK = 0.1
"""A chain is stuck if its predictions vary less than this share of the median chain's, or if most
draws repeat the draw before. It adds one point to the mixture with the weight of a chain."""

LOST = 5.0
"""A chain is lost if its NLL exceeds the median chain's by more than this many standard deviations,
over draws and over chains, and by three standard errors over data points."""

_LAGS = 100
_ROOM = 1 << 17
"""Members times data points of one pass."""


@dataclass(frozen=True, eq=False)
class Convergence:
    """R-hat and effective draws of Q quantities, within each of C chains and across all of them.

    Attributes:
        rhat: R-hat of the halves of each chain [C, Q].
        effective: effective draws of each chain [C, Q].
        rhat_between: R-hat of all chains [Q].
        effective_of_all: effective draws of all chains together [Q]; chains that disagree count as
            draws that are far apart in time.
    """

    rhat: Tensor
    effective: Tensor
    rhat_between: Tensor
    effective_of_all: Tensor

    @classmethod
    def of(cls, draws: Tensor) -> "Convergence":
        """From draws of all quantities [C, K, Q]; chains that are not finite have NaN."""
        within = [(split_rhat(chain), effective_draws(chain)) for chain in draws.split(1)]
        rhat, effective = (torch.stack(parts) for parts in zip(*within, strict=True))
        broken = ~draws.isfinite().flatten(1).all(1)
        sound = draws[~broken]
        rhat[broken] = effective[broken] = math.nan
        if not len(sound):
            return cls(rhat, effective, rhat[0], effective[0])
        return cls(rhat, effective, split_rhat(sound), effective_draws(sound))


@dataclass(frozen=True)
class Finding:
    """One judgement.

    Attributes:
        name: the subject.
        value: the number as text.
        sentence: what it says.
        good: False where draws should not be trusted; None where nothing is judged.
    """

    name: str
    value: str
    sentence: str
    good: bool | None = None


@dataclass(frozen=True, eq=False, repr=False)
class ChainDiagnostics:
    """Whether the draws of C chains, K draws each, can be trusted.

        found = run.chains((x_test, y_test))
        found.trusted, found.warnings
        found.predictions.rhat            # [C, points]

    Attributes:
        data: name of the data.
        points: number of data points.
        nll: mean NLL of these points under each draw [C, K], in nats.
        spread: standard deviation of predictions within each chain [C], root mean square.
        between: share of the variance of predictions that lies between chains.
        repeated: share of draws whose predictions equal those of the draw before [C].
        gap_error: standard error over data points of each chain's NLL less the median chain's [C].
        correlation: autocorrelation of the predictions by lag [C, L], mean over points.
        worst: draws of the prediction with the largest R-hat within a chain [C, K].
        predictions: R-hat and effective draws of predicted means, or of probabilities of the most
            probable class.
        likelihoods: the same of the log-likelihood of each point.
        energy_error: squared energy error per dimension and step [C]; empty if not known.
        wanted: the energy error that the sampler was asked for; NaN if there is none.
        refused: share of refused steps [C]; empty if not known.
        accepted: mean probability that a trajectory is accepted [C]; empty for other samplers.
    """

    data: str
    points: int
    nll: Tensor
    spread: Tensor
    between: float
    repeated: Tensor
    gap_error: Tensor
    correlation: Tensor
    worst: Tensor
    predictions: Convergence
    likelihoods: Convergence
    energy_error: Tensor
    wanted: float
    refused: Tensor
    accepted: Tensor = field(default_factory=lambda: torch.empty(0))

    @property
    def chains(self) -> int:
        """Number of chains C."""
        return len(self.nll)

    @property
    def draws(self) -> int:
        """Number of draws K of each chain."""
        return self.nll.shape[1]

    @property
    def rhat(self) -> Tensor:
        """R-hat within each chain [C] that 95 % of its predictions and log-likelihoods keep."""
        both = torch.stack([_level(each.rhat, MOST) for each in self._kinds])
        return both.amax(0)

    @property
    def effective(self) -> Tensor:
        """Effective draws of each chain [C] that 95 % of predictions and log-likelihoods have."""
        both = torch.stack([_level(each.effective, 1 - MOST) for each in self._kinds])
        return both.amin(0)

    @property
    def _kinds(self) -> tuple[Convergence, Convergence]:
        return self.predictions, self.likelihoods

    @property
    def drift(self) -> Tensor:
        """Mean NLL of the last third of the draws less the first third's, in standard errors [C].

        The standard error of a third is its standard deviation / √n, with n effective draws.
        """
        third = self.draws // 3
        parts = self.nll[:, :third], self.nll[:, -third:]
        square = _squared_error(parts[0]) + _squared_error(parts[1])
        change = parts[1].mean(1) - parts[0].mean(1)
        return torch.where((change == 0) & (square == 0), 0.0, change / square.sqrt())

    @property
    def diverged(self) -> Tensor:
        """Which chains have draws that are not finite [C]."""
        return ~(self.nll.isfinite().all(1) & self.spread.isfinite())

    @property
    def stuck(self) -> Tensor:
        """Which chains hardly move [C]."""
        usual = self.spread[~self.diverged].median() if not self.diverged.all() else math.nan
        return (self.repeated > 0.5) | (self.spread < STUCK * usual)

    @property
    def gap(self) -> Tensor:
        """Mean NLL of each chain less the median chain's [C]."""
        means = self.nll.mean(1)
        return means - means.nanmedian()

    @property
    def lost(self) -> Tensor:
        """Which chains predict far worse than the others [C]; all of them right for two chains."""
        over_chains = 1.4826 * self.gap.abs().nanmedian()
        over_draws = self.nll[~self.diverged].var(1).median().sqrt()
        reach = torch.maximum(LOST * torch.maximum(over_chains, over_draws), 3 * self.gap_error)
        return self.gap > reach

    @property
    def findings(self) -> list[Finding]:
        """Every judgement, with a sentence each."""
        return [*_moving(self), *_convergence(self), *_energy(self)]

    @property
    def sentences(self) -> list[str]:
        """What every judgement says."""
        return [finding.sentence for finding in self.findings]

    @property
    def warnings(self) -> list[str]:
        """The sentences of the judgements for which draws should not be trusted."""
        return [finding.sentence for finding in self.findings if finding.good is False]

    @property
    def trusted(self) -> bool:
        """Whether no judgement gives a warning."""
        return not self.warnings

    @property
    def verdict(self) -> str:
        """The judgements in one sentence."""
        if self.trusted:
            return "The chains give no reason to distrust their draws."
        reasons = joined([f.name for f in self.findings if f.good is False])
        return f"Do not trust these draws yet: see {reasons}."

    def state(self, chain: int) -> str:
        """What is wrong with a chain, in one word; empty if nothing is."""
        states = {"diverged": self.diverged, "stuck": self.stuck, "lost": self.lost}
        return next((name for name, which in states.items() if which[chain]), "")

    @property
    def columns(self) -> dict[str, Tensor]:
        """Numbers of every chain, by name [C]."""
        known = {
            "NLL": self.nll.mean(1), "R-hat": self.rhat, "effective draws": self.effective,
            "drift": self.drift, "spread": self.spread, "refused": self.refused,
            "accepted": self.accepted, "energy error": self.energy_error,
        }  # fmt: skip
        return {name: values for name, values in known.items() if len(values)}

    def to_pandas(self) -> Any:
        """A table with one row per chain."""
        rows = {name: values.tolist() for name, values in self.columns.items()}
        states = {"state": [self.state(chain) for chain in range(self.chains)]}
        return require("pandas", extra="frames").DataFrame({**rows, **states})

    def __repr__(self) -> str:
        about = f"{counted(self.chains, 'chain')} of {self.draws} draws"
        title = f"Chains: {about}, {self.points} points of {self.data}"
        rows = [
            [str(c), *(f"{float(v[c]):.3g}" for v in self.columns.values()), self.state(c)]
            for c in range(self.chains)
        ]
        lines = table(rows, ["chain", *self.columns, ""])
        return "\n\n".join([title, lines, "\n".join([self.verdict, *self.sentences])])

    def _repr_html_(self) -> str:
        title = f"Can these draws be trusted? ({self.points} points of {self.data})"
        facts = {finding.name: finding.sentence for finding in self.findings}
        curves = {f"chain {c}": Curve(self.nll[c].tolist()) for c in range(min(self.chains, 3))}
        figure = curves_svg(curves, "draw", (1, self.draws), "NLL of each draw")
        return facts_html(title, {"verdict": self.verdict, **facts}, figure)

    def stored(self) -> dict[str, Tensor]:
        """The diagnostics as tensors, which `read` makes diagnostics again."""
        kept = {}
        for name, value in vars(self).items():
            if isinstance(value, Convergence):
                kept |= {f"{name}/{part}": tensor for part, tensor in vars(value).items()}
            elif name != "data":
                kept[name] = value if isinstance(value, Tensor) else torch.tensor(value)
        return {name: tensor.contiguous() for name, tensor in kept.items()}

    @classmethod
    def read(cls, data: str, tensors: Mapping[str, Tensor]) -> "ChainDiagnostics | None":
        """The diagnostics that were stored; None without any."""
        if "nll" not in tensors:
            return None
        kinds = ("predictions", "likelihoods")
        names = [each.name for each in fields(Convergence)]
        plain = {f.name: tensors[f.name] for f in fields(cls) if f.name in tensors}
        scalars = {name: plain[name].item() for name in ("points", "between", "wanted")}
        parts = {k: Convergence(*(tensors[f"{k}/{name}"] for name in names)) for k in kinds}
        return cls(data=data, **(plain | scalars | parts))  # pyright: ignore[reportArgumentType]


def _level(values: Tensor, level: float) -> Tensor:
    return values.double().nanquantile(level, dim=-1)


def _squared_error(part: Tensor) -> Tensor:
    """Squared standard error of the mean of each row of correlated numbers [C, n]."""
    effective = torch.stack([effective_draws(row[None]) for row in part])
    return part.var(1) / effective.clamp(max=part.shape[1])


def _chains(marks: Tensor, one: str = "", several: str = "") -> str:
    """The chains that are marked, and a verb: "Chains 0 and 2 are"; empty if none is."""
    chains = [str(c) for c in marks.nonzero().flatten().tolist()]
    if len(chains) < 2:
        return f"Chain {chains[0]} {one}".rstrip() if chains else ""
    return f"Chains {joined(chains)} {several}".rstrip()


def _judged(name: str, value: str, marks: Tensor, good: str, bad: str) -> Finding:
    """One of two sentences, by whether a chain is marked."""
    failed = bool(marks.any())
    return Finding(name, value, bad if failed else good, not failed)


def _moving(found: ChainDiagnostics) -> Iterator[Finding]:
    """Chains that diverged, are stuck, are lost or drift."""
    diverged, stuck, lost = found.diverged, found.stuck, found.lost
    if diverged.any():
        text = f"{_chains(diverged)} diverged: some predictions are not finite; take smaller steps."
        yield Finding("diverged chains", str(int(diverged.sum())), text, good=False)
    usual = found.spread[~diverged].median() if not diverged.all() else math.nan
    share = percent(float((found.spread / usual).nan_to_num(math.inf).min()))
    yield _judged(
        "stuck chains", str(int(stuck.sum())), stuck,
        f"No chain is stuck: predictions vary by at least {share} of the median chain's.",
        f"{_chains(stuck, 'is', 'are')} stuck: predictions hardly change from draw to draw; "
        f"leave the chain out, or start at another member.",
    )  # fmt: skip
    if found.chains > 1:
        worst = number(float(found.gap.nan_to_num(-math.inf).max()), 0.005)
        yield _judged(
            "lost chains", str(int(lost.sum())), lost,
            f"No chain is lost: the worst has an NLL {worst} nats above the median chain's.",
            f"{_chains(lost, 'is', 'are')} lost: the NLL is {worst} nats above the median "
            f"chain's; leave the chain out, or train its member longer.",
        )  # fmt: skip
    most, drifting = float(found.drift.abs().nan_to_num(0).max()), found.drift.abs() > DRIFT
    yield _judged(
        "drift", f"{most:.1f}", drifting,
        f"The NLL does not drift: last and first third of the draws differ by at most {most:.1f} "
        f"standard errors (limit {DRIFT:g}).",
        f"{_chains(drifting, 'drifts', 'drift')}: the NLL changes by {most:.1f} standard errors "
        f"from the first to the last third (limit {DRIFT:g}); take a longer warm-up.",
    )  # fmt: skip


def _convergence(found: ChainDiagnostics) -> Iterator[Finding]:
    """R-hat and effective draws, within and between chains."""
    largest, bad = float(found.rhat.nan_to_num(0).max()), found.rhat > RHAT
    yield _judged(
        "R-hat within chains", f"{largest:.2f}", bad,
        f"The halves of every chain agree: R-hat of predictions is at most {largest:.2f} "
        f"(limit {RHAT:g}).",
        f"{_chains(bad)}: R-hat between the halves of a chain is up to {largest:.2f} "
        f"(limit {RHAT:g}); draw more, or with a larger thin.",
    )  # fmt: skip
    least, few = float(found.effective.nan_to_num(math.inf).min()), found.effective < EFFECTIVE
    yield _judged(
        "effective draws", f"{least:.0f}", few,
        f"Every chain has at least {least:.0f} effective draws of {found.draws} "
        f"(limit {EFFECTIVE}).",
        f"{_chains(few, 'has', 'have')} few effective draws, as few as {least:.0f} of "
        f"{found.draws} (limit {EFFECTIVE}); draw more, or with a larger thin.",
    )  # fmt: skip
    if found.chains > 1:
        between = max(float(_level(each.rhat_between, MOST)) for each in found._kinds)
        total = min(float(_level(each.effective_of_all, 1 - MOST)) for each in found._kinds)
        share = percent(found.between)
        where = "Chains agree with each other"
        if between > AGREE:
            where = "Chains stay in modes of their own, as chains of networks do"
        yield Finding(
            "R-hat between chains", f"{between:.2f}",
            f"{where}: R-hat between chains is {between:.2f}, and {share} of the variance of "
            f"predictions lies between them ({total:.0f} effective draws of all chains).",
        )  # fmt: skip


def _energy(found: ChainDiagnostics) -> Iterator[Finding]:
    """What the sampler knows of its own steps."""
    if len(found.refused):
        worst, bad = percent(float(found.refused.max())), found.refused > REFUSED
        limit = f"(limit {percent(REFUSED)})"
        yield _judged(
            "refused steps", worst, bad,
            f"No chain refuses more than {worst} of its steps {limit}.",
            f"{_chains(bad, 'refuses', 'refuse')} up to {worst} {limit}; take a longer warm-up or "
            f"smaller steps.",
        )  # fmt: skip
    if len(found.accepted):
        least, bad = percent(float(found.accepted.min())), found.accepted < ACCEPTED
        limit = f"(limit {percent(ACCEPTED)})"
        yield _judged(
            "acceptance", least, bad,
            f"Every chain accepts at least {least} of its trajectories {limit}.",
            f"{_chains(bad, 'accepts', 'accept')} as few as {least} {limit}; take a longer "
            f"warm-up.",
        )  # fmt: skip
    if len(found.energy_error) and math.isfinite(found.wanted):
        bad = ~(found.energy_error <= ENERGY * found.wanted)
        low, high = float(found.energy_error.min()), float(found.energy_error.max())
        text = (
            f"The squared energy error per dimension is {low:.2g} to {high:.2g} "
            f"(wanted {found.wanted:g}, limit {ENERGY * found.wanted:.2g})"
        )
        needs = _chains(bad, "needs", "need").lower()
        longer = f"{text}; {needs} a longer warm-up."
        yield _judged("energy error", f"{high:.2g}", bad, f"{text}.", longer)


def is_drawn(run: Any) -> bool:
    """Whether the members of a run are draws of chains that are long enough to be judged."""
    about = getattr(run, "config", {}).get(DRAWS)
    return about is not None and int(about["draws"]) >= FEWEST


def diagnose(
    run: Any,
    split: Split,
    *,
    name: str = "",
    scaling: Scaling | None = None,
    points: int = POINTS,
    seed: int = 0,
) -> ChainDiagnostics:
    """The diagnostics of a run of draws on labelled data.

    Args:
        run: a run of `shoal.draw`.
        split: inputs and targets, in their original units.
        name: name of the data.
        scaling: units of the targets.
        points: number of data points, chosen at random from the split.
        seed: fixes the chosen points.
    """
    about = getattr(run, "config", {}).get(DRAWS)
    if about is None:
        raise ConfigError("the members of this run are no draws; type: shoal.draw(run)")
    if not is_drawn(run):
        raise ConfigError(
            f"chains are judged from {FEWEST} draws on, and these have {about['draws']}; type: "
            f"shoal.draw(run, draws={5 * FEWEST})"
        )
    values, scores = _followed(run, split.sample(points, generator(seed, "chains")), scaling)
    known = run.provenance.get(DRAWS, {})
    sampler = known_sampler("sampler", about["sampler"])
    facts = {each: torch.tensor(known.get(key, ())) for each, key in _KNOWN.items()}
    wanted = float(getattr(sampler, "energy_error", math.nan))
    return diagnostics_of(values, scores, name, wanted=wanted, **facts)


_KNOWN = {"energy_error": "energy error", "refused": "refused", "accepted": "acceptance"}
"""What samplers tell of themselves, by the name of the field here."""

_UNKNOWN = torch.empty(0)


def diagnostics_of(
    values: Tensor,
    scores: Tensor,
    data: str = "",
    *,
    energy_error: Tensor = _UNKNOWN,
    refused: Tensor = _UNKNOWN,
    accepted: Tensor = _UNKNOWN,
    wanted: float = math.nan,
) -> ChainDiagnostics:
    """The diagnostics from draws of predictions [C, K, Q] and of log-likelihoods [C, K, B]."""
    values, scores = values.double(), scores.double()
    predictions, likelihoods = Convergence.of(values), Convergence.of(scores)
    variance = values.var(1)
    spread = variance.mean(-1).sqrt()
    sound = spread.isfinite()
    apart = values[sound].mean(1).var(0).mean() if int(sound.sum()) > 1 else torch.tensor(0.0)
    total = apart + variance[sound].mean()
    repeated = (values[:, 1:] == values[:, :-1]).all(-1).double().mean(1)
    rhat = predictions.rhat.nan_to_num(0)
    lags = min(values.shape[1] // 2, _LAGS)
    return ChainDiagnostics(
        data,
        scores.shape[-1],
        -scores.mean(-1),
        spread,
        float(apart / total) if float(total) > 0 else 0.0,
        repeated,
        _gap_error(scores),
        autocorrelation(values, lags).nanmean(-1),
        values[..., int(rhat.amax(0).argmax())].clone(),
        predictions,
        likelihoods,
        energy_error,
        wanted,
        refused,
        accepted,
    )


def _gap_error(scores: Tensor) -> Tensor:
    """Standard error over points of each chain's mean NLL less the median chain's [C]."""
    means = -scores.mean(1)
    gaps = means - means.nanmedian(0).values
    return gaps.std(1) / math.sqrt(gaps.shape[1]) if gaps.shape[1] > 1 else gaps[:, 0] * 0


def _followed(run: Any, split: Split, scaling: Scaling | None) -> tuple[Tensor, Tensor]:
    """Draws of predictions [C, K, Q] and of log-likelihoods [C, K, B], block by block."""
    ensemble, draws = run.ensemble, int(run.config[DRAWS]["draws"])
    precision, trained = training_of(run)
    size = max(_ROOM // ensemble.members, 1)
    values, scores = [], []
    for x, y in split.batches(min(size, len(split))):
        outputs = member_outputs(ensemble, x, precision=precision, trained=trained)
        pred = in_units(Predictive(outputs, run.likelihood), scaling)
        pred, targets, _ = pred.values_alone(*parted(y))
        pred, targets = pred.points(targets)
        values.append(_by_chain(ensemble, draws, _predicted(pred)))
        log_prob = pred.likelihood.log_prob(pred.members, targets)
        scores.append(_by_chain(ensemble, draws, log_prob))
    return torch.cat(values, -1), torch.cat(scores, -1)


def _predicted(pred: Predictive) -> Tensor:
    """What each member predicts [M, Q]: means, or the probability of the most probable class."""
    about, likelihood = pred.likelihood.about, pred.likelihood
    if "loss" in about.kinds:
        return pred.members.flatten(1)
    means = likelihood.mean(pred.members)
    if not about.has_classes or "binary" in about.kinds:
        return means.flatten(1)
    top = means.nanmean(0).argmax(-1, keepdim=True)
    return means.gather(-1, top.expand(len(means), *top.shape)).flatten(1)


def _by_chain(ensemble: Ensemble, draws: int, values: Tensor) -> Tensor:
    """Values of members [M, ...] as [C, K, ...]: member k C + c of a group is draw k of chain c."""
    parts = values.detach().cpu().split([group.members for group in ensemble.groups])
    return torch.cat([part.unflatten(0, (draws, -1)).transpose(0, 1) for part in parts])

"""`evidence` computes the whole empirical-Bayes view of a trained ensemble, stored with its run.

It has caveats: members may coincide, other weightings may be better, and members may not be at an
optimum. `member_weights` gives predictions their weights.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from shoal.analysis.evidence import pointmass
from shoal.analysis.evidence.members import (
    EvidenceSplits,
    log_likelihoods,
    log_priors,
    log_probs,
    modules_of,
    parts_of,
    prior_of,
    sites_of,
    stacking_weights,
)
from shoal.analysis.evidence.prior_comparison import PriorComparison, PriorResult, compare_priors
from shoal.analysis.stored_results import keep_result, kept_result, stored_table, write_result
from shoal.core.errors import CheckpointCorrupt, ConfigError, DataError
from shoal.core.opaque import Opaque
from shoal.core.registry import nearest
from shoal.core.structure import parted
from shoal.core.tree import add_scaled, member_norms, rows
from shoal.core.types import Tree
from shoal.core.values import describe_value
from shoal.data.dataset import Split
from shoal.engine.members.precision import full_precision
from shoal.inference.ensemble import Ensemble
from shoal.inference.posterior import Posterior, as_points, total_weight
from shoal.inference.priors import Flat
from shoal.prediction.metrics.similarity import affinity
from shoal.prediction.predict import member_outputs
from shoal.prediction.predictive import ArrayLike, Predictive
from shoal.training.folder.own_data import again, own_data
from shoal.training.forces import forces
from shoal.training.step.drive import Batch

__all__ = [
    "FILE",
    "Degeneracy",
    "Evidence",
    "Weighted",
    "Weighting",
    "compare",
    "degeneracy",
    "evidence",
    "gradient_norms",
    "keep_evidence",
    "kept_evidence",
    "load_evidence",
    "member_weights",
    "merged",
    "save_evidence",
    "total_variation",
]


@dataclass(frozen=True)
class Degeneracy:
    """Groups of members that coincide; every member is in one group.

    Attributes:
        in_weights: groups of members with the same weights.
        in_function: groups of members with the same predictions.
    """

    in_weights: list[list[int]]
    in_function: list[list[int]]

    @property
    def effective(self) -> int:
        """Number of groups with different predictions."""
        return len(self.in_function)


def degeneracy(
    pred: Predictive, weights: Tree | None = None, tolerance: float = 1e-3
) -> Degeneracy:
    """Members with the same weights (equal architectures) or the same predictions.

    Args:
        pred: prediction of the members for some inputs.
        weights: their tensors [M, ...]; None for different architectures.
        tolerance: relative distance of weights, and Hellinger distance of predictions.
    """
    apart = (1 - affinity(pred)).clamp_min(0).sqrt()
    alone = [[member] for member in range(pred.size)]
    near = alone if weights is None else _groups(_relative_distances(weights) <= tolerance)
    return Degeneracy(near, _groups(apart <= tolerance))


def merged(weights: Tensor, groups: list[list[int]]) -> Tensor:
    """Weights of the point masses after merging each group, in the order of the groups."""
    return torch.stack([weights[group].sum() for group in groups])


def _relative_distances(weights: Tree) -> Tensor:
    flat = torch.cat([rows(tensor.detach()).double().cpu() for tensor in weights.values()], 1)
    lengths = flat.norm(dim=1)
    longest = torch.maximum(lengths[:, None], lengths).clamp_min(1e-300)
    return torch.stack([(flat - row).norm(dim=1) for row in flat]) / longest


def _groups(same: Tensor) -> list[list[int]]:
    """Connected components of a symmetric relation, each in ascending order."""
    left, components = set(range(len(same))), []
    while left:
        reached, fresh = set(), {min(left)}
        while fresh:
            reached |= fresh
            fresh = {j for i in fresh for j in same[i].nonzero().flatten().tolist()} - reached
        components.append(sorted(reached))
        left -= reached
    return components


GRID = 2001

REACH = 8.0


@dataclass(frozen=True)
class Weighted:
    """A weighting of the members and its scores.

    Attributes:
        weights: weights of the members [M].
        nll: NLL of the targets, in nats per point.
        total_variation: total variation from the uniform average, mean over the inputs.
    """

    weights: Tensor
    nll: float
    total_variation: float


def compare(pred: Predictive, y: ArrayLike, weights: Tensor) -> Weighted:
    """Evaluate a weighting and compare it with the uniform average."""
    uniform, other = replace(pred, weights=None), replace(pred, weights=weights)
    nll = -float(other.log_prob(y).double().mean())
    return Weighted(weights, nll, float(total_variation(uniform, other).mean()))


def total_variation(p: Predictive, q: Predictive) -> Tensor:
    """Total variation distance of two predictions for the same inputs [B]."""
    if p.likelihood.about.has_classes:
        return 0.5 * (p.probs.double() - q.probs.double()).abs().sum(-1)
    p, q = p.columns, q.columns
    return torch.stack([_integrated(p, q, point) for point in range(len(p))])


def _integrated(p: Predictive, q: Predictive, point: int) -> Tensor:
    """Half the integral of |p - q| over the targets of one input, averaged over columns."""
    moments = [tuple(m[:, point].double() for m in pred.moments()) for pred in (p, q)]
    reach = [REACH * variance.sqrt() for _, variance in moments]
    low = torch.stack([(m - r).amin(0) for (m, _), r in zip(moments, reach, strict=True)]).amin(0)
    high = torch.stack([(m + r).amax(0) for (m, _), r in zip(moments, reach, strict=True)]).amax(0)
    grid = low + torch.linspace(0, 1, GRID, dtype=torch.float64)[:, None] * (high - low)
    densities = [
        pred.average(torch.distributions.Normal(m[:, None], v.sqrt()[:, None]).log_prob(grid).exp())
        for pred, (m, v) in zip((p, q), moments, strict=True)
    ]
    step = (high - low) / (GRID - 1)
    return (0.5 * (densities[0] - densities[1]).abs().sum(0) * step).mean()


def gradient_norms(
    ensemble: Ensemble, posterior: Posterior, data: Split, batch_size: int = 1024
) -> Tensor:
    """Norm of the gradient of log p(theta | D) / N for each member [M], over all data.

    Only private tensors count: a tensor that all members train moves by the mean of their
    gradients.

    Args:
        ensemble: the members; they run in evaluation mode and keep their mode.
        posterior: likelihood and prior, with N targets.
        data: the training data, with targets.
        batch_size: data points per forward pass.
    """
    training = ensemble.training
    ensemble.train(False)
    total: Tree | None = None
    sites = sites_of(ensemble, data)
    whole = total_weight(posterior.likelihood, data.y, sites)
    try:
        for x, y in _batches(ensemble, data, batch_size):
            velocity, _ = forces(ensemble, posterior, None, (x, y))
            drive = {name: velocity[name] for name in ensemble.weights}
            # each batch includes the whole prior, and the shares sum to one
            share = total_weight(posterior.likelihood, y, sites) / whole
            total = add_scaled(
                {n: torch.zeros_like(t) for n, t in drive.items()} if total is None else total,
                drive,
                share,
            )
    finally:
        ensemble.train(training)
    assert total is not None, "a split has at least one data point"
    return member_norms(total, ensemble.spans).cpu()


def _batches(ensemble: Ensemble, data: Split, batch_size: int) -> Iterator[Batch]:
    assert data.y is not None, "the evidence needs targets"
    for x, y in data.batches(batch_size):
        x = x.to(ensemble.device, ensemble.dtype if x.is_floating_point() else None)
        yield x, y.to(ensemble.device)


@dataclass(frozen=True)
class Weighting:
    """Weights of the members and their scores.

    Attributes:
        weights: weights of all members, 0 for diverged members [M].
        effective: effective number of members, 1 / sum w².
        nll: NLL on the evaluation data, in nats per point; NaN without data.
        total_variation: total variation from uniform averaging, on the same data.
    """

    weights: list[float]
    effective: float
    nll: float = math.nan
    total_variation: float = math.nan


@dataclass(frozen=True)
class Evidence:
    """The empirical-Bayes view of an ensemble.

    Attributes:
        members: number of members.
        finite_members: indices of the finite members.
        points: N, number of training targets that count: data points, or their tokens.
        step: step of the run at the time of computation.
        log_likelihoods: log L of each finite member.
        log_priors: log density of the weight prior at each finite member; empty without a prior.
        log_evidence: log (1/M) sum_m L_m.
        lower, upper: bounds of the log evidence for any ensemble.
        spread: largest minus smallest log-likelihood, in nats.
        ties: number of members within one nat of the best.
        half_temperature: temperature at which the effective number of members is M / 2.
        gradient_norms: norm of the gradient of log p(theta | D) / N at each finite member.
        in_weights, in_function: groups of members that coincide.
        distinct: effective number of functions under uniform weights, coinciding members merged.
        weightings: uniform, posterior, penalised (with the weight prior), implied (the prior under
            which uniform weights are exact) and stacking, if available.
        learned_priors: learned priors, the largest evidence first.
        missing: priors that could not be computed, and the reasons.
        held_out, evaluated_on: data that fitted the stacking weights, and data of the NLL.
        prior_known: whether the gradient is that of the posterior; else that of the likelihood.
    """

    members: int
    finite_members: list[int]
    points: int
    step: int
    log_likelihoods: list[float]
    log_priors: list[float]
    log_evidence: float
    lower: float
    upper: float
    spread: float
    ties: int
    half_temperature: float
    gradient_norms: list[float]
    in_weights: list[list[int]]
    in_function: list[list[int]]
    distinct: float
    weightings: dict[str, Weighting]
    learned_priors: list[PriorResult] = field(default_factory=list)
    missing: dict[str, str] = field(default_factory=dict)
    held_out: str = ""
    evaluated_on: str = ""
    prior_known: bool = True

    @property
    def tolerance(self) -> float:
        """The difference in loss, in nats per point, that changes a weight by e: 1 / N."""
        return 1 / self.points


@full_precision()
def evidence(
    run: Any,
    data: Any,
    *,
    priors: bool = True,
    points: int | None = None,
    flow_steps: int = 200,
    tell: Callable[[str], None] = lambda what: None,
) -> Evidence:
    """Log evidence, member weights, optimality, degeneracy, and a prior comparison.

    Args:
        run: a run from `fit` or `load`.
        data: the training `Dataset`, or its pair (x, y).
        priors: also compare learned priors, which takes most of the time.
        points: number of training data points for the curvature, scaled to all data; None for 500,
            and for at least 10 per weight in the last layer.
        flow_steps: training steps of the flow prior.
        tell: called with the name of each finished step of the work.
    """
    if run.likelihood.derivatives_by is not None:
        raise ConfigError(
            "evidence counts targets of the outputs alone, and this run was trained on derivatives "
            "too; train a run without them to compute it"
        )
    parts = parts_of(data)
    each = log_likelihoods(run, parts.train)
    finite = (each > -math.inf).nonzero().flatten().tolist()
    log_L = each[finite]
    tell("likelihoods")
    facts = _point_masses(log_L) | _same(run, parts, finite)
    facts |= {"gradient_norms": _norms(run, parts.train)[finite].tolist()}
    tell("optimality and degeneracy")
    facts["weightings"] = _weightings(run, parts, each, finite)
    tell("weightings")
    if priors:
        comparison = _comparison(run, parts, log_L, finite, points, flow_steps)
        facts["learned_priors"], facts["missing"] = compare_priors(comparison, tell)
    prior = log_priors(run)
    return Evidence(
        members=run.ensemble.members,
        finite_members=finite,
        points=round(_targets(run, parts.train)),
        step=step_of(run),
        log_likelihoods=log_L.tolist(),
        log_priors=[] if prior is None else prior[finite].tolist(),
        prior_known=prior_of(run.config) is not None,
        held_out=parts.held_out_words,
        evaluated_on=parts.test_words if parts.test is not None else "",
        **facts,
    )


def step_of(run: Any) -> int:
    """Training step of a run; evidence of another step is out of date."""
    return int(run.history[-1].get("step") or 0) if run.history else 0


def _point_masses(log_L: Tensor) -> dict[str, Any]:
    lower, upper = pointmass.bounds(log_L)
    return {
        "log_evidence": pointmass.log_evidence(log_L),
        "lower": lower,
        "upper": upper,
        "spread": pointmass.spread(log_L),
        "ties": pointmass.ties(log_L),
        "half_temperature": pointmass.half_temperature(log_L),
    }


def _same(run: Any, parts: EvidenceSplits, finite: list[int]) -> dict[str, Any]:
    """Groups of members that coincide, as indices among all members."""
    split = parts.train if parts.test is None else parts.test
    outputs, _ = as_points(run.likelihood, member_outputs(run.ensemble, split)[finite], split.y)
    pred = Predictive(outputs, run.likelihood)
    one = len(run.ensemble.groups) == 1
    tensors = {name: t[finite] for name, t in run.ensemble.weights.items()} if one else None
    same = degeneracy(pred, tensors)
    uniform = torch.full((len(finite),), 1 / len(finite), dtype=torch.float64)
    return {
        "in_weights": [[finite[i] for i in group] for group in same.in_weights],
        "in_function": [[finite[i] for i in group] for group in same.in_function],
        "distinct": pointmass.effective_number(merged(uniform, same.in_function)),
    }


def _norms(run: Any, train: Split) -> Tensor:
    prior = prior_of(run.config)
    n = _targets(run, train)
    posterior = Posterior(run.likelihood, Flat() if prior is None else prior, n)
    return gradient_norms(run.ensemble, posterior, train)


def _targets(run: Any, train: Split) -> float:
    """N: the number of targets that count; tokens and places are targets of their own."""
    return total_weight(run.likelihood, train.y, sites_of(run.ensemble, train))


def _weightings(
    run: Any, parts: EvidenceSplits, each: Tensor, finite: list[int]
) -> dict[str, Weighting]:
    log_L = each[finite]
    weights = {
        "uniform": torch.full_like(log_L, 1 / len(log_L)),
        "posterior": pointmass.posterior_weights(log_L),
    }
    prior = log_priors(run)
    if prior is not None:
        weights["penalised"] = pointmass.posterior_weights(log_L + prior[finite])
    weights["implied"] = pointmass.implied_prior(log_L)
    if parts.held_out is not None:
        weights["stacking"] = stacking_weights(log_probs(run, parts.held_out)[finite])
    pred, y = None, None
    if parts.test is not None:
        outputs = member_outputs(run.ensemble, parts.test)[finite].double()
        outputs, y = as_points(run.likelihood, outputs, parts.test.y)
        pred = Predictive(outputs, run.likelihood)
    return {
        name: _weighting(pred, y, values, finite, len(each)) for name, values in weights.items()
    }


def _weighting(
    pred: Predictive | None, y: Tensor | None, weights: Tensor, finite: list[int], members: int
) -> Weighting:
    whole = torch.zeros(members, dtype=torch.float64)
    whole[finite] = weights
    effective = pointmass.effective_number(weights)
    if pred is None or y is None:
        return Weighting(whole.tolist(), effective)
    beside = compare(pred, y, weights)
    return Weighting(whole.tolist(), effective, beside.nll, beside.total_variation)


def _comparison(
    run: Any,
    parts: EvidenceSplits,
    log_L: Tensor,
    finite: list[int],
    points: int | None,
    flow_steps: int,
) -> PriorComparison:
    modules = modules_of(run.ensemble, finite)
    if isinstance(parts.train.x, Opaque):  # batch objects keep their type
        modules = [module.to(run.ensemble.dtype) for module in modules]
    train, test = _double(parts.train), parts.test
    test = None if test is None else _double(test)
    options = {"points": points, "flow_steps": flow_steps}
    return PriorComparison(modules, run.likelihood, train, test, log_L, **options)


def _double(split: Split) -> Split:
    x = split.x
    if not isinstance(x, Tensor) or x.is_floating_point():
        x = x.to(torch.float64)
    return Split(x.cpu(), None if split.y is None else parted(split.y)[0].cpu())


FILE = "evidence.json"
_OLD_KEYS = {"rungs": "learned_priors", "judged": "evaluated_on", "living": "finite_members"}
NAMED = ("uniform", "posterior", "stacking")


def save_evidence(result: Evidence, folder: Path | str) -> None:
    """Write the evidence to the folder of the run."""
    write_result(folder, FILE, result)


def keep_evidence(run: Any, result: Evidence) -> None:
    """Store the evidence with its run."""
    keep_result(run, "evidence", FILE, result)


def kept_evidence(run: Any) -> Evidence | None:
    """The evidence that `keep_evidence` stored; None without any."""
    return kept_result(run, "evidence", load_evidence)


def load_evidence(folder: Path | str) -> Evidence | None:
    """The evidence that `shoal evidence` stored in the folder of a run; None without any."""
    value = stored_table(folder, FILE, "evidence")
    if value is None:
        return None
    try:
        value = {_OLD_KEYS.get(key, key): each for key, each in value.items()}
        priors = [PriorResult(**_known(_numbers(p))) for p in value.pop("learned_priors")]
        weightings = {k: Weighting(**_numbers(w)) for k, w in value.pop("weightings").items()}
        hints = get_type_hints(Evidence)
        value = {key: _not_null(each, hints.get(key)) for key, each in value.items()}
        result = Evidence(learned_priors=priors, weightings=weightings, **value)
        for each in (result, *priors, *weightings.values()):
            _check_types(each)
        return result
    except (TypeError, KeyError, AttributeError) as error:
        raise CheckpointCorrupt(
            f"{Path(folder) / FILE} is not valid evidence ({error}); "
            f"type: {again('evidence', folder)}"
        ) from None


def member_weights(run: Any, kind: str, data: Any = None) -> Tensor | None:
    """The weights [M] with this name; None for uniform weights.

    The weights come from the run's folder, if its evidence belongs to the last training step.
    Otherwise they are computed from `data`, or from the run's data set if it can be loaded.
    """
    if kind not in NAMED:
        raise ConfigError(f"there are no weights called '{kind}'; {nearest(str(kind), NAMED)}")
    if kind == "uniform":
        return None
    kept = None if data is not None else kept_evidence(run)
    if kept is None or kept.step != step_of(run):
        known = own_data(run, "this run", "pass data=(x, y)") if data is None else data
        kept = evidence(getattr(run, "trained", run), known, priors=False)
    if kind not in kept.weightings:
        raise DataError(
            "stacking weights need held-out data, and this data set has none; "
            "pass data=Dataset(..., test=Split(x, y))"
        )
    weights = [math.nan if w is None else w for w in kept.weightings[kind].weights]
    return torch.tensor(weights, dtype=torch.float64)


def _known(result: dict[str, Any]) -> dict[str, Any]:
    """A stored result with the centre of Gaussians; older files have it only in the name."""
    old = {f"Gaussians {words}": centre for words, centre in _CENTRES.items()}
    centre = next((c for name, c in old.items() if str(result["name"]).startswith(name)), "")
    return {"centre": centre, **result}


_CENTRES = {"at the members": "members", "at zero": "zero"}


def _numbers(table: dict[str, Any]) -> dict[str, Any]:
    """The table with null (a number that is not finite) as NaN."""
    return {name: float("nan") if value is None else value for name, value in table.items()}


def _not_null(value: Any, annotation: Any) -> Any:
    """The value with NaN where its type is a float and the file has null."""
    if value is None and annotation is float:
        return math.nan
    if isinstance(value, list) and get_args(annotation) == (float,):
        return [math.nan if each is None else each for each in value]
    return value


def _check_types(result: Any) -> None:
    """Refuse values of wrong types."""
    for name, annotation in get_type_hints(type(result)).items():
        if not _fits(getattr(result, name), annotation):
            raise TypeError(f"{name} is {describe_value(getattr(result, name))}")


def _fits(value: Any, annotation: Any) -> bool:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is list:
        return isinstance(value, list) and all(_fits(each, inner[0]) for each in value)
    if origin is dict:
        return isinstance(value, dict) and all(_fits(each, inner[1]) for each in value.values())
    if annotation is float:  # None means a number that is not finite
        return value is None or (isinstance(value, int | float) and not isinstance(value, bool))
    return isinstance(value, annotation)

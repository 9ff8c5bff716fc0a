"""`evidence` computes the whole empirical-Bayes view of a trained ensemble."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from shoal.analysis.evidence import pointmass
from shoal.analysis.evidence.caveats import compare, degeneracy, gradient_norms, merged
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
from shoal.core.opaque import Opaque
from shoal.core.structure import parted
from shoal.data.dataset import Split
from shoal.engine.members.precision import full_precision
from shoal.inference.posterior import Posterior, as_points, total_weight
from shoal.inference.priors import Flat
from shoal.prediction.predict import member_outputs
from shoal.prediction.predictive import Predictive

__all__ = ["Evidence", "Weighting", "evidence"]


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
    parts = parts_of(data)
    each = log_likelihoods(run, parts.train)
    finite = (each > -math.inf).nonzero().flatten().tolist()
    found = each[finite]
    tell("likelihoods")
    facts = _point_masses(found) | _same(run, parts, finite)
    facts |= {"gradient_norms": _norms(run, parts.train)[finite].tolist()}
    tell("optimality and degeneracy")
    facts["weightings"] = _weightings(run, parts, each, finite)
    tell("weightings")
    if priors:
        comparison = _comparison(run, parts, found, finite, points, flow_steps)
        facts["learned_priors"], facts["missing"] = compare_priors(comparison, tell)
    prior = log_priors(run)
    return Evidence(
        members=run.ensemble.members,
        finite_members=finite,
        points=round(_targets(run, parts.train)),
        step=step_of(run),
        log_likelihoods=found.tolist(),
        log_priors=[] if prior is None else prior[finite].tolist(),
        prior_known=prior_of(run.config) is not None,
        held_out=parts.held_out_words,
        evaluated_on=parts.test_words if parts.test is not None else "",
        **facts,
    )


def step_of(run: Any) -> int:
    """Training step of a run; evidence of another step is out of date."""
    return int(run.history[-1].get("step") or 0) if run.history else 0


def _point_masses(found: Tensor) -> dict[str, Any]:
    lower, upper = pointmass.bounds(found)
    return {
        "log_evidence": pointmass.log_evidence(found),
        "lower": lower,
        "upper": upper,
        "spread": pointmass.spread(found),
        "ties": pointmass.ties(found),
        "half_temperature": pointmass.half_temperature(found),
    }


def _same(run: Any, parts: EvidenceSplits, finite: list[int]) -> dict[str, Any]:
    """Groups of members that coincide, as indices among all members."""
    split = parts.train if parts.test is None else parts.test
    found, _ = as_points(run.likelihood, member_outputs(run.ensemble, split)[finite], split.y)
    pred = Predictive(found, run.likelihood)
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
    found = each[finite]
    weights = {
        "uniform": torch.full_like(found, 1 / len(found)),
        "posterior": pointmass.posterior_weights(found),
    }
    prior = log_priors(run)
    if prior is not None:
        weights["penalised"] = pointmass.posterior_weights(found + prior[finite])
    weights["implied"] = pointmass.implied_prior(found)
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
    found: Tensor,
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
    return PriorComparison(modules, run.likelihood, train, test, found, **options)


def _double(split: Split) -> Split:
    x = split.x
    if not isinstance(x, Tensor) or x.is_floating_point():
        x = x.to(torch.float64)
    return Split(x.cpu(), None if split.y is None else parted(split.y)[0].cpu())

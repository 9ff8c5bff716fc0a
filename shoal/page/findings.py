"""Sentences about landscape and evidence, each made from its numbers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.analysis.evidence.compute_evidence import Evidence
from shoal.analysis.landscape.scene import AnalysisResult
from shoal.core.display.text import counted, joined, number, percent

__all__ = ["answers", "degenerate", "exact", "finding", "tied", "widths"]

Scores = Mapping[str, Any]


def finding(name: str, result: AnalysisResult, labels: bool = True) -> str:
    """One or two sentences about an analysis, or why it was not computed.

    Args:
        name: name of the analysis.
        result: its scores and tensors.
        labels: functions differ by a share of their labels; otherwise by a number.
    """
    if "missing" in result.scores:
        return f"Not computed: {result.scores['missing']}."
    if name in _DISAGREEMENT:
        return _DISAGREEMENT[name](result.scores, labels)
    return _SENTENCES[name](result.scores)


def _trajectories(scores: Scores, labels: bool) -> str:
    within, between = scores.get("last_snapshots"), scores.get("between_ends")
    if within is None or between is None:
        return "There are too few snapshots or members to compare trajectories."
    return (
        f"Two trained members differ {_difference(between, labels)}. "
        f"The last two snapshots of one member differ {_difference(within, labels)}."
    )


def _difference(value: float, labels: bool) -> str:
    return f"in {percent(value)} of their labels" if labels else f"by {number(value)} on average"


def _functions(scores: Scores) -> str:
    spaces = [f"{number(value, 0.05)} by {space}" for space, value in scores["effective"].items()]
    members = scores["members"]
    return f"The effective number of functions is {joined(spaces)} ({members} members)."


def _diversity(scores: Scores) -> str:
    diversities = {
        name: value for name, value in scores["at_equal_accuracy"].items() if value is not None
    }
    members = diversities.pop("members", None)
    if members is None or not diversities:
        return "No samples are as accurate as the members, so there is no comparison."
    best = max(diversities, key=lambda name: diversities[name])
    return (
        f"At equal accuracy, the diversity (disagreement / error rate) of another member is "
        f"{number(members, 0.05)}. The best samples around one member ({best}) have "
        f"{number(diversities[best], 0.05)}."
    )


def _averaging(scores: Scores) -> str:
    parts = []
    for name, table in scores["parts"].items():
        one, whole = (
            table["solution"]["nll"][0],
            {key: row["nll"][-1] for key, row in table.items()},
        )
        within = min(row["nll"][0] for row in table.values())
        best = min(whole, key=lambda key: whole[key])
        helps = "More modes" if whole["solution"] < within else "Averages within one mode"
        label = "members" if best == "solution" else best
        parts.append(
            f"{helps} lower NLL on {name} more. The best NLL on {name} is {number(whole[best])} "
            f"nats ({label} in every mode), against {number(one)} nats of one member."
        )
    return " ".join(parts)


def _paths(scores: Scores, labels: bool) -> str:
    parts = []
    for name, path in scores["paths"].items():
        ends = sum(path["ends"]) / 2
        if name == "tunnel":
            parts.append(
                f"Along the low-loss tunnel, the loss stays within {percent(path['uneven'])} of "
                f"the loss at its ends. "
                f"Predictions on the tunnel differ {_difference(path['most_apart'], labels)}."
            )
        else:
            route = _ROUTES.get(name, name)
            parts.append(f"{route} has {_barrier(path['barrier'])} (ends: {number(ends)} nats).")
    return " ".join(parts)


def _barrier(barrier: float) -> str:
    if barrier <= 0:
        return "no loss barrier"
    return f"a loss barrier of {number(barrier)} nats"


_ROUTES = {
    "straight": "The straight line",
    "aligned": "The straight line with matched units",
    "bezier": "The Bezier curve",
}


def _plane(scores: Scores) -> str:
    side = scores["points"]
    return f"{side} x {side} networks, each evaluated on {scores['inputs']} test inputs."


def _curvature(scores: Scores) -> str:
    return (
        f"The largest Hessian eigenvalue at a member is {number(scores['top'])}. "
        f"The trace over all {scores['weights']:,} weights is {number(scores['trace'])}."
    )


_SENTENCES: dict[str, Callable[[Scores], str]] = {
    "functions": _functions,
    "diversity": _diversity,
    "averaging": _averaging,
    "origin-plane": _plane,
    "three-plane": _plane,
    "curvature": _curvature,
}

_DISAGREEMENT: dict[str, Callable[[Scores, bool], str]] = {
    "trajectories": _trajectories,
    "line": _paths,
    "tunnel": _paths,
}
"""Analyses of the difference between functions: a share of labels or a number."""


COLLAPSED = 1e-3
"""A Gaussian scale below this is a point mass."""


def answers(evidence: Evidence) -> list[str]:
    """One or two sentences per result."""
    sentences = [
        evidence_sentence(evidence),
        tied(evidence),
        exact(evidence),
        degenerate(evidence),
        optimal(evidence),
    ]
    sentences += [widths(evidence)] if evidence.learned_priors else []
    sentences += [f"Not computed: {name} ({why})." for name, why in evidence.missing.items()]
    return sentences


def evidence_sentence(evidence: Evidence) -> str:
    """The log evidence of equal point masses, and its bounds."""
    return (
        f"With equal point masses at the members as the prior, the log evidence is "
        f"{evidence.log_evidence:.2f} nats. Its bounds are {evidence.lower:.2f} and "
        f"{evidence.upper:.2f}."
    ).replace("-", "−")


def tied(evidence: Evidence) -> str:
    """The effective number of members of the posterior, and the temperature for half of them."""
    posterior = evidence.weightings["posterior"].effective
    if len(evidence.finite_members) == 1:
        return "The only member has weight 1."
    text = (
        f"The exact posterior has an effective number of {number(posterior, 0.05)} of "
        f"{len(evidence.finite_members)} members. The range of the members' log-likelihoods is "
        f"{evidence.spread:.3g} nats ({evidence.spread / evidence.points:.2g} per data point); a "
        f"tie needs {evidence.tolerance:.2g}."
    )
    if evidence.half_temperature == 0:
        return f"{text} At every temperature, at least half of the members count."
    return f"{text} At temperature {evidence.half_temperature:.3g}, half of the members count."


def exact(evidence: Evidence) -> str:
    """NLL of the uniform average, beside posterior weights and stacking weights."""
    uniform, posterior = evidence.weightings["uniform"], evidence.weightings["posterior"]
    if math.isnan(uniform.nll):
        return "There are no test data to compare weights on."
    words = [f"{posterior.nll:.4f} with posterior weights"]
    if "stacking" in evidence.weightings:
        fitted = evidence.weightings["stacking"]
        words.append(f"{fitted.nll:.4f} with stacking weights fitted on {evidence.held_out}")
    return (
        f"On {evidence.evaluated_on}, the uniform average has an NLL of {uniform.nll:.4f} nats, "
        f"against {joined(words)}. The total variation between uniform and posterior predictions "
        f"is {percent(posterior.total_variation)}."
    )


def degenerate(evidence: Evidence) -> str:
    """How many members are distinct functions."""
    count = len(evidence.in_function)
    if count == len(evidence.finite_members):
        return f"No two members are the same: the ensemble has {counted(count, 'distinct member')}."
    same = [group for group in evidence.in_function if len(group) > 1]
    groups = joined([" = ".join(str(i + 1) for i in group) for group in same])
    copies = sum(len(group) - 1 for group in evidence.in_weights)
    how = f" ({counted(copies, 'copy').replace('copys', 'copies')} in weights)" if copies else ""
    return (
        f"Members {groups} are the same function{how}: the ensemble has "
        f"{counted(count, 'distinct member')}, not {len(evidence.finite_members)}."
    )


def optimal(evidence: Evidence) -> str:
    """The gradient of the log posterior at the members."""
    norms = evidence.gradient_norms
    of = "log posterior" if evidence.prior_known else "log-likelihood (the prior is not known)"
    return (
        f"The gradient norm of the {of} per data point is {min(norms):.2g} to "
        f"{max(norms):.2g} at the members. At a maximum the gradient norm is 0."
    )


def widths(evidence: Evidence) -> str:
    """The best Gaussian width at the members, by the learned priors."""
    priors = evidence.learned_priors
    at_members = [prior for prior in priors if prior.centre == "members" and prior.scales]
    widest = max((max(prior.scales.values()) for prior in at_members), default=0.0)
    gap = priors[0].log_evidence - priors[-1].log_evidence
    best = (
        "the best Gaussian width at the members goes to 0, so point masses are the best prior"
        if widest < COLLAPSED
        else f"the best Gaussian width at the members is {widest:.2g}"
    )
    return (
        f"From the most to the least flexible prior, the log evidence falls by {gap:.4g} nats; "
        f"{best}."
    )

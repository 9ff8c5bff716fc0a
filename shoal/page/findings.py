"""Landscape and evidence in sentences, each made from its numbers."""

import math
from collections.abc import Callable, Mapping
from typing import Any

from shoal.analysis.evidence.compute_evidence import Evidence
from shoal.analysis.landscape.scene import AnalysisResult
from shoal.core.text import counted, joined, number, percent

__all__ = ["answers", "degenerate", "exact", "finding", "tied", "widths"]

Scores = Mapping[str, Any]


def finding(name: str, part: AnalysisResult, labels: bool = True) -> str:
    """One or two sentences about a part; why there is nothing, where there is nothing.

    Args:
        name: of the part.
        part: what was found.
        labels: functions differ by a share of their labels; if not, by a number.
    """
    if "missing" in part.scores:
        return f"Not looked at: {part.scores['missing']}."
    if name in _UNLIKE:
        return _UNLIKE[name](part.scores, labels)
    return _SENTENCES[name](part.scores)


def _trajectories(scores: Scores, labels: bool) -> str:
    within, between = scores.get("last_snapshots"), scores.get("between_ends")
    if within is None or between is None:
        return "There are too few snapshots or members to compare trajectories."
    return (
        f"Two trained members differ {_apart(between, labels)}, the last two snapshots of one "
        f"member {_apart(within, labels)}."
    )


def _apart(value: float, labels: bool) -> str:
    return f"in {percent(value)} of their labels" if labels else f"by {number(value)} on average"


def _functions(scores: Scores) -> str:
    spaces = [f"{number(value, 0.05)} by {space}" for space, value in scores["effective"].items()]
    return f"The {scores['members']} members count as {joined(spaces)}."


def _diversity(scores: Scores) -> str:
    found = {
        name: value for name, value in scores["at_equal_accuracy"].items() if value is not None
    }
    members = found.pop("members", None)
    if members is None or not found:
        return "No samples are as accurate as the members, so that nothing can be compared."
    best = max(found, key=lambda name: found[name])
    return (
        f"At the accuracy of the members, another member differs by {number(members, 0.05)} of its "
        f"errors, the best of the other ways ({best}) by {number(found[best], 0.05)}."
    )


def _averaging(scores: Scores) -> str:
    told = []
    for name, table in scores["parts"].items():
        one, whole = (
            table["solution"]["nll"][0],
            {key: row["nll"][-1] for key, row in table.items()},
        )
        within = min(row["nll"][0] for row in table.values())
        best = min(whole, key=lambda key: whole[key])
        helps = "more modes help more" if whole["solution"] < within else "averaging helps more"
        told.append(f"{name}: {helps}; best of all is {best} in every mode ({number(whole[best])}, "
                    f"one solution {number(one)})")  # fmt: skip
    return f"NLL on {'. On '.join(told)}."


def _paths(scores: Scores, labels: bool) -> str:
    told = []
    for name, path in scores["paths"].items():
        ends = sum(path["ends"]) / 2
        if name == "tunnel":
            told.append(
                f"along the tunnel the loss stays within {percent(path['uneven'])} of its ends "
                f"while predictions come to differ {_apart(path['most_apart'], labels)}"
            )
        else:
            told.append(f"{_ROUTES.get(name, name)} {_climb(path['barrier'])} ({number(ends)})")
    text = "; ".join(told)
    return f"{text[:1].upper()}{text[1:]}."


def _climb(barrier: float) -> str:
    if barrier <= 0:
        return "nowhere rises above its ends"
    return f"rises by at most {number(barrier)} above its ends"


_ROUTES = {
    "straight": "the loss on the straight line",
    "aligned": "with units matched it",
    "bezier": "along the Bezier curve it",
}


def _plane(scores: Scores) -> str:
    side = scores["points"]
    return f"{side} x {side} networks, each judged on {scores['inputs']} test inputs."


def _curvature(scores: Scores) -> str:
    return (
        f"The steepest direction at a member has a curvature of {number(scores['top'])}, all "
        f"{scores['weights']:,} directions together {number(scores['trace'])}."
    )


_SENTENCES: dict[str, Callable[[Scores], str]] = {
    "functions": _functions,
    "diversity": _diversity,
    "averaging": _averaging,
    "origin-plane": _plane,
    "three-plane": _plane,
    "curvature": _curvature,
}

_UNLIKE: dict[str, Callable[[Scores, bool], str]] = {
    "trajectories": _trajectories,
    "line": _paths,
    "tunnel": _paths,
}
"""Those that tell how far functions are apart, which is a share of labels or a number."""


COLLAPSED = 1e-3
"""A scale below this, beside weights of usual size, is a point."""


def answers(told: Evidence) -> list[str]:
    """Everything that the numbers say, a sentence each."""
    found = [evidence_sentence(told), tied(told), exact(told), degenerate(told), optimal(told)]
    found += [widths(told)] if told.rungs else []
    found += [f"Left out: {name} ({why})." for name, why in told.missing.items()]
    return found


def evidence_sentence(told: Evidence) -> str:
    """The evidence of equal point masses and the bounds around it."""
    return (
        f"With equal point masses at its members as the prior, the log evidence is "
        f"{told.log_evidence:.2f} nats, between {told.lower:.2f} and {told.upper:.2f}, "
        f"as it must be."
    ).replace("-", "−")


def tied(told: Evidence) -> str:
    """How many members the posterior leaves, and how hot it would have to be for half of them."""
    posterior = told.weightings["posterior"].effective
    if len(told.living) == 1:
        return "A single member has all the weight there is."
    text = (
        f"The members' log likelihoods spread over {told.spread:.3g} nats "
        f"({told.spread / told.points:.2g} a data point), where {told.tolerance:.2g} would be a "
        f"tie: the exact posterior counts {number(posterior, 0.05)} of {len(told.living)} members"
    )
    if told.half_temperature == 0:
        return f"{text}, at least half of them at any temperature."
    return f"{text}; half of them would count at temperature {told.half_temperature:.3g}."


def exact(told: Evidence) -> str:
    """What uniform averaging costs or gains beside the posterior's and the stacked one."""
    uniform, posterior = told.weightings["uniform"], told.weightings["posterior"]
    if math.isnan(uniform.nll):
        return "There are no test data to compare weightings on."
    words = [f"{posterior.nll:.4f} with posterior weights"]
    if "stacking" in told.weightings:
        fitted = told.weightings["stacking"]
        words.append(f"{fitted.nll:.4f} with stacking weights fitted on {told.held_out}")
    return (
        f"On {told.judged} the uniform average has a loss of {uniform.nll:.4f} nats, against "
        f"{joined(words)}; uniform and posterior predictions differ by "
        f"{percent(posterior.total_variation)} of probability."
    )


def degenerate(told: Evidence) -> str:
    """How many members there really are."""
    count = len(told.in_function)
    if count == len(told.living):
        return f"No two members are the same: the ensemble really has {counted(count, 'member')}."
    same = [group for group in told.in_function if len(group) > 1]
    groups = joined([" = ".join(str(i + 1) for i in group) for group in same])
    copies = sum(len(group) - 1 for group in told.in_weights)
    how = f" ({counted(copies, 'copy').replace('copys', 'copies')} in weights)" if copies else ""
    return (
        f"Members {groups} are the same function{how}: the ensemble really has "
        f"{counted(count, 'member')}, not {len(told.living)}."
    )


def optimal(told: Evidence) -> str:
    """How far the members are from the top of their posterior."""
    norms = told.gradient_norms
    return (
        f"Divided by the number of data, the gradient of the log posterior has a length of "
        f"{min(norms):.2g} to {max(norms):.2g} at the members; at a maximum it would be 0."
    )


def widths(told: Evidence) -> str:
    """What the richer priors say: a width, or that points are best."""
    at_members = [rung for rung in told.rungs if rung.centre == "members" and rung.scales]
    widest = max((max(rung.scales.values()) for rung in at_members), default=0.0)
    gap = told.rungs[0].log_evidence - told.rungs[-1].log_evidence
    best = (
        "points are the best prior that Gaussians at the members can be"
        if widest < COLLAPSED
        else f"Gaussians at the members want a width of {widest:.2g}"
    )
    return (
        f"From the most to the least flexible prior the log evidence falls by {gap:.4g} nats, and "
        f"{best}."
    )

"""What each part of the landscape says, in a sentence made from its numbers."""

from collections.abc import Callable, Mapping
from typing import Any

from shoal.analysis.landscape.study import Part
from shoal.app.words import joined, number, percent

__all__ = ["finding"]

Scores = Mapping[str, Any]


def finding(name: str, part: Part, labels: bool = True) -> str:
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

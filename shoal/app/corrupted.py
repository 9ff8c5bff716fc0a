"""Means over corruptions, as published robustness is told."""

from collections.abc import Mapping, Sequence

from shoal.data.corruptions import SEVERITIES, parse_shift, registry

__all__ = ["corrupted_means"]

Scores = Mapping[str, float]


def corrupted_means(shifts: Mapping[str, Scores]) -> dict[str, dict[str, float]]:
    """The mean of every metric over the corruptions among the shifts.

    `all` is over every corruption and severity, `standard` over those that published means are
    taken over (when there are others, too), `severity-3` over the corruptions of that severity.

    >>> corrupted_means({"fog-1": {"nll": 1.0}, "fog-5": {"nll": 3.0}, "rotated-5": {"nll": 9.0}})
    {'all': {'nll': 2.0}, 'severity-1': {'nll': 1.0}, 'severity-5': {'nll': 3.0}}

    Args:
        shifts: metrics by the name of the shift, such as `fog-3`.
    """
    found = [(pair, scores) for name, scores in shifts.items() if (pair := parse_shift(name))]
    groups = {"all": [scores for _, scores in found]}
    standard = [scores for (name, _), scores in found if registry[name].standard]
    if 0 < len(standard) < len(found):
        groups["standard"] = standard
    for severity in SEVERITIES:
        groups[f"severity-{severity}"] = [scores for (_, s), scores in found if s == severity]
    return {name: _mean(group) for name, group in groups.items() if group}


def _mean(group: Sequence[Scores]) -> dict[str, float]:
    keys = [key for key in group[0] if all(key in scores for scores in group)]
    return {key: sum(scores[key] for scores in group) / len(group) for key in keys}

"""Claims of Fort et al. (2019) as differences between treatments, with a verdict by rule.

A claim is confirmed if its difference has the claimed sign and a p value below 0.05 after Holm's
correction over all claims and cases. It is refuted if the difference has the other sign at that
level. Otherwise these seeds cannot tell.
"""

from collections.abc import Callable, Iterator
from typing import NamedTuple

from tables import Rows, shifted, tested, values

from shoal.core.text import markdown_table
from shoal.prediction.statistics import holm, paired_difference, paired_p_value, verdict

__all__ = ["CLAIMS", "Claim", "table"]

BySeed = dict[int, float]


class Claim(NamedTuple):
    """The first number minus the second has the sign."""

    words: str
    first: Callable[[Rows], BySeed]
    second: Callable[[Rows], BySeed]
    sign: int


def _nll(where: Callable[..., BySeed], treatment: str) -> Callable[[Rows], BySeed]:
    return lambda rows: where(rows, "nll", treatment)


def _value(analysis: str, treatment: str, metric: str, split: str) -> Callable[[Rows], BySeed]:
    return lambda rows: values(
        rows, analysis=analysis, treatment=treatment, metric=metric, split=split
    )


def _best_sampler(rows: Rows) -> BySeed:
    """In each seed, the largest diversity that any sampler has at the members' accuracy."""
    names = {row["treatment"] for row in rows if row["analysis"] == "diversity"} - {"members"}
    found = [_value("diversity", name, "equal", "test")(rows) for name in names]
    seeds = {seed for each in found for seed in each}
    return {seed: max(each[seed] for each in found if seed in each) for seed in seeds}


def _gain(where: Callable[..., BySeed]) -> Callable[[Rows], BySeed]:
    """How much five members lower the NLL of one."""

    def found(rows: Rows) -> BySeed:
        one, five = (where(rows, "nll", name) for name in ("1 member", "5 member"))
        return {seed: one[seed] - five[seed] for seed in one}

    return found


def _nothing(rows: Rows) -> BySeed:
    return dict.fromkeys((row["seed"] for row in rows), 0.0)


def _variance(treatment: str, split: str) -> Callable[[Rows], BySeed]:
    return _value("bias-variance", treatment, "variance", split)


CLAIMS = (
    Claim("other members are more diverse than any sampler, at equal accuracy",
          _value("diversity", "members", "equal", "test"), _best_sampler, 1),
    Claim("mean-field VI samples are less diverse than members",
          _value("diversity", "mean-field", "full", "test"),
          _value("diversity", "members", "full", "test"), -1),
    Claim("snapshots of one member are more similar than two members",
          _value("trajectories", "snapshots of the second half", "apart", "test"),
          _value("trajectories", "two members", "apart", "test"), -1),
    Claim("the straight line has a loss barrier",
          _value("line", "straight", "barrier", "train"), _nothing, 1),
    Claim("ensembling helps more than averaging weights, clean NLL",
          _nll(tested, "5 member"), _nll(tested, "1 average"), -1),
    Claim("ensembling helps more than averaging weights, corrupted NLL",
          _nll(shifted, "5 member"), _nll(shifted, "1 average"), -1),
    Claim("ensembling helps more than SWAG, corrupted NLL",
          _nll(shifted, "5 member"), _nll(shifted, "1 SWAG"), -1),
    Claim("ensembling helps more than mean-field VI, clean NLL",
          _nll(tested, "5 member"), _nll(tested, "mean-field"), -1),
    Claim("ensembling helps more than mean-field VI, corrupted NLL",
          _nll(shifted, "5 member"), _nll(shifted, "mean-field"), -1),
    Claim("averages in every mode are best of both worlds, clean NLL",
          _nll(tested, "5 average"), _nll(tested, "5 member"), -1),
    Claim("averages in every mode are best of both worlds, corrupted NLL",
          _nll(shifted, "5 average"), _nll(shifted, "5 member"), -1),
    Claim("the gain of ensembling is larger under corruption", _gain(shifted), _gain(tested), 1),
    Claim("members have more variance to average than SWAG samples, test images",
          _variance("members", "test"), _variance("SWAG", "test"), 1),
    Claim("members have more variance to average than mean-field VI samples, test images",
          _variance("members", "test"), _variance("mean-field", "test"), 1),
)  # fmt: skip


def _pairs(rows: Rows, cases: list[str]) -> Iterator[tuple[str, Claim, list[float], list[float]]]:
    for claim in CLAIMS:
        for case in cases:
            mine = [row for row in rows if row["case"] == case]
            first, second = claim.first(mine), claim.second(mine)
            seeds = [seed for seed in first if seed in second]
            if len(seeds) > 1:
                yield case, claim, [first[s] for s in seeds], [second[s] for s in seeds]


def table(rows: Rows, cases: list[str]) -> str:
    """One line per claim and case with at least two seeds."""
    known = list(_pairs(rows, cases))
    adjusted = holm([paired_p_value(a, b) for _, _, a, b in known])
    lines = []
    for (case, claim, a, b), p in zip(known, adjusted, strict=True):
        change = paired_difference(a, b)
        mean, low, high = (f"{value:+.3f}" for value in change)
        ends = f"{sum(a) / len(a):.3f} and {sum(b) / len(b):.3f}"
        what = verdict(change.difference, claim.sign, p)
        lines.append([claim.words, case, ends, f"{mean} ({low} to {high})", str(len(a)), what])
    titles = ["claim", "case", "first and second", "difference (95 %)", "seeds", "verdict"]
    return markdown_table(titles, lines) if lines else "No case has two seeds."

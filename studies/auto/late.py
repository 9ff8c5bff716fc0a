"""What `method="auto"` misses: margins, the baseline with own batches, regret, other rules.

The plan (docs/results/auto/plan.md) was committed before any of it was computed.
`python -m studies.auto.rules` writes the tables.
"""

# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

from collections import Counter
from itertools import product

import numpy as np
import pandas as pd

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import (
    Decision,
    Difference,
    Pairs,
    decide,
    paired_difference,
    pairs_needed,
)
from studies.auto.make import OWN, TRUNKS
from studies.auto.rules import (
    FOLDER,
    PLAIN,
    ROUNDS,
    SCORES,
    SHIPPED,
    TITLES,
    Rule,
    judged,
    outcomes,
    price,
    read,
    verdicts,
)

CHOOSING = ("digits", "mnist", "kmnist", "cifar10", "boston", "energy", "yacht", "kin8nm",
            "breast-cancer", "protein")  # fmt: skip
"""The sets that choose among the other rules; the rest judge the choice."""
JUDGED_BY = ("nll", "shifted_nll", "auroc")
NAMES = dict(zip(SCORES, TITLES, strict=True))
MARGIN, MOST_MARGINS, MOST_PRICE, SHOWN = 0.01, 10, 3.0, 8
GUARDS = (1.0, 2.0, np.inf)
WEIGHTS = (0.5, 0.75, 1.0)
ROUNDS_AND_SLOPES = ((1, 0.0), (2, 0.0), (3, 0.0), (3, 0.5), (3, 1.0))
SHORT = {
    Rule(SHIPPED.arms, keep, errors, weight, slope): f"second round for {keep}, weight {weight:g}, "
    f"guard {errors:g}" + (f", slope {slope:g}" if slope else "")
    for (keep, slope), weight, errors in product(ROUNDS_AND_SLOPES, WEIGHTS, GUARDS)
}
"""Rules on the two short trainings."""
TRUNK = {
    Rule(SHIPPED.arms, 0, errors, weight, trunk=trunk): f"trunk {trunk}, weight {weight:g}, "
    f"guard {errors:g}"
    for trunk, weight, errors in product(TRUNKS, WEIGHTS, GUARDS)
}
"""Rules on candidates that differ late."""


def tables(rows: pd.DataFrame) -> list[str]:
    """All tables, as Markdown."""
    found = outcomes(rows, SHIPPED)
    full = rows[rows.stage == "1"].set_index(["set", "seed", "arm"])
    auto = full.loc[list(map(tuple, found[["set", "seed", "arm"]].to_numpy()))].droplevel("arm")
    plain, limits = full.xs(PLAIN, level="arm"), margins(rows)
    parts = ["## Margins: `auto` less the plain ensemble with common batches", MARGIN_WORDS]
    parts += decided(auto, plain, limits)
    own = read("own-batches.csv").set_index(["set", "seed"])
    parts += ["## Margins: `auto` less the plain ensemble with own batches"]
    parts += decided(auto, own, limits)
    parts += ["## Margins: plain ensembles, own batches less common batches"]
    parts += decided(own, plain, limits)
    if (FOLDER / "own-grid.csv").exists():
        parts += ["## Margins: own batches for `auto` and for the plain ensemble"]
        grid = read("own-grid.csv").assign(arm=lambda d: d.arm.str.removesuffix(OWN))
        chosen = judged(grid, outcomes(grid, SHIPPED)).set_index(["set", "seed", "method"])
        mine, other = (chosen.xs(method, level="method") for method in ("auto", "ensemble"))
        parts += decided(mine, other, limits)
    parts += ["## Regret: what the best candidate gains beyond the chosen one", REGRET_WORDS]
    parts += [regret_table(regret(rows, found))]
    parts += ["## Other rules", RULE_WORDS, *compared(rows, SHORT, limits)]
    late = with_trunk(rows)
    parts += ["## Rules with a trunk", *compared(late, TRUNK, limits)]
    parts += [
        "## What a short training foretells",
        FORETOLD_WORDS,
        foretold(rows, ROUNDS),
    ]
    return [*parts, "The sets, seeds and lengths of trunk.csv:", foretold(late, (*ROUNDS, *TRUNKS))]


def with_trunk(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the sets and seeds that trunk.csv has, and those of trunk.csv."""
    found = read("trunk.csv")
    return pd.concat([rows.merge(found[["set", "seed"]].drop_duplicates()), found])


MARGIN_WORDS = (
    "*Mean difference ± half of the 95 % interval; the margin is 0.01 nats, or 1 % of the plain "
    "ensemble's mean score if that is more, and 0.01 for AUROC. Verdicts are those of "
    "`shoal.prediction.statistics.decide`, one family for each score; ≤: not worse by the margin.*"
)
REGRET_WORDS = (
    "*Mean ± half of the 95 % interval over seeds; positive: the choice missed a gain. `seen`: the "
    "best candidate by the test score of the same seed, which counts noise as gain. `others`: the "
    "candidate that is best in the mean of the other seeds, named at the right. Bold: the interval "
    "is above 0, without a correction.*"
)
RULE_WORDS = (
    "*Score: gain over the plain ensemble in margins, clipped at ±10, the mean over NLL, NLL under "
    "shift, seeds and sets. Losses: sets with a significant loss in one of them, after Holm.*"
)


FORETOLD_WORDS = (
    "*Share of candidates, sets and seeds whose mean of clean and shifted NLL lies on the same "
    "side of the plain ensemble's in the short training, on held-out data, as in the whole one, on "
    "test data. `missed`: share of the gains of the whole training that are losses in the short "
    "one. `false`: share of the losses that are gains.*"
)


def foretold(rows: pd.DataFrame, stages: tuple[str, ...]) -> str:
    """How often short trainings have the sign of the whole training, by candidate."""

    def mean(stage: str, *columns: str) -> pd.DataFrame:
        part = rows[rows.stage == stage]
        values = part.assign(mean=part[list(columns)].mean(axis=1))
        return values.pivot(index=["set", "seed"], columns="arm", values="mean")

    full, lines = mean("1", "nll", "shifted_nll"), []
    for stage in stages:
        short = mean(stage, "clean_diff", "shift_diff")
        line = [stage]
        for arm in SHIPPED.arms:
            seen, true = short[arm] < 0, (full[arm] < full[PLAIN]).loc[short.index]
            shares = (seen == true).mean(), (~seen[true]).mean(), seen[~true].mean()
            line.append(" / ".join("–" if np.isnan(s) else f"{100 * s:.0f} %" for s in shares))
        lines.append(line)
    heads = ["length", *(f"{arm}: right / missed / false" for arm in SHIPPED.arms)]
    return markdown_table(heads, lines)


def margins(rows: pd.DataFrame) -> pd.DataFrame:
    """The difference that matters, by set and score."""
    plain = rows[(rows.stage == "1") & (rows.arm == PLAIN)].groupby("set")[list(SCORES)].mean()
    found = (MARGIN * plain.abs()).clip(lower=MARGIN)
    return found.assign(auroc=MARGIN, auroc_mi=MARGIN)


def decided(mine: pd.DataFrame, other: pd.DataFrame, limits: pd.DataFrame) -> list[str]:
    """Verdicts of all sets, and their numbers."""
    decisions = {key: _decisions(mine, other, key, limits) for key in JUDGED_BY}
    lines = [
        [name, next(iter(decisions.values()))[name].pairs]
        + [_cell(decisions[key][name]) for key in JUDGED_BY]
        for name in decisions["nll"]
    ]
    counts = []
    for key, each in decisions.items():
        kinds = Counter(str(d.verdict) for d in each.values())
        shown = [kinds[word] for word in ("better", "equal", "not decided", "worse")]
        counts.append([NAMES[key], *shown, sum(d.not_worse for d in each.values())])
    heads = ["score", "better", "equal", "not decided", "worse", "not worse by the margin"]
    titles = [NAMES[key] for key in JUDGED_BY]
    return [markdown_table(heads, counts), markdown_table(["set", "seeds", *titles], lines)]


def _decisions(
    mine: pd.DataFrame, other: pd.DataFrame, key: str, limits: pd.DataFrame
) -> dict[str, Decision]:
    both = mine[[key]].join(other[[key]], rsuffix="_other", how="inner")
    pairs = {
        str(name): Pairs(
            part[key].tolist(),
            part[f"{key}_other"].tolist(),
            "lower" if SCORES[key] < 0 else "higher",
            float(limits[key][name]),
        )
        for name, part in both.groupby("set", sort=False)
    }
    return decide(NAMES[key], pairs)


def _cell(d: Decision) -> str:
    mean, low, _ = d.difference
    return f"{mean:+.3f} ± {mean - low:.3f} {d.verdict}{', ≤' if d.not_worse else ''}"


def regret(rows: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Regret of every set and seed, for each score: seen afterwards, and by the other seeds."""
    lines = []
    full = rows[rows.stage == "1"]
    for name, part in found.groupby("set", sort=False):
        arms = [PLAIN, *SHIPPED.on(str(name)).arms]
        cell = full[(full["set"] == name) & full.arm.isin(arms)]
        for key in JUDGED_BY:
            gains = SCORES[key] * cell.pivot(index="seed", columns="arm", values=key)[arms]
            for seed, arm in part[["seed", "arm"]].itertuples(index=False):
                mine, others = gains.loc[seed], gains.drop(index=seed).mean()
                best = str(others.idxmax())
                seen, kept = mine.max() - mine[arm], mine[best] - mine[arm]
                line = {"set": name, "seed": seed, "score": key, "chosen": arm, "best": best}
                lines.append(line | {"seen": seen, "others": kept})
    return pd.DataFrame(lines)


def regret_table(found: pd.DataFrame) -> str:
    """One line for each set."""
    lines = []
    for name, part in found.groupby("set", sort=False):
        line = [name]
        for key in JUDGED_BY:
            of = part[part.score == key]
            best = ", ".join(f"{arm} {n}" for arm, n in of.best.value_counts().items())
            line += [f"{_zero(of[kind])}" for kind in ("seen", "others")] + [best]
        lines.append(line)
    heads = [f"{NAMES[key]}, {kind}" for key in JUDGED_BY for kind in ("seen", "others", "best")]
    return markdown_table(["set", *heads], lines)


def _zero(values: pd.Series) -> str:
    found = paired_difference(values, np.zeros(len(values)))
    bold = "**" if found.low > 0 else ""
    return f"{bold}{found.difference:+.3f} ± {found.difference - found.low:.3f}{bold}"


def score(found: pd.DataFrame, limits: pd.DataFrame) -> pd.Series:
    """The score of a rule, by set."""
    clipped = [
        (-found[key] / limits[key].loc[found["set"]].to_numpy()).clip(-MOST_MARGINS, MOST_MARGINS)
        for key in ("nll", "shifted_nll")
    ]
    return (sum(clipped) / 2).groupby(found["set"]).mean()


def losses(found: pd.DataFrame) -> int:
    """Number of sets with a significant loss in NLL or NLL under shift."""
    made = verdicts(found)
    return int(((made.nll_verdict == "loss") | (made.shifted_nll_verdict == "loss")).sum())


def compared(rows: pd.DataFrame, rules: dict[Rule, str], limits: pd.DataFrame) -> list[str]:
    """The rules on the choosing half, and the chosen one on the judging half."""
    chooses = rows["set"].isin(CHOOSING)
    halves = {"choosing": rows[chooses], "judging": rows[~chooses]}
    shipped = {half: outcomes(part, SHIPPED) for half, part in halves.items()}
    listed = []
    for rule, name in {**rules, SHIPPED: "shipped"}.items():
        found = outcomes(halves["choosing"], rule)
        listed.append((name, rule, score(found, limits).mean(), losses(found), price(rule)))
    fit = [e for e in listed if e[1] in rules and not e[3] and e[4] <= MOST_PRICE]
    best = max(fit, key=lambda e: e[2])
    ranked = enumerate(sorted(listed, key=lambda e: -e[2]))
    shown = [e for place, e in ranked if place < SHOWN or e[1] == SHIPPED]
    lines = [[n, f"{s:.2f}", lost, f"{p:.2f}"] for n, _, s, lost, p in shown]
    judging = outcomes(halves["judging"], best[1])
    mine, other = score(judging, limits), score(shipped["judging"], limits)
    change: Difference = paired_difference(mine, other)
    needed = pairs_needed(change.difference, float((mine - other).std()))
    sets = [[n, f"{other[n]:+.2f}", f"{mine[n]:+.2f}"] for n in mine.index]
    words = (
        f"Chosen on {shipped['choosing']['set'].nunique()} sets: {best[0]}. On the other "
        f"{len(mine)} sets its score is {mine.mean():.2f}, that of the shipped rule "
        f"{other.mean():.2f}: {change.difference:+.2f} (95 % interval {change.low:+.2f} to "
        f"{change.high:+.2f}). A true difference of this size would need {needed} sets. Sets with "
        f"a significant loss: {losses(judging)}. Accuracy under shift, less that of the shipped "
        f"rule: {_points(judging, shipped['judging'])}."
    )
    heads = ["rule, choosing half", "score", "losses", "largest price"]
    judged_by = ["set, judging half", "shipped", "chosen rule"]
    return [markdown_table(heads, lines), words, markdown_table(judged_by, sets)]


def _points(mine: pd.DataFrame, other: pd.DataFrame) -> str:
    """Difference in accuracy under shift over the sets with classes, in points."""
    means = [100 * each.groupby("set").shifted_accuracy.mean().dropna() for each in (mine, other)]
    found = paired_difference(*means)
    return (
        f"{found.difference:+.2f} points ({found.low:+.2f} to {found.high:+.2f}, "
        f"{len(means[0])} sets with classes)"
    )

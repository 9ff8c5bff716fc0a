"""Rules that choose an arm by short runs, computed from raw.csv.

    python -m studies.auto.rules

A rule has arms, rounds and a criterion. All arms train for an eighth of the steps. The best
`keep` of them, and the plain ensemble, train for a third. Of these the rule takes the arm with the
lowest weighted mean of clean and shifted NLL among those that pass the guard. An arm passes if its
clean NLL is higher than that of the plain ensemble by at most `errors` paired standard errors.
A rule with a trunk has one round instead, in which arms differ late (trunk.csv).
"""

# pandas' types say Series | DataFrame of nearly every expression
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false, reportCallIssue=false
# pyright: reportGeneralTypeIssues=false

import math
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd

from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import holm, paired_difference, paired_p_value
from studies import RESULTS
from studies.auto.controller import TARGETS
from studies.auto.problems import UNSEEN, UNSEEN_AFTER, UNSEEN_BEFORE

FOLDER = RESULTS / "auto"
PLAIN = "ensemble"
ROUNDS = ("0.125", "0.333")
WIDE = ("features",)
"""Sets whose axes of input gradients cost more than `search.candidates.MOST_AXES_PRICE`."""


@dataclass(frozen=True)
class Rule:
    """One rule.

    Attributes:
        arms: the arms, without the plain ensemble.
        keep: number of arms in the second round; 0 decides after the first.
        errors: standard errors by which the clean NLL may be higher; infinite for no guard.
        weight: that of the shifted NLL; the clean NLL has the rest.
        slope: share of the change between the rounds, per logarithm of the steps, that is added
            to the differences of the second round to foretell those of the whole training.
        trunk: stage of the only round; "" for the two rounds.
    """

    arms: tuple[str, ...]
    keep: int = 1
    errors: float = 1.0
    weight: float = 0.5
    slope: float = 0.0
    trunk: str = ""

    def on(self, name: str) -> "Rule":
        """The rule on a set: `method="auto"` leaves out arms whose axes cost too much."""
        others = tuple(arm for arm in self.arms if not arm.startswith("forde"))
        return replace(self, arms=others) if others and name in WIDE else self

    def order(self, round_: pd.DataFrame) -> pd.Series:
        """The criterion of every arm: 0 for the plain ensemble, lower is better."""
        return (1 - self.weight) * round_.clean_diff + self.weight * round_.shift_diff

    def last(self, first: pd.DataFrame, second: pd.DataFrame) -> pd.DataFrame:
        """The round that decides."""
        if not self.keep:
            return first
        far = self.slope * math.log(3) / math.log(8 / 3)
        foretold = {
            key: second[key] + far * (second[key] - first[key])
            for key in ("clean_diff", "shift_diff")
        }
        return second.assign(**foretold)

    def choose(self, first: pd.DataFrame, second: pd.DataFrame) -> str:
        """The arm that is chosen, from the rows of both rounds by arm."""
        arms = [arm for arm in self.arms if np.isfinite(first.held_shifted[arm])]
        if self.keep:
            arms = list(self.order(first.loc[arms]).sort_values().index[: self.keep])
        taking = self.last(first, second).loc[[PLAIN, *arms]]
        passes = (taking.clean_diff <= self.errors * taking.clean_se) | (taking.index == PLAIN)
        return str(self.order(taking[passes]).idxmin())


SHIPPED = Rule(("kde:1e3", "forde:4", "forde:16"))
"""The rule of `method="auto"`, fixed on the sets of the design."""


CONTROLLERS = {
    "targets of kde and f-kde": Rule(tuple(f"{m}@{t}" for m in ("kde", "f-kde") for t in TARGETS)),
    "targets of kde": Rule(tuple(f"kde@{t}" for t in TARGETS)),
    "targets of f-kde": Rule(tuple(f"f-kde@{t}" for t in TARGETS)),
}
"""Rules that choose the target of a controller."""


def read(name: str = "raw.csv") -> pd.DataFrame:
    """All rows of a file."""
    return pd.read_csv(FOLDER / name, dtype={"stage": str})


SCORES = {"nll": -1, "shifted_nll": -1, "auroc": 1, "auroc_mi": 1}
"""Scores that judge, and the sign of a gain."""
TITLES = ("NLL", "NLL under shift", "AUROC", "AUROC by disagreement")
OTHERS = {
    "three arms, second round for one (shipped)": SHIPPED,
    "the same, no guard": Rule(SHIPPED.arms, errors=np.inf),
    "the same, by clean NLL": Rule(SHIPPED.arms, weight=0),
    "the same, decided after the first round": Rule(SHIPPED.arms, keep=0),
    "the same, second round for two": Rule(SHIPPED.arms, keep=2),
    "also kde:1e4": Rule(("kde:1e3", "kde:1e4", "forde:4", "forde:16")),
    "also kde:1e4, second round for two": Rule(("kde:1e3", "kde:1e4", "forde:4", "forde:16"), 2),
    "strength of forde": Rule(("forde:4", "forde:16", "forde:64")),
    "strength of kde": Rule(("kde:100", "kde:1e3", "kde:1e4")),
    "strength of f-kde": Rule(("f-kde:10", "f-kde:100", "f-kde:1e3")),
}
"""Rules that were compared."""
PRICES = {"forde": 2.2, "kde": 1.1, "f-kde": 1.1, PLAIN: 1.0}
"""Time of a step in plain steps, on ten residual networks (docs/benchmarks)."""


def outcomes(rows: pd.DataFrame, every: Rule) -> pd.DataFrame:
    """What a rule chooses for every set and seed, and what it brings on the test data."""
    found = []
    for (name, seed), cell in rows.groupby(["set", "seed"], sort=False):
        rule = every.on(str(name))
        stages = {stage: part.set_index("arm") for stage, part in cell.groupby("stage")}
        taking = (rule.trunk, rule.trunk) if rule.trunk else ROUNDS
        if not {*taking, "1"} <= set(stages) or not {PLAIN, *rule.arms} <= set(stages["1"].index):
            continue
        first, second, full = (stages[stage] for stage in (*taking, "1"))
        arm = rule.choose(first, second)
        arms = [PLAIN, *rule.arms]
        taken = [PLAIN, *list(rule.order(first.loc[list(rule.arms)]).sort_values().index)]
        spent = first.seconds[arms].sum() + second.seconds[taken[: rule.keep + 1]].sum()
        spent = spent if rule.keep else first.seconds[arms].sum()
        row = {"set": name, "seed": seed, "arm": arm, "times_plain": spent / full.seconds[PLAIN]}
        row |= {key: full[key][arm] - full[key][PLAIN] for key in (*SCORES, "shifted_accuracy")}
        found.append(row)
    return pd.DataFrame(found)


def price(rule: Rule) -> float:
    """Largest price of a search by a rule, in trainings of the plain ensemble."""
    each = [PRICES[arm.split(":")[0].split("@")[0]] for arm in rule.arms]
    if rule.trunk:
        length, after = map(float, rule.trunk.split("@"))
        return length * (after + (1 - after) * (1 + sum(each)))
    second = (1 + sum(sorted(each, reverse=True)[: rule.keep])) / 3 if rule.keep else 0
    return (PRICES[PLAIN] + sum(each)) / 8 + second


def judged(rows: pd.DataFrame, found: pd.DataFrame) -> pd.DataFrame:
    """Scores on the test data of the plain ensemble and of the chosen arm."""
    full = rows[rows.stage == "1"].set_index(["set", "seed", "arm"])
    lines = []
    for name, seed, arm in found[["set", "seed", "arm"]].itertuples(index=False):
        for method, taken in (("ensemble", PLAIN), ("auto", arm)):
            scores = full.loc[(name, seed, taken), list(SCORES)].to_dict()
            lines.append({"set": name, "seed": seed, "method": method, "arm": taken, **scores})
    return pd.DataFrame(lines)


def verdicts(found: pd.DataFrame) -> pd.DataFrame:
    """Mean differences to the plain ensemble by set, with Holm-corrected verdicts by score."""
    lines = {}
    for name, part in found.groupby("set", sort=False):
        line = {"seeds": len(part), "chosen": _chosen(part.arm), "price": part.times_plain.mean()}
        for key in SCORES:
            line |= {
                key: part[key].mean(),
                f"{key}_half": _half(part[key]),
                f"{key}_p": paired_p_value(part[key], np.zeros(len(part))),
            }
        lines[name] = line
    made = pd.DataFrame(lines).T
    for key, sign in SCORES.items():
        p = np.array(holm(made[f"{key}_p"].tolist()))
        side = np.sign(sign * made[key].astype(float))
        made[f"{key}_verdict"] = np.where(p < 0.05, np.where(side > 0, "win", "loss"), "tie")
    return made


def _chosen(arms: pd.Series) -> str:
    counts = arms.value_counts()
    return ", ".join(f"{arm} {count}" for arm, count in counts.items())


def _half(values: pd.Series) -> float:
    """Half of the 95 % interval of the mean."""
    mean, low, _ = paired_difference(values, np.zeros(len(values)))
    return mean - low


def table(made: pd.DataFrame) -> str:
    """One line for each set."""
    lines = []
    for name, line in made.iterrows():
        cells = []
        for key in SCORES:
            bold = "" if line[f"{key}_verdict"] == "tie" else "**"
            half = line[f"{key}_half"]
            width = f"± {half:.3f}" if np.isfinite(half) else "(one seed)"
            cells.append(f"{bold}{line[key]:+.3f} {width}{bold}")
        lines.append([name, line.seeds, line.chosen, *cells, f"{line.price:.1f}"])
    return markdown_table(["set", "seeds", "chosen", *TITLES, "search / plain training"], lines)


def counts(made: pd.DataFrame) -> list[str]:
    """Wins, ties and losses of each score."""
    kinds = [made[f"{key}_verdict"].value_counts() for key in SCORES]
    return [f"{k.get('win', 0)} / {k.get('tie', 0)} / {k.get('loss', 0)}" for k in kinds]


def comparison(rows: pd.DataFrame) -> str:
    """All rules on the sets of the design."""
    lines = []
    for name, rule in OTHERS.items():
        found = outcomes(rows, rule)
        lines.append([name, found["set"].nunique(), *counts(verdicts(found)), f"{price(rule):.2f}"])
    return markdown_table(["rule", "sets", *TITLES, "largest price"], lines)


def against_plain(rows: pd.DataFrame, arm: str) -> pd.DataFrame:
    """An arm less the plain ensemble on the test data, without a choice, by set and seed."""
    full = rows[rows.stage == "1"].set_index(["set", "seed"])
    mine, plain = full[full.arm == arm], full[full.arm == PLAIN]
    change = mine[list(SCORES)] - plain[list(SCORES)]
    times = mine.seconds / plain.seconds
    return change.reset_index().assign(arm=arm, times_plain=times.to_numpy())


def controllers(rows: pd.DataFrame, controlled: pd.DataFrame) -> list[str]:
    """Targets of a controller beside the shipped rule, on the same sets and seeds."""
    runs = controlled[["set", "seed"]].drop_duplicates()
    shipped = outcomes(rows.merge(runs), SHIPPED)
    lines = [["shipped", *counts(verdicts(shipped)), "", "", f"{price(SHIPPED):.2f}"]]
    for name, rule in CONTROLLERS.items():
        found = outcomes(controlled, rule)
        less = _less(found, shipped)
        signs = [f"{(way * less.nll > 0).sum()}" for way in (-1, 1)]
        signs.insert(1, f"{(less.nll == 0).sum()}")
        cells = [", ".join(counts(verdicts(less))[:3]), " / ".join(signs), f"{price(rule):.2f}"]
        lines.append([name, *counts(verdicts(found)), *cells])
    whole = outcomes(controlled, CONTROLLERS["targets of kde and f-kde"])
    beside = "less the shipped rule: NLL, under shift, AUROC"
    lower = "runs with lower / equal / higher NLL than the shipped rule"
    heads = ["rule", *TITLES, beside, lower, "largest price"]
    return [
        markdown_table(heads, lines),
        "Targets of kde and f-kde, less the plain ensemble:",
        table(verdicts(whole)),
        "Targets of kde and f-kde, less the shipped rule:",
        table(verdicts(_less(whole, shipped))),
        "Each target by itself, less the plain ensemble; strengths at the end of the training:",
        _targets(controlled),
    ]


def _less(found: pd.DataFrame, other: pd.DataFrame) -> pd.DataFrame:
    """The outcomes of a rule less those of another, by set and seed."""
    both = found.merge(other, on=["set", "seed"], suffixes=("", "_other"))
    return both.assign(**{key: both[key] - both[f"{key}_other"] for key in SCORES})


def _targets(controlled: pd.DataFrame) -> str:
    """Wins, ties and losses of every target without a choice, and strengths at the end."""
    lines = []
    for arm in CONTROLLERS["targets of kde and f-kde"].arms:
        found = against_plain(controlled, arm)
        mine = controlled[(controlled.stage == "1") & (controlled.arm == arm)].set_index("set")
        ends = np.exp(np.log(mine.strength).groupby("set").mean())
        ratios = mine.ratio.groupby("set").mean()
        spread = f"{ends.min():,.0f} to {ends.max():,.0f}"
        kept = f"{ratios.min():.2g} to {ratios.max():.2g}"
        lines.append([arm, *counts(verdicts(found)), spread, kept])
    return markdown_table(
        ["target", *TITLES, "strength, lowest to highest set", "push / drive"], lines
    )


def figure(*parts: pd.DataFrame) -> None:
    """What the choice brings on every set, with its interval; a dotted line between the parts."""
    import matplotlib.pyplot as plt

    from shoal.plots.figure import rc

    both = pd.concat(parts[::-1])[::-1]
    ends = np.cumsum([len(part) for part in parts])[:-1]
    height = 0.33 * len(both) + 1.4
    with plt.rc_context(rc()):
        figure, axes = plt.subplots(1, 3, figsize=(11, height), sharey=True)
        for ax, key, title in zip(axes, ("nll", "shifted_nll", "auroc"), TITLES, strict=False):
            values, half = both[key].astype(float), both[f"{key}_half"].astype(float)
            gain = SCORES[key] * values
            colours = {"win": "C0", "tie": "0.6", "loss": "C3"}
            for at, (name, verdict) in enumerate(both[f"{key}_verdict"].items()):
                ax.errorbar(gain[name], at, xerr=half[name], fmt="o", color=colours[verdict])
            ax.axvline(0, color="0.5", lw=1)
            for end in ends:
                ax.axhline(end - 0.5, color="0.5", lw=1, ls=":")
            ax.set_xscale("symlog", linthresh=0.02)
            ticks = (-10, -0.1, 0, 0.1, 10) if key == "shifted_nll" else (-0.1, 0, 0.1)
            ax.set_xticks(ticks, [f"{tick:+g}" if tick else "0" for tick in ticks])
            ax.minorticks_off()
            ax.set_title(f"gain in {title}" if key == "auroc" else f"lower {title}")
            ax.margins(y=0.03)
        prices = [f"{line.price:.1f}" for _, line in both.iterrows()]
        for at, price in enumerate(prices):
            axes[-1].text(1.04, at, price, transform=axes[-1].get_yaxis_transform(), va="center")
        axes[-1].text(1.04, 1.02, "search,\ntimes training", transform=axes[-1].transAxes)
        axes[0].set_yticks(range(len(both)), both.index)
        figure.savefig(FOLDER / "gain.png", dpi=150, bbox_inches="tight")


def main() -> None:
    """Write chosen.csv, tables.md and gain.png."""
    from studies.auto import late  # which needs this module

    rows = read()
    judged(rows, outcomes(rows, SHIPPED)).to_csv(FOLDER / "chosen.csv", index=False)
    both = verdicts(outcomes(rows, SHIPPED))
    made, before, after = (
        both.loc[[name for name in both.index if name in names]]
        for names in (set(both.index) - set(UNSEEN), UNSEEN_BEFORE, UNSEEN_AFTER)
    )
    parts = [
        '# Tables of the study of `method="auto"`',
        "*Written by `python -m studies.auto.rules` from the CSV files. "
        "Differences to the plain ensemble, mean ± half of the 95 % interval by Student's t, "
        "paired by seed. Bold: significant after Holm's correction over all sets. "
        "For tables of numbers, AUROC is that of the standard deviation.*",
        "## Sets of the design",
        table(made),
        "## Sets that were opened after the rule was written, and came with it",
        table(before),
        "## Sets that were opened after commit f792b82, which has the rule",
        table(after),
        "## All sets: wins / ties / losses",
        markdown_table(
            ["sets", "number", *TITLES],
            [
                [name, len(part), *counts(part)]
                for name, part in (
                    ("design", made),
                    ("opened later", before),
                    ("opened after f792b82", after),
                    ("all", both),
                )
            ],
        ),
        "## Rules on the sets of the design: wins / ties / losses",
        comparison(rows[~rows["set"].isin(UNSEEN)]),
    ]
    parts += ["## A controller that keeps push / drive at a target: wins / ties / losses"]
    parts += controllers(rows, read("controller.csv"))
    found = verdicts(against_plain(read("target.csv"), "kde@0.03"))
    parts += [
        "## One target for all sets, without a search",
        markdown_table(["sets", *TITLES], [[len(found), *counts(found)]]),
        table(found.assign(chosen="–")),
        *late.tables(rows),
    ]
    (FOLDER / "tables.md").write_text("\n\n".join(parts) + "\n", encoding="utf-8")
    figure(made, before, after)
    print("\n\n".join(parts[2:]))


if __name__ == "__main__":
    main()

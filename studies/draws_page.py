"""The page on draws and repulsion, and its figure: python -m studies.draws_page

Writes corners.md and corners.png from posteriors.csv, uci.csv and digits.csv. The docstring of
`studies.draws_corners` is the plan.
"""

from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import Any

import matplotlib

from shoal.core.display.text import markdown_table, plus_minus
from shoal.plots.figure import COLOURS, blank, legend, png, power, rc
from shoal.prediction.statistics import mean_and_error, paired_difference
from studies.common import read_csv
from studies.draws_corners import CHAINS, PLACE, PROBLEMS, SAMPLERS, STARTS
from studies.draws_uci import LARGE, SMALL

Values = Mapping[str, Mapping[tuple, float]]
"""By arm, then by what pairs runs: problem and seed or split."""

DISTANCES = {
    "frechet": "Fréchet distance",
    "tv": "total variation",
    "stein": "Stein discrepancy",
    "weights/sliced": "sliced distance of weights",
    "members": "networks",
    "seconds": "seconds",
}
NETWORKS = "perceptron", "convolutions"

TEXT = """# Draws and repulsion

    python -m studies.draws_corners --jobs 12             # posteriors.csv
    python -m studies.draws_uci --uci uci_regression.npz --jobs 12
    python -m studies.draws_digits --jobs 12
    python -m studies.draws_page                          # this page

Which corner of {{plain, repelled}} x {{points, draws}} is nearest to the posterior, and which
predicts best, at equal cost? The docstrings of the commands are the plan; they were written before
the runs. "More" points are as many members as take the seconds of their draws. Seconds are those of
the processor, one thread, on x86 cores. All arms of a seed ran on one of two machines, whose speeds
differ about twofold. Known posteriors: {seeds}. Differences are paired by seed or split, with 95 %
intervals by Student's t, not corrected for their number.

{answer}

![Distance and NLL of every corner](corners.png)

Above: distance to the known posteriors, means over seeds. Below: NLL minus that of more members,
means over splits or seeds with 95 % intervals.

## Nearest to the posterior

{distances}

{nearest}

{posterior_questions}

## Best prediction

{best}

{prediction_questions}

[UCI problems](README.md) and [digits](digits.md) have all numbers.
"""


def posteriors(path: Path = PLACE / "posteriors.csv") -> dict[str, dict[str, dict[tuple, float]]]:
    """Distance, then arm, then (problem, seed)."""
    found: dict[str, dict[str, dict[tuple, float]]] = {}
    for row in read_csv(path):
        by_arm = found.setdefault(row["distance"], {}).setdefault(row["arm"], {})
        by_arm[row["problem"], row["seed"]] = float(row["value"])
    return found


def scores(path: Path, measure: str = "nll") -> dict[str, dict[tuple, float]]:
    """Arm, then (problem or network, split or seed)."""
    found: dict[str, dict[tuple, float]] = {}
    for row in read_csv(path):
        name, number, *_ = row.values()
        found.setdefault(row["arm"], {})[name, number] = float(row[measure])
    return found


def paired(values: Values, first: str, second: str, names: tuple[str, ...]):
    """The difference of two arms on some problems, and its number of pairs; None if too few."""
    a, b = values.get(first, {}), values.get(second, {})
    keys = [key for key in a if key in b and key[0] in names]
    if len(keys) < 2:
        return None
    return paired_difference([a[key] for key in keys], [b[key] for key in keys]), len(keys)


def asked(values: Values, questions: list[tuple[str, str, str]], sets: dict[str, tuple]) -> str:
    """A table: each question on each set of problems."""
    lines = []
    for question, first, second in questions:
        for name, problems in sets.items():
            if (found := paired(values, first, second, problems)) is not None:
                (away, low, high), pairs = found
                word = "lower" if high < 0 else "higher" if low > 0 else "not significant"
                cells = f"{away:+.4f} ({low:+.4f} to {high:+.4f})"
                lines.append([question, f"{first} minus {second}", name, cells, pairs, word])
    heads = ["question", "arms", "data", "difference (95 %)", "pairs", "result"]
    return markdown_table(heads, lines)


def corner(values: Values, corners: dict[str, str], problem: str) -> str:
    """The corner with the lowest mean, and those that are not shown to be higher."""
    known = {name: values[arm] for name, arm in corners.items() if arm in values}
    means = {
        name: mean(own[key] for key in own if key[0] == problem)
        for name, own in known.items()
        if any(key[0] == problem for key in own)
    }
    if len(means) < len(corners):
        return ""
    lowest = min(means, key=lambda name: means[name])
    close = []
    for name in means:
        if name != lowest:
            found = paired(values, corners[name], corners[lowest], (problem,))
            if found is None or found[0].low <= 0:
                close.append(name)
    return lowest if not close else f"{lowest} (open: {', '.join(close)})"


def corners_of(repelled: str, sampler: str) -> dict[str, str]:
    """The four corners of a method and a sampler on the known posteriors."""
    return {
        "plain points": "more ensemble",
        "repelled points": f"more {repelled}",
        "draws": f"ensemble + {sampler}",
        "repelled draws": f"{repelled} + {sampler}",
    }


def distance_tables(found: dict[str, dict[str, dict[tuple, float]]]) -> str:
    """Means and standard errors of every distance."""
    arms = [
        *(name for start in STARTS for name in (start, f"more {start}")),
        *(f"{start} + {sampler}" for sampler in SAMPLERS for start in STARTS),
        *CHAINS,
    ]
    tables = []
    for distance, title in DISTANCES.items():
        names = PROBLEMS[:1] if distance.startswith("weights") else PROBLEMS
        lines = []
        for arm in arms:
            own = found[distance].get(arm, {})
            cells = [[v for key, v in own.items() if key[0] == name] for name in names]
            shown = [
                ("" if not each else f"{mean(each):.0f}")
                if distance == "members"
                else ("" if not each else plus_minus(*mean_and_error(each)))
                for each in cells
            ]
            lines.append([arm, *shown])
        tables.append(markdown_table([title, *names], lines))
    return "\n\n".join(tables)


def nearest_table(values: Values) -> str:
    """Nearest corner by Fréchet distance for each method and sampler."""
    lines = [
        [method, sampler, *(corner(values, corners_of(method, sampler), p) for p in PROBLEMS)]
        for method in STARTS[1:]
        for sampler in SAMPLERS
    ]
    return markdown_table(["repelled", "sampler", *PROBLEMS], lines)


def corners_by_nll(problem: str) -> dict[str, str]:
    """The four corners of a data set."""
    drawn = "draws" if problem in SMALL else "mclmc" if problem == "perceptron" else "sghmc"
    return {
        "plain points": "more members",
        "repelled points": "more repelled",
        "draws": drawn,
        "repelled draws": f"repelled {drawn}",
    }


def best_table(uci: Values, digits: Values) -> str:
    """Best corner by NLL for each data set."""
    lines = []
    for problem in (*SMALL, *LARGE, *NETWORKS):
        corners = corners_by_nll(problem)
        values = digits if problem in NETWORKS else uci
        cells = []
        for arm in corners.values():
            each = [v for key, v in values.get(arm, {}).items() if key[0] == problem]
            cells.append(plus_minus(*mean_and_error(each)) if len(each) > 1 else "")
        if all(cells):
            lines.append([problem, corners["draws"], *cells, corner(values, corners, problem)])
    heads = ["NLL", "draws by", "plain points", "repelled points", "draws", "repelled draws"]
    return markdown_table([*heads, "lowest"], lines)


def posterior_questions(values: Values) -> str:
    """The four questions by Fréchet distance."""
    questions = [
        *(("draws", f"ensemble + {s}", "more ensemble") for s in SAMPLERS),
        *(
            ("repelled starts", f"{m} + {s}", f"ensemble + {s}")
            for s in SAMPLERS
            for m in STARTS[1:]
        ),
        *(("repelled points", f"more {m}", "more ensemble") for m in STARTS[1:]),
        *(("chains that repel", arm, "noise 1") for arm in list(CHAINS)[1:]),
    ]
    return asked(values, questions, {name: (name,) for name in PROBLEMS})


def prediction_questions(uci: Values, digits: Values) -> str:
    """The four questions by NLL."""
    small = asked(uci, [
        ("draws", "draws", "more members"),
        ("repelled starts", "repelled draws", "draws"),
        ("repelled points", "more repelled", "more members"),
        ("chains that repel", "repelling sghmc", "sghmc"),
    ], {"five UCI problems": SMALL})  # fmt: skip
    large = asked(uci, [
        ("draws", "sghmc", "more members"),
        ("repelled starts", "repelled sghmc", "sghmc"),
        ("repelled points", "more repelled", "more members"),
        ("chains that repel", "repelling sghmc", "sghmc"),
    ], {"three large UCI problems": LARGE})  # fmt: skip
    images = asked(digits, [
        ("draws", "mclmc", "more members"),
        ("draws", "sghmc", "more members"),
        ("repelled starts", "repelled mclmc", "mclmc"),
        ("repelled starts", "repelled sghmc", "sghmc"),
        ("repelled points", "more repelled", "more members"),
        ("chains that repel", "repelling sghmc", "sghmc"),
    ], {f"digits, {name}": (name,) for name in NETWORKS})  # fmt: skip
    return "\n\n".join((small, large, images))


LOOKS = {
    "points": (COLOURS["ensemble"], "o"),
    "repelled points": (COLOURS["f-svgd"], "s"),
    "draws": ("#0078a8", "D"),
    "repelled draws": ("#d87800", "^"),
    "chains that repel": (COLOURS["forde"], "P"),
}
"""Colour and marker of each corner."""


def figure(distance: Values, uci: Values, digits: Values) -> Any:
    """Distances of the corners above, differences in NLL below."""
    drawing, (above, below) = blank(2, 2.1)
    _draw_distances(above, distance)
    _draw_differences(below, uci, digits)
    legend(drawing, above)
    return drawing


def _draw_distances(axes: Any, values: Values) -> None:
    """Mean Fréchet distance of every corner, by problem."""
    arms = [*corners_of("f-svgd:calibrated", "hmc").values(), "strength 0.5, noise 0.5"]
    for place, (label, arm) in enumerate(zip(LOOKS, arms, strict=True)):
        colour, marker = LOOKS[label]
        found = {
            x: mean(v for key, v in values[arm].items() if key[0] == problem)
            for x, problem in enumerate(PROBLEMS)
            if any(key[0] == problem for key in values[arm])
        }
        where = [x + 0.14 * (place - 2) for x in found]
        axes.plot(where, list(found.values()), marker, color=colour, markersize=7, label=label)
    axes.set(yscale="log", ylabel="Fréchet distance", title="Distance to the posterior")
    axes.set_xticks(range(len(PROBLEMS)), PROBLEMS)
    power(axes.yaxis)


def _draw_differences(axes: Any, uci: Values, digits: Values) -> None:
    """NLL of every corner minus that of plain points, by data set."""
    sets = [*SMALL, *LARGE, *NETWORKS]
    for x, problem in enumerate(sets):
        values = digits if problem in NETWORKS else uci
        arms = [*list(corners_by_nll(problem).values())[1:], "repelling sghmc"]
        for place, (label, arm) in enumerate(zip(list(LOOKS)[1:], arms, strict=True)):
            if (found := paired(values, arm, "more members", (problem,))) is not None:
                (away, low, high), _ = found
                colour, marker = LOOKS[label]
                axes.errorbar(
                    [x + 0.17 * (place - 1.5)], [away], [[away - low], [high - away]],
                    fmt=marker, color=colour, markersize=5, linewidth=1.2,
                )  # fmt: skip
    axes.axhline(0, color="0.5", linewidth=0.8)
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_yticks([-10, -1, -0.1, 0, 0.1, 1, 10], ["−10", "−1", "−0.1", "0", "0.1", "1", "10"])
    axes.set(ylabel="NLL minus more members", title="Prediction")
    axes.set_xticks(range(len(sets)), sets, rotation=45, ha="right")


ANSWER = """
**Nearest to the posterior: draws on networks.** On the three networks draws are far nearer than as
many seconds of plain members, or of repelled members. Between plain and repelled starts all is
open: no start is shown to be nearer, by either sampler. On the linear model points repelled by
`kde:calibrated` are nearest.

**Best prediction: it depends on the data.** On the UCI problems draws, of either start, have the
lowest NLL. On digits more plain members have it, for both networks; draws by `mclmc` for the
perceptron are not decided. There draws are better in AUROC and a little in accuracy. Nearest to the
posterior and best in NLL are not the same.

**Repelled points.** `f-svgd:calibrated` is nearer to the posterior than plain points on all four,
`kde:calibrated` on two and farther on two. With the strength of this study, NLL of repelled points
is higher at equal cost on the five small tables and for the perceptron. It is shown to be lower
nowhere.

**Chains that repel.** They are not shown to predict better or worse than the same chains without
repulsion. Strength 0.5 and noise 0.5 are nearer to the posterior than noise 1 on the linear model
and farther on the three networks: there the score of 20 members does not replace the noise.
Strength 1 and noise 1 are farther on the linear model, as the doubled temperature says, nearer on
`regression`, and no different on the others.
"""


def main() -> None:
    """Write the page and its figure."""
    found = posteriors()
    uci, digits = scores(PLACE / "uci.csv"), scores(PLACE / "digits.csv")
    settings: Any = rc()
    with matplotlib.rc_context(settings):
        (PLACE / "corners.png").write_bytes(png(figure(found["frechet"], uci, digits), 110))
    count = len({seed for _, seed in found["frechet"]["ensemble"]})
    text = TEXT.format(
        seeds=f"{count} seeds" + ("" if count == 5 else " of the five planned"),
        answer=ANSWER.strip(),
        distances=distance_tables(found),
        nearest=nearest_table(found["frechet"]),
        posterior_questions=posterior_questions(found["frechet"]),
        best=best_table(uci, digits),
        prediction_questions=prediction_questions(uci, digits),
    )
    (PLACE / "corners.md").write_text(text)


if __name__ == "__main__":
    main()

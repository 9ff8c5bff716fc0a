"""The page of the suite, from its raw files: judging*.csv, development*.csv, ablation*.csv
and repulsion*.csv.

python -m studies.tables.page
"""

from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure

from shoal.core.display.text import markdown_table
from shoal.plots.figure import COLOURS, INK, png, rc
from studies.common import read_csv
from studies.tables.repulsion import section as repulsion_section
from studies.tables.results import (
    DEFAULTS,
    FIRST,
    OURS,
    SECONDS,
    TUNED,
    Raw,
    cliques,
    geometric,
    label,
    ranks,
)
from studies.tables.sets import HALVES, SPLITS, SUITE

PLAN = Path(__file__).with_name("plan.md")
"""Written before the runs."""

EIGHT = "boston", "concrete", "energy", "kin8nm", "power", "protein", "wine", "yacht"
MORE = {
    "regression": {"nll": "NLL", "rmse": "RMSE", "coverage": "Coverage of 90 % intervals"}
    | {"width": "Mean width of 90 % intervals"},
    "classification": {"error": "Error", "brier": "Brier score", "ece": "ECE"},
}
TITLES = {"crps": "CRPS", "log_loss": "Log-loss"} | MORE["regression"] | MORE["classification"]


def set_table(half):
    """The sets of a half."""
    rows = [row for row in read_csv(SUITE / "sets.csv") if row["half"] == half]
    kinds = {"regression": "regression", "classification": "{classes} classes"}
    lines = [
        [row["name"], kinds[row["task"]].format(**row), row["source"].split(":", 1)[1]]
        + [f"{int(row['train']):,} / {int(row['test']):,}"]
        + [row["numbers"], row["categories"], row["gaps"]]
        for row in rows
    ]
    heads = ["set", "task", "source", "training / test points", "numbers", "categories", "gaps"]
    return f"The {half} half:\n\n{markdown_table(heads, lines)}"


def ranked(raw, task):
    """The default models with a row for every set of the task, and the sets."""
    sets = raw.sets(task)
    models = [m for m in raw.models(DEFAULTS) if sets and raw.complete(m, sets)]
    return models, sets


def number(value, best=False):
    """Three digits; bold for the best; a dash where there is none."""
    text = f"{value:.3g}" if abs(value) < 1e4 else f"{value:,.0f}"
    return "-" if np.isnan(value) else f"**{text}**" if best else text


def score_table(raw, task, score, models):
    """Means over the splits; bold: the lowest of a set; a star: not all splits."""
    lines = []
    for name, row in zip(raw.sets(task), raw.means(raw.sets(task), models, score), strict=True):
        least = np.nan if score in ("coverage", "width") else np.nanmin(row, initial=np.inf)
        stars = ["*" * (0 < len(raw.values(name, m, score)) < len(SPLITS)) for m in models]
        cells = [number(v, v == least) + star for v, star in zip(row, stars, strict=True)]
        lines.append([name, *cells])
    return markdown_table(["set", *map(label, models)], lines)


def rank_table(raw, task, models, sets):
    """Mean rank, ratio to the best other model, coverage and seconds of every default model."""
    score = FIRST[task]
    table = raw.means(sets, models, score)
    best = np.nanmin(table, 1)
    seconds = raw.means(sets, models, SECONDS)
    base = raw.means(sets, ["catboost"], SECONDS)[:, 0]
    found = ranks(table, models)
    heads = ["model", "mean rank", "lowest on", f"{TITLES[score]} / lowest", "worst ratio"]
    heads += ["coverage, lowest to highest"] if task == "regression" else ["mean ECE"]
    lines = []
    for j in np.argsort(found.mean, kind="stable"):
        ratio = table[:, j] / best
        if task == "regression":
            cover = raw.means(sets, [models[j]], "coverage")
            third = f"{np.nanmin(cover):.2f} to {np.nanmax(cover):.2f}"
        else:
            third = f"{np.nanmean(raw.means(sets, [models[j]], 'ece')):.3f}"
        lines.append(
            [label(models[j]), f"{found.mean[j]:.2f}", int((ratio == 1).sum())]
            + [f"{geometric(ratio):.3f}", f"{np.nanmax(ratio):.2f}", third]
            + [number(geometric(seconds[:, j])), number(geometric(seconds[:, j] / base))]
        )
    return markdown_table([*heads, "CPU seconds", "CPU seconds / CatBoost"], lines), found


def rank_figure(found, title):
    """Mean ranks on a line; a bar joins models that do not differ significantly."""
    order = np.argsort(found.mean, kind="stable")
    groups = cliques(found)
    settings: Any = rc() | {"font.size": 10}
    with matplotlib.rc_context(settings):
        rows = -(-len(order) // 2)
        figure = Figure(figsize=(7.6, 1.1 + 0.26 * rows + 0.14 * len(groups)))
        axes = figure.add_axes((0.02, 0.02, 0.96, 0.88))
        low, high = np.floor(found.mean.min()), np.ceil(found.mean.max())
        low, high = min(low, high - found.critical), high
        deep = 0.32 * len(groups) + 0.5
        axes.set(xlim=(low - 0.42 * (high - low), high + 0.42 * (high - low)))
        axes.set_ylim(-deep - 0.6 * rows, 1.5)
        axes.axis("off")
        axes.set_title(title, fontsize=11, color=INK)
        axes.plot([low, high], [0, 0], color=INK, linewidth=1)
        for tick in range(int(np.ceil(low)), int(high) + 1):
            axes.plot([tick, tick], [0, 0.12], color=INK, linewidth=1)
            axes.text(tick, 0.2, str(tick), ha="center", va="bottom", color=INK)
        axes.plot([low, low + found.critical], [0.95, 0.95], color=INK, linewidth=2)
        axes.text(
            low + found.critical / 2, 1.02, f"critical difference {found.critical:.2f}",
            ha="center", va="bottom", color=INK,
        )  # fmt: skip
        for k, (start, end) in enumerate(groups):
            height = -0.3 - 0.32 * k
            axes.plot([start - 0.03, end + 0.03], [height] * 2, color=COLOURS["kde"], linewidth=3.5)
        for place, j in enumerate(order):
            left = place < rows
            height = -deep - 0.6 * (place if left else len(order) - 1 - place)
            side = low - 0.03 * (high - low) if left else high + 0.03 * (high - low)
            ours = found.models[j] == OURS
            colour = COLOURS["forde"] if ours else INK
            at = found.mean[j]
            axes.plot([at, at, side], [0, height, height], color=colour, linewidth=1 + ours)
            text = f"{label(found.models[j])}  {at:.2f}"
            axes.text(
                side, height, f" {text} ", ha="right" if left else "left", va="center",
                color=colour, weight="bold" if ours else "normal",
            )  # fmt: skip
    return figure


def ranking(raw, task, where, figure=True):
    """Ranks of the default models on the sets of a task."""
    models, sets = ranked(raw, task)
    if OURS not in models or len(models) < 3:
        return []
    table, found = rank_table(raw, task, models, sets)
    left = [label(m) for m in raw.models(DEFAULTS) if m not in models]
    text = (
        f"{TITLES[FIRST[task]]} on {len(sets)} {task} sets of the {where} half, {len(models)} "
        f"default models. Friedman's test of equal ranks: p = {found.p_value:.2g}."
    )
    text += f" Without a row for every set, so without a rank: {', '.join(left)}." if left else ""
    parts = [text]
    if figure:
        name = f"ranks-{task}.png"
        title = f"Mean rank in {TITLES[FIRST[task]]}, {len(sets)} {task} sets"
        (raw.folder / name).write_bytes(png(rank_figure(found, title), 120))
        parts.append(f"![Mean ranks and critical difference, {task}]({name})")
    return [*parts, table]


def judged(raw):
    """What the plan asked, what was found, and whether that is enough."""
    lines = []
    for task in FIRST:
        models, sets = ranked(raw, task)
        if OURS in models and len(models) > 2:
            lines += compared(raw, task, models, sets)
    lines += covered(raw, OURS, 0.87, 0.94, 500, "4. coverage of 0.87 to 0.94, 500 points or more")
    lines += covered(raw, "shoal-conformal", 0.88, 1, 0, "4. coverage of `conformal=True`, 0.88")
    sets = [name for task in FIRST for name in raw.sets(task)]
    for model, most in ((OURS, 5), ("shoal-fast", 1)):
        mean = geometric(raw.ratios(sets, model, "catboost", SECONDS))
        if np.isfinite(mean):
            asked = f"5. CPU seconds of {label(model)} / CatBoost, at most {most}"
            lines.append([asked, f"{mean:.2f}", mean <= most])
    lines.sort(key=lambda line: str(line[0])[0])
    cells = [[asked, text, "yes" if enough else "**no**"] for asked, text, enough in lines]
    return markdown_table(["asked", "found", "reached"], cells)


def compared(raw, task, models, sets):
    """Lines of the verdict on ranks and on ratios to the best other default model."""
    found = ranks(raw.means(sets, models, FIRST[task]), models)
    mine, others = found.mean[models.index(OURS)], np.delete(found.mean, models.index(OURS))
    text = f"{mine:.2f}; the best other model has {others.min():.2f}"
    lines = [[f"1. best mean rank, {task}", text, mine < others.min()]]
    ratio = {name: raw.largest_ratio(name, FIRST[task])[0] for name in sets}
    if set(EIGHT) <= set(ratio):
        least = [name for name in EIGHT if ratio[name] <= 1]
        text = f"{len(least)} of 8: {', '.join(least) or 'none'}"
        lines.append(["2. lowest CRPS on six of eight UCI problems", text, len(least) >= 6])
    above = {name: r for name, r in ratio.items() if not r <= 1.05}
    text = ", ".join(f"{name} {r:.2f}" for name, r in above.items()) or "none"
    return [*lines, [f"3. no ratio above 1.05, {task}", text, not above]]


def covered(raw, model, low, high, points, asked):
    """A line of the verdict on coverage; none without rows."""
    every = [name for task in FIRST for name in raw.sets(task)]
    sets = [name for name in every if int(raw.about[name]["rows"]) >= points]
    found = {name: raw.mean(name, model, "coverage") for name in sets}
    found = {name: value for name, value in found.items() if np.isfinite(value)}
    outside = [f"{name} {v:.3f}" for name, v in found.items() if not low <= v <= high]
    inside = f"all {len(found)} sets"
    if outside:
        inside = f"outside: {', '.join(outside)}, of {len(found)} sets"
    return [[asked, inside, not outside]] if found else []


def behind(raw):
    """Sets on which another default model is better, by name."""
    lines = []
    for task, score in FIRST.items():
        found = [(*raw.largest_ratio(name, score), name) for name in raw.sets(task)]
        for ratio, other, name in sorted(found, reverse=True):
            if ratio > 1:
                ours, theirs = (raw.values(name, model, score) for model in (OURS, other))
                both = ours.keys() & theirs.keys()
                worse = sum(ours[k] > theirs[k] for k in both)
                share, mean = f"{100 * (ratio - 1):,.1f} %", np.mean([theirs[k] for k in both])
                cells = [name, TITLES[score], label(other), share, number((ratio - 1) * mean)]
                cells += [f"{worse} of {len(both)}"]
                lines.append(cells)
    heads = ["set", "score", "best other model", "Shoal is higher by", "that is"]
    heads += ["splits with a higher score"]
    return markdown_table(heads, lines) if lines else "On no set is another default model better."


def beside(raw, models, base):
    """Geometric means of scores and seconds over those of a base, set by set, on common splits."""
    lines, sets = [], [n for task in FIRST for n in raw.sets(task)]
    folds = np.isfinite(raw.means(sets, [base], "oof")).any()
    for model in models:
        cells = []
        for task, score in FIRST.items():
            ratio = raw.ratios(raw.sets(task), model, base, score)
            held = np.isfinite(ratio).sum()
            lower = f"{(ratio < 1).sum()} of {held}"
            cells += [f"{geometric(ratio):.3f}", lower] if held else ["-", "-"]
        if folds:
            inside = geometric(raw.ratios(sets, model, base, "oof"))
            cells.append(f"{inside:.3f}" if np.isfinite(inside) else "-")
        cover = raw.means(raw.sets("regression"), [model], "coverage")
        spread = (
            f"{np.nanmin(cover):.2f} to {np.nanmax(cover):.2f}" if np.isfinite(cover).any() else "-"
        )
        time = geometric(raw.ratios(sets, model, base, SECONDS))
        lines.append([label(model), *cells, spread, number(time)])
    heads = [f"model, beside {label(base)}", "CRPS ratio", "lower on", "log-loss ratio", "lower on"]
    heads += ["out-of-fold ratio"] if folds else []
    return markdown_table([*heads, "coverage", "CPU seconds ratio"], lines)


FEWEST = 5
"""Sets that a model needs for a rank beside those with all sets."""


def some_sets(raw):
    """Models with rows for some sets alone: beside ours, and ranks where all models have rows."""
    first, every = raw.at(SPLITS[0]), [n for task in FIRST for n in raw.sets(task)]
    models = first.models(DEFAULTS)
    few = [m for m in models if not raw.complete(m, every)]
    if not few or OURS not in models:
        return []
    parts = ["## Models on some of the sets", beside(raw, few, OURS)]
    for task, score in FIRST.items():
        there = {m: {n for n in first.sets(task) if first.has(n, m)} for m in models}
        enough = [m for m in models if len(there[m]) >= FEWEST]
        sets = [n for n in first.sets(task) if all(n in there[m] for m in enough)]
        if set(enough) & set(few) and len(sets) >= FEWEST:
            table, found = rank_table(first, task, enough, sets)
            text = (
                f"{TITLES[score]} on split 0 of the {len(sets)} {task} sets that {len(enough)} "
                f"default models have: {', '.join(sets)}. Friedman's test: "
                f"p = {found.p_value:.2g}; critical difference {found.critical:.2f}."
            )
            parts += [text, table]
    left = {label(m): [n for n in every if not raw.has(n, m)] for m in few}
    text = "; ".join(f"{model} on {', '.join(names)}" for model, names in left.items() if names)
    return [*parts, f"Not run: {text or 'some splits'}."]


def failures(raw):
    """Fits that failed, by name."""
    found = raw.failures()
    lines = [
        [name, label(model), reason.replace("|", "/")] for (name, model), reason in found.items()
    ]
    return [markdown_table(["set", "model", "reason"], lines)] if lines else []


def by_the_clock(raw):
    """Why seconds are those of the CPU, and what the clock says, split by split."""
    sets = [n for task in FIRST for n in raw.sets(task)]
    found = {}
    for split in SPLITS:
        both = [
            geometric(raw.at(split).ratios(sets, OURS, "catboost", score))
            for score in ("wall_seconds", SECONDS)
        ]
        found |= {split: both} if np.isfinite(both).all() else {}
    if not found:
        return []
    each = ", ".join(f"{clock:.2f} ({cpu:.2f}) on split {k}" for k, (clock, cpu) in found.items())
    return [
        "Seconds are those of the CPU, of fit and predictions: other work shared the machine, but "
        f"not during split 1. By the clock (by the CPU), Shoal / CatBoost is {each}."
    ]


def results(raw):
    """All tables of the judging half."""
    versions = sorted({row["version"] for row in raw.rows.values()})
    threads = sorted({row["threads"] for row in raw.rows.values()})
    devices = sorted({row["device"] for row in raw.rows.values()})
    parts = ["## What was found", judged(raw)]
    parts += [f"Versions: {', '.join(versions)}. Threads of a fit: {', '.join(threads)}."]
    parts[-1] += f" Device: {', '.join(devices)}. All fits are in `judging*.csv`."
    parts += by_the_clock(raw)
    runs = sorted({split for _, model, split in raw.rows if model == OURS})
    if runs and len(runs) < len(SPLITS):
        parts += [f"**Splits that were run: {', '.join(map(str, runs))}, of the three planned.**"]
    ours = sorted({row["version"] for row in raw.rows.values() if row["model"] == OURS})
    if len(ours) > 1:
        text = f"The default of Shoal was run with code of {len(ours)} states: {'; '.join(ours)}."
        parts += [f"**{text} A setting may have changed after a look at the judging half.**"]
    there = {name for task in FIRST for name in raw.sets(task)}
    left = [
        name for name, row in raw.about.items() if row["half"] == "judging" and name not in there
    ]
    parts += [f"**Not run yet: {', '.join(left)}.**"] if left else []
    parts += ["## What remains worse than another library", behind(raw), "## Ranks"]
    for task in FIRST:
        parts += ranking(raw, task, "judging")
    parts += some_sets(raw)
    others = raw.models(TUNED)
    if others and raw.models([OURS]):
        parts += ["## Usual settings of others", beside(raw, [*others, "catboost"], OURS)]
    if raw.arms():
        parts += ["## Other settings of Shoal", beside(raw, raw.arms(), OURS)]
    stars = "Means over three splits; with a star, over fewer. Bold: the lowest. A dash: no score."
    parts += ["## Set by set", stars]
    for task, score in FIRST.items():
        models = raw.models((*DEFAULTS, *TUNED))
        for name in (score, *MORE[task], SECONDS):
            title = TITLES.get(name, f"CPU seconds of fit and predictions, {task}")
            parts += [f"{title}:", score_table(raw, task, name, models)] if raw.sets(task) else []
    bad = failures(raw)
    return [*parts, *(["## Fits that failed", *bad] if bad else [])]


def page(folder=SUITE):
    """The plan, the sets, and what the raw files hold so far."""
    parts = [PLAN.read_text().strip()]
    judging, development, ablation = (
        Raw(f"{n}*.csv", folder) for n in ("judging", "development", "ablation")
    )
    if judging.rows:
        parts += results(judging)
    repulsion = Raw("repulsion*.csv", folder)
    if repulsion.rows:
        parts += ["## Repulsion", *repulsion_section(repulsion)]
    if ablation.rows:
        sets = [name for task in FIRST for name in ablation.sets(task)]
        parts += ["## One part of the recipe at a time"]
        text = (
            f"Sets of the ten planned that were run, split 0: {', '.join(sets)}. Out-of-fold scores"
        )
        parts += [f"{text} are of all training points, and of fewer members each."]
        parts += [beside(ablation, ablation.arms(), OURS)]
    if development.rows:
        parts += ["## Development half"]
        for task in FIRST:
            parts += ranking(development, task, "development", figure=False)
        if development.arms():
            parts += ["Settings that were tried:", beside(development, development.arms(), OURS)]
    parts += ["## Sets", *map(set_table, HALVES)]
    (folder / "README.md").write_text("\n\n".join(parts) + "\n")


if __name__ == "__main__":
    page()

"""What points between the data do, on the toy problems: python -m studies.points

The script trains `f-kde` at every kind of points, strength and seed, and writes results.csv beside
itself. Rows that are already there are not trained again. It then draws regression.png and
classification.png (first seed, largest strength) and prints the tables of README.md. It takes about
twenty minutes on one core; --draw uses the rows that are there.
"""

import argparse
import csv
import itertools
import math
import statistics

import torch
from scipy.stats import t as student

import shoal
from shoal.core.display.text import markdown_table
from shoal.models import MLP, Blueprint
from shoal.plots.toys import band, plane
from studies import RESULTS
from studies.common import read_csv, sheet

FOLDER = RESULTS / "points"
RAW = FOLDER / "results.csv"
KINDS = {
    "ensemble": None,
    "batch": {"name": "batch"},
    "noise": {"name": "noise", "scale": 0.5},
    "mixup": {"name": "mixup"},
    "uniform": {"name": "uniform", "margin": 0.0},
    "uniform, wide": {"name": "uniform", "margin": 0.5},
}
STRENGTHS = (1.0, 10.0)
SEEDS = 5
GAP, INTERVALS = (2.5, 4.5), ((1.5, 2.5), (4.5, 6.0))
LABELS = {
    "regression": {
        "nll_data": "NLL on the data",
        "nll_gap": "NLL in the gap",
        "std_data": "std on the data",
        "std_gap": "std in the gap",
        "ratio": "force ratio",
    },
    "classification": {
        "nll": "NLL, test set",
        "mi_test": "MI, test set",
        "mi_centre": "MI, centre",
        "mi_ring": "MI, far ring",
        "ratio": "force ratio",
    },
}


def train(toy, data, kind, strength, seed):
    """Twenty members of two hidden layers, as in the figures of all methods."""
    blueprint = Blueprint(MLP((50, 50)), data.input_shape, data.outputs)
    regression = toy == "regression"
    points = KINDS[kind]
    return shoal.fit(
        shoal.Ensemble.init(blueprint, members=20, seed=seed),
        data,
        method="ensemble" if points is None else {"name": "f-kde", "points": points},
        strength=None if points is None else strength,
        likelihood=shoal.likelihoods.Gaussian(0.25) if regression else None,
        lr=1e-2,
        schedule="cosine",
        epochs=300 if regression else 100,
        batch_size=30 if regression else 50,
        seed=seed,
        progress=False,
    )


def load(toy, seed):
    """The data of one seed; a dense grid of test targets for regression."""
    more = {"test_points": 1400} if toy == "regression" else {"test_points": 200}
    return shoal.data.load({"name": f"toy-{toy}", "seed": seed, **more})


def within(x, *intervals):
    """Which inputs lie in one of the intervals."""
    return torch.stack([(x >= low) & (x <= high) for low, high in intervals]).any(0)


def measured(toy, data, run):
    """The numbers of one run."""
    pred = shoal.predict(run, data.test.x)
    last = run.history[-1]
    found = {"ratio": last["push"] / last["drive"]}
    if toy == "classification":
        at = {"test": pred, **{n: shoal.predict(run, s.x) for n, s in data.ood.items()}}
        found |= {f"mi_{n}": float(p.mutual_information().mean()) for n, p in at.items()}
        return found | {"nll": shoal.evaluate(pred, data.test.y)["nll"]}
    x = data.test.x[:, 0]
    spread = pred.members[..., 0].std(0)
    for name, there in (("data", within(x, *INTERVALS)), ("gap", within(x, GAP))):
        part = shoal.predict(run, data.test.x[there])
        found[f"nll_{name}"] = shoal.evaluate(part, data.test.y[there])["nll"]
        found[f"std_{name}"] = float(spread[there].mean())
    return found


def cases(seeds):
    """Toy, kind, strength and seed of every run; a plain ensemble has no strength."""
    for strength, seed, toy in itertools.product(reversed(STRENGTHS), range(seeds), LABELS):
        for kind in KINDS:
            if kind != "ensemble" or strength == STRENGTHS[-1]:
                yield toy, kind, 0.0 if kind == "ensemble" else strength, seed


def known():
    """Numbers by toy, kind, strength, seed and metric."""
    return {
        (r["toy"], r["kind"], float(r["strength"]), int(r["seed"]), r["metric"]): float(r["value"])
        for r in read_csv(RAW, missing_ok=True)
    }


def complete(seeds):
    """Train what is missing; every run adds its rows at once."""
    done = {key[:4] for key in known()}
    if not done:
        RAW.write_text("toy,kind,strength,seed,metric,value\n")
    for case in cases(seeds):
        if case in done:
            continue
        toy, kind, strength, seed = case
        data = load(toy, seed)
        found = measured(toy, data, train(toy, data, kind, strength, seed))
        with RAW.open("a", newline="") as file:
            rows = [[*case, metric, f"{value:.6g}"] for metric, value in found.items()]
            csv.writer(file, lineterminator="\n").writerows(rows)
        print(*case, {name: round(value, 4) for name, value in found.items()}, flush=True)


def interval(values):
    """Mean and half width of the 95 % interval by Student's t."""
    values = list(values)
    half = student.ppf(0.975, len(values) - 1) * statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), half


def tables():
    """The tables of both toys, and the differences to the batch, paired by seed."""
    numbers = known()
    for toy, labels in LABELS.items():
        rows, told = [], []
        for strength in (0.0, *STRENGTHS):
            for kind in KINDS:
                seeds = sorted({k[3] for k in numbers if k[:3] == (toy, kind, strength)})
                if len(seeds) < 2:
                    continue

                def values(metric, which=kind, seeds=seeds, strength=strength, toy=toy):
                    return [numbers[toy, which, strength, seed, metric] for seed in seeds]

                cells = ["{:.3f} ± {:.3f}".format(*interval(values(m))) for m in labels]
                rows.append([kind, f"{strength:g}" if strength else "", *cells])
                if kind not in ("ensemble", "batch"):
                    told.append(_differences(toy, kind, strength, labels, values))
        print(f"\n{toy}, {len(seeds)} seeds\n")
        print(markdown_table(["points", "strength", *labels.values()], rows), "\n")
        print("\n".join(told))


def _differences(toy, kind, strength, labels, values):
    words = []
    for metric, label in labels.items():
        pairs = zip(values(metric), values(metric, "batch"), strict=True)
        mean, half = interval(a - b for a, b in pairs)
        if metric != "ratio":
            words.append(f"{label} {mean:+.3f} ({mean - half:+.3f} to {mean + half:+.3f})")
    return f"- {kind} - batch, strength {strength:g}: {', '.join(words)}"


def figures(strength):
    """One panel per kind of points, first seed."""
    for toy, draw in (("regression", curve), ("classification", information)):
        data = load(toy, 0)
        panels = [draw(data, train(toy, data, kind, strength, 0), kind) for kind in KINDS]
        sheet(panels, 3, FOLDER / f"{toy}.png")


def curve(data, run, kind):
    """Mean and two standard deviations over the input range."""
    x = torch.linspace(0.5, 7, 260)[:, None]
    pred = shoal.predict(run, x)
    method = "ensemble" if kind == "ensemble" else "f-kde"
    points = data.train.x[:, 0], data.train.y
    figure = band(x[:, 0], pred.mean.flatten(), pred.stddev.flatten(), points, method, kind)
    figure.axes[0].set_ylim(-9, 7)
    return figure


def information(data, run, kind):
    """Mutual information over the plane, in one colour scale for all panels."""
    side = torch.linspace(-12, 12, 80)
    up, across = torch.meshgrid(side, side, indexing="ij")
    grid = torch.stack([across.flatten(), up.flatten()], -1)
    values = shoal.predict(run, grid).mutual_information().reshape(80, 80)
    figure = plane(side, side, values, (data.train.x, data.train.y), kind)
    figure.axes[0].images[0].set_clim(0, 0.2)
    figure.axes[1].set_ylabel("mutual information (nats)")
    return figure


def main():
    """Train, draw, and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--draw", action="store_true", help="train nothing but the figures")
    parser.add_argument("--tables", action="store_true", help="only print the tables")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not (options.draw or options.tables):
        complete(options.seeds)
    if not options.tables:
        figures(STRENGTHS[-1])
    tables()


if __name__ == "__main__":
    main()

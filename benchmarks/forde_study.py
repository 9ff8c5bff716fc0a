"""A study of repelled input gradients: questions that the paper leaves open.

    python benchmarks/forde_study.py --seeds 10                    digits, on a CPU
    python benchmarks/forde_study.py --data tables --seeds 10      tables
    python benchmarks/forde_study.py --data cifar10 --device cuda  ResNet18 on corrupted CIFAR-10

The study compares axes (principal components, cosines, pixels), the power of their eigenvalues
(alpha), batch fractions and their statistics, strengths, and the cost beside other methods, on
images and on tables. Every method is trained from every seed on the same data, and differences are
paired by seed. The script writes runs.csv, study.json, table.md and figures into the folder of
--out.
"""

import csv
import io
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from common import options, parser, say, title
from study_data import corrupted_digits, tables

import shoal
from shoal.core.display.text import markdown_table
from shoal.core.storage.files import write_bytes, write_json, write_text
from shoal.models import MLP, Blueprint, SmallCNN
from shoal.models import registry as models
from shoal.plots import MetricCurve, comparison, png, severity
from shoal.prediction.statistics import mean_and_error, paired_difference

DOCS = Path(__file__).resolve().parent.parent / "docs" / "results" / "forde"
SGD = {"name": "sgd", "momentum": 0.9, "nesterov": True, "weight_decay": 5e-4}
BASES = {"forde": {}, "forde-identity": {}, "forde-dct": {}}
ALPHAS = (0.0, 0.1, 0.2, 0.4, 0.8, 1.0)
HALF, QUARTER = 0.5, 0.25
STRENGTHS = (1.0, 4.0, 16.0, 64.0)
OTHERS = ("ensemble", "kde", "svgd", "f-kde", "f-svgd")


def compared_methods() -> dict[str, Any]:
    """Every method that is trained, by its label in tables and figures."""
    found: dict[str, Any] = {name: name for name in (*OTHERS, *BASES)}
    for alpha in ALPHAS[1:-1]:
        found[f"forde-tuned alpha={alpha}"] = {"name": "forde-tuned", "alpha": alpha}
    found[f"forde fraction={HALF}"] = {"name": "forde", "fraction": HALF, "coupled": False}
    for times in STRENGTHS[1:]:
        found[strong(times)] = shoal.methods.get("forde").with_strength(times)
    rules = {"": {"coupled": False}, " own": {"own_statistics": True}, " coupled": {}}
    for words, rule in rules.items():
        method = shoal.methods.get("forde", fraction=QUARTER, **rule)
        for times in (STRENGTHS[0], STRENGTHS[2]):
            found[f"{strong(times)} fraction={QUARTER}{words}"] = method.with_strength(times)
    return found


def strong(times: float) -> str:
    """Label of `forde` at a multiple of its published strength."""
    return "forde" if times == 1 else f"forde strength={times:g}"


def evaluated(run: shoal.Run, data: shoal.Dataset) -> dict[str, Any]:
    """Scores on the test set, their mean over the shifts, and scores at each severity."""
    assert data.test is not None, "a study needs a test set"
    row: dict[str, Any] = dict(_scores(run, data.test))
    shifts = {name: _scores(run, split) for name, split in data.shifts.items()}
    for metric in list(row):
        values = [scores[metric] for scores in shifts.values()]
        if values:
            row[f"corrupted_{metric}"] = statistics.fmean(values)
    levels: dict[str, list[dict[str, float]]] = {}
    for name, scores in shifts.items():
        levels.setdefault(name.rpartition("-")[2], []).append(scores)
    row["severity"] = {
        level: {m: statistics.fmean(s[m] for s in scores) for m in scores[0]}
        for level, scores in levels.items()
    }
    return row


def _scores(run: shoal.Run, split: shoal.Split) -> dict[str, float]:
    assert split.y is not None, "a study needs labels"
    found = shoal.evaluate(shoal.predict(run, split.x), split.y)
    wanted = ("accuracy", "nll", "ece", "rmse", "crps")
    return {name: float(found[name]) for name in wanted if name in found}


def trained(data: shoal.Dataset, method: Any, seed: int, build: Any, how: dict[str, Any]) -> dict:
    """One run: its scores, and the milliseconds per step after the first epoch."""
    likelihood = how.get("likelihood") or shoal.likelihoods.Categorical()
    blueprint = Blueprint(build, data.input_shape, likelihood.width(data.outputs))
    ensemble = shoal.Ensemble.init(blueprint, how["members"], seed=seed)
    settings = {key: value for key, value in how.items() if key != "members"}
    run = shoal.fit(ensemble, data, method=method, seed=seed, progress=False, **settings)
    steps = -(-len(data.train) // settings["batch_size"])
    later = [row["seconds"] for row in run.history[1:]] or [run.history[0]["seconds"]]
    last = run.history[-1]
    return evaluated(run, data) | {
        "ms_per_step": 1000 * statistics.median(later) / steps,
        "push_over_drive": last["ratio"],
        "h2": [row["h2"] for row in run.history],
    }


def study(
    name: str, data: Any, build: Any, how: dict, seeds: int, methods: dict, first: int = 0
) -> list[dict]:
    """Every method from every seed; `data` is a data set, or a function of the seed."""
    rows = []
    for seed in range(first, first + seeds):
        given: Any = data(seed) if callable(data) else data
        for label, method in methods.items():
            row = trained(given, method, seed, build, how)
            rows.append({"data": name, "method": label, "seed": seed, **row})
            shown = {k: round(v, 4) for k, v in row.items() if isinstance(v, float)}
            say(f"{name} {label} seed {seed}: {shown}")
    return rows


def summary(rows: list[dict]) -> dict[str, dict[str, Any]]:
    """Mean and standard error of every number, and its difference from the plain ensemble."""
    found: dict[str, dict[str, Any]] = {}
    plain = {row["seed"]: row for row in rows if row["method"] == "ensemble"}
    for label in dict.fromkeys(row["method"] for row in rows):
        own = [row for row in rows if row["method"] == label]
        numbers = [key for key, value in own[0].items() if isinstance(value, float)]
        entry: dict[str, Any] = {}
        for key in numbers:
            mean, error = mean_and_error([row[key] for row in own])
            entry[key] = {"mean": mean, "error": error}
            if label != "ensemble" and len(own) > 1 and plain:
                base = [plain[row["seed"]][key] for row in own]
                difference = paired_difference([row[key] for row in own], base)
                entry[key]["difference"] = difference._asdict()
        found[label] = entry
    return found


COLUMNS = {
    "accuracy": ("clean accuracy, %", 100, 2),
    "rmse": ("clean RMSE", 1, 3),
    "nll": ("clean NLL", 1, 4),
    "corrupted_accuracy": ("corrupted accuracy, %", 100, 2),
    "corrupted_rmse": ("corrupted RMSE", 1, 3),
    "corrupted_nll": ("corrupted NLL", 1, 3),
    "corrupted_ece": ("corrupted ECE", 1, 4),
    "push_over_drive": ("force ratio", 1, 3),
}
"""The format of each number in the table: heading, factor and digits."""


def table(name: str, means: dict[str, dict[str, Any]]) -> str:
    """Means, with differences and their intervals in parentheses; significant ones are bold."""
    known = [key for key in COLUMNS if key in next(iter(means.values()))]
    lines = [[label, *(_cell(entry[key], key) for key in known)] for label, entry in means.items()]
    return markdown_table([name, *(COLUMNS[key][0] for key in known)], lines) + "\n"


def _cell(number: dict[str, Any], key: str) -> str:
    _, factor, digits = COLUMNS[key]
    mean, found = f"{factor * number['mean']:.{digits}f}", number.get("difference")
    if found is None or key == "push_over_drive":
        return mean
    middle, low, high = (f"{factor * value:+.{digits}f}" for value in found.values())
    words = f"{mean} ({middle}; {low} to {high})"
    return f"**{words}**" if found["low"] > 0 or found["high"] < 0 else words


def figures(rows: list[dict], out: Path) -> None:
    """Corrupted accuracy of each setting, accuracy against severity, and cost."""
    means = summary(rows)

    def bars(labels: list[str], metric: str, name: str, words: str, share: bool) -> None:
        values = {k: (means[k][metric]["mean"], means[k][metric]["error"]) for k in labels}
        write_bytes(out / name, png(comparison(values, words, share=share), 110))

    bases = ["ensemble", *BASES]
    bars(bases, "corrupted_accuracy", "bases.png", "accuracy under corruption", True)
    bars(list(means), "ms_per_step", "cost.png", "ms per step", False)
    ends = {0.0: "forde-identity", 1.0: "forde"}
    labels = [ends.get(alpha, f"forde-tuned alpha={alpha}") for alpha in ALPHAS]
    _against(means, dict(zip(ALPHAS, labels, strict=True)), "alpha", out)
    doublings = {math.log2(times): strong(times) for times in STRENGTHS}
    _against(means, doublings, "strength", out, "doublings of the published strength")
    for metric in ("accuracy", "ece"):
        shown = ["ensemble", "f-kde", *BASES, strong(STRENGTHS[2])]
        write_bytes(out / f"{metric}.png", png(_by_severity(rows, shown, metric), 110))


def _against(means: dict, labels: dict[float, str], name: str, out: Path, words: str = "") -> None:
    """Clean and corrupted accuracy against a setting."""
    curves = {}
    for metric, who in (("accuracy", "clean"), ("corrupted_accuracy", "corrupted")):
        scores = [means[label][metric] for label in labels.values()]
        points = [score["mean"] for score in scores], [score["error"] for score in scores]
        curves[who] = MetricCurve(list(labels), *points)
    drawn = severity(curves, "accuracy", words or name, share=True)
    write_bytes(out / f"{name}.png", png(drawn, 110))


def _by_severity(rows: list[dict], labels: list[str], metric: str) -> Any:
    curves = {}
    for label in labels:
        own = [row for row in rows if row["method"] == label]
        levels = sorted(own[0]["severity"], key=int)
        means = [
            mean_and_error([row["severity"][level][metric] for row in own]) for level in levels
        ]
        start = mean_and_error([row[metric] for row in own])
        points = [start, *means]
        places = [0.0, *map(float, levels)]
        curves[label] = MetricCurve(places, [mean for mean, _ in points], [e for _, e in points])
    return severity(curves, metric, share=metric == "accuracy")


def _csv(rows: list[dict]) -> str:
    text = io.StringIO()
    keys = list(dict.fromkeys(k for row in rows for k, v in row.items() if _flat(v)))
    writer = csv.DictWriter(text, keys, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def _flat(value: Any) -> bool:
    return isinstance(value, str | int | float)


def settings(found: Any) -> tuple[Any, Any, dict[str, Any]]:
    """Data, architecture and training of the study of images."""
    how: dict[str, Any] = {"optimizer": SGD, "prior": "flat", "schedule": "flat-then-linear"}
    how |= {"members": found.members, "epochs": found.epochs, "device": str(found.device)}
    if found.data == "digits":
        build = SmallCNN((8, 16), norm="batch")
        batch = found.batch or 64
        return corrupted_digits, build, how | {"lr": 0.05 * batch / 64, "batch_size": batch}
    wanted = {"name": found.data, "subset": found.subset, "pixels": "standard"}
    data = shoal.data.load(wanted | {"corruptions": "all"})
    batch = found.batch or 128
    how |= {"lr": 0.1 * batch / 128, "batch_size": batch}
    how |= {"augment": "crop-flip", "precision": "bfloat16"}
    return data, models.make(found.model), how


def of_tables(found: Any, seeds: int) -> list[dict]:
    """The same study on tables, for class labels and for real targets."""
    rows = []
    labels = ("ensemble", "f-kde", *BASES, *map(strong, STRENGTHS[1:3]))
    methods = {label: m for label, m in compared_methods().items() if label in labels}
    for name, make in tables().items():
        real = make(0).task == "regression"
        noise = shoal.likelihoods.HeteroscedasticGaussian() if real else None
        how = {"members": found.members, "epochs": found.epochs, "batch_size": 32, "lr": 3e-3}
        how |= {"likelihood": noise, "device": str(found.device), "schedule": "cosine"}
        rows += study(name, make, MLP((50,)), how, seeds, methods)
    return rows


def main() -> None:
    """Train every method, and write the results."""
    made = parser(__doc__ or "")
    made.add_argument("--data", default="digits", help="digits, tables, or an image set by name")
    made.add_argument("--subset", type=int, default=25000, help="training images of a large set")
    made.add_argument("--model", default="resnet18", help="architecture for a large set")
    made.add_argument("--members", type=int, default=5)
    made.add_argument("--epochs", type=int)
    made.add_argument("--batch", type=int, help="images per batch; the learning rate follows it")
    made.add_argument("--seeds", type=int, default=3)
    made.add_argument("--first", type=int, default=0, help="the first seed")
    made.add_argument("--only", help="labels of the table, separated by commas; without figures")
    found = options(made)
    found.epochs = found.epochs or {"digits": 20, "tables": 40}.get(found.data, 36)
    if found.quick:
        found.members = min(found.members, 4)
    out = Path(found.out) if found.out else DOCS / found.data
    out.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(found.threads or torch.get_num_threads())
    if found.data == "tables":
        rows = of_tables(found, found.seeds)
    else:
        methods, chosen = compared_methods(), found.only and found.only.split(",")
        methods = {label: methods[label] for label in chosen or methods}
        rows = study(found.data, *settings(found), found.seeds, methods, found.first)
        if chosen is None:
            figures(rows, out)
    write_text(out / "runs.csv", _csv(rows))
    names = dict.fromkeys(row["data"] for row in rows)
    means = {name: summary([row for row in rows if row["data"] == name]) for name in names}
    write_text(out / "table.md", "\n".join(table(name, entries) for name, entries in means.items()))
    asked = {key: str(value) for key, value in vars(found).items() if key != "out"}
    write_json(out / "study.json", title(found.device) | {"options": asked, "results": means})


if __name__ == "__main__":
    main()

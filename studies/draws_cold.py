"""Cold posteriors and calibration of draws on digits; writes cold.csv and cold.md.

python -m studies.draws_cold [--seeds 0,1,2]

A second call goes on where the first one stopped; `--page` writes the page alone.

Plan, written before the runs. Draws on digits have a higher NLL and ECE than their members, since
the posterior of the library's prior at temperature 1 is less sure. Do a lower temperature, another
prior width or calibration mend it, chosen without the test set? Network, optimiser, sampler and
seconds are those of the perceptron of `draws_digits` ("mclmc", 1,000 steps of warm-up, 100 draws
ten steps apart, five chains). Seeds 0, 1, 2. 260 of the 1,297 training images are held out, others
for every seed; all arms train on the 1,037 that remain, and are scored on the 500 test images.

- members: five, and members calibrated.
- draws at temperatures 1, 0.3, 0.1 and 0.03 with the library's prior, and with the prior widths
  0.5 and 0.25 at temperature 1.
- draws at temperature 1 calibrated.
- chosen temperature, chosen width: for each seed that of the lowest held-out NLL.

Second round, planned after the first: the lowest temperature and the widest prior were the best, so
temperature 0.01 and the widths 2 and 4 are added, and chosen in the same way.

Third round, planned after the second: temperature 0.01, again the lowest, was chosen for all seeds,
so 0.003 and 0.001 are added.

`shoal.calibrate` sees the held-out images alone. An arm mends draws if its mean NLL and its mean
ECE are below those of draws at temperature 1, with paired intervals of 95 % below 0.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.core.display.text import markdown_table
from shoal.data.dataset import Dataset, Split
from shoal.prediction.statistics import mean_and_error, paired_difference
from studies import RESULTS
from studies.common import append_rows, read_csv
from studies.draws_digits import MCLMC, scores, trained

PLACE = RESULTS / "draws"
HEADER = ["seed", "arm", "held out", "nll", "accuracy", "ece", "auroc", "seconds"]
HELD_OUT = 260
TEMPERATURES, WIDTHS = (1.0, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001), (4.0, 2.0, 0.5, 0.25)
FIRST = "draws, T = 1"
COLD: dict[str, dict[str, Any]] = {f"draws, T = {t:g}": {"temperature": t} for t in TEMPERATURES}
WIDE: dict[str, dict[str, Any]] = {
    f"draws, prior width {w:g}": {"prior": {"name": "gaussian", "std": w}} for w in WIDTHS
}
CHOICES = {"chosen temperature": list(COLD), "chosen width": [FIRST, *WIDE]}
CALIBRATED = {"members": "members, calibrated", FIRST: "draws, T = 1, calibrated"}

TEXT = """# Cold draws and calibration on digits

`python -m studies.draws_cold` writes this page and [cold.csv](cold.csv). Seeds {seeds}, one thread,
seconds of the processor for training and sampling. 260 training images are held out; "held out" is
the NLL on them, the other columns are of the test set. Means over seeds ± standard errors. Seconds
of temperatures 0.003 and 0.001 are of a later run, and cannot be compared with those of the others.

{table}

{verdict}
"""


def split(seed):
    """Digits without some training images, and these."""
    data = shoal.data.load("digits")
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))
    kept, apart = order[HELD_OUT:], order[:HELD_OUT]
    train = Split(data.train.x[kept], data.train.y[kept])
    less = Dataset("digits", train, test=data.test, ood=data.ood)
    return less, (data.train.x[apart], data.train.y[apart])


def compute(seed, known):
    """Rows of the arms of a seed that are not known."""
    data, (x, y) = split(seed)

    def row(arm, run, seconds):
        held_out = float(shoal.metrics.nll(shoal.predict(run, x), y))
        return [seed, arm, *(f"{v:.6g}" for v in (held_out, *scores(run, data), seconds))]

    began = time.process_time()
    run = trained("perceptron", seed, data, {"method": "ensemble"})
    base = time.process_time() - began
    if "members" not in known:
        yield row("members", run, base)
        yield row(CALIBRATED["members"], shoal.calibrate(run, (x, y)), base)
    for arm, options in (COLD | WIDE).items():
        if arm in known:
            continue
        began = time.process_time()
        drawn = shoal.draw(run, data, seed=seed, progress=False, **MCLMC, **options)
        seconds = base + time.process_time() - began
        yield row(arm, drawn, seconds)
        if arm in CALIBRATED:
            yield row(CALIBRATED[arm], shoal.calibrate(drawn, (x, y)), seconds)


def page(rows):
    """The page."""
    seeds = sorted({row["seed"] for row in rows})
    by = {(row["arm"], row["seed"]): row for row in rows}
    for choice, arms in CHOICES.items():
        for seed in seeds:
            tried = [by[arm, seed] for arm in arms]
            best = min(tried, key=lambda row: float(row["held out"]))
            spent = sum(float(row["seconds"]) for row in tried)
            by[choice, seed] = best | {"seconds": spent}
    lines, verdicts = [], []
    for arm in dict.fromkeys(arm for arm, _ in by):
        values = {name: [float(by[arm, s][name]) for s in seeds] for name in HEADER[2:]}
        lines.append([arm])
        for name, each in values.items():
            mean, error = mean_and_error(each)
            digits = 0 if name == "seconds" else 4
            lines[-1].append(f"{mean:.{digits}f} ± {error:.{digits}f}")
        if arm in (*CHOICES, *CALIBRATED.values()) and len(seeds) > 1:
            verdicts.append(_judged(arm, by, seeds))
    table = markdown_table(HEADER[1:], lines)
    chosen = [f"Seed {s}: {_names(by, s)}." for s in seeds]
    return TEXT.format(
        seeds=", ".join(seeds), table=table, verdict="\n\n".join([*verdicts, " ".join(chosen)])
    )


def _names(by, seed):
    """What was chosen for a seed."""
    return " and ".join(by[choice, seed]["arm"] for choice in CHOICES)


def _judged(arm, by, seeds):
    """NLL and ECE beside draws at temperature 1."""
    parts, mends = [], []
    for name in ("nll", "ece"):
        a, b = ([float(by[side, s][name]) for s in seeds] for side in (arm, FIRST))
        away = paired_difference(a, b)
        parts.append(f"{name.upper()} {away.difference:+.4f} ({away.low:+.4f} to {away.high:+.4f})")
        mends.append(away.high < 0)
    word = "mends draws" if all(mends) else "mends a part" if any(mends) else "is not decided"
    return f"{arm}: {', '.join(parts)} beside draws at temperature 1: {word}."


def main():
    """Compute what is missing, and write the page."""
    parser = argparse.ArgumentParser(description="Cold draws and calibration on digits.")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--out", type=Path, default=PLACE, help="folder of cold.csv")
    asked = parser.parse_args()
    file = asked.out / "cold.csv"
    torch.set_num_threads(1)
    for seed in () if asked.page else asked.seeds.split(","):
        known = {row["arm"] for row in read_csv(file, True) if row["seed"] == seed}
        if not {*COLD, *WIDE} <= known:
            append_rows(file, HEADER, list(compute(int(seed), known)))
            print("done", seed, flush=True)
    (asked.out / "cold.md").write_text(page(read_csv(file)))


if __name__ == "__main__":
    main()

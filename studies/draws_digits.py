"""Points, draws and repulsion on digits, at equal cost; writes digits.csv and digits.md.

python -m studies.draws_digits --jobs 12 [--seeds 0,1,2]

A second call goes on where the first one stopped; `--page` writes the page alone.

Plan, written before the runs. Data: the digits that come with the library, with their out-of-domain
photographs. Networks: a perceptron of 50 units, and the small convolutional network of the config
`digits-cnn` (channels 16, 32, 32, no normalisation). Seeds 0 to 4. One thread a process, seconds of
the processor for training and sampling.

- members: five, Adam at 0.01 along a cosine, batches of 128, the library's prior; 80 epochs for the
  perceptron, 20 for the convolutional network.
- draws: chains from the five members. Perceptron: "mclmc" with 1,000 steps of warm-up and 100 draws
  ten steps apart, and "sghmc" with lr 0.2 (of 0.05 and 0.2 the lower NLL on seed 100).
  Convolutional network: "sghmc" with lr 0.05, not chosen. Both "sghmc" have 100 steps of warm-up
  and 60 draws five steps apart, batches of 128.
- repelled, repelled mclmc, repelled sghmc: the same with `method="f-kde", strength=100`, the
  strength of the study of equal cost.
- repelling sghmc: as sghmc from plain members, with the noise and the repulsion in every step.
- more members, more repelled: as many as take the seconds of their draws, "mclmc" for the
  perceptron and "sghmc" for the convolutional network (`draws_corners`).

Measures: NLL, accuracy, ECE, and AUROC of the photographs by predictive entropy. Draws pay on a
network if their mean NLL is lower than that of more members with a paired interval of 95 % below 0.
`draws_corners` has the other questions. Seeds 0, 1, 2 of the perceptron were seen before, on
another machine and with "more" members by proportion; the rows of this plan replace them.
"""

import argparse
import math
import time
from functools import partial
from pathlib import Path
from typing import Any

from torch import nn

import shoal
from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import mean_and_error, paired_difference
from studies import RESULTS
from studies.common import read_csv
from studies.draws_corners import Pace, members_for, repelling_chains, write_missing

PLACE = RESULTS / "draws"
HEADER = ["network", "seed", "arm", "members", "nll", "accuracy", "ece", "auroc", "seconds"]
EPOCHS = {"perceptron": 80, "convolutions": 20}
SGHMC: dict[str, Any] = {"warmup": 100, "draws": 60, "thin": 5}
RATES = {"perceptron": 0.2, "convolutions": 0.05}
LEAPFROG = {"name": "mclmc", "integrator": "leapfrog"}
"""The default of the time of the runs, as of those of `draws_uci`."""
MCLMC: dict[str, Any] = {"sampler": LEAPFROG, "warmup": 1000, "draws": 100, "thin": 10}
SAMPLERS = {"perceptron": ("mclmc", "sghmc"), "convolutions": ("sghmc",)}
REPELS: dict[str, Any] = {"method": "f-kde", "strength": 100.0}
ARMS = ("members", "more members", "repelled", "more repelled", "mclmc", "repelled mclmc", "sghmc",
        "repelled sghmc", "repelling sghmc")  # fmt: skip

TEXT = """# Draws beside members on digits

`python -m studies.draws_digits` writes this page and [digits.csv](digits.csv). Seeds {seeds}, one
thread; seconds of the processor for training and sampling. "More" members are as many as take the
seconds of their draws, `mclmc` for the perceptron and `sghmc` for the convolutional network. Means
over seeds ± standard errors. [Draws and repulsion](corners.md) compares the arms.

{table}

{verdict}
"""


def perceptron():
    """64 inputs, 50 units, 10 classes."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 50), nn.ReLU(), nn.Linear(50, 10))


def convolutions():
    """The network of the config `digits-cnn`."""
    return shoal.models.SmallCNN().build((1, 8, 8), 10)


BUILDS = {"perceptron": perceptron, "convolutions": convolutions}


def trained(network, seed, data, how, members=5, callbacks=()):
    """An ensemble."""
    return shoal.fit(
        shoal.Ensemble.init(BUILDS[network], members, seed=seed), data, lr=0.01, seed=seed,
        schedule="cosine", epochs=EPOCHS[network], batch_size=128, progress=False,
        callbacks=callbacks, **how,
    )  # fmt: skip


def scores(run, data):
    """NLL, accuracy, ECE and AUROC of the photographs."""
    pred = shoal.predict(run, data.test.x)
    ood = shoal.predict(run, data.ood["photographs"].x)
    y, metrics = data.test.y, shoal.metrics
    return [
        float(metrics.nll(pred, y)),
        float(metrics.accuracy(pred, y)),
        float(metrics.ece(pred, y)),
        float(metrics.auroc(pred.entropy(), ood.entropy())),
    ]


def arms_of(network, seed, group):
    """Arms of a group, the trained members first."""
    if group == "chains":
        return ["repelling sghmc"]
    points, word = ("repelled", "repelled ") if group == "repelled" else ("members", "")
    return [points, *(word + name for name in SAMPLERS[network]), f"more {points}"]


def compute(network, seed, group):
    """Rows of one group of arms, each in a list of its own."""
    data = shoal.data.load("digits")
    how = REPELS if group == "repelled" else {"method": "ensemble"}
    train = partial(trained, network, seed, data, how)
    first, *names = arms_of(network, seed, group)

    def timed(arm, seconds, act):
        began = time.process_time()
        run = act()
        seconds += time.process_time() - began
        row = [arm, run.ensemble.members, *(f"{v:.6g}" for v in (*scores(run, data), seconds))]
        return run, seconds, [row]

    train(callbacks=[Pace(1, 2)])  # loads what the first call loads
    run, base, row = timed(first, 0.0, train)
    if group == "chains":
        more = {"noise": 1.0, "lr": RATES[network], "batch_size": 128, "seed": seed}
        yield timed(first, base, lambda: repelling_chains(run, data, **SGHMC, **REPELS, **more))[2]
        return
    yield row
    longest = base
    for name in names[:-1]:
        sghmc = SGHMC | {"sampler": {"name": "sghmc", "lr": RATES[network]}}
        options = MCLMC if "mclmc" in name else sghmc
        draw = partial(shoal.draw, run, data, seed=seed, progress=False, **options)
        _, seconds, row = timed(name, base, draw)
        longest = max(longest, seconds)
        yield row
    steps = run.history[-1]["step"]
    members = members_for(longest, train, 5, steps, steps // len(run.history))
    yield timed(names[-1], 0.0, partial(train, members))[2]


def page(rows):
    """The page."""
    lines, verdicts = [], []
    for network in BUILDS:
        values = {arm: {} for arm in ARMS}
        for row in rows:
            if row["network"] == network:
                values[row["arm"]][row["seed"]] = row
        for arm, found in values.items():
            if found:
                cells = []
                for name, digits in zip(HEADER[3:], (0, 4, 4, 4, 4, 0), strict=True):
                    mean, error = mean_and_error([float(row[name]) for row in found.values()])
                    cells.append(f"{mean:.{digits}f} ± {error:.{digits}f}")
                lines.append([network, arm, *cells])
        for sampler in SAMPLERS[network]:
            mine, other = values[sampler], values["more members"]
            seeds = [seed for seed in mine if seed in other]
            if len(seeds) > 1:
                a, b = ([float(side[s]["nll"]) for s in seeds] for side in (mine, other))
                away = paired_difference(a, b)
                judged = "pay" if away.high < 0 else "cost" if away.low > 0 else "are not decided"
                verdicts.append(
                    f"{network}, {sampler}: NLL {away.difference:+.4f} ({away.low:+.4f} to "
                    f"{away.high:+.4f}) beside more members: draws {judged}."
                )
    seeds = ", ".join(sorted({row["seed"] for row in rows}))
    table = markdown_table(["network", *HEADER[2:]], lines)
    return TEXT.format(seeds=seeds, table=table, verdict="\n\n".join(verdicts))


def main():
    """Compute what is missing, and write the page."""
    parser = argparse.ArgumentParser(description="Draws beside members on digits.")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--networks", default="convolutions,perceptron")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds for all cells")
    parser.add_argument("--out", type=Path, default=PLACE, help="folder of digits.csv")
    asked = parser.parse_args()
    if not asked.page:
        cells = [
            (network, int(seed), group)
            for seed in asked.seeds.split(",")
            for network in asked.networks.split(",")
            for group in ("repelled", "plain", "chains")
        ]
        file = asked.out / "digits.csv"
        write_missing(file, HEADER, cells, arms_of, compute, asked.jobs, asked.within)
    (asked.out / "digits.md").write_text(page(read_csv(asked.out / "digits.csv")))


if __name__ == "__main__":
    main()

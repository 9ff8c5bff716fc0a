"""Draws beside members on digits, at equal cost; writes digits.csv and digits.md.

python -m studies.draws_digits [--seeds 0,1,2]

A second call goes on where the first one stopped.

Plan, written before the runs. Data: the digits that come with the library, with their out-of-domain
photographs. Networks: a perceptron of 50 units, and the small convolutional network of the config
`digits-cnn` (channels 16, 32, 32, no normalisation). Seeds 0, 1, 2. One thread.

- members: five, Adam at 0.01 along a cosine, 80 epochs, batches of 128, the library's prior.
- more members: as many as take the seconds of all of "draws", by the seconds of "members".
- draws: chains from the five members. Perceptron: "mclmc" with 1,000 steps of warm-up and 100 draws
  ten steps apart, and "sghmc" with lr 0.2 (of 0.05 and 0.2 the lower NLL on seed 100).
  Convolutional network: "sghmc" with lr 0.05, not chosen. Both "sghmc" have 100 steps of warm-up
  and 60 draws five steps apart, batches of 128.

Measures: NLL, accuracy, ECE, and AUROC of the photographs by predictive entropy. Draws pay on a
network if their mean NLL is lower than that of more members with a paired interval of 95 % below 0.
"""

import argparse
import math
import time

import numpy as np
import torch
from torch import nn

import shoal
from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import t_quantile
from studies import RESULTS
from studies.common import append_rows, read_csv

PLACE = RESULTS / "draws"
HEADER = ["network", "seed", "model", "members", "nll", "accuracy", "ece", "auroc", "seconds"]
SGHMC = {"warmup": 100, "draws": 60, "thin": 5}
MCLMC = {"sampler": "mclmc", "warmup": 1000, "draws": 100, "thin": 10}
SAMPLERS = {
    "perceptron": {"mclmc": MCLMC, "sghmc": SGHMC | {"sampler": {"name": "sghmc", "lr": 0.2}}},
    "convolutions": {"sghmc": SGHMC | {"sampler": {"name": "sghmc", "lr": 0.05}}},
}

TEXT = """# Draws beside members on digits

`python -m studies.draws_digits` writes this page and [digits.csv](digits.csv). Seeds {seeds}, one
thread; seconds of the processor. Members "as long as" a sampler are as many as would take the
seconds of training and draws by proportion; members that train together take fewer. Means over
seeds ± standard errors.

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


def trained(build, members, seed, data):
    """A plain ensemble."""
    return shoal.fit(
        shoal.Ensemble.init(build, members, seed=seed), data, method="ensemble", lr=0.01,
        schedule="cosine", epochs=80, batch_size=128, seed=seed, progress=False,
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


def compute(network, seed, data):
    """Rows of one network and seed."""
    build, start = BUILDS[network], time.process_time()
    run = trained(build, 5, seed, data)
    base = time.process_time() - start
    yield ["members", 5, *scores(run, data), base]
    for name, options in SAMPLERS[network].items():
        start = time.process_time()
        drawn = shoal.draw(run, data, seed=seed, progress=False, **options)
        whole = base + time.process_time() - start
        yield [name, drawn.ensemble.members, *scores(drawn, data), whole]
        count = max(round(5 * whole / base), 6)
        start = time.process_time()
        more = trained(build, count, seed, data)
        yield [f"as long as {name}", count, *scores(more, data), time.process_time() - start]


def page(rows):
    """The page."""
    lines, verdicts = [], []
    kinds = list(dict.fromkeys((row["network"], row["model"]) for row in rows))
    values = {
        kind: {r["seed"]: r for r in rows if (r["network"], r["model"]) == kind} for kind in kinds
    }
    for kind, found in values.items():
        line = [*kind]
        for name, digits in zip(HEADER[3:], (0, 4, 4, 4, 4, 0), strict=True):
            each = [float(row[name]) for row in found.values()]
            error = np.std(each, ddof=1) / math.sqrt(len(each)) if len(each) > 1 else math.nan
            line.append(f"{np.mean(each):.{digits}f} ± {error:.{digits}f}")
        lines.append(line)
    for network, model in kinds:
        other = values.get((network, f"as long as {model}"))
        if other is None:
            continue
        mine = values[network, model]
        away = [float(mine[s]["nll"]) - float(other[s]["nll"]) for s in mine if s in other]
        if len(away) > 1:
            spread = np.std(away, ddof=1) / math.sqrt(len(away))
            half = t_quantile(0.975, len(away) - 1) * spread
            low, high = np.mean(away) - half, np.mean(away) + half
            judged = "pay" if high < 0 else "cost" if low > 0 else "are not decided"
            verdicts.append(
                f"{network}, {model}: NLL {np.mean(away):+.4f} ({low:+.4f} to {high:+.4f}) beside "
                f"as many seconds of members: draws {judged}."
            )
    seeds = ", ".join(sorted({row["seed"] for row in rows}))
    table = markdown_table(["network", "model", *HEADER[3:]], lines)
    return TEXT.format(seeds=seeds, table=table, verdict="\n\n".join(verdicts))


def main():
    """Compute what is missing, and write the page."""
    parser = argparse.ArgumentParser(description="Draws beside members on digits.")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--networks", default="perceptron,convolutions")
    given = parser.parse_args()
    torch.set_num_threads(1)
    data, file = shoal.data.load("digits"), PLACE / "digits.csv"
    for seed in given.seeds.split(","):
        for network in given.networks.split(","):
            known = {(row["network"], row["seed"]) for row in read_csv(file, missing_ok=True)}
            if (network, seed) in known:
                continue
            rows = []
            for name, count, *numbers in compute(network, int(seed), data):
                rows.append([network, seed, name, count, *(f"{value:.6g}" for value in numbers)])
                print(*rows[-1], flush=True)
            append_rows(file, HEADER, rows)
    (PLACE / "digits.md").write_text(page(read_csv(file)))


if __name__ == "__main__":
    main()

"""Points, draws and repulsion on the UCI problems, beside bde; writes uci.csv and README.md.

python -m studies.draws_uci --uci uci_regression.npz --rates --jobs 12    # rates.csv, once
python -m studies.draws_uci --uci uci_regression.npz --jobs 12 [--splits 0] [--groups plain,bde]
python -m studies.draws_uci --uci uci_regression.npz --loading --problems yacht,wine --jobs 4
python -m studies.draws_uci --uci uci_regression.npz --longer    # longer.csv, integrator.csv
python -m studies.draws_uci --uci uci_regression.npz --lengths    # lengths.csv, and its table
python -m studies.draws_uci --uci uci_regression.npz --integrators    # integrators.csv, likewise

A second call goes on where the first one stopped; `--page` writes the page alone.

Plan, written before the runs. Problems: yacht, boston, energy, concrete and wine for gradients of
all data; kin8nm, power and protein by mini-batches. Published splits 0, 1, 2, one after another.
Networks: five of one hidden layer with 50 ReLU units and an output for the noise, normal prior of
width 1, inputs standardised. The seed is the split. One thread a process on a machine with nothing
else to do, seconds of the processor for training and sampling, without the predictions.

- members: `shoal.fit` with Adam at 0.005, batches of 128, 15 % of the points for the best epoch, at
  most 2,000 steps, patience of 20 epochs.
- draws: `shoal.draw` of these members with its defaults: mclmc, 2,500 steps of warm-up and 1,000
  draws, one a step. The seconds include the training.
- sghmc: `shoal.draw` by mini-batches of 128, 100 draws a chain, a quarter of an epoch and at least
  20 steps apart, after a warm-up of half of that. The learning rate is that of 0.0001, 0.001,
  0.003, 0.01 and 0.03 with the lowest NLL on split 10 (protein: 4), which is not judged.
- repelled, repelled draws, repelled sghmc: the same with `method="f-kde", strength=100`. On split
  10 of yacht, boston, energy and concrete it had the lowest mean NLL of all that repel with a force
  ratio of 0.001 or more on all four; f-kde and kde with strengths 1, 100 and 1,000 were tried.
- repelling sghmc: as sghmc from plain members, with the noise and the repulsion in every step.
- more members, more repelled: as many as take the seconds of their draws (`draws_corners`).
- bde: BdeRegressor of sklearn-contrib-bde 1.0.2, the same networks and prior, Adam at 0.005, 15 %
  for early stopping with a patience of 20, at most 1,000 epochs, then 5,000 steps of warm-up and
  2,000 draws two steps apart. Its seconds include what JAX compiles.

The large problems have sghmc for draws, and no bde. Judged: NLL and RMSE of the draws at most those
of bde in the mean over problems and splits, in at most a quarter of its seconds; and the four
questions of `draws_corners`. NLL in units of the targets; RMSE as a ratio, in the geometric mean.
Settings of mclmc were chosen on splits 10 of yacht and boston; a prototype had seen split 0 of
yacht, boston, energy and concrete. Former rows of splits 0 and 1 (members, draws and bde of four
problems) came from another, busy machine; the rows of this plan replace them.

Second plan, after the runs above had missed on NLL and RMSE, before its own runs (--longer): chains
as long as those of bde, 5,000 steps of warm-up and 1,000 draws four steps apart, of members trained
anew, on the five small problems and splits 0, 1, 2; the default chains beside them on the same
members. On split 10 of concrete and energy, which is not judged, this setting had the lowest RMSE
of those tried. Judged: NLL and RMSE at most those of bde (uci.csv) in the mean. The price is the
ratio of seconds to the default chains; seconds beside bde are that times those of uci.csv.

Third plan, before its own runs (--lengths): decoherence lengths of mclmc, on yacht, energy and
concrete and splits 10, 11 and 12, of which split 10 of yacht had served to choose settings. The
other settings are the defaults, and all lengths begin at the same members. Seconds are those of
sampling. Effective draws are those of one chain and one predicted mean at the test points, the
median over both. Judged: "auto" as the default, if its NLL and RMSE are not higher than those of 3.

All chains so far have the integrator "leapfrog", the default of their time.

Fourth plan, before its own runs (--integrators): "minimal-norm" with half the steps of warm-up, on
the five small problems and splits 10 to 13, as in the third plan; splits 10 to 13 had served to try
it, with and without units. Then (--longer) its default chains and longer ones, 2,500 steps of
warm-up and 1,000 draws two steps apart, on splits 0, 1, 2, as in the second plan. Judged as there,
and: default chains in at most a quarter of bde's seconds. The seconds of these chains are those of
another machine than bde's, so they are measured beside "leapfrog" chains of the same members, whose
seconds beside bde are known.
"""

import argparse
import math
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import shoal
from shoal.core.display.text import markdown_table
from shoal.prediction.statistics import paired_difference
from studies import RESULTS
from studies.common import read_csv
from studies.draws_corners import Pace, members_for, repelling_chains, write_missing
from studies.draws_digits import LEAPFROG

PLACE = RESULTS / "draws"
HEADER = ["problem", "split", "arm", "members", "nll", "rmse", "coverage", "seconds"]
SMALL = "yacht", "boston", "energy", "concrete", "wine"
LARGE = "kin8nm", "power", "protein"
TRIED: dict[str, tuple[dict[str, dict], str, tuple[str, ...], tuple[int, ...]]] = {
    "lengths": (
        {str(n): {**LEAPFROG, "length": n} for n in (0.3, 1, 3, 10, "auto")},
        "3", ("yacht", "energy", "concrete"), (10, 11, 12),
    ),
    "integrators": (
        {"leapfrog": LEAPFROG, "minimal-norm": {"name": "mclmc"}},
        "leapfrog", SMALL, (10, 11, 12, 13),
    ),
}  # fmt: skip
"""Settings of mclmc that were tried: samplers, the one they stand beside, problems and splits."""
LONGER: dict[str, dict[str, dict[str, Any]]] = {
    "longer.csv": {
        "draws": {"sampler": LEAPFROG},
        "longer draws": {"sampler": LEAPFROG, "warmup": 5000, "thin": 4},
    },
    "integrator.csv": {
        "draws": {},
        "leapfrog draws": {"sampler": LEAPFROG},
        "longer draws": {"warmup": 2500, "thin": 2},
    },
}
"""Chains beside those of bde, by file."""
RATES = 0.0001, 0.001, 0.003, 0.01, 0.03
UNITS, CHAINS, STEPS, BATCH, STRENGTH = 50, 5, 2000, 128, 100.0
GROUPS = {
    "bde": ["bde"],
    "repelled": ["repelled", "repelled draws", "more repelled"],
    "plain": ["members", "draws", "more members"],
    "chains": ["sghmc", "repelling sghmc"],
}
ONE_THREAD = "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1"
"""Flags of XLA."""
ON_LARGE = {
    "repelled": ["repelled", "repelled sghmc", "more repelled"],
    "plain": ["members", "sghmc", "more members"],
    "chains": ["repelling sghmc"],
}
ARMS = ["members", "more members", "repelled", "more repelled", "draws", "repelled draws", "sghmc",
        "repelled sghmc", "repelling sghmc", "bde"]  # fmt: skip

TEXT = """# Draws beside members and bde on UCI problems

`python -m studies.draws_uci --uci uci_regression.npz` writes this page and [uci.csv](uci.csv). Five
networks of 50 units, published splits {splits}, one thread. Seconds of the processor are those of
training and sampling, on one machine of 16 x86 cores, on which other programs ran as well, which
the plan did not want. Each number is the mean over splits.
The docstring of the command is the plan; it was written before the runs. [Draws and
repulsion](corners.md) compares the arms at equal cost.

{tables}

{verdict}
"""

FINDING = """

Judged by the plan: draws take less than a quarter of bde's seconds on every problem. "NLL and RMSE
at most those of bde in the mean" is missed: both means are higher, with 0 and 1 inside the
intervals. NLL loses on energy and concrete, RMSE on yacht, too. bde takes 9,000 steps of two
gradients, and `draw` 3,500 of one. Draws have a lower NLL than as many seconds of plain members on
all five problems.

- The seconds of bde include what JAX compiles and loads: {shares}, by a run
  with hardly any steps on another machine ([loading.csv](loading.csv), added after the runs).
  Without that share draws take {times} of bde's seconds:
  in a process that has compiled before, a quarter is not kept.
- Mini-batch chains (`sghmc`) lose members on yacht: two splits have an RMSE above 100. On the large
  problems they gain over as many seconds of plain members. Chains that repel lost a member on
  protein.
- protein has two splits, the others three: the third did not fit into the time.

All chains above have the integrator "leapfrog", the default of their time. The others were run on
another machine; their seconds are beside those of the default chains above, of the same members:

- Longer chains, by the second plan ([longer.csv](longer.csv)), 9,000 steps: {longer}
- Today's default chains, with the integrator "minimal-norm" ([integrator.csv](integrator.csv)), by
  the fourth plan: {norm}
- Longer chains of these, 9,000 gradients: {longer_norm}"""


class Table:
    """One split of a problem, inputs standardised."""

    def __init__(self, archive, problem, split):
        x, y = archive[f"{problem}_x"].astype("float64"), archive[f"{problem}_y"].astype("float64")
        test = archive[f"{problem}_test"].astype(bool)[split]
        mean, std = x[~test].mean(0), x[~test].std(0)
        x = ((x - mean) / np.where(std > 0, std, 1)).astype("float32")
        self.x, self.y = x[~test], y[~test].astype("float32")
        self.x_test, self.y_test = x[test], y[test].astype("float32")


def trained(table, seed, repels, members=CHAINS, callbacks=()):
    """Trained networks at their best epoch."""
    width = table.x.shape[1]

    def build():
        return nn.Sequential(nn.Linear(width, UNITS), nn.ReLU(), nn.Linear(UNITS, 2))

    return shoal.fit(
        shoal.Ensemble.init(build, members, seed=seed), (table.x, table.y), **method(repels),
        likelihood="heteroscedastic", lr=0.005, batch_size=BATCH, seed=seed, validation=0.15,
        epochs=max(STEPS * BATCH // len(table.x), 1), patience=20, keep="best", progress=False,
        callbacks=callbacks,
    )  # fmt: skip


def method(repels) -> dict[str, Any]:
    """What `shoal.fit` is told of repulsion."""
    return {"method": "f-kde", "strength": STRENGTH} if repels else {"method": "ensemble"}


def scores(run, table):
    """NLL, RMSE and coverage of 90 % intervals of the mixture, at the test points."""
    pred = shoal.predict(run, table.x_test)
    each = run.likelihood.log_prob(pred.members, torch.from_numpy(table.y_test)).double()
    nll = -float((each.logsumexp(0) - math.log(len(each))).mean())
    error = np.asarray(pred.mean, float).reshape(-1) - table.y_test
    low, high = (np.asarray(end, float).reshape(-1) for end in pred.interval(0.9))
    inside = (low <= table.y_test) & (table.y_test <= high)
    return nll, float(np.sqrt((error**2).mean())), float(inside.mean())


def by_sghmc(run, table, seed, rate, repels=False):
    """Draws by mini-batches, of chains that repel each other or not."""
    thin = max(math.ceil(len(table.x) / BATCH / 4), 20)
    how = {"draws": 100, "warmup": 50 * thin, "thin": thin, "batch_size": BATCH, "seed": seed}
    data = table.x, table.y
    if not repels:
        sampler = {"name": "sghmc", "lr": rate}
        return shoal.draw(run, data, sampler=sampler, progress=False, **how)
    more = {"likelihood": "heteroscedastic", "noise": 1.0, "lr": rate, **method(True)}
    return repelling_chains(run, data, **how, **more)


def sampled_by_bde(table, seed, **fewer):
    """Size, NLL, RMSE and coverage of bde's mixture, and its seconds."""
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", ONE_THREAD)
    from bde import BdeRegressor  # pyright: ignore[reportMissingImports]
    from bde.loss import GaussianNLL  # pyright: ignore[reportMissingImports]

    middle, unit = float(table.y.mean()), float(table.y.std())
    length = {"epochs": 1000, "warmup_steps": 5000, "n_samples": 2000, "n_thinning": 2} | fewer
    model = BdeRegressor(
        loss=GaussianNLL(), hidden_layers=[UNITS], n_members=CHAINS, seed=seed, patience=20,
        validation_split=0.15, lr=0.005, weight_decay=0.0, **length,
    )  # fmt: skip
    began = time.process_time()
    model.fit(x=table.x, y=((table.y - middle) / unit)[:, None])
    seconds = time.process_time() - began
    raw = np.asarray(model.predict(table.x_test, raw=True), float)
    raw = torch.from_numpy(raw.reshape(-1, *raw.shape[2:]))
    mean, std = middle + unit * raw[..., 0], unit * (nn.functional.softplus(raw[..., 1]) + 1e-6)
    y = torch.from_numpy(table.y_test).double()
    each = torch.distributions.Normal(mean, std).log_prob(y)
    nll = -float((each.logsumexp(0) - math.log(len(each))).mean())
    below = torch.distributions.Normal(mean, std).cdf(y).mean(0)
    inside = ((below >= 0.05) & (below <= 0.95)).double().mean()
    rmse = float((mean.mean(0) - y).square().mean().sqrt())
    return len(mean), nll, rmse, float(inside), seconds


def compute(archive, rates, problem, split, group):
    """Rows of one group of arms, each in a list of its own."""
    table = Table(np.load(archive), problem, split)
    if group == "bde":
        yield [_row("bde", *sampled_by_bde(table, split))]
        return
    arms, repels = arms_of(problem, split, group), group == "repelled"

    def train(members=CHAINS, callbacks=()):
        return trained(table, split, repels, members, callbacks)

    def timed(arm, seconds, act):
        began = time.process_time()
        run = act()
        seconds += time.process_time() - began
        return run, seconds, [_row(arm, run.ensemble.members, *scores(run, table), seconds)]

    train(callbacks=[Pace(1, 2)])  # loads what the first call loads
    run, base, row = timed(arms[0], 0.0, train)
    if group == "chains":
        for arm in arms:
            move = partial(by_sghmc, run, table, split, rate_of(rates, problem), arm != "sghmc")
            yield timed(arm, base, move)[2]
        return
    yield row
    how: dict[str, Any] = {"sampler": LEAPFROG, "seed": split, "progress": False}
    draw = partial(shoal.draw, run, (table.x, table.y), **how)
    if "sghmc" in arms[1]:
        draw = partial(by_sghmc, run, table, split, rate_of(rates, problem))
    _, seconds, row = timed(arms[1], base, draw)
    yield row
    steps = run.history[-1]["step"]
    span = max(40, steps // len(run.history))  # an epoch with its validation
    members = members_for(seconds, train, CHAINS, steps, span)
    yield timed(arms[2], 0.0, partial(train, members))[2]


def _row(arm, members, *values):
    return [arm, members, *(f"{value:.6g}" for value in values)]


def arms_of(problem, split, group):
    """Arms of a group, the trained members first."""
    return (ON_LARGE if problem in LARGE else GROUPS).get(group, [])


def try_rate(archive, problem, split, rate):
    """NLL of one learning rate on a split that is not judged."""
    table = Table(np.load(archive), problem, split)
    drawn = by_sghmc(trained(table, split, False), table, split, rate)
    yield [[str(rate), f"{scores(drawn, table)[0]:.6g}"]]


def longer(archive, arms, problem, split, arm):
    """Rows of chains of several lengths from the same members."""
    table = Table(np.load(archive), problem, split)
    run = trained(table, split, False)
    for name, options in arms.items():
        yield [_row(name, *sampled(run, table, split, **options)[1])]


def sampled(run, table, split, **options):
    """The run of draws, and its size, scores and seconds."""
    began = time.process_time()
    drawn = shoal.draw(run, (table.x, table.y), seed=split, progress=False, **options)
    seconds = time.process_time() - began
    return drawn, (drawn.ensemble.members, *scores(drawn, table), seconds)


def tried(archive, samplers, problem, split, arm):
    """Rows of chains by each sampler from the same members."""
    table = Table(np.load(archive), problem, split)
    run = trained(table, split, False)
    for name, sampler in samplers.items():
        drawn, values = sampled(run, table, split, sampler=sampler)
        each = drawn.chains((table.x_test, table.y_test)).predictions.effective
        yield [_row(name, *values, float(each.median()))]


def tried_table(rows, names, base):
    """Means of every setting over problems and splits, beside those of one setting in pairs."""
    cells = {(row["arm"], row["problem"], row["split"]): row for row in rows}
    keys = list(dict.fromkeys(key[1:] for key in cells))

    def values(name, measure):
        found = [float(cells[name, *key][measure]) for key in keys]
        return found if measure == "nll" else [math.log(value) for value in found]

    lines = []
    for name in names:
        nll, *ratios = (
            paired_difference(values(name, measure), values(base, measure))
            for measure in ("nll", "rmse", "effective", "seconds")
        )
        beside = [f"{nll.difference:+.3f} ({nll.low:+.3f} to {nll.high:+.3f})"]
        for found in ratios:
            ratio, low, high = map(math.exp, found)
            beside.append(f"{ratio:.2f} ({low:.2f} to {high:.2f})")
        lines.append([name, f"{np.mean(values(name, 'nll')):.3f}", *beside])
    heads = [f"NLL less that of {base}"]
    heads += [f"{each}, times" for each in ("RMSE", "effective draws", "seconds")]
    return markdown_table(["setting", "NLL", *heads], lines)


def loaded(archive, problem, split, arm):
    """Seconds of bde, and of bde with hardly any steps: what it compiles and loads."""
    fewer = {"epochs": 2, "warmup_steps": 20, "n_samples": 10} if arm == "few steps" else {}
    *_, seconds = sampled_by_bde(Table(np.load(archive), problem, split), split, **fewer)
    yield [[arm, f"{seconds:.6g}"]]


def rate_of(rates, problem):
    """The learning rate with the lowest NLL in rates.csv."""
    found = [row for row in read_csv(rates) if row["problem"] == problem]
    if len(found) < len(RATES):
        raise RuntimeError(f"{rates.name} has {len(found)} of {len(RATES)} rates of {problem}.")
    return float(min(found, key=lambda row: float(row["nll"]))["arm"])


def page(rows):
    """The page: a table per measure, and what the draws are beside bde."""
    cells = {(r["problem"], int(r["split"]), r["arm"]): r for r in rows}
    names = [arm for arm in ARMS if any(key[2] == arm for key in cells)]
    tables = []
    for measure, digits in (("nll", 3), ("rmse", 3), ("coverage", 2), ("seconds", 1)):
        lines = []
        for problem in SMALL + LARGE:
            keys = [key for key in cells if key[0] == problem]
            found = [[float(cells[key][measure]) for key in keys if key[2] == m] for m in names]
            if any(found):
                values = [f"{np.mean(each):.{digits}f}" if each else "" for each in found]
                lines.append([problem, *values, max(map(len, found))])
        title = {"nll": "NLL", "rmse": "RMSE", "coverage": "Coverage of 90 % intervals"}
        heads = [title.get(measure, "Seconds of the processor"), *names, "splits"]
        tables.append(markdown_table(heads, lines))
    splits = ", ".join(sorted({str(key[1]) for key in cells}))
    verdict = _beside_bde(cells)
    return TEXT.format(splits=splits, tables="\n\n".join(tables), verdict=verdict)


def _beside_bde(cells):
    """Draws and bde: a line for each problem, and what the plan judges."""
    both = [key[:2] for key in cells if key[2] == "bde" and (*key[:2], "draws") in cells]
    if len(both) < 2:
        return "bde has no results yet."
    pairs = {key: (cells[(*key, "draws")], cells[(*key, "bde")]) for key in both}

    def values(measure, problems=SMALL):
        found = [pair for key, pair in pairs.items() if key[0] in problems]
        act = math.log if measure != "nll" else float
        return [[act(float(pair[side][measure])) for pair in found] for side in (0, 1)]

    lines = []
    for problem in SMALL:
        means = {m: np.mean(values(m, (problem,)), axis=1) for m in ("nll", "rmse", "seconds")}
        away = {m: ours - theirs for m, (ours, theirs) in means.items()}
        ratios = [f"{math.exp(away[m]):.2f}" for m in ("rmse", "seconds")]
        lines.append([problem, f"{away['nll']:+.3f}", *ratios])
    table = markdown_table(["draws beside bde", "NLL", "RMSE, times", "seconds, times"], lines)
    nll, rmse, cost = (
        paired_difference(ours, theirs) for ours, theirs in map(values, ("nll", "rmse", "seconds"))
    )
    lower = [sum(a < b for a, b in zip(*values(m), strict=True)) for m in ("nll", "rmse")]
    ratio, low, high = map(math.exp, rmse)
    return (
        f"{table}\n\nDraws beside bde on {len(both)} splits: NLL {nll.difference:+.3f} (95 % "
        f"interval {nll.low:+.3f} to {nll.high:+.3f}; lower on {lower[0]}), RMSE times "
        f"{ratio:.2f} ({low:.2f} to {high:.2f}; lower on {lower[1]}), seconds times "
        f"{math.exp(cost.difference):.2f}.{FINDING.format(**_without_loading(pairs))}"
    )


def _without_loading(pairs):
    """The share that bde compiles and loads, and the seconds of draws over the rest."""
    known = {(r["problem"], r["arm"]): float(r["seconds"]) for r in read_csv(PLACE / "loading.csv")}
    shares, times = [], []
    for problem in dict.fromkeys(key[0] for key in known):
        share = known[problem, "few steps"] / known[problem, "bde"]
        found = [pair for key, pair in pairs.items() if key[0] == problem]
        ours, theirs = (np.mean([float(pair[i]["seconds"]) for pair in found]) for i in (0, 1))
        shares.append(f"{share:.0%} on {problem}")
        times.append(f"{ours / theirs / (1 - share):.2f} ({problem})")
    bde = {key: pair[1] for key, pair in pairs.items()}
    return {
        "shares": " and ".join(shares),
        "times": " and ".join(times),
        "longer": _longer(bde, "longer.csv", "longer draws", "draws"),
        "norm": _longer(bde, "integrator.csv", "draws", "leapfrog draws"),
        "longer_norm": _longer(bde, "integrator.csv", "longer draws", "leapfrog draws"),
    }


def _longer(bde, file, arm, base):
    """Chains of a file beside bde, and their price beside other chains."""
    rows = {(r["problem"], int(r["split"]), r["arm"]): r for r in read_csv(PLACE / file)}
    keys, ours = [key for key in bde if (*key, arm) in rows], {}
    for measure, act in (("nll", float), ("rmse", math.log)):
        each = [
            [act(float(found[measure])) for found in side]
            for side in ([rows[*key, arm] for key in keys], [bde[key] for key in keys])
        ]
        ours[measure] = paired_difference(each[0], each[1])
    times = [
        math.log(float(rows[*key, arm]["seconds"]) / float(rows[*key, base]["seconds"]))
        for key in keys
    ]
    judged = {m: "missed" if each.difference > 0 else "met" for m, each in ours.items()}
    nll, (ratio, low, high) = ours["nll"], map(math.exp, ours["rmse"])
    return (
        f"NLL {nll.difference:+.3f} (95 % interval {nll.low:+.3f} to {nll.high:+.3f}) and RMSE "
        f"times {ratio:.2f} ({low:.2f} to {high:.2f}) on {len(keys)} splits, for "
        f"{math.exp(np.mean(times)):.1f} times the seconds of sampling. "
        f'"At most those of bde in the mean" is {judged["nll"]} for NLL and '
        f"{judged['rmse']} for RMSE."
    )


def main():
    """Compute what is missing, and write the page."""
    parser = argparse.ArgumentParser(description="Draws beside members and bde.")
    parser.add_argument("--uci", type=Path, help="archive of the UCI problems")
    parser.add_argument("--splits", default="0,1,2")
    parser.add_argument("--problems", default=",".join(SMALL + LARGE))
    parser.add_argument("--groups", default=",".join(GROUPS))
    parser.add_argument("--rates", action="store_true", help="choose learning rates of sghmc")
    parser.add_argument("--loading", action="store_true", help="seconds that bde compiles")
    parser.add_argument("--longer", action="store_true", help="chains as long as those of bde")
    for name in TRIED:
        parser.add_argument(f"--{name}", action="store_true", help=f"{name} of mclmc")
    parser.add_argument("--page", action="store_true", help="write the page alone")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds for all cells")
    parser.add_argument("--out", type=Path, default=PLACE, help="folder of the raw files")
    asked = parser.parse_args()
    problems, how = asked.problems.split(","), (asked.jobs, asked.within)
    if asked.rates:
        cells = [
            (name, 4 if name == "protein" else 10, rate)
            for name in reversed(problems)
            for rate in RATES
        ]
        act = partial(try_rate, asked.uci)
        header = ["problem", "split", "arm", "nll"]
        write_missing(
            asked.out / "rates.csv", header, cells, lambda *cell: [str(cell[2])], act, *how
        )
        return
    if asked.loading:
        cells = [(problem, 0, arm) for problem in problems for arm in ("few steps", "bde")]
        file, header = asked.out / "loading.csv", ["problem", "split", "arm", "seconds"]
        act = partial(loaded, asked.uci)
        write_missing(file, header, cells, lambda *cell: [cell[2]], act, *how)
        return
    if asked.longer:
        cells = [(problem, split, "") for split in (0, 1, 2) for problem in SMALL]
        for name, chains in LONGER.items():
            arms, act = (lambda *cell, names=chains: [*names]), partial(longer, asked.uci, chains)
            write_missing(asked.out / name, HEADER, cells, arms, act, *how)
        return
    for name in filter(vars(asked).get, TRIED):
        samplers, base, chosen, splits = TRIED[name]
        cells = [(p, split, "") for split in splits for p in chosen if p in problems]
        file, header = asked.out / f"{name}.csv", [*HEADER, "effective"]
        arms, act = (lambda *cell, names=samplers: [*names]), partial(tried, asked.uci, samplers)
        write_missing(file, header, cells, arms, act, *how)
        print(tried_table(read_csv(file), samplers, base))
        return
    file = asked.out / "uci.csv"
    if not asked.page:
        cells = [
            (problem, split, group)
            for split in map(int, asked.splits.split(","))
            for group in asked.groups.split(",")
            for problem in reversed(problems)
        ]
        write_missing(
            file, HEADER, cells, arms_of, partial(compute, asked.uci, asked.out / "rates.csv"), *how
        )
    (asked.out / "README.md").write_text(page(read_csv(file)))


if __name__ == "__main__":
    main()

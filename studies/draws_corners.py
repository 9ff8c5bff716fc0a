"""Draws and repulsion: which corner of {plain, repelled} x {points, draws} is nearest to the
posterior, and which predicts best, at equal cost? Writes posteriors.csv.

python -m studies.draws_corners --jobs 12          # what is missing
python -m studies.draws_page                      # corners.md, from the three raw files

`studies.draws_uci` and `studies.draws_digits` have the same corners on UCI problems and on digits;
their docstrings say with which networks.

Plan, written before the runs.

- Points are trained members, draws are chains that begin at them, `repelled` is a method with
  repulsion. "More" points are as many members as take the seconds of members and draws
  together: a pilot doubles the ensemble until it is too slow, and takes the size between. The
  repelled corner has its own "more". Seconds are those of the processor, one thread.
- Chains that repel have noise and repulsion in every step (docs/noise.md); beside them stand the
  same chains without repulsion.

Known posteriors: linear, regression, classification, digits, with the settings of `shoal fidelity`
(20 members, 400 steps). Seeds 0 to 4. Repelled: `kde:calibrated`, by weights, and
`f-svgd:calibrated`, by predictions the nearest ensemble so far. Draws: `mclmc` and `hmc`, 50 a
chain, about 1,500 gradients, as in `studies.fidelity.samplers`. "More" have the seconds of `mclmc`.
Chains that repel: SGHMC with all data, learning rate 0.001, 1,000 steps and then 50 draws ten steps
apart, from plain members: noise 1 alone; `kde:calibrated` with strength 0.5 and noise 0.5, whose
temperature is 1 if the score is true; and with strength 1 and noise 1, whose temperature is 2.

Nearest: the lowest mean Fréchet distance; total variation, unbiased Stein discrepancy and, on
`linear`, the sliced distance of the weights stand beside it. Predicts best: the lowest NLL.
Four questions, each a difference paired by seed or split with a 95 % interval: (1) draws minus
more members, (2) draws of repelled members minus draws, (3) more repelled minus more members, (4)
chains that repel minus the same without repulsion. A corner is named nearest or best only if its
intervals against the three others lie on one side of 0; otherwise the page says what is open.

Expected: (1) below 0 for distances on the networks and above 0 for NLL on digits; (2) and (4) no
difference, since a chain forgets where it began and a chain at temperature 1 samples one law;
strength 1 with noise 1 farther away. Seed 0 of `regression` was run once to try the command.
"""

import argparse
import copy
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import shoal
from shoal.analysis.fidelity import problems
from shoal.analysis.fidelity import reference as references
from shoal.analysis.fidelity.study import Budget, contestant, distances_of, fitted, sampled
from studies import RESULTS
from studies.common import append_rows, finished, read_csv

PLACE = RESULTS / "draws"
FILE = PLACE / "posteriors.csv"
HEADER = ["problem", "seed", "arm", "distance", "value"]
PROBLEMS = "linear", "regression", "classification", "digits"
STARTS = "ensemble", "kde:calibrated", "f-svgd:calibrated"
SAMPLERS = "mclmc", "hmc"
CHAINS = {"noise 1": (0.0, 1.0), "strength 0.5, noise 0.5": (0.5, 0.5),
          "strength 1, noise 1": (1.0, 1.0)}  # fmt: skip
CHAIN = {"lr": 1e-3, "warmup": 1000, "draws": 50, "thin": 10}


class Pace(shoal.Callback):
    """Seconds of the processor per step, from step `first` to step `last`, where training ends."""

    def __init__(self, first: int, last: int) -> None:
        self.first, self.last, self.began, self.each = first, last, 0.0, math.nan

    def step_end(self, event: Any) -> None:
        if event.step == self.first:
            self.began = time.process_time()
        if event.step == self.last:
            self.each = (time.process_time() - self.began) / (self.last - self.first)
            event.stop()


def members_for(
    seconds: float, train: Callable[..., Any], members: int, steps: int, span: int = 40
) -> int:
    """Ensemble size whose training takes these seconds of the processor.

    Args:
        seconds: of the whole training.
        train: trains `train(members, callbacks)`.
        members: the smallest size.
        steps: steps of the whole training.
        span: steps that are timed for each size, after ten others.
    """
    before = None
    while True:
        pace = Pace(10, 10 + span)
        train(members, [pace])
        whole = pace.each * steps
        if not whole < seconds:
            break
        before, members = (members, whole), 2 * members
    if before is None:
        return members
    fewer, faster = before
    return fewer + round((members - fewer) * (seconds - faster) / (whole - faster))


class _Keep(shoal.Callback):
    """Keeps the members after every `thin` steps behind the warm-up."""

    def __init__(self, ensemble: shoal.Ensemble, warmup: int, thin: int) -> None:
        self.ensemble, self.warmup, self.thin = ensemble, warmup, thin
        self.kept: list[dict[str, torch.Tensor]] = []

    def step_end(self, event: Any) -> None:
        after = event.step - self.warmup
        if after > 0 and after % self.thin == 0:
            weights = self.ensemble.weights
            self.kept.append({name: w.detach().clone() for name, w in weights.items()})


def repelling_chains(
    run: shoal.Run, data: Any, *, warmup: int, draws: int, thin: int, **options: Any
) -> shoal.Run:
    """Draws of members that sample while they repel: `shoal.fit` with noise, begun at a run."""
    chains = copy.deepcopy(run.ensemble)
    keep = _Keep(chains, warmup, thin)
    moved = shoal.fit(
        chains, data, optimizer={"name": "sgd", "momentum": 0.9}, steps=warmup + draws * thin,
        callbacks=[keep], progress=False, **options,
    )  # fmt: skip
    weights = {name: torch.cat([each[name] for each in keep.kept]) for name in keep.kept[0]}
    return replace(moved, ensemble=chains.repeated(draws, weights))


def timed(act: Callable[[], Any]) -> tuple[Any, float]:
    """A result, and its seconds of the processor."""
    began = time.process_time()
    result = act()
    return result, time.process_time() - began


def write_missing(
    file: Path,
    header: list[str],
    cells: Iterable[tuple],
    arms: Callable[..., Iterable[str]],
    compute: Callable[..., Iterator[list]],
    jobs: int,
    within: float = math.inf,
) -> None:
    """Compute cells with missing arms, in several processes; a row is written once it is known.

    A row begins with the cell, without its last entry, and the arm.
    """
    known = {tuple(list(row.values())[: header.index("arm") + 1]) for row in read_csv(file, True)}
    missing = []
    for cell in cells:
        lacking = [arm for arm in arms(*cell) if (*map(str, cell[:-1]), arm) not in known]
        if lacking:
            missing.append((cell, lacking))
    act = partial(_write, file, header, compute)
    done = finished(
        missing, act, jobs, within, torch.set_num_threads, (1,), lambda pair: pair[0][0::2]
    )
    for (cell, _), _ in done:
        print("done", *cell, flush=True)


def _write(
    file: Path, header: list[str], compute: Callable[..., Iterator[list]], cell: tuple, arms: list
) -> None:
    width = len(cell) - 1
    for rows in compute(*cell):
        wanted = [[*cell[:-1], *row] for row in rows if row[0] in arms]
        append_rows(file, header, wanted)
        print(*(wanted[0][: width + 1] if wanted else ()), flush=True)


def arms_of(problem: str, seed: int, start: str) -> list[str]:
    """Arms of one cell of the known posteriors."""
    if start == "chains":
        return list(CHAINS)
    return [start, f"more {start}", *(f"{start} + {sampler}" for sampler in SAMPLERS)]


def distances(problem: str, seed: int, start: str) -> Iterator[list[list]]:
    """Rows of one cell: distances of points, of draws and of more points, or of chains."""
    case = problems.make(problem)
    reference = references.load(case)

    def rows(arm: str, flat: torch.Tensor, seconds: float) -> list[list]:
        values = {"members": len(flat), "seconds": seconds, **distances_of(case, reference, flat)}
        return [[arm, name, f"{value:.6g}"] for name, value in values.items()]

    method = "ensemble" if start == "chains" else start
    fitted(case, method, Budget(steps=2), seed)  # loads what the first call loads
    run, base = timed(lambda: fitted(case, method, Budget(), seed))
    if start == "chains":
        for arm, (strength, noise) in CHAINS.items():
            how = "kde:calibrated" if strength else "ensemble"
            drawn, took = timed(
                lambda how=how, strength=strength, noise=noise: repelling_chains(
                    run, (case.x, case.y), method=contestant(how), strength=strength or None,
                    noise=noise, likelihood=case.likelihood, prior=case.prior, seed=seed,
                    batch_size=len(case.x), engine="vmap", **CHAIN,
                )
            )  # fmt: skip
            yield rows(arm, flat_weights(drawn), base + took)
        return
    yield rows(start, flat_weights(run), base)
    longest = base
    for sampler in SAMPLERS:
        flat, took = timed(lambda sampler=sampler: sampled(case, sampler, run, seed))
        longest = base + took if sampler == SAMPLERS[0] else longest
        yield rows(f"{start} + {sampler}", flat, base + took)

    def train(members: int, callbacks: Sequence = ()) -> shoal.Run:
        return fitted(case, start, Budget(members), seed, callbacks)

    members = members_for(longest, train, Budget().members, Budget().steps)
    more, took = timed(lambda: train(members))
    yield rows(f"more {start}", flat_weights(more), took)


def flat_weights(run: shoal.Run) -> torch.Tensor:
    """Weights [M, D]."""
    return torch.cat([w.detach().flatten(1) for w in run.ensemble.weights.values()], 1)


def main() -> None:
    """Read the command line."""
    parser = argparse.ArgumentParser(description="Draws and repulsion on the known posteriors.")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--within", type=float, default=math.inf, help="seconds for all cells")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--problems", default=",".join(PROBLEMS))
    parser.add_argument("--starts", default=",".join((*STARTS, "chains")))
    parser.add_argument("--out", type=Path, default=FILE)
    asked = parser.parse_args()
    cells = [
        (problem, seed, start)
        for seed in map(int, asked.seeds.split(","))
        for start in reversed(asked.starts.split(","))
        for problem in asked.problems.split(",")
    ]
    write_missing(asked.out, HEADER, cells, arms_of, distances, asked.jobs, asked.within)


if __name__ == "__main__":
    main()

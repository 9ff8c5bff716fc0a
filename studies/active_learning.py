"""Active learning by an alarm of forces, beside random frames: python -m studies.active_learning

The plan. It was written before the runs of seeds 0 to 4. All numbers below were set by runs of seed
100.

System: a cluster of 13 copper atoms, with energies and forces of ASE's EMT potential. The committee
has five members. The network of a member sees the distances of each atom to the others through
twelve Gaussians (Behler & Parrinello 2007, doi 10.1103/PhysRevLett.98.146401). A run begins with
ten frames of EMT dynamics at 300 K. Each of six rounds runs four simulations by the committee,
Langevin dynamics at a temperature that rises from 440 K to 1000 K, labels the last frame of each by
EMT, and continues training from the present members. So each arm has 10 + 24 labels. A simulation
goes on where the last one ended. It has crashed if two atoms are closer than 1.6 Å, or an atom is
more than 4.5 Å from all others. It is then counted, and begun anew at a labelled frame.

Arms:
- `alarm`: a simulation ends at the alarm of forces, or after 100 steps. The threshold is found
  before each round. Four simulations of 40 steps at its temperature visit 40 frames, which need no
  labels. The alarm is raised by a deviation that 5 % of such frames exceed.
- `random`: a simulation ends after 1 to 100 steps, uniformly drawn.
- `f-kde`: `alarm` with repulsion of outputs, which are energies and forces; strength 1000.
- `forde`: `alarm` with repulsion of input gradients, which are the forces; strength 100.
The strengths were chosen on seed 100 among 10 to 10,000. The force ratio is then near 1, and the
RMSE of forces at most 5 % above that of plain members.

Measures, on 100 frames of EMT dynamics at 1000 K: RMSE of forces and of the energy per atom;
Spearman's correlation between the deviation of a frame and the largest error of a force in it;
AUROC with which the deviation finds the fifth of the frames with the largest error. Also the first
number of labels with a force RMSE of at most 0.12 eV/Å (four more than all if it is not reached),
and crashes. For repulsion, the members are also trained anew on the final labels of `random`.

Judgement: differences to `alarm` (to plain members where the data are the same), paired by seed,
with 95 % intervals of Student's t, without a correction for their number. The primary measures are
the labels that are needed and, for repulsion, AUROC on the same data. An interval that contains 0
decides nothing.
"""

import argparse
import math
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import mean, stdev
from typing import Any

import numpy as np
import torch
from ase import Atoms, units
from ase.calculators.emt import EMT
from ase.cluster import Icosahedron
from ase.md.langevin import Langevin
from scipy.stats import spearmanr
from torch import Tensor, nn

import shoal
from shoal.core.display.text import markdown_table
from shoal.integrations.ase import Committee, ForceAlarm
from shoal.plots.figure import blank, legend, look, png, rc
from shoal.prediction.metrics import auroc
from shoal.prediction.predictive import Predictive
from shoal.prediction.statistics import Difference, paired_difference, t_quantile
from studies import RESULTS
from studies.common import append_rows, read_csv

FOLDER = RESULTS / "active-learning"
CURVE, SAME = FOLDER / "curve.csv", FOLDER / "same-data.csv"
ARMS = {
    "alarm": {"method": "ensemble"},
    "random": {"method": "ensemble"},
    "f-kde": {"method": "f-kde", "strength": 1000.0},
    "forde": {"method": "forde", "strength": 100.0},
}
SEEDS, MEMBERS, START, ROUNDS, WALKERS = 5, 5, 10, 6, 4
COLD, HOT, LIMIT, SURVEY, RATE = 300.0, 1000.0, 100, 40, 0.05
FIRST_STEPS, STEPS, TARGET = 400, 150, 0.12

SCORES = ["force_rmse", "energy_rmse", "spearman", "auroc", "deviation", "error"]
HEADER = ["seed", "arm", "labels", *SCORES, "threshold", "alarms", "crashes", "steps", "found"]
HEADER += ["seconds"]
SAME_HEADER = ["seed", "arm", "labels", *SCORES, "seconds"]


class Network(nn.Module):
    """The energy of a cluster: a perceptron for each atom, of smooth counts of its distances."""

    centres: Tensor

    def __init__(self, hidden: int = 32, cutoff: float = 6.0, gaussians: int = 12) -> None:
        super().__init__()
        self.cutoff, self.width = cutoff, 4.0 / (gaussians - 1)
        self.register_buffer("centres", torch.linspace(1.5, 5.5, gaussians))
        self.atom = nn.Sequential(
            nn.Linear(gaussians, hidden), nn.SiLU(), nn.Linear(hidden, hidden), nn.SiLU(),
            nn.Linear(hidden, 1),
        )  # fmt: skip

    def forward(self, pos: Tensor) -> Tensor:
        """Energies [B, 1] of positions [B, n, 3]."""
        itself = torch.eye(pos.shape[-2], dtype=pos.dtype, device=pos.device)
        away = pos.unsqueeze(-2) - pos.unsqueeze(-3)
        distance = (away.square().sum(-1) + itself).sqrt()
        near = 0.5 * ((distance.clamp(max=self.cutoff) * (torch.pi / self.cutoff)).cos() + 1)
        counts = (-0.5 * ((distance.unsqueeze(-1) - self.centres) / self.width).square()).exp()
        seen = (counts * (near * (1 - itself)).unsqueeze(-1)).sum(-2)
        return self.atom(seen).sum(-2)


def cluster() -> Atoms:
    """The icosahedron of 13 atoms."""
    return Icosahedron("Cu", 2)


def zero() -> float:
    """Its energy by EMT, which is the zero of all energies."""
    return labelled(cluster()).info["energy"]


def labelled(atoms: Atoms) -> Atoms:
    """A copy of a frame with its energy and forces by EMT."""
    frame = atoms.copy()
    frame.calc = EMT()
    frame.info = {"energy": frame.get_potential_energy(), "forces": frame.get_forces()}
    frame.calc = None
    return frame


def heated(atoms: Atoms, kelvin: float, rng: np.random.Generator) -> Atoms:
    """A copy with momenta of this temperature."""
    made = atoms.copy()
    scale = np.sqrt(units.kB * kelvin * made.get_masses())[:, None]
    made.set_momenta(scale * rng.normal(size=(len(made), 3)))
    return made


def dynamics(atoms: Atoms, kelvin: float, rng: np.random.Generator) -> Langevin:
    """Langevin dynamics with steps of 5 fs and a relaxation time of 50 fs."""
    friction = 0.02 / units.fs
    return Langevin(
        atoms, 5 * units.fs, temperature_K=kelvin, friction=friction, fixcm=False, rng=rng
    )


def reference_frames(kelvin: float, count: int, every: int, rng: np.random.Generator) -> list:
    """Frames of EMT dynamics, in trajectories of 25 frames after 100 steps each."""
    frames: list[Atoms] = []
    while len(frames) < count:
        atoms = heated(cluster(), kelvin, rng)
        atoms.calc = EMT()
        moves = dynamics(atoms, kelvin, rng)
        moves.run(100)
        for _ in range(min(25, count - len(frames))):
            moves.run(every)
            frames.append(labelled(atoms))
    return frames


def positions(frames: Iterable[Atoms]) -> dict[str, Tensor]:
    """The input of the network [B, n, 3]."""
    return {"pos": torch.tensor(np.array([f.positions for f in frames]), dtype=torch.float32)}


def targets(frames: Iterable[Atoms]) -> tuple[Tensor, Tensor]:
    """Energies [B] and forces [B, n, 3]."""
    found = [(f.info["energy"] - zero(), f.info["forces"]) for f in frames]
    energies, forces = (torch.tensor(np.array(part)).float() for part in zip(*found, strict=True))
    return energies, forces


def unphysical(atoms: Atoms) -> bool:
    """Whether a simulation has crashed."""
    if not np.isfinite(atoms.positions).all():
        return True
    nearest = (atoms.get_all_distances() + 1e3 * np.eye(len(atoms))).min(1)
    return bool(nearest.min() < 1.6 or nearest.max() > 4.5)


def train(ensemble: shoal.Ensemble, frames: list, steps: int, arm: str, seed: int) -> Any:
    """Train the present members on all labelled frames."""
    normal = shoal.likelihoods.Gaussian
    likelihood = shoal.likelihoods.WithDerivatives(
        normal(0.03), of="pos", derivatives=normal(0.02), sign=-1
    )
    return shoal.fit(
        ensemble, (positions(frames), targets(frames)), likelihood=likelihood, steps=steps,
        batch_size=10, lr=2e-2, schedule="cosine", seed=seed, progress=False, **ARMS[arm],
    )  # fmt: skip


def errors(pred: Predictive, forces: Tensor) -> Tensor:
    """The largest error of a force in each frame [B], in eV/Å."""
    return (pred.of_derivatives.mean - forces).norm(dim=-1).amax(-1)


def scores(run: Any, test: list) -> list[float]:
    """The measures on the test frames, in the order of SCORES."""
    energies, forces = targets(test)
    pred = shoal.predict(run, positions(test))
    found = shoal.evaluate(pred, (energies, forces))
    deviation, error = pred.derivative_deviation(), errors(pred, forces)
    large = error > error.quantile(0.8)
    rank: Any = spearmanr(deviation, error)
    area = auroc(deviation[~large], deviation[large])
    rmse = found["derivatives_rmse"], found["rmse"] / len(test[0])
    return [*rmse, float(rank.statistic), area, float(deviation.mean()), float(error.mean())]


@dataclass
class Loop:
    """What the rounds of one arm share.

    Attributes:
        frames: labelled frames.
        walkers: where the simulations are.
        counts: alarms, crashes and steps of simulations so far.
        found: largest errors of a force in the frames that were labelled last, before training.
    """

    arm: str
    rng: np.random.Generator
    frames: list[Atoms]
    walkers: list[Atoms]
    counts: dict[str, int] = field(default_factory=lambda: dict(alarms=0, crashes=0, steps=0))
    found: list[float] = field(default_factory=list)

    def threshold(self, run: Any, kelvin: float) -> Any:
        """The alarm for simulations as they are now; None for the random arm."""
        if self.arm == "random":
            return None
        seen: list[Atoms] = []
        for walker in self.walkers:
            _, visited = self._simulated(run, None, kelvin, walker, SURVEY)
            seen.extend(visited)
        pred = shoal.predict(run, positions(seen))
        return shoal.decisions.ood_alarm(pred, RATE, score="derivative_deviation")

    def round(self, run: Any, rule: Any, kelvin: float) -> None:
        """Simulate, and label one frame of each simulation."""
        self.found = []
        for index, walker in enumerate(self.walkers):
            atoms, _ = self._simulated(run, rule, kelvin, walker, LIMIT)
            frame = labelled(atoms)
            calculator: Any = atoms.calc
            wrong = calculator.results["forces"] - frame.info["forces"]
            self.found.append(float(np.linalg.norm(wrong, axis=-1).max()))
            self.frames.append(frame)
            self.walkers[index] = atoms

    def _simulated(
        self, run: Any, rule: Any, kelvin: float, begin: Atoms, limit: int
    ) -> tuple[Atoms, list[Atoms]]:
        """The end of a simulation that did not crash, and every fourth frame of it."""
        while True:
            atoms, seen, alarm = begin.copy(), list[Atoms](), None
            atoms.calc = Committee(run, inputs=lambda frame: positions([frame]))
            moves = dynamics(atoms, kelvin, self.rng)
            if rule is not None:
                alarm = ForceAlarm(moves, rule)
                moves.attach(alarm)
            moves.attach(_look, 1, moves, seen)
            drawn = self.arm == "random"
            moves.run(int(self.rng.integers(1, limit + 1)) if drawn else limit)
            self.counts["steps"] += moves.nsteps
            if not unphysical(atoms):
                self.counts["alarms"] += bool(alarm and alarm.raised)
                return atoms, seen
            self.counts["crashes"] += 1
            labelled_frame = self.frames[int(self.rng.integers(len(self.frames)))]
            begin = heated(labelled_frame, kelvin, self.rng)


def _look(moves: Langevin, seen: list[Atoms]) -> None:
    """Keep every fourth frame, and stop a simulation that has crashed."""
    if unphysical(moves.atoms):
        moves.max_steps = moves.nsteps
    elif moves.nsteps % 4 == 0 and moves.nsteps:
        seen.append(moves.atoms.copy())


def active(arm: str, seed: int, start: list, test: list) -> tuple[list[list], list]:
    """The rows of one arm and its labelled frames."""
    begun = time.process_time()
    rng = np.random.default_rng([seed, 7])
    ensemble = shoal.Ensemble.init(Network, MEMBERS, seed=seed)
    run = train(ensemble, start, FIRST_STEPS, arm, seed)
    picks = rng.choice(len(start), WALKERS, replace=False)
    walkers = [heated(start[int(pick)], COLD, rng) for pick in picks]
    loop, rows = Loop(arm, rng, [*start], walkers), []
    for turn in range(ROUNDS + 1):
        kelvin = COLD + (HOT - COLD) * min(1.0, 0.2 + 0.8 * turn / (ROUNDS - 1))
        rule = loop.threshold(run, kelvin) if turn < ROUNDS else None
        found = mean(loop.found) if loop.found else math.nan
        numbers = [*scores(run, test), rule.threshold if rule else math.nan]
        spent = time.process_time() - begun
        rows.append([seed, arm, len(loop.frames), *numbers, *loop.counts.values(), found, spent])
        if turn < ROUNDS:
            loop.round(run, rule, kelvin)
            run = train(run.ensemble, loop.frames, STEPS, arm, 1000 * seed + turn)
    return rows, loop.frames


def trained_anew(seed: int, frames: list, test: list) -> list[list]:
    """Rows of members that are trained on the same frames, by each kind of repulsion."""
    rows = []
    for arm in ("alarm", "f-kde", "forde"):
        begun = time.process_time()
        ensemble = shoal.Ensemble.init(Network, MEMBERS, seed=seed)
        run = train(ensemble, frames, FIRST_STEPS, arm, seed)
        spent = time.process_time() - begun
        rows.append([seed, arm, len(frames), *scores(run, test), spent])
    return rows


def rounded(row: list) -> list:
    """A row with six digits of every number."""
    return [f"{value:.6g}" if isinstance(value, float) else value for value in row]


def study(seeds: Iterable[int]) -> None:
    """Run the arms that are not in the file."""
    known = {(int(row["seed"]), row["arm"]) for row in read_csv(CURVE, missing_ok=True)}
    FOLDER.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        missing = [arm for arm in ARMS if (seed, arm) not in known]
        if not missing:
            continue
        rng = np.random.default_rng(seed)
        start = reference_frames(COLD, START, 20, rng)
        test = reference_frames(HOT, 100, 20, rng)
        for arm in missing:
            rows, frames = active(arm, seed, start, test)
            append_rows(CURVE, HEADER, map(rounded, rows))
            print(*rounded(rows[-1]), flush=True)
            if arm == "random":
                append_rows(SAME, SAME_HEADER, map(rounded, trained_anew(seed, frames, test)))


LAST = START + ROUNDS * WALKERS
TITLES = {
    "force_rmse": "RMSE of forces (eV/Å)",
    "energy_rmse": "RMSE of energies (meV per atom)",
    "spearman": "Spearman",
    "auroc": "AUROC",
    "needed": f"labels to {TARGET} eV/Å",
    "found": "error at labelled frames (eV/Å)",
    "alarms": "alarms",
    "crashes": "crashes",
}
UNIT = {"energy_rmse": 1000.0}
TICKS = (0.06, 0.08, 0.1, 0.15, 0.2, 0.3)


def values(rows: list[dict[str, str]], metric: str, **wanted: Any) -> list[float]:
    """One number for each seed: the mean of a metric over the rows with these values."""
    fits = [row for row in rows if all(row[k] == str(v) for k, v in wanted.items())]
    by_seed = {row["seed"]: [r for r in fits if r["seed"] == row["seed"]] for row in fits}
    return [
        mean(float(row[metric]) for row in by_seed[seed]) * UNIT.get(metric, 1.0)
        for seed in sorted(by_seed)
    ]


def needed(rows: list[dict[str, str]], arm: str) -> list[float]:
    """The first number of labels at which forces are good enough, of each seed."""
    seeds = sorted({row["seed"] for row in rows})
    found = []
    for seed in seeds:
        mine = [r for r in rows if (r["seed"], r["arm"]) == (seed, arm)]
        good = [int(r["labels"]) for r in mine if float(r["force_rmse"]) <= TARGET]
        found.append(float(min(good, default=LAST + WALKERS)))
    return found


def after_start(rows: list[dict[str, str]]) -> list[dict[str, str]]:
    """The rows of the rounds."""
    return [row for row in rows if row["labels"] != str(START)]


def arm_numbers(rows: list[dict[str, str]], arm: str) -> dict[str, list[float]]:
    """The measures of one arm, a number for each seed."""
    end = {"arm": arm, "labels": LAST}
    found = {"needed": needed(rows, arm)}
    found |= {name: values(rows, name, **end) for name in ("force_rmse", "energy_rmse")}
    rounds = after_start(rows)
    found |= {name: values(rounds, name, arm=arm) for name in ("spearman", "auroc", "found")}
    return found | {name: values(rows, name, **end) for name in ("alarms", "crashes")}


def digits(metric: str) -> int:
    """Decimal places of a metric in the tables."""
    return {"needed": 1, "energy_rmse": 2, "alarms": 1, "crashes": 1}.get(metric, 3)


def plain(metric: str, numbers: list[float]) -> str:
    """Mean and half width of the 95 % interval."""
    reach = t_quantile(0.975, len(numbers) - 1) * stdev(numbers) / math.sqrt(len(numbers))
    return f"{mean(numbers):.{digits(metric)}f} ± {reach:.{digits(metric)}f}"


def signed(metric: str, found: Difference) -> str:
    """A difference with its interval; a star if the interval excludes 0."""
    change, low, high = (f"{value:+.{digits(metric)}f}" for value in found)
    return f"{change} ({low} to {high}){'*' if found.low > 0 or found.high < 0 else ''}"


def arms_table() -> str:
    """The measures of every arm."""
    found = {arm: arm_numbers(read_csv(CURVE), arm) for arm in ARMS}
    lines = [
        [title, *(plain(metric, found[arm][metric]) for arm in ARMS)]
        for metric, title in TITLES.items()
    ]
    return markdown_table(["measure", *ARMS], lines)


def differences_table() -> str:
    """Every arm minus `alarm`."""
    found = {arm: arm_numbers(read_csv(CURVE), arm) for arm in ARMS}
    others = [arm for arm in ARMS if arm != "alarm"]
    lines = [
        [
            TITLES[metric],
            *(signed(metric, paired_difference(found[a][metric], numbers)) for a in others),
        ]
        for metric, numbers in found["alarm"].items()
        if metric not in ("alarms", "crashes")
    ]
    return markdown_table(["measure", *(f"{arm} - alarm" for arm in others)], lines)


def curve_table() -> str:
    """RMSE of forces by the number of labels."""
    rows, lines = read_csv(CURVE), []
    for labels in range(START, LAST + 1, WALKERS):
        each = {a: values(rows, "force_rmse", arm=a, labels=labels) for a in ARMS}
        change = signed("force_rmse", paired_difference(each["random"], each["alarm"]))
        lines.append([labels, *(f"{mean(each[a]):.3f}" for a in ARMS), change])
    return markdown_table(["labels", *ARMS, "random - alarm"], lines)


def same_data_table() -> str:
    """Repulsion minus plain members, on the same data."""
    lines = []
    for labels, rows in ((START, read_csv(CURVE)), (LAST, read_csv(SAME))):
        for metric in ("auroc", "spearman", "force_rmse", "deviation"):
            base = values(rows, metric, arm="alarm", labels=labels)
            changes = [
                signed(metric, paired_difference(values(rows, metric, arm=a, labels=labels), base))
                for a in ("f-kde", "forde")
            ]
            title = TITLES.get(metric, "mean deviation (eV/Å)")
            lines.append([labels, title, f"{mean(base):.3f}", *changes])
    header = ["labels", "measure", "plain", "f-kde - plain", "forde - plain"]
    return markdown_table(header, lines)


def draw() -> None:
    """RMSE of forces and AUROC of the deviation by the number of labels."""
    from matplotlib import rc_context

    rows = read_csv(CURVE)
    counts = range(START, LAST + 1, WALKERS)
    styles = {"alarm": "kde", "random": "ensemble", "f-kde": "f-kde", "forde": "forde"}
    settings: Any = rc()
    with rc_context(settings):
        figure, (above, below) = blank(2, 1.7, sharex=True)
        for arm, style in styles.items():
            for axes, metric in ((above, "force_rmse"), (below, "auroc")):
                each = np.array([values(rows, metric, arm=arm, labels=n) for n in counts])
                axes.plot(counts, each.mean(1), label=arm, **look(style).spot)
                if arm in ("alarm", "random"):
                    axes.plot(counts, each, color=look(style).colour, alpha=0.35, linewidth=0.7)
        above.set(ylabel="RMSE of forces (eV/Å)", yscale="log", yticks=TICKS)
        above.yaxis.set_major_formatter("{x:g}")
        above.yaxis.set_minor_formatter("")
        below.set(ylabel="AUROC of the deviation", xlabel="labels", xticks=counts)
        legend(figure, above)
        (FOLDER / "curves.png").write_bytes(png(figure, 110))


def main() -> None:
    """Run what is missing, then draw and print the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--draw", action="store_true", help="use the rows that are there")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if not options.draw:
        study(range(options.seeds))
    draw()
    tables = arms_table(), differences_table(), curve_table(), same_data_table()
    print(*tables, sep="\n\n")


if __name__ == "__main__":
    main()

"""The methods as particle systems, on small problems: python -m studies.particles.make

    python -m studies.particles.make --jobs 8 --within 300     all parts, seed after seed
    python -m studies.particles.make --tables     tables.md and figures from raw.csv alone

Every cell is one training, and adds its rows to raw.csv in --out when it ends. Cells that are in
raw.csv, in --out or beside this file, are not trained again. No cell starts that would end after
--within seconds, by the time that such a cell took before.
"""

import argparse
import csv
import time
from itertools import product
from pathlib import Path
from typing import NamedTuple

from studies import RESULTS
from studies.common import finished, read_csv

FOLDER = RESULTS / "particles"

HEADER = ["part", "problem", "method", "members", "seed", "metric", "value"]
PUBLISHED = ("ensemble", "kde", "sge", "ssge", "svgd")
RADIAL = ("rbf", "laplace", "imq", "matern")


class Cell(NamedTuple):
    """One training."""

    part: str
    problem: str
    method: str
    members: int
    seed: int

    @property
    def key(self) -> tuple[str, str, str, int]:
        """The cell without its seed."""
        return self[:4]


def plan(part: str, seed: int) -> list[Cell]:
    """The cells of a part."""
    return [Cell(part, *case, seed) for case in CASES[part]()]


def densities_cases():
    """Published and corrected methods on the published densities; exact draws for comparison."""
    forms = [f"{name}:published" for name in PUBLISHED[1:]]
    methods = ("exact draws", *PUBLISHED, *forms, "kde:calibrated")
    return product(("gaussian", "mixture", "funnel"), methods, (100,))


def kernels_cases():
    """Kernels of KDE and SVGD on the densities; RBF is in the part `densities`."""
    labels = [f"{flow}+{kernel}" for flow in ("kde", "svgd") for kernel in RADIAL[1:]]
    return product(("gaussian", "mixture", "funnel"), (*labels, "svgd+linear"), (100,))


def fidelity_cases():
    """Kernels on problems with a known posterior."""
    labels = [f"{m}+{k}" for m in ("kde", "f-kde", "f-kde:calibrated") for k in RADIAL[:3]]
    return product(("linear", "regression", "classification", "digits"), labels, (20,))


def annealing_cases():
    """Schedules on densities with several hills, from a broad start and from one hill."""
    schedules = ("constant", "linear", "hyperbolic", "cyclic")
    starts = ("broad", "one hill")
    methods = [f"{m}@{s}/{w}" for m, s, w in product(("kde", "svgd"), schedules, starts)]
    return product(("mixture", "far"), methods, (100,))


def convergence_cases():
    """Distances against the number of particles."""
    methods = ("exact draws", "kde+rbf", "kde+laplace", "kde+imq", "svgd+rbf", "kde:calibrated")
    problems = [f"{n}-{d}" for n, d in product(("gaussian", "mixture"), (2, 10, 50))]
    return product(problems, methods, (5, 20, 50, 200))


def toys_cases():
    """Published methods with published settings, and three calibrated ones."""
    published = [f"{name}:legacy" for name in ("kde", "ssge", "svgd", "f-kde", "f-ssge", "f-svgd")]
    calibrated = [f"{name}:calibrated" for name in ("kde", "f-kde", "f-svgd")]
    return product(
        ("regression", "classification"), ("ensemble", *published, *calibrated), (20,)
    )  # fmt: skip


def grow_cases():
    """One by one against all at once, on digits and on problems with a known posterior."""
    procedures = ("at once", "one by one")
    labels = [f"{m}/{p}" for m, p in product(("kde:300", "f-kde:100"), procedures)]
    yield from product(("digits",), ("ensemble/at once", *labels), (6,))
    known = [f"{m}:calibrated/{p}" for m, p in product(("kde", "f-kde"), procedures)]
    yield from product(("regression", "classification"), ("ensemble/at once", *known), (6,))


def mixed_cases():
    """Networks of ReLU, of tanh and of both, with and without repulsion of outputs."""
    return product(
        ("digits",),
        [f"{m}/{k}" for m, k in product(("ensemble", "f-kde:1", "f-kde:100"),
                                        ("relu", "tanh", "mixed"))],
        (10,),
    )  # fmt: skip


def digits_cases():
    """Adversarial training and batch normalisation, with repulsion of weights and outputs."""
    words = ("", "/adv 0.01", "/adv 0.05", "/batchnorm")
    methods = [f"{m}{w}" for m, w in product(("ensemble", "kde:300", "f-kde:100"), words)]
    return product(("digits",), methods, (5,))


def hot_cases():
    """Kernels in weight space at the settings of the report, on digits."""
    labels = ("ensemble", "kde", "kde+laplace-100", "kde+laplace", "kde+linear")
    return product(("digits",), [f"{label}/hot" for label in labels], (5, 17))


CASES = {
    "densities": densities_cases,
    "kernels": kernels_cases,
    "fidelity": fidelity_cases,
    "annealing": annealing_cases,
    "convergence": convergence_cases,
    "grow": grow_cases,
    "mixed": mixed_cases,
    "digits": digits_cases,
    "hot": hot_cases,
    "toys": toys_cases,
}
"""Parts and their cases: problem, method, members."""

STEPS = {"convergence": 400, "annealing": 600}
"""Steps on a density: 500 if the part is not here, and three times as many on the funnel."""


def trained(cell: Cell) -> dict[str, float]:
    """Numbers of a cell, in a process with one thread."""
    import torch

    from studies.particles import densities, networks

    torch.set_num_threads(1)
    begun = time.monotonic()
    if cell.part in ("densities", "kernels", "annealing", "convergence"):
        steps = STEPS.get(cell.part, 500) * (3 if cell.problem == "funnel" else 1)
        with torch.no_grad():
            found = densities.measured(*cell[1:], steps)
    elif cell.part == "toys":
        found = networks.toy(*cell[1:])
    elif cell.part == "fidelity" or cell.problem != "digits":
        found = networks.fidelity(*cell[1:])
    else:
        found = networks.digits(*cell[1:])
    return found | {"seconds": time.monotonic() - begun}


def done(folder: Path) -> set[Cell]:
    """The cells in raw.csv of this folder."""
    return {
        Cell(r["part"], r["problem"], r["method"], int(r["members"]), int(r["seed"]))
        for r in read_csv(folder / "raw.csv", missing_ok=True)
    }


def append(folder: Path, cell: Cell, found: dict[str, float]) -> None:
    """Add the rows of a cell."""
    path = folder / "raw.csv"
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerows([HEADER] if new else [])
        writer.writerows([[*cell, name, f"{value:.6g}"] for name, value in found.items()])


def run(cells: list[Cell], asked: argparse.Namespace) -> None:
    """Train the cells, `--jobs` at a time, while there is time."""
    tasks = [(cell,) for cell in cells]
    for (cell,), found in finished(
        tasks, trained, asked.jobs, asked.within, kind=lambda task: task[0].key
    ):
        append(asked.out, cell, found)
        print(*cell, f"{found['seconds']:.1f} s", flush=True)


def options() -> argparse.Namespace:
    """The command-line options."""
    made = argparse.ArgumentParser(description=__doc__)
    made.add_argument("--out", type=Path, default=FOLDER, help="the folder of raw.csv")
    made.add_argument("--within", type=float, default=1e9, help="seconds for all cells")
    made.add_argument("--jobs", type=int, default=1, help="processes of one thread each")
    made.add_argument("--seeds", type=int, default=5)
    made.add_argument("--parts", default="", help="names with commas (default: all)")
    made.add_argument("--tables", action="store_true", help="train nothing; tables and figures")
    return made.parse_args()


def main() -> None:
    """Train what is missing, or write tables and figures."""
    asked = options()
    if asked.tables:
        from studies.particles import summary

        summary.write(asked.out)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    parts = asked.parts.split(",") if asked.parts else list(CASES)
    known = done(asked.out) | done(FOLDER)
    cells = [cell for seed in range(asked.seeds) for part in parts for cell in plan(part, seed)]
    run([cell for cell in cells if cell not in known], asked)


if __name__ == "__main__":
    main()

"""The methods as particle systems, on small problems: python -m studies.particles.make

    python -m studies.particles.make --jobs 8 --within 300     all parts, seed after seed
    python -m studies.particles.make --tables     tables.md and figures from raw.csv alone

Every cell is one training, and adds its rows to raw.csv in --out when it ends. Cells that are in
raw.csv, in --out or beside this file, are not trained again. No cell starts that would end after
--within seconds, by the time that such a cell took before.
"""

import argparse
import time
from pathlib import Path
from typing import NamedTuple

from studies import RESULTS
from studies.common import append_rows, finished, read_csv
from studies.particles.cases import CASES

FOLDER = RESULTS / "particles"

HEADER = ["part", "problem", "method", "members", "seed", "metric", "value"]


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


def append(folder: Path, cell: Cell, scores: dict[str, float]) -> None:
    """Add the rows of a cell."""
    rows = [[*cell, name, f"{value:.6g}"] for name, value in scores.items()]
    append_rows(folder / "raw.csv", HEADER, rows)


def run(cells: list[Cell], asked: argparse.Namespace) -> None:
    """Train the cells, `--jobs` at a time, while there is time."""
    tasks = [(cell,) for cell in cells]
    for (cell,), scores in finished(
        tasks, trained, asked.jobs, asked.within, kind=lambda task: task[0].key
    ):
        append(asked.out, cell, scores)
        print(*cell, f"{scores['seconds']:.1f} s", flush=True)


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


def _write_tables(folder: Path) -> None:
    """Write tables.md, the claims of README.md and the figures beside raw.csv."""
    from studies.particles import claims, figures, summary  # matplotlib is not needed to train

    rows = summary.write(folder)
    claims.write(folder, rows)
    for name, draw in figures.FIGURES.items():
        (folder / f"{name}.png").write_bytes(draw(rows))


def main() -> None:
    """Train what is missing, or write tables and figures."""
    asked = options()
    if asked.tables:
        _write_tables(asked.out)
        return
    asked.out.mkdir(parents=True, exist_ok=True)
    parts = asked.parts.split(",") if asked.parts else list(CASES)
    known = done(asked.out) | done(FOLDER)
    cells = [cell for seed in range(asked.seeds) for part in parts for cell in plan(part, seed)]
    run([cell for cell in cells if cell not in known], asked)


if __name__ == "__main__":
    main()

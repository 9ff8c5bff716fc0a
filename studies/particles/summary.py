"""Tables of the study, from raw.csv alone.

Numbers are means over seeds with 95 % intervals by Student's t. Differences are paired by seed.
Bold differences are significant after Holm's correction over all differences of a table.
"""

from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np

from shoal.core.display.text import markdown_table
from studies.particles.cases import CASES
from studies.particles.comparison import (
    Case,
    Column,
    Pair,
    Rows,
    differences,
    interval,
    mean_text,
    read,
    values,
)

MMD, SLICED = Column("mmd", "MMD"), Column("sliced", "sliced distance")
ACCURACY, NLL = Column("accuracy", "accuracy, %", 100, 2), Column("nll", "NLL", digits=4)
AUROC = Column("auroc_mutual_information", "AUROC, mutual information")
FUNCTIONS = Column("effective_functions", "effective functions")
FIDELITY = (Column("frechet", "Fréchet distance"), Column("tv", "total variation"))
IMAGES = (
    ACCURACY,
    NLL,
    Column("ece", "ECE", digits=4),
    Column("entropy_ratio", "entropy ratio, OOD / test", digits=2),
    Column("auroc_entropy", "AUROC, entropy"),
    AUROC,
)
CURVES = (
    Column("nll_on", "NLL on the data"),
    Column("nll_off", "NLL off the data", digits=2),
    Column("coverage_on", "coverage on, %", 100, 1),
    Column("coverage_off", "coverage off, %", 100, 1),
    Column("std_off", "std off the data"),
)
PLANES = (
    Column("kl_test", "KL, test", digits=4),
    Column("kl_centre", "KL, centre"),
    Column("kl_ring", "KL, far ring"),
    Column("entropy_ring", "entropy, far ring"),
    Column("auroc_centre", "AUROC, centre"),
    Column("auroc_ring", "AUROC, far ring"),
)
DENSITIES = ("gaussian", "mixture", "funnel")
SIZES = (5, 20, 50, 200)


def planned(part: str, problem: str) -> list[str]:
    """The methods of a problem, in the order of the plan."""
    return list(dict.fromkeys(case[1] for case in CASES[part]() if case[0] == problem))


def density_tables(rows: Rows) -> list[str]:
    """Published densities: distances, and differences to SVGD."""
    methods = planned("densities", "gaussian")
    cases = [((p, m), ("densities", p, m, 100)) for p, m in product(DENSITIES, methods)]
    shown = (MMD, SLICED, Column("variance", "variance / true variance"))
    forms = (("", "svgd"), (":published", "svgd:published"))
    pairs = [
        Pair((p, f"{n}{f} − {o}"), ("densities", p, n + f, 100), ("densities", p, o, 100))
        for p, (f, o), n in product(DENSITIES, forms, ("kde", "sge", "ssge"))
    ]
    titles = ("density", "method")
    return ["## Densities", values(rows, cases, shown, titles),
            differences(rows, pairs, shown[:2], titles)]  # fmt: skip


def kernel_pairs() -> list[Pair]:
    """Kernels against RBF on the densities."""
    kernels = [*product(("kde", "svgd"), ("laplace", "imq", "matern")), ("svgd", "linear")]
    return [
        Pair((p, f, f"{k} − rbf"), ("kernels", p, f"{f}+{k}", 100), ("densities", p, f, 100))
        for p, (f, k) in product(DENSITIES, kernels)
    ]


def fidelity_pairs() -> list[Pair]:
    """Kernels against RBF on the fidelity problems."""
    problems = ("linear", "regression", "classification", "digits")
    methods = ("kde", "f-kde", "f-kde:calibrated")
    return [
        Pair((p, m, f"{k} − rbf"),
             ("fidelity", p, f"{m}+{k}", 20), ("fidelity", p, f"{m}+rbf", 20))
        for p, m, k in product(problems, methods, ("laplace", "imq"))
    ]  # fmt: skip


def hot_pairs() -> list[Pair]:
    """Kernels against RBF at the settings of the report, on digits."""
    kernels = {"laplace-100": "laplace, h = 100", "laplace": "laplace, median", "linear": "linear"}
    found = []
    for size in (5, 17):
        rbf, plain = (("hot", "digits", f"{name}/hot", size) for name in ("kde", "ensemble"))
        found.append(Pair(("digits", str(size), "rbf − plain ensemble"), rbf, plain))
        found += [
            Pair(("digits", str(size), f"{words} − rbf"),
                 ("hot", "digits", f"kde+{kernel}/hot", size), rbf)
            for kernel, words in kernels.items()
        ]  # fmt: skip
    return found


def annealing_pairs() -> list[Pair]:
    """Schedules against a constant drive."""
    found = []
    for p, m, w, s in product(("mixture", "far"), ("kde", "svgd"), ("broad", "one hill"),
                              ("linear", "hyperbolic", "cyclic")):  # fmt: skip
        case, other = (("annealing", p, f"{m}@{k}/{w}", 100) for k in (s, "constant"))
        found.append(Pair((p, m, w, f"{s} − constant"), case, other))
    return found


def annealing_tables(rows: Rows) -> list[str]:
    """Schedules: means, and differences to a constant drive."""
    shown = (MMD, Column("wrong_share", "wrong share of hills"))
    schedules = ("constant", "linear", "hyperbolic", "cyclic")
    cases = [
        ((p, m, w, s), ("annealing", p, f"{m}@{s}/{w}", 100))
        for p, m, w, s in product(("mixture", "far"), ("kde", "svgd"), ("broad", "one hill"),
                                  schedules)
    ]  # fmt: skip
    titles = ("density", "method", "start", "schedule")
    return ["## Annealing", values(rows, cases, shown, titles),
            differences(rows, annealing_pairs(), shown, titles)]  # fmt: skip


def slope(sizes: Sequence[int], distances: Sequence[float]) -> float:
    """Exponent of the least-squares power law, distance = c sizes^exponent.

    >>> round(slope([1, 4, 16], [1.0, 0.5, 0.25]), 6)
    -0.5
    """
    return float(np.polyfit(np.log(sizes), np.log(distances), 1)[0])


def slopes(rows: Rows, problem: str, method: str, metric: str) -> list[float]:
    """The exponent of each seed that has all sizes."""
    found = [rows.get((("convergence", problem, method, m), metric), {}) for m in SIZES]
    seeds = sorted(set.intersection(*map(set, found))) if all(found) else []
    return [slope(SIZES, [row[seed] for row in found]) for seed in seeds]


def convergence_table(rows: Rows, metric: str) -> str:
    """Distances by number of particles, and the exponent of their power law."""
    methods = planned("convergence", "gaussian-2")
    problems = [f"{n}-{d}" for n, d in product(("gaussian", "mixture"), (2, 10, 50))]
    lines = []
    for p, m in product(problems, methods):
        found = [rows.get((("convergence", p, m, size), metric), {}) for size in SIZES]
        exponents = slopes(rows, p, m, metric)
        if len(exponents) > 1:
            mean, half = interval(exponents)
            cells = [mean_text(row, Column(metric, "")) for row in found]
            lines.append([p, m, len(exponents), *cells, f"{mean:.2f} ± {half:.2f}"])
    titles = ["density", "method", "seeds", *(f"M = {size}" for size in SIZES), "exponent"]
    return markdown_table(titles, lines) if lines else ""


def grow_tables(rows: Rows) -> list[str]:
    """One by one against all at once."""
    parts = []
    for problems, methods, columns in (
        (("digits",), ("kde:300", "f-kde:100"), (ACCURACY, NLL, FUNCTIONS, AUROC)),
        (("regression", "classification"), ("kde:calibrated", "f-kde:calibrated"), FIDELITY),
    ):
        every = [f"{m}/{p}" for m, p in product(methods, ("at once", "one by one"))]
        every = ["ensemble/at once", *every]
        cases = [((p, m), ("grow", p, m, 6)) for p, m in product(problems, every)]
        pairs = []
        for p, m in product(problems, methods):
            once, single, plain = (("grow", p, name, 6) for name in (
                f"{m}/at once", f"{m}/one by one", "ensemble/at once"))  # fmt: skip
            pairs += [Pair((p, f"{m}: one by one − at once"), single, once),
                      Pair((p, f"{m}: one by one − plain"), single, plain),
                      Pair((p, f"{m}: at once − plain"), once, plain)]  # fmt: skip
        titles = ("problem", "method")
        parts += [values(rows, cases, columns, titles), differences(rows, pairs, columns, titles)]
    return ["## One by one", *parts]


def mixed_tables(rows: Rows) -> list[str]:
    """Two activations in one ensemble."""

    def case(word: str) -> Case:
        return ("mixed", "digits", word, 10)

    methods = ("ensemble", "f-kde:1", "f-kde:100")
    words = [f"{m}/{k}" for m, k in product(methods, ("relu", "tanh", "mixed"))]
    shown = (*IMAGES, FUNCTIONS, Column("between", "distance between kinds", digits=1),
             Column("within", "within a kind", digits=1),
             Column("shift_share", "share that no probability sees", digits=2))  # fmt: skip
    wanted = [(f"{m}/mixed", "ensemble/mixed") for m in methods[1:]]
    wanted += [(f"{m}/mixed", f"{m}/{k}") for m, k in product(methods, ("relu", "tanh"))]
    pairs = [Pair((f"{a} − {b}",), case(a), case(b)) for a, b in wanted]
    every = [((w,), case(w)) for w in words]
    table = differences(rows, pairs, (*IMAGES, FUNCTIONS), ("difference",))
    return ["## Mixed architectures", values(rows, every, shown, ("members",)), table]


def digits_tables(rows: Rows) -> list[str]:
    """Adversarial training and batch normalisation."""

    def case(word: str) -> Case:
        return ("digits", "digits", word, 5)

    methods, words = ("ensemble", "kde:300", "f-kde:100"), ("/adv 0.01", "/adv 0.05", "/batchnorm")
    shown = (*IMAGES, Column("rotated_nll", "NLL, rotated by 30°"),
             Column("ratio", "force ratio", digits=4))  # fmt: skip
    every = [((f"{m}{w}",), case(f"{m}{w}")) for m, w in product(methods, ("", *words))]
    pairs = [Pair((f"{m}{w} − {m}",), case(m + w), case(m)) for m, w in product(methods, words)]
    pairs += [Pair((f"{m}{w} − ensemble{w}",), case(m + w), case(f"ensemble{w}"))
              for w, m in product(("", *words), methods[1:])]  # fmt: skip
    table = differences(rows, pairs, shown[:-1], ("difference",))
    return ["## Adversarial training and batch normalisation",
            values(rows, every, shown, ("members",)), table]  # fmt: skip


def toy_tables(rows: Rows) -> list[str]:
    """Toys: means, and differences to the plain ensemble."""
    parts = ["## Toys"]
    for problem, columns in (("regression", CURVES), ("classification", PLANES)):
        cases = [((m,), ("toys", problem, m, 20)) for m in planned("toys", problem)]
        plain = ("toys", problem, "ensemble", 20)
        pairs = [Pair(words, case, plain) for words, case in cases if case != plain]
        parts += [f"### {problem.title()}", values(rows, cases, columns, ("method",)),
                  "Difference to the plain ensemble:",
                  differences(rows, pairs, columns, ("method",))]  # fmt: skip
    return parts


def write(folder: Path) -> Rows:
    """Write tables.md beside raw.csv; returns the rows of raw.csv."""
    rows = read(folder)
    parts = density_tables(rows)
    parts += [
        "## Kernels on densities",
        differences(rows, kernel_pairs(), (MMD, SLICED), ("density", "flow", "kernel")),
    ]
    parts += [
        "## Kernels on fidelity problems",
        differences(rows, fidelity_pairs(), FIDELITY, ("problem", "method", "kernel")),
    ]
    parts += ["## Kernels at the settings of the report",
              differences(rows, hot_pairs(), IMAGES, ("data", "size", "kernel"))]  # fmt: skip
    parts += annealing_tables(rows)
    for metric, title in (("mmd", "MMD"), ("sliced", "sliced distance")):
        parts += [f"## Convergence with the number of particles: {title}",
                  convergence_table(rows, metric)]  # fmt: skip
    parts += grow_tables(rows) + mixed_tables(rows) + digits_tables(rows)
    parts += toy_tables(rows)
    head = "# Tables of the particles study\n\n" + (__doc__ or "").partition("\n\n")[2].strip()
    (folder / "tables.md").write_text("\n\n".join([head, *filter(None, parts)]) + "\n")
    return rows

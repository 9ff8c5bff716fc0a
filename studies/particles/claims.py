"""Claims about repulsive ensembles, one line each, and the table of README.md."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path

from shoal.core.display.text import markdown_table
from studies.particles import network_claims
from studies.particles.claim_line import Expected, Line, line_of
from studies.particles.comparison import Case, Rows, interval
from studies.particles.summary import (
    annealing_pairs,
    fidelity_pairs,
    hot_pairs,
    kernel_pairs,
    slopes,
)

BLOCK = re.compile(r"(<!-- claims -->\n).*?(<!-- end of claims -->)", re.DOTALL)


def kernel_claims(rows: Rows) -> list[Line]:
    """Kernels."""

    def laplace(pairs, metric, flows):
        return [
            Expected(", ".join(p.words), p.case, p.other, metric, -1)
            for p in pairs
            if p.words[-1].startswith("laplace") and (not flows or p.words[1] in flows)
        ]  # fmt: skip

    every = laplace(kernel_pairs(), "mmd", ("kde",))
    every += laplace(fidelity_pairs(), "frechet", ("kde", "f-kde"))
    digits = [t._replace(digits=4) for t in laplace(hot_pairs(), "nll", ())]
    linear = [
        Expected(f"{p.words[0]}, {p.words[1]} members: NLL", p.case, p.other, "nll", 1, digits=4)
        for p in hot_pairs()
        if p.words[-1].startswith("linear")
    ]
    claim = "KDE with the Laplace kernel consistently outperforms KDE with RBF"
    return [
        line_of(rows, f"{claim}: densities (MMD) and known posteriors (Fréchet)", every, True),
        line_of(rows, f"{claim}: digits, settings of the report (NLL)", digits, True),
        line_of(rows, "The linear kernel is no substitute for RBF in KDE", linear),
    ]


def convergence_claims(rows: Rows) -> list[Line]:
    """The number of particles, the kernel and the dimension."""

    def at(problem: str, method: str, members: int = 200) -> Case:
        return ("convergence", problem, method, members)

    def exponents(method: str, problems: Sequence[str]) -> str:
        found = [(p, slopes(rows, p, method, "mmd")) for p in problems]
        told = [(p, interval(values)) for p, values in found if len(values) > 1]
        return ", ".join(f"{p} {mean:.2f} ± {half:.2f}" for p, (mean, half) in told)

    gaussians = [f"gaussian-{d}" for d in (2, 10, 50)]
    far, cursed = (
        [
            Expected(f"{p}, KDE − {word}: MMD", at(p, "kde+rbf"), at(p, other), "mmd", -1)
            for p in gaussians
        ]
        for word, other in (("exact draws", "exact draws"), ("SVGD", "svgd+rbf"))
    )
    closer = [Expected(p, at(p, "kde:calibrated"), at(p, "kde+rbf"), "mmd", -1)
              for p in (*gaussians, *(f"mixture-{d}" for d in (2, 10, 50)))]  # fmt: skip
    kernels = "; ".join(
        f"{k}: {exponents(f'kde+{k}', gaussians)}" for k in ("rbf", "laplace", "imq")
    )
    return [
        line_of(rows, "Repelled particles come as close as exact draws, M = 200", far),
        line_of(rows, "Unlike SVGD, the method does not suffer from the curse of dimensionality, "
               "M = 200", cursed),
        ("The rate depends on the kernel (open question of the report)",
         f"exponent of MMD in M: {kernels}", "confirmed: RBF is the fastest; none converges in 50"),
        line_of(rows, "Calibrated repulsion (ours) is closer than KDE, M = 200", closer),
    ]  # fmt: skip


def density_claims(rows: Rows) -> list[Line]:
    """Published densities, and annealing."""

    def at(problem: str, method: str) -> Case:
        return ("densities", problem, method, 100)

    shapes = ("gaussian", "mixture", "funnel")
    flows = [Expected(f"{p}, {m} − svgd: MMD", at(p, f"{m}:published"), at(p, "svgd:published"),
                        "mmd", -1) for p in shapes for m in ("kde", "ssge")]  # fmt: skip
    spread = [
        Expected(f"{p}: MMD", at(p, "kde:published"), at(p, "ensemble"), "mmd", -1) for p in shapes
    ]
    hill, broad = (
        [
            Expected(", ".join(p.words), p.case, p.other, "wrong_share", -1)
            for p in annealing_pairs()
            if p.words[2] == start
        ]
        for start in ("one hill", "broad")
    )
    return [
        line_of(rows, "Repulsion prevents collapse: KDE against no repulsion", spread),
        line_of(rows, "Wasserstein flows sample better than SVGD, published settings", flows),
        ("The annealing factor increases the influence of repulsion as training progresses",
         "by its formula the factor of the drive rises from 0 to 1, so the influence falls",
         "refuted"),
        line_of(rows, "Annealing fills hills better, if all particles start in one hill", hill),
        line_of(rows, "Annealing fills hills better from a broad start", broad),
    ]  # fmt: skip


def lines(rows: Rows) -> list[Line]:
    """Every claim."""
    makers: tuple[Callable[[Rows], list[Line]], ...] = (
        kernel_claims,
        convergence_claims,
        density_claims,
        network_claims.toy_claims,
        network_claims.procedure_claims,
        network_claims.digits_claims,
    )
    return [line for make in makers for line in make(rows)]


def write(folder: Path, rows: Rows) -> None:
    """Replace the lines between the marks of README.md, if it is there."""
    page = folder / "README.md"
    if page.exists():
        table = markdown_table(["claim", "measured", "verdict"], lines(rows))
        text = page.read_text(encoding="utf-8")
        page.write_text(BLOCK.sub(lambda m: f"{m[1]}{table}\n{m[2]}", text), encoding="utf-8")

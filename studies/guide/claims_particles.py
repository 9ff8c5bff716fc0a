"""Claims about particles on small problems: kernels, annealing, architectures, the Jacobian."""

from studies.guide.claims import Claim, higher, lower, same
from studies.guide.claims_repulsive import HALF, PAPER, STUDY
from studies.guide.evidence import PERCENT, by_seed

PARTICLES, JACOBIAN = "particles/raw.csv", "jacobian/raw.csv"
DENSITIES = ("gaussian", "mixture", "funnel")
PLANE = "densities in the plane, 100 particles"


def small(part, problem, method, metric, members=None):
    """Values by seed of the study on particles."""
    where = {"part": part, "problem": problem, "method": method}
    return by_seed(PARTICLES, metric, **where, **({"members": members} if members else {}))


def pulled(problem, rule):
    """Fréchet distances by seed of the study on the Jacobian, calibrated, after 400 steps."""
    where = {"problem": problem, "rule": rule, "form": "calibrated", "steps": 400}
    return by_seed(JACOBIAN, "frechet", **where)


def on_densities(words, first, second):
    """The MMD of two methods on each density; a method is a part of the study and its name."""
    return [
        lower(f"{words}, {name}", *(small(p, name, m, "mmd") for p, m in (first, second)))
        for name in DENSITIES
    ]


def nearer(words, rule):
    """The Fréchet distances of a rule and of the transpose, on each problem."""
    return [
        lower(
            f"Fréchet distance, {words} minus transpose, {name}",
            pulled(name, rule),
            pulled(name, "transpose"),
        )
        for name in ("linear", "regression", "classification", "digits")
    ]


SMALL = [
    Claim(
        "Particles with repulsion sample a density; without it they collapse.",
        PAPER,
        PLANE,
        lambda: on_densities(
            "MMD of kde minus plain", ("densities", "kde"), ("densities", "ensemble")
        ),
        "particles/README.md",
    ),
    Claim(
        "WGD samples a density better than SVGD.",
        PAPER,
        PLANE,
        lambda: on_densities("MMD of kde minus svgd", ("densities", "kde"), ("densities", "svgd")),
        "particles/README.md",
    ),
    Claim(
        "KDE with the Laplace kernel is consistently better than with the RBF kernel.",
        STUDY,
        PLANE,
        lambda: on_densities("MMD", ("kernels", "kde+laplace"), ("densities", "kde")),
        "particles/README.md",
    ),
    Claim(
        "The same on networks with a known posterior.",
        STUDY,
        "20 members, small networks",
        lambda: [
            lower(
                f"Fréchet distance, {name}",
                small("fidelity", name, "kde+laplace", "frechet"),
                small("fidelity", name, "kde+rbf", "frechet"),
            )
            for name in ("regression", "classification", "digits")
        ],
        "particles/README.md",
    ),
    Claim(
        "Annealing helps particles to cover several modes.",
        PAPER,
        "mixtures in the plane, 100 particles that start on one hill",
        lambda: [
            lower(
                f"MMD of kde with {schedule} annealing, {name}",
                small("annealing", name, f"kde@{schedule}/one hill", "mmd"),
                small("annealing", name, "kde@constant/one hill", "mmd"),
            )
            for name in ("mixture", "far")
            for schedule in ("linear", "cyclic")
        ],
        "particles/README.md",
    ),
    Claim(
        "More particles come closer to the density.",
        STUDY,
        "Gaussians of 2, 10 and 50 axes",
        lambda: [
            lower(
                f"MMD of kde, 200 minus 20 particles, {axes} axes",
                small("convergence", f"gaussian-{axes}", "kde+rbf", "mmd", 200),
                small("convergence", f"gaussian-{axes}", "kde+rbf", "mmd", 20),
            )
            for axes in (2, 10, 50)
        ],
        "particles/README.md",
    ),
    Claim(
        "Members can be trained one after another.",
        STUDY,
        "digits, six members",
        lambda: [
            same(
                f"NLL, {name}",
                small("grow", "digits", f"{name}/one by one", "nll"),
                small("grow", "digits", f"{name}/at once", "nll"),
                HALF,
            )
            for name in ("kde:300", "f-kde:100")
        ],
        "particles/README.md",
    ),
    Claim(
        "Repulsion in function space works between different architectures.",
        STUDY,
        "digits, ten members of ReLU and tanh",
        lambda: [
            lower(
                "NLL, f-kde:100 minus plain",
                small("mixed", "digits", "f-kde:100/mixed", "nll"),
                small("mixed", "digits", "ensemble/mixed", "nll"),
            )
        ],
        "particles/README.md",
    ),
    Claim(
        "Adversarial training enhances accuracy.",
        STUDY,
        "digits, five members",
        lambda: [
            higher(
                f"accuracy, epsilon {size}",
                small("digits", "digits", f"ensemble/adv {size}", "accuracy"),
                small("digits", "digits", "ensemble", "accuracy"),
                **PERCENT,
            )
            for size in ("0.01", "0.05")
        ],
        "particles/README.md",
    ),
    Claim(
        "Functional methods have more uncertainty off the data than weight-space methods.",
        PAPER,
        "1-D regression as published, 20 members",
        lambda: [
            lower(
                "NLL off the data, f-kde minus kde",
                small("toys", "regression", "f-kde:legacy", "nll_off"),
                small("toys", "regression", "kde:legacy", "nll_off"),
            )
        ],
        "particles/README.md",
    ),
]

METRIC = [
    Claim(
        "The Jacobian of the update deserves study: Gauss-Newton is closer to the posterior.",
        PAPER,
        "calibrated function space, 20 members, small networks",
        lambda: nearer("Gauss-Newton", "gauss-newton"),
        "jacobian/README.md",
    ),
    Claim(
        "The neural tangent kernel as metric comes closer to the posterior.",
        PAPER,
        "calibrated function space, 20 members, small networks",
        lambda: nearer("NTK", "ntk"),
        "jacobian/README.md",
    ),
]

GROUPS = {"Particles on small problems": SMALL, "The Jacobian in function space": METRIC}

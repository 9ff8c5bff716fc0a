"""The cases of each part of the study: problem, method, members."""

from collections.abc import Callable, Iterable
from itertools import product

PUBLISHED = ("ensemble", "kde", "sge", "ssge", "svgd")
RADIAL = ("rbf", "laplace", "imq", "matern")


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


CASES: dict[str, Callable[[], Iterable[tuple[str, str, int]]]] = {
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

"""Claims that networks test: toys, growing, mixed members, adversarial training, BatchNorm."""

import math

from studies.particles.claim_line import Expected, Line, line_of
from studies.particles.comparison import Case, Rows

METHODS = ("ensemble", "kde:300", "f-kde:100")
AUROC = "auroc_mutual_information"


def toy_claims(rows: Rows) -> list[Line]:
    """Uncertainty off the data."""

    def at(method: str, problem: str = "regression") -> Case:
        return ("toys", problem, method, 20)

    def coverage(methods: tuple[str, ...], form: str, other: str) -> list[Expected]:
        return [
            Expected(f"{m}: coverage off the data, points", at(f"{m}:{form}"),
                     at(other.replace("NAME", m)), "coverage_off", 1, 100, 1)
            for m in methods
        ]  # fmt: skip

    weights = ("kde", "ssge", "svgd")
    functional = [
        Expected(f"f-{m} − {m}: {w}", at(f"f-{m}:legacy"), at(f"{m}:legacy"), metric, sign, scale,
                 1)
        for m in weights
        for w, metric, sign, scale in (("NLL off the data", "nll_off", -1, 1.0),
                                       ("coverage off the data, points", "coverage_off", 1, 100))
    ]  # fmt: skip
    ring = [
        Expected(f"{m}: entropy", at(f"{m}:legacy", "classification"),
                 at("ensemble", "classification"), "entropy_ring", 1)
        for m in (*weights, *(f"f-{m}" for m in weights))
    ]  # fmt: skip
    calibrated = coverage(("kde", "f-kde", "f-svgd"), "calibrated", "NAME:legacy")
    return [
        line_of(rows, "1-D regression: functional methods capture epistemic uncertainty better "
                "than weight-space methods", functional),
        line_of(rows, "1-D regression: published repulsion of weights covers more off the data "
                "than a plain ensemble", coverage(weights, "legacy", "ensemble")),
        line_of(rows, "1-D regression: calibrated repulsion (ours) covers more than published",
                calibrated),
        line_of(rows, "2-D classification: repulsion raises entropy far from the data", ring),
    ]  # fmt: skip


def procedure_claims(rows: Rows) -> list[Line]:
    """One by one, and mixed architectures."""

    def grow(problem: str, method: str) -> Case:
        return ("grow", problem, method, 6)

    def mixed(method: str) -> Case:
        return ("mixed", "digits", method, 10)

    single = [
        Expected(f"digits, {m}: NLL", grow("digits", f"{m}/one by one"),
                 grow("digits", f"{m}/at once"), "nll", 1, digits=4)
        for m in METHODS[1:]
    ]  # fmt: skip
    single += [
        Expected(f"{p}, {m}: Fréchet", grow(p, f"{m}:calibrated/one by one"),
                 grow(p, f"{m}:calibrated/at once"), "frechet", 1)
        for p in ("regression", "classification")
        for m in ("kde", "f-kde")
    ]  # fmt: skip
    both = mixed("f-kde:100/mixed"), mixed("ensemble/mixed")
    for case in both:  # a size: seeds differ by factors
        found = rows.get((case, "between"), {})
        rows = rows | {(case, "log"): {seed: math.log10(value) for seed, value in found.items()}}
    words = "log10 of the squared distance between ReLU and tanh members, repelled − plain"
    apart = Expected(words, *both, "log", 1, digits=2)
    gain = [
        Expected(f"mixed − {k}: {w}", mixed("f-kde:100/mixed"), mixed(f"f-kde:100/{k}"), metric,
                 sign, digits=4)
        for k in ("relu", "tanh")
        for w, metric, sign in (("NLL", "nll", -1), ("AUROC", AUROC, 1))
    ]  # fmt: skip
    brings = [
        Expected(w, *both, metric, sign, digits=4)
        for w, metric, sign in (("NLL", "nll", -1), ("AUROC", AUROC, 1))
    ]
    return [
        line_of(rows, "Members must be updated at the same time: one by one is worse", single),
        line_of(rows, "Repulsion of outputs acts between different architectures", [apart]),
        line_of(rows, "Mixed architectures are better than equal ones, under repulsion", gain),
        line_of(rows, "Mixed architectures gain by repulsion", brings),
    ]


def digits_claims(rows: Rows) -> list[Line]:
    """Adversarial training, batch normalisation and the force ratio."""

    def at(method: str) -> Case:
        return ("digits", "digits", method, 5)

    accuracy = [
        Expected(f"{m}, ε = {e}, points", at(f"{m}/adv {e}"), at(m), "accuracy", 1, 100, 2)
        for m in METHODS
        for e in ("0.01", "0.05")
    ]
    unsure = [
        Expected(f"{m}, ε = 0.05: {w}", at(f"{m}/adv 0.05"), at(m), metric, sign)
        for m in METHODS
        for w, metric, sign in (("NLL, rotated", "rotated_nll", -1), ("AUROC", "auroc_entropy", 1))
    ]
    normal = [
        Expected(f"{m}: NLL", at(f"{m}/batchnorm"), at(m), "nll", -1, digits=4) for m in METHODS
    ]
    repelled = [
        Expected(
            f"{m}: {w}", at(f"{m}/batchnorm"), at("ensemble/batchnorm"), metric, sign, digits=4
        )
        for m in METHODS[1:]
        for w, metric, sign in (("NLL", "nll", -1), ("AUROC", AUROC, 1))
    ]
    return [
        line_of(rows, "Adversarial training enhances accuracy, on digits", accuracy),
        line_of(rows, "Adversarial training improves uncertainty (report: it does not)", unsure),
        line_of(rows, "Batch normalisation works with repulsion: it lowers NLL", normal),
        line_of(rows, "Repulsion helps networks with batch normalisation", repelled),
        _ratio(rows),
    ]


def _ratio(rows: Rows) -> Line:
    found = rows[("hot", "digits", "kde/hot", 5), "ratio"]
    ratio = math.fsum(found.values()) / len(found)
    claim = "The drive is six orders of magnitude larger than the repulsion"
    measured = f"push / drive of weight KDE, with the drive divided by 100, on digits: {ratio:.1e}"
    return claim, measured, "in part: it depends on data, network and how far training has come"

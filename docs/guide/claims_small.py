"""Claims measured with small CNNs on a part of CIFAR-10 at 8 x 8 pixels: a check of direction.

A strength in capitals is the one that validation images chose, in runs of seed 100. Those runs
count nowhere else.
"""

from math import isfinite, log10

from claims import Claim, higher, lower, same
from evidence import PERCENT, by_seed, rows

PATH, LINK = "cifar10/small/raw.csv", "cifar10/small/README.md"
CHOOSING = 100
SETTING = "2,000 images of CIFAR-10 at 8 x 8 pixels, five small CNNs"
FORDE, RDE, OPEN = "Trinh et al. (2024)", "D'Angelo & Fortuin (2021)", "open in the paper"
STUDY, OURS = "Barabanshchikova et al. (2023)", "our hypothesis"
ELEVEN, SHIFTED, OWN = "ensemble+members=11", "corrupted_accuracy", "ensemble+own-batches"


def strength(method):
    """The strength of a method that has the lowest validation NLL with the choosing seed."""
    tried = {
        row["method"].partition(":")[2]: float(row["validation_nll"])
        for row in rows(PATH)
        if int(row["seed"]) == CHOOSING and row["method"].partition(":")[0] == method
    }
    return min((held, word) for word, held in tried.items() if isfinite(held))[1]


def arm(word):
    """The arm of a word such as `kde+laplace:KDE`."""
    name, _, method = word.partition(":")
    return f"{name}:{strength(method.lower())}" if method else name


def values(metric, word):
    """Values by seed."""
    found = by_seed(PATH, metric, method=arm(word))
    return {seed: value for seed, value in found.items() if seed != CHOOSING and isfinite(value)}


TITLES = {
    "accuracy": "accuracy", SHIFTED: "corrupted accuracy", "nll": "NLL",
    "corrupted_nll": "corrupted NLL", "corrupted_ece": "corrupted ECE",
    "auroc_entropy": "AUROC by entropy", "auroc_mutual_information": "AUROC by mutual information",
    "gradient_cosine": "cosine of input gradients", "cam_8": "one minus cosine of maps",
}  # fmt: skip


def measured(rule, metric, first, second="ensemble", *size):
    """The difference of two arms, and what the claim says about it."""
    style = PERCENT if metric.endswith("accuracy") else {}
    words = f"{TITLES[metric]}, {arm(first)} minus {arm(second)}"
    return rule(words, values(metric, first), values(metric, second), *size, **style)


def line(words, source, *measures, setting=SETTING):
    """A claim; a measure is (rule, metric, first arm, second arm, size)."""
    return Claim(
        f"{words} (small CNN).", source, setting,
        lambda: [measured(*measure) for measure in measures], LINK,
    )  # fmt: skip


def _orders(word):
    first, last = (values(metric, word) for metric in ("h2_first", "h2_last"))
    return {seed: log10(last[seed] / first[seed]) for seed in first}


SPACES = ("kde", "sge", "ssge")

REPULSION = [
    line("On CIFAR-10 weight-space methods are more accurate than function-space methods", RDE,
         *((higher, "accuracy", name, f"f-{name}") for name in SPACES)),
    line("The same with strengths that validation images chose", OURS,
         (higher, "accuracy", "kde:KDE", "f-kde:F-KDE"), (lower, "nll", "kde:KDE", "f-kde:F-KDE")),
    line("On CIFAR-10 weight-space methods detect SVHN better than function-space methods", RDE,
         *((higher, "auroc_entropy", name, f"f-{name}") for name in SPACES)),
    line("On CIFAR-10 weight-space methods are more accurate than deep ensembles", RDE,
         *((higher, "accuracy", name) for name in SPACES)),
    line("On CIFAR-10 SVGD is less accurate than deep ensembles", RDE,
         (lower, "accuracy", "svgd")),
    line("Weight-space repulsion of a chosen strength helps on CIFAR-10", OURS,
         (lower, "nll", "kde:KDE"), (higher, SHIFTED, "kde:KDE")),
    line("Function-space repulsion of a chosen strength helps on CIFAR-10", OURS,
         (lower, "nll", "f-kde:F-KDE"), (higher, SHIFTED, "f-kde:F-KDE")),
    line("The Laplace kernel is better than the RBF kernel", STUDY,
         (lower, "nll", "kde+laplace:KDE", "kde:KDE"),
         (higher, "accuracy", "kde+laplace:KDE", "kde:KDE")),
    line("The linear kernel is no substitute for RBF in KDE", STUDY,
         (higher, "nll", "kde+linear-kernel:KDE", "kde:KDE")),
    line("Adversarial training enhances accuracy", STUDY,
         (higher, "accuracy", "ensemble+adversarial")),
    line("Annealing helps", RDE, (lower, "nll", "kde+hyperbolic:KDE", "kde:KDE")),
    line("Hyper-deep ensembles are a stronger baseline", RDE,
         (lower, "nll", "hyper"), (higher, "accuracy", "hyper")),
    line("Repulsion beats hyper-deep ensembles", OURS,
         (lower, "nll", "kde:KDE", "hyper"), (lower, "nll", "forde:FORDE", "hyper"),
         (higher, SHIFTED, "forde:FORDE", "hyper")),
    line("Plain members with batches of their own are better than those with common batches", OURS,
         (lower, "nll", OWN), (higher, "accuracy", OWN), (lower, "corrupted_nll", OWN)),
    line("Repulsion beats plain members with batches of their own", OURS,
         (lower, "nll", "kde:KDE", OWN), (lower, "nll", "forde:FORDE", OWN),
         (lower, "corrupted_nll", "forde:FORDE", OWN)),
]  # fmt: skip

GRADIENTS = [
    line("FoRDE is more accurate than deep ensembles under corruption", FORDE,
         (higher, SHIFTED, "forde"), setting=f"{SETTING}, published strength"),
    line("The same with the strength that validation images chose", OURS,
         (higher, SHIFTED, "forde:FORDE")),
    line("FoRDE has a lower ECE under corruption", FORDE,
         (lower, "corrupted_ece", "forde"), (lower, "corrupted_ece", "forde:FORDE")),
    line("FoRDE stays competitive on clean data", FORDE,
         (same, "accuracy", "forde", "ensemble", 0.005),
         (same, "accuracy", "forde:FORDE", "ensemble", 0.005)),
    line("FoRDE detects OOD data better", FORDE,
         *((higher, f"auroc_{name}", "forde:FORDE") for name in ("entropy", "mutual_information"))),
    line("FoRDE is better than the other repulsive methods under corruption", FORDE,
         *((higher, SHIFTED, "forde", name) for name in (*SPACES, "svgd", "f-kde"))),
    line("The same with strengths that validation images chose", OURS,
         *((higher, SHIFTED, "forde:FORDE", name) for name in ("kde:KDE", "f-kde:F-KDE"))),
    line("PCA lengthscales are more robust than identity", FORDE,
         (higher, SHIFTED, "forde:FORDE", "forde-identity:FORDE")),
    line("Identity lengthscales are better on clean images", FORDE,
         (higher, "accuracy", "forde-identity:FORDE", "forde:FORDE")),
    line("Tuned lengthscales are better than both on corrupted images", FORDE,
         (higher, SHIFTED, "forde-tuned:FORDE", "forde:FORDE"),
         (higher, SHIFTED, "forde-tuned:FORDE", "forde-identity:FORDE")),
    line("Cosines are as robust as principal components", OPEN,
         (same, SHIFTED, "forde-dct:FORDE", "forde:FORDE", 0.02)),
    line("FoRDE is more robust than LIT", FORDE, (higher, SHIFTED, "forde:FORDE", "lit:LIT")),
    line("FoRDE is more robust than SWAG in every mode", FORDE,
         (higher, SHIFTED, "forde:FORDE", "ensemble+swag")),
    line("FoRDE is more robust than the EmpCov prior", FORDE,
         (higher, SHIFTED, "forde:FORDE", "ensemble+empcov")),
    line("FoRDE is more robust than private nodes with shared weights", FORDE,
         (higher, SHIFTED, "forde:FORDE", "ensemble+nodes")),
    line("FoRDE is better under corruption than plain ensembles of 2, 10 and 20 members", OPEN,
         *((rule, metric, f"forde+members={size}:FORDE", f"ensemble+members={size}")
           for rule, metric in ((higher, SHIFTED), (lower, "corrupted_nll"))
           for size in (2, 10, 20)), setting=SETTING.replace("five small", "2 to 20 small")),
    line("Repelled input gradients make input gradients differ", FORDE,
         (lower, "gradient_cosine", "forde"), (lower, "gradient_cosine", "forde:FORDE")),
    line("Class-activation maps of members differ more", FORDE,
         (higher, "cam_8", "forde"), (higher, "cam_8", "forde:FORDE"),
         setting=f"{SETTING} with one size of maps"),
    line("FoRDE with 5 members is better than a plain ensemble of equal cost", OURS,
         (higher, SHIFTED, "forde:FORDE", ELEVEN), (lower, "corrupted_nll", "forde:FORDE", ELEVEN),
         (lower, "nll", "forde:FORDE", ELEVEN), setting=f"{SETTING}; plain with eleven"),
    Claim("The median bandwidth of input gradients is stable over training (small CNN).",
          OPEN, SETTING,
          lambda: [same("decimal orders from first to last epoch", _orders("forde:FORDE"), 0.0,
                        0.5, digits=2)], LINK),
]  # fmt: skip

GROUPS = {
    "CIFAR-10 with a small CNN: repulsion and baselines": REPULSION,
    "CIFAR-10 with a small CNN: input gradients": GRADIENTS,
}

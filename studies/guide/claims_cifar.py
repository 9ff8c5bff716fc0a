"""Claims measured with every method on a part of CIFAR-10: ResNet32, and small CNNs.

The small CNNs see 8 x 8 pixels and are a check of direction with ten seeds; ResNet32 has three. A
strength in capitals is the larger one. For the small CNNs validation images chose it, in runs of
seed 100, which count nowhere else.
"""

from math import isfinite, log10
from typing import NamedTuple

from studies.guide.claims import FIFTH, Claim, Margin, higher, lower, same
from studies.guide.evidence import PERCENT, by_seed, difference, rows

CHOOSING = 100
FORDE, RDE, OPEN = "Trinh et al. (2024)", "D'Angelo & Fortuin (2021)", "open in the paper"
STUDY, OURS = "Barabanshchikova et al. (2023)", "our hypothesis"
ELEVEN, SHIFTED, OWN = "ensemble+members=11", "corrupted_accuracy", "ensemble+own-batches"
THREEFOLD = Margin(0.5, "a factor 3.2, less than the 4 between neighbouring strengths")
TITLES = {
    "accuracy": "accuracy", SHIFTED: "corrupted accuracy", "nll": "NLL",
    "corrupted_nll": "corrupted NLL", "corrupted_ece": "corrupted ECE",
    "auroc_entropy": "AUROC by entropy", "auroc_mutual_information": "AUROC by mutual information",
    "gradient_cosine": "cosine of input gradients",
    **{f"cam_{size}": f"one minus cosine of maps, {size} x {size}" for size in (32, 16, 8)},
}  # fmt: skip


class Study(NamedTuple):
    """Runs of every method with one network.

    Attributes:
        name: the network.
        folder: of raw.csv and README.md.
        setting: data and networks.
        larger: what the strengths in capitals are.
        strengths: those strengths; None if validation images chose them.
        repelled: arms whose gradients, maps and bandwidths were recorded, and their reference.
        maps: sizes of the class-activation maps.
        sizes: whether published sizes of an effect are shown; that needs the published network.
    """

    name: str
    folder: str
    setting: str
    larger: str
    strengths: dict[str, str] | None
    repelled: tuple[tuple[str, str], ...]
    maps: tuple[int, ...]
    sizes: bool

    @property
    def path(self):
        """The raw file."""
        return f"{self.folder}/raw.csv"

    def strength(self, method):
        """The larger strength: by default that of the lowest validation NLL."""
        if self.strengths:
            return self.strengths[method]
        tried = {
            row["method"].partition(":")[2]: float(row["validation_nll"])
            for row in rows(self.path)
            if int(row["seed"]) == CHOOSING and row["method"].partition(":")[0] == method
        }
        return min((held, word) for word, held in tried.items() if isfinite(held))[1]

    def arm(self, word):
        """The arm of a word such as `kde+laplace:KDE`."""
        name, _, method = word.partition(":")
        return f"{name}:{self.strength(method.lower())}" if method else name

    def values(self, metric, word):
        """Values by seed."""
        found = by_seed(self.path, metric, method=self.arm(word))
        return {s: value for s, value in found.items() if s != CHOOSING and isfinite(value)}

    def change(self, metric, first, second="ensemble"):
        """The mean difference of two arms."""
        return difference(self.values(metric, first), self.values(metric, second))

    def measured(self, rule, metric, first, second="ensemble", size=None):
        """The difference of two arms, and what the claim says about it."""
        style = PERCENT if metric.endswith("accuracy") else {}
        words = f"{TITLES[metric]}, {self.arm(first)} minus {self.arm(second)}"
        values, others = self.values(metric, first), self.values(metric, second)
        if rule is same:
            return same(words, values, others, size, **style)
        return rule(words, values, others, size if self.sizes else None, **style)

    def line(self, words, source, *measures, setting=None):
        """A claim; a measure is (rule, metric, first arm, second arm, size)."""
        return Claim(
            f"{words} ({self.name}).",
            source,
            setting or self.setting,
            lambda: [self.measured(*measure) for measure in measures],
            f"{self.folder}/README.md",
        )

    def orders(self, word):
        """Decimal orders by which the squared bandwidth grows over training, by seed."""
        first, last = (self.values(metric, word) for metric in ("h2_first", "h2_last"))
        return {seed: log10(last[seed] / first[seed]) for seed in first}


SMALL = Study(
    "small CNN",
    "cifar10/small",
    "2,000 images of CIFAR-10 at 8 x 8 pixels, five small CNNs",
    "with strengths that validation images chose",
    None,
    (("forde", "ensemble"), ("forde:FORDE", "ensemble")),
    (8,),
    sizes=False,
)
RESNET = Study(
    "ResNet32",
    "cifar10/methods",
    "10,000 images of CIFAR-10, five ResNet32",
    "with larger strengths",
    {"kde": "1000", "f-kde": "30", "forde": "16", "lit": "128"},
    (("forde-dct:FORDE", ELEVEN), ("forde-tuned:FORDE", ELEVEN)),
    (32, 16, 8),
    sizes=True,
)


def repulsion(study):
    """Claims about repulsion of weights and outputs, and about other baselines."""
    line = study.line
    return [
        line("On CIFAR-10 weight-space methods are more accurate than function-space methods", RDE,
             *((higher, "accuracy", name, f"f-{name}", size)
               for name, size in (("kde", 0.0102), ("sge", 0.0103), ("ssge", 0.0088)))),
        line(f"The same {study.larger}", OURS, (higher, "accuracy", "kde:KDE", "f-kde:F-KDE"),
             (lower, "nll", "kde:KDE", "f-kde:F-KDE")),
        line("On CIFAR-10 weight-space methods detect SVHN better than function-space methods", RDE,
             *((higher, "auroc_entropy", name, f"f-{name}", size)
               for name, size in (("kde", 0.047), ("sge", 0.042), ("ssge", 0.040)))),
        line("On CIFAR-10 weight-space methods are more accurate than deep ensembles", RDE,
             *((higher, "accuracy", name, "ensemble", size)
               for name, size in (("kde", 0.0035), ("sge", 0.0024), ("ssge", 0.0009)))),
        line("On CIFAR-10 SVGD is less accurate than deep ensembles", RDE,
             (lower, "accuracy", "svgd")),
        line(f"Weight-space repulsion helps on CIFAR-10 {study.larger}", OURS,
             (lower, "nll", "kde:KDE"), (higher, SHIFTED, "kde:KDE")),
        line("Five members with repelled weights beat eleven plain members", OURS,
             (lower, "nll", "kde:KDE", ELEVEN), (higher, SHIFTED, "kde:KDE", ELEVEN)),
        line(f"Function-space repulsion helps on CIFAR-10 {study.larger}", OURS,
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
        line("Plain members with batches of their own are better than those with common batches",
             OURS, (lower, "nll", OWN), (higher, "accuracy", OWN), (lower, "corrupted_nll", OWN)),
        line("Repelled weights beat plain members with batches of their own", OURS,
             (lower, "nll", "kde:KDE", OWN), (lower, "corrupted_nll", "kde:KDE", OWN)),
        line("Repelled input gradients beat plain members with batches of their own", OURS,
             (lower, "nll", "forde:FORDE", OWN), (lower, "corrupted_nll", "forde:FORDE", OWN)),
    ]  # fmt: skip


def gradients(study):
    """Claims about repulsion of input gradients."""
    line = study.line
    return [
        line("FoRDE is more accurate than deep ensembles under corruption", FORDE,
             (higher, SHIFTED, "forde"), setting=f"{study.setting}, published strength"),
        line(f"The same {study.larger}", OURS, (higher, SHIFTED, "forde:FORDE")),
        line("FoRDE has a lower ECE under corruption", FORDE, (lower, "corrupted_ece", "forde"),
             setting=f"{study.setting}, published strength"),
        line(f"The same {study.larger}", OURS, (lower, "corrupted_ece", "forde:FORDE")),
        line("FoRDE stays competitive on clean data", FORDE,
             (same, "accuracy", "forde", "ensemble", FIFTH),
             (same, "accuracy", "forde:FORDE", "ensemble", FIFTH)),
        line("FoRDE detects OOD data better", FORDE,
             *((higher, f"auroc_{name}", "forde:FORDE")
               for name in ("entropy", "mutual_information"))),
        line("FoRDE is better than the other repulsive methods under corruption", FORDE,
             *((higher, SHIFTED, "forde", name)
               for name in ("kde", "sge", "ssge", "svgd", "f-kde"))),
        line(f"The same {study.larger}", OURS,
             *((higher, SHIFTED, "forde:FORDE", name) for name in ("kde:KDE", "f-kde:F-KDE"))),
        line("PCA lengthscales are more robust than identity", FORDE,
             (higher, SHIFTED, "forde:FORDE", "forde-identity:FORDE")),
        line("Identity lengthscales are better on clean images", FORDE,
             (higher, "accuracy", "forde-identity:FORDE", "forde:FORDE")),
        line("Tuned lengthscales are better than both on corrupted images", FORDE,
             (higher, SHIFTED, "forde-tuned:FORDE", "forde:FORDE"),
             (higher, SHIFTED, "forde-tuned:FORDE", "forde-identity:FORDE")),
        line("Tuned lengthscales are better than a plain ensemble on corrupted images", OURS,
             (higher, SHIFTED, "forde-tuned:FORDE"), (lower, "corrupted_nll", "forde-tuned:FORDE")),
        line("Cosines are as robust as principal components", OPEN,
             (same, SHIFTED, "forde-dct:FORDE", "forde:FORDE", FIFTH)),
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
               for size in (2, 10, 20)), setting=study.setting.replace("five", "2 to 20")),
        line("Repelled input gradients make input gradients differ", FORDE,
             *((lower, "gradient_cosine", *pair) for pair in study.repelled)),
        line("Class-activation maps of members differ more, at every depth", FORDE,
             *((higher, f"cam_{size}", *pair) for pair in study.repelled for size in study.maps)),
        line("FoRDE with 5 members is better than a plain ensemble of equal cost", OURS,
             (higher, SHIFTED, "forde:FORDE", ELEVEN),
             (lower, "corrupted_nll", "forde:FORDE", ELEVEN), (lower, "nll", "forde:FORDE", ELEVEN),
             setting=f"{study.setting}; plain with eleven"),
        Claim(f"The median bandwidth of input gradients is stable over training ({study.name}).",
              OPEN, study.setting,
              lambda: [same(f"decimal orders from first to last epoch, {study.arm(word)}",
                            study.orders(word), 0.0, THREEFOLD, digits=2)
                       for word in {word: None for word, _ in study.repelled if ":" in word}],
              f"{study.folder}/README.md"),
    ]  # fmt: skip


GROUPS = {
    f"CIFAR-10 with {article}{study.name}: {title}": made(study)
    for article, study in (("", RESNET), ("a ", SMALL))
    for title, made in (("repulsion and baselines", repulsion), ("input gradients", gradients))
}

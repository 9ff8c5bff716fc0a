"""Claims about repelled input gradients: Trinh et al. (2024), FoRDE."""

from studies.guide.claims import FIFTH, Claim, Margin, higher, lower, same
from studies.guide.evidence import PERCENT, by_seed, mean, times_plain
from studies.guide.findings import CIFAR, CORRUPTED, DIGITS, QUARTER, RESNET32, TABLES, WEAK

PAPER = "Trinh et al. (2024)"
BASES = "cifar10/bases/results.csv"
STRONG, PART = "forde:16", "forde+fraction=0.25:16"
RESNET18 = "CIFAR-10, 25,000 images, 36 epochs, five ResNet18"
SMALL = "digits, five small CNNs"
ACCURACY = "test.accuracy"
CORRUPTED_ECE = "corrupted.all.ece"


def both(path, metric, method, plain="ensemble", **where) -> tuple[dict, dict]:
    """Values by seed of a method and of the plain ensemble."""
    values = by_seed(path, metric, method=method, **where)
    return values, by_seed(path, metric, method=plain, **where)


def small(metric, method, plain="ensemble"):
    """Values by seed on the digits of 8 x 8 pixels."""
    return both(DIGITS, metric, method, plain, data="digits")


def _on_gpu():
    """Time of a step as a multiple of the plain one, for four networks on an H200."""
    files = {"forde": "resnet18", "forde-bare": "resnet18-bare"}
    files |= {name: name for name in ("vit", "vit-encoder")}
    times = [times_plain(f"h200-{file}.json", "forde", model) for file, model in files.items()]
    return dict(enumerate(times))


def _on_cpu():
    """Time of training as a multiple of the plain one by seed, for small CNNs on a CPU."""
    repelled, plain = both("cifar10/small/raw.csv", "seconds", "forde")
    return {seed: repelled[seed] / plain[seed] for seed in repelled.keys() & plain.keys()}


ROBUST = [
    Claim(
        "FoRDE is more accurate than deep ensembles under corruption.",
        PAPER,
        f"{RESNET18}, published strength",
        lambda: [higher("corrupted accuracy", *both(WEAK, CORRUPTED, "forde"), 0.024, **PERCENT)],
        "cifar10/README.md",
    ),
    Claim(
        "The same with a stronger repulsion.",
        "our hypothesis",
        f"{RESNET18}, strength 16",
        lambda: [higher("corrupted accuracy", *both(CIFAR, CORRUPTED, STRONG), **PERCENT)],
        "cifar10/README.md",
    ),
    Claim(
        "FoRDE has a lower ECE under corruption.",
        PAPER,
        f"{RESNET18}, published strength",
        lambda: [lower("corrupted ECE", *both(WEAK, CORRUPTED_ECE, "forde"))],
        "cifar10/README.md",
    ),
    Claim(
        "The same with a stronger repulsion.",
        "our hypothesis",
        f"{RESNET18}, strength 16",
        lambda: [lower("corrupted ECE", *both(CIFAR, CORRUPTED_ECE, STRONG))],
        "cifar10/README.md",
    ),
    Claim(
        "FoRDE stays competitive on clean data.",
        PAPER,
        f"{RESNET18}, published strength",
        lambda: [same("clean accuracy", *both(WEAK, ACCURACY, "forde"), FIFTH, **PERCENT)],
        "cifar10/README.md",
    ),
    Claim(
        "A stronger repulsion stays competitive on clean data.",
        "our hypothesis",
        "CIFAR-10, 25,000 images, strength 16",
        lambda: [
            same("clean accuracy, ResNet18", *both(CIFAR, ACCURACY, STRONG), FIFTH, **PERCENT),
            same("clean accuracy, ResNet32", *both(RESNET32, ACCURACY, PART), FIFTH, **PERCENT),
        ],
        "cifar10/resnet32/README.md",
    ),
    Claim(
        "Gains are kept across architectures.",
        PAPER,
        "CIFAR-10, 25,000 images, five ResNet32, fraction 0.25, strength 16",
        lambda: [
            higher("corrupted accuracy", *both(RESNET32, CORRUPTED, PART), **PERCENT),
            lower("corrupted ECE", *both(RESNET32, CORRUPTED_ECE, PART)),
        ],
        "cifar10/resnet32/README.md",
    ),
    Claim(
        "FoRDE improves robustness on small grey images.",
        PAPER,
        f"{SMALL}, strengths 1 and 16",
        lambda: [
            higher(f"corrupted accuracy, {name}", *small("corrupted_accuracy", name), **PERCENT)
            for name in ("forde", "forde strength=16")
        ],
        "forde/README.md",
    ),
    Claim(
        "FoRDE improves calibration on small grey images.",
        PAPER,
        f"{SMALL}, strengths 1 and 16",
        lambda: [
            lower(f"corrupted ECE, {name}", *small("corrupted_ece", name))
            for name in ("forde", "forde strength=16")
        ],
        "forde/README.md",
    ),
    Claim(
        "FoRDE detects OOD data better.",
        PAPER,
        "CIFAR-10, five ResNet32, SVHN as OOD set",
        lambda: [
            higher(f"AUROC by {name}", *both(RESNET32, f"ood.svhn.auroc_{name}", PART))
            for name in ("entropy", "mutual_information")
        ],
        "cifar10/resnet32/README.md",
    ),
    Claim(
        "FoRDE is better than the other repulsive methods under corruption.",
        PAPER,
        f"{SMALL}, published strength",
        lambda: [
            higher(
                f"corrupted accuracy, forde minus {name}",
                *small("corrupted_accuracy", "forde", name),
                **PERCENT,
            )
            for name in ("kde", "svgd", "f-kde", "f-svgd")
        ],
        "forde/README.md",
    ),
    Claim(
        "FoRDE helps on structured data with perturbed inputs.",
        "open in the paper",
        "five tables, five perceptrons, strength 4",
        lambda: [
            lower(
                f"NLL, {name.removeprefix('uci-')}",
                *both(TABLES, "corrupted_nll", "forde strength=4", data=name),
            )
            for name in ("breast-cancer", "diabetes", "uci-concrete", "uci-energy", "wine")
        ],
        "forde/README.md",
    ),
]

MECHANISM = [
    Claim(
        "Repelled input gradients make members functionally diverse.",
        PAPER,
        f"{RESNET18}, strengths 1 and 16",
        lambda: [
            higher(
                "mutual information on test images, strength 1",
                *both(WEAK, "test.mutual_information", "forde"),
            ),
            higher("strength 16", *both(CIFAR, "test.mutual_information", STRONG)),
        ],
        "cifar10/README.md",
    ),
    Claim(
        "PCA lengthscales are more robust than identity.",
        PAPER,
        f"{RESNET18}, strength 16",
        lambda: [
            higher(
                "corrupted accuracy",
                *both(BASES, CORRUPTED, STRONG, "forde-identity:16"),
                **PERCENT,
            )
        ],
        "cifar10/README.md",
    ),
    Claim(
        "PCA lengthscales are more robust than identity.",
        PAPER,
        f"{SMALL}, published strength",
        lambda: [
            higher(
                "corrupted accuracy",
                *small("corrupted_accuracy", "forde", "forde-identity"),
                **PERCENT,
            )
        ],
        "forde/README.md",
    ),
    Claim(
        "The orthonormal basis matters: cosines instead of principal components.",
        "open in the paper",
        f"{SMALL}, published strength",
        lambda: [
            higher(
                "corrupted accuracy, cosines minus components",
                *small("corrupted_accuracy", "forde-dct", "forde"),
                **PERCENT,
            )
        ],
        "forde/README.md",
    ),
    Claim(
        "An intermediate lengthscale is best on clean and corrupted data.",
        "open in the paper",
        f"{SMALL}, published strength",
        lambda: [
            higher(
                f"{words} accuracy, alpha {alpha} minus PCA",
                *small(metric, f"forde-tuned alpha={alpha}", "forde"),
                **PERCENT,
            )
            for words, metric in (("clean", "accuracy"), ("corrupted", "corrupted_accuracy"))
            for alpha in ("0.1", "0.2", "0.4", "0.8")
        ],
        "forde/README.md",
        one=True,
    ),
    Claim(
        "Subsets of a batch bias the repulsion.",
        PAPER,
        f"{RESNET18}, strength 16",
        lambda: [
            lower(
                "corrupted accuracy, a quarter minus the whole batch",
                *both(QUARTER, CORRUPTED, PART, STRONG),
                **PERCENT,
            )
        ],
        "cifar10/README.md",
    ),
    Claim(
        "A quarter of each batch keeps a gain.",
        "our hypothesis",
        f"{RESNET18}, strength 16",
        lambda: [higher("corrupted accuracy", *both(QUARTER, CORRUPTED, PART), **PERCENT)],
        "cifar10/README.md",
    ),
    Claim(
        "FoRDE takes roughly three times longer to train.",
        PAPER,
        "networks take the place of seeds on one H200; five small CNNs on a CPU",
        lambda: [
            same(
                f"a step takes {mean(times, 1, 2)} times the plain step, {device}; minus 3",
                times,
                3.0,
                Margin(0.5, "rounds to three"),
                digits=2,
            )
            for device, times in (("H200", _on_gpu()), ("CPU", _on_cpu()))
        ],
        "../benchmarks/README.md",
    ),
    Claim(
        "Very small batches make training diverge.",
        PAPER,
        f"{SMALL}, batches of 4 instead of 64",
        lambda: [
            lower(
                f"accuracy, {name}",
                *(
                    by_seed(f"forde/batches/{size}/runs.csv", "accuracy", method=name)
                    for size in (4, 64)
                ),
                **PERCENT,
            )
            for name in ("forde", "forde strength=16")
        ],
        "forde/README.md",
    ),
    Claim(
        "FoRDE is better on CIFAR-100 and TinyImageNet.",
        PAPER,
        "",
        None,
        missing="both data sets; 300 epochs",
    ),
]

GROUPS = {
    "Input gradients: robustness": ROBUST,
    "Input gradients: how they work": MECHANISM,
}

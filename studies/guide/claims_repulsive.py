"""Claims about ensemble size, and about repulsion on MNIST."""

from math import log10

from studies.guide.claims import Claim, Margin, higher, lower, same
from studies.guide.evidence import PERCENT, by_seed, rows
from studies.guide.findings import LETTERS, MNIST, WASSERSTEIN

PAPER = "D'Angelo & Fortuin (2021)"
STUDY = "Barabanshchikova et al. (2023)"
STRENGTH, PUBLISHED = "mnist/strength/raw.csv", "mnist-published/results.csv"
PARTICLES, MANY = "particles/raw.csv", {"part": "convergence", "members": 200}
FOUR = {"digits": 4}
ACCURACY, NLL = "test.accuracy", "test.nll"


def mnist(metric, method="ensemble", members=17):
    """Values by seed on MNIST."""
    return by_seed(MNIST, metric, method=method, members=members)


def strength(metric, method="ensemble", members=17):
    """Values by seed of the sweep over strengths on MNIST."""
    return by_seed(STRENGTH, metric, method=method, members=members)


def above(split, method, members=17):
    """The least of (accuracy of predictions above a confidence) - confidence, by seed."""
    found = {}
    for row in rows(STRENGTH):
        if (row["method"], row["members"]) == (method, str(members)):
            curve = map(float, row[f"{split}_above"].split())
            found[int(row["seed"])] = min(y - i / 10 for i, y in enumerate(curve))
    return found


def less(first, second):
    """Differences by seed."""
    return {seed: first[seed] - second[seed] for seed in first.keys() & second.keys()}


def _orders(ratio):
    return {seed: -log10(value) for seed, value in ratio.items()}


PERCEPTRON = "MNIST, perceptrons"
IMAGES = Margin(0.001, "ten of 10,000 test images")
GAIN = Margin(0.001, "a sixteenth of the gain from one to five members")
ECE = Margin(0.001, "a fifth of the gain from one to five members")
HALF = Margin(0.005, "half of what kde at strength 300 gains in the demo")

SIZES = [
    Claim(
        "An ensemble is more accurate than a single model.",
        STUDY,
        f"{PERCEPTRON}, five and one",
        lambda: [
            higher("accuracy", mnist(ACCURACY, members=5), mnist(ACCURACY, members=1), **PERCENT)
        ],
        "mnist/README.md",
    ),
    Claim(
        "An ensemble has a lower NLL than a single model.",
        STUDY,
        f"{PERCEPTRON}, five and one",
        lambda: [lower("NLL", mnist(NLL, members=5), mnist(NLL, members=1), **FOUR)],
        "mnist/README.md",
    ),
    Claim(
        "A single model is overconfident on unknown data; an ensemble captures uncertainty.",
        STUDY,
        f"{PERCEPTRON}, five and one",
        lambda: [
            higher(
                "entropy on letters",
                mnist("ood.notmnist.entropy", members=5),
                mnist("ood.notmnist.entropy", members=1),
            ),
            higher("AUROC of letters", mnist(LETTERS, members=5), mnist(LETTERS, members=1)),
        ],
        "mnist/README.md",
    ),
    Claim(
        "There is no clear trend of accuracy from 5 to 17 models.",
        STUDY,
        PERCEPTRON,
        lambda: [same("accuracy", mnist(ACCURACY), mnist(ACCURACY, members=5), IMAGES, **PERCENT)],
        "mnist/README.md",
    ),
    Claim(
        "There is no clear trend of NLL from 5 to 17 models.",
        STUDY,
        PERCEPTRON,
        lambda: [same("NLL", mnist(NLL), mnist(NLL, members=5), GAIN, **FOUR)],
        "mnist/README.md",
    ),
    Claim(
        "There is no clear trend of ECE from 5 to 17 models.",
        STUDY,
        PERCEPTRON,
        lambda: [same("ECE", mnist("test.ece_30"), mnist("test.ece_30", members=5), ECE, **FOUR)],
        "mnist/README.md",
    ),
    Claim(
        "There is no clear trend of the entropy ratio from 5 to 17 models.",
        STUDY,
        PERCEPTRON,
        lambda: [
            same(
                "ratio",
                mnist("ood.notmnist.entropy_ratio"),
                mnist("ood.notmnist.entropy_ratio", members=5),
                Margin(1.0, "a seventh of the gain from one to five members"),
                digits=2,
            )
        ],
        "mnist/README.md",
    ),
    Claim(
        "Function-space methods have no clear trend of NLL from 5 to 17 models.",
        STUDY,
        PERCEPTRON,
        lambda: [
            same(f"{name} NLL", mnist(NLL, name), mnist(NLL, name, 5), GAIN, **FOUR)
            for name in ("f-kde", "f-sge", "f-ssge")
        ],
        "mnist/README.md",
    ),
    Claim(
        "Plain ensembles saturate with additional members.",
        PAPER,
        f"{PERCEPTRON}, 13 to 17",
        lambda: [same("NLL", mnist(NLL), mnist(NLL, members=13), GAIN, **FOUR)],
        "mnist/README.md",
    ),
    Claim(
        "Repulsion makes additional members count more.",
        PAPER,
        f"{PERCEPTRON}, 5 to 17",
        lambda: [
            lower(
                f"gain of {name} minus gain of the plain ensemble, NLL",
                less(mnist(NLL, name), mnist(NLL, name, 5)),
                less(mnist(NLL), mnist(NLL, members=5)),
                margin=GAIN,
                **FOUR,
            )
            for name in ("kde", "f-kde")
        ],
        "mnist/README.md",
    ),
]

MNIST_METHODS = [
    Claim(
        "Five members reach the published accuracy and NLL with the published settings.",
        STUDY,
        "MNIST as published, five perceptrons",
        lambda: [
            same(
                "accuracy minus 97.84 %",
                by_seed(PUBLISHED, ACCURACY, method="ensemble"),
                0.9784,
                Margin(0.002, "1.4 standard errors of 10,000 test images"),
                **PERCENT,
            ),
            same(
                "NLL minus 0.0694",
                by_seed(PUBLISHED, NLL, method="ensemble"),
                0.0694,
                Margin(0.005, "the published methods of five members differ by 0.0046"),
                **FOUR,
            ),
        ],
        "mnist-published/README.md",
    ),
    Claim(
        "Repulsion makes the members more diverse.",
        PAPER,
        f"{PERCEPTRON}, 17, strength 1",
        lambda: [
            higher(
                f"{name} mutual information on letters",
                mnist("ood.notmnist.mutual_information", name),
                mnist("ood.notmnist.mutual_information"),
                **FOUR,
            )
            for name in WASSERSTEIN
        ],
        "mnist/README.md",
    ),
    Claim(
        "The driving term is about six orders of magnitude larger than the repulsion.",
        STUDY,
        "MNIST, 18,000 images, 17 perceptrons, strength 1",
        lambda: [
            same(
                f"decimal orders of drive / push minus six, {name}",
                _orders(strength("ratio", name)),
                6.0,
                Margin(0.5, "rounds to six"),
                digits=1,
            )
            for name in ("kde", "sge", "ssge", "published/kde")
        ],
        "mnist/strength/README.md",
    ),
    Claim(
        "KDE with the Laplace kernel is consistently better than with the RBF kernel.",
        STUDY,
        "MNIST, 18,000 images, published settings, 5 and 17 perceptrons",
        lambda: [
            lower(
                f"NLL, {members} members",
                strength("test_nll", "published/kde+laplace", members),
                strength("test_nll", "published/kde", members),
                size,
                **FOUR,
            )
            for members, size in ((5, 0.0079), (17, None))
        ],
        "mnist/strength/README.md",
    ),
    Claim(
        "Adversarial training enhances accuracy.",
        STUDY,
        "MNIST, 18,000 images, 5 and 17 perceptrons, ours and published settings",
        lambda: [
            higher(
                f"{words}, {members} members",
                strength("test_accuracy", f"{form}ensemble+adversarial", members),
                strength("test_accuracy", f"{form}ensemble", members),
                **PERCENT,
            )
            for form, words in (("", "ours"), ("published/", "published"))
            for members in (5, 17)
        ],
        "mnist/strength/README.md",
    ),
    Claim(
        "Adversarial training has no positive impact on predictive uncertainty.",
        STUDY,
        "MNIST, 18,000 images, 17 perceptrons, published settings",
        lambda: [
            same(
                f"AUROC of {word}",
                strength(f"auroc_entropy_{word}", "published/ensemble+adversarial"),
                strength(f"auroc_entropy_{word}", "published/ensemble"),
                Margin(0.01, "published gains are 0.010 to 0.013"),
            )
            for word in ("letters", "clothes", "characters")
        ],
        "mnist/strength/README.md",
    ),
    Claim(
        "On test data, accuracy above a confidence is at least as high as that confidence.",
        STUDY,
        "MNIST, 18,000 images, 17 perceptrons",
        lambda: [
            higher(
                f"accuracy above confidence 0 to 0.9, least excess, {name}",
                above("test", name),
                0.0,
                **PERCENT,
            )
            for name in ("ensemble", "kde", "f-kde")
        ],
        "mnist/strength/README.md",
    ),
    Claim(
        "On rotated and flipped digits, accuracy above a confidence falls below that confidence.",
        STUDY,
        "MNIST, 18,000 images, 17 perceptrons",
        lambda: [
            lower(
                f"accuracy above confidence 0 to 0.9, least excess, {name}",
                above("turned", name),
                0.0,
                **PERCENT,
            )
            for name in ("ensemble", "kde", "f-kde")
        ],
        "mnist/strength/README.md",
    ),
    Claim(
        "Disagreement is larger on unlike data.",
        STUDY,
        f"{PERCEPTRON}, 17, letters and digits",
        lambda: [
            higher(
                f"disagreement, {name}",
                mnist("ood.notmnist.disagreement", name),
                mnist("test.disagreement", name),
            )
            for name in ("ensemble", "kde", "f-kde")
        ],
        "mnist/README.md",
    ),
    Claim(
        "SVGD averages gradients and suffers in high dimension; repulsive ensembles do not.",
        STUDY,
        f"{PERCEPTRON}, 17 (kde is a plain ensemble in effect); Gaussians, 200 particles",
        lambda: [
            higher("NLL, svgd minus plain", mnist(NLL, "svgd"), mnist(NLL), **FOUR),
            lower("NLL, kde minus svgd", mnist(NLL, "kde"), mnist(NLL, "svgd"), **FOUR),
            *(
                lower(
                    f"MMD, kde minus svgd, {axes} axes",
                    *(
                        by_seed(PARTICLES, "mmd", problem=f"gaussian-{axes}", method=name, **MANY)
                        for name in ("kde+rbf", "svgd+rbf")
                    ),
                )
                for axes in (10, 50)
            ),
        ],
        "particles/README.md",
    ),
    Claim(
        "With the driving term at one hundredth, repulsion improves accuracy.",
        STUDY,
        "MNIST as published, five perceptrons",
        lambda: [
            higher(
                f"accuracy, {name} minus plain",
                by_seed(PUBLISHED, ACCURACY, method=name),
                by_seed(PUBLISHED, ACCURACY, method="ensemble"),
                **PERCENT,
            )
            for name in ("kde", "sge", "f-kde")
        ],
        "mnist-published/README.md",
    ),
]

GROUPS = {"More members": SIZES, "Repulsion on MNIST": MNIST_METHODS}

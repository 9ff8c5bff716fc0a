"""Claims about repulsion on images and the posterior: D'Angelo & Fortuin (2021)."""

import json

from studies.guide.claims import Claim, Margin, fact, higher, lower, same
from studies.guide.claims_repulsive import ACCURACY, FOUR, HALF, NLL, PAPER, STUDY, mnist
from studies.guide.evidence import PERCENT, RESULTS, by_seed, mean, times_plain
from studies.guide.findings import FASHION, FIDELITY, WASSERSTEIN

DIGITS = "ood.mnist.auroc_entropy"
CURVED = ("regression", "classification", "digits")


def fashion(metric, method="ensemble"):
    """Values by seed on Fashion-MNIST."""
    return by_seed(FASHION, metric, method=method, members=20)


def distance(problem, method, name="frechet"):
    """Distances to the posterior by seed."""
    return by_seed(FIDELITY, name, problem=problem, method=method)


def stein(problem, method):
    """Squared Stein discrepancies by seed; an unbiased estimate below 0 counts as 0."""
    found = by_seed("fidelity/stein.csv", "stein", problem=problem, method=method)
    return {seed: max(value, 0.0) for seed, value in found.items()}


def with_outputs(form):
    """The distances of methods with outputs and with weights, on the regression."""
    return [
        lower(
            f"f-{name} minus {name}, regression",
            distance("regression", f"f-{name}:{form}"),
            distance("regression", f"{name}:{form}"),
        )
        for name in ("kde", "sge", "ssge")
    ]


def f_svgd(metric):
    """The distances of calibrated f-SVGD and of the plain ensemble, on each problem."""
    return [
        lower(
            f"f-svgd, {problem}",
            metric(problem, "f-svgd:calibrated"),
            metric(problem, "ensemble"),
        )
        for problem in ("linear", *CURVED)
    ]


def on_and_off(words, method):
    """The distances of last layers and of the plain ensemble, on and off the data."""
    return [
        lower(
            f"{words}{end} the data",
            head(f"frechet/{end}", method),
            head(f"frechet/{end}", "ensemble"),
        )
        for end in ("on", "off")
    ]


def head(name, method):
    """Distances of last layers to their posterior by seed."""
    return by_seed("fidelity/heads.csv", name, method=method)


def grown(metric, method, procedure):
    """Values by seed of the study on growing."""
    held = json.loads((RESULTS / "grow/digits.json").read_text(encoding="utf-8"))
    return dict(enumerate(held["results"][method][procedure][metric]))


def _percent(path):
    return mean(by_seed(path, ACCURACY, method="ensemble"), 100, 1)


def _times(model):
    return times_plain(f"h200-{model}-kernels.json", "kde", model)


NEAR = Margin(0.003, "half of the 0.006 by which the published methods differ, without f-SVGD")
CLOTHES = "Fashion-MNIST, published form, 20 perceptrons (published: 50)"
POSTERIOR = "small problems with a known posterior, 20 members"
HEADS = "digits, 20 last layers on one perceptron, posterior by NUTS"

IMAGES = [
    Claim(
        "On Fashion-MNIST the methods are more accurate than deep ensembles.",
        PAPER,
        CLOTHES,
        lambda: [
            higher(name, fashion(ACCURACY, name), fashion(ACCURACY), **PERCENT)
            for name in WASSERSTEIN
        ],
        "fashion-mnist/README.md",
    ),
    Claim(
        "On Fashion-MNIST the methods are more accurate than SVGD.",
        PAPER,
        CLOTHES,
        lambda: [
            higher(name, fashion(ACCURACY, name), fashion(ACCURACY, "svgd"), **PERCENT)
            for name in WASSERSTEIN
        ],
        "fashion-mnist/README.md",
    ),
    Claim(
        "On Fashion-MNIST the methods detect MNIST better than deep ensembles.",
        PAPER,
        CLOTHES,
        lambda: [
            higher(f"AUROC, {name}", fashion(DIGITS, name), fashion(DIGITS), size)
            for name, size in zip(
                WASSERSTEIN, (0.002, 0.002, 0.010, 0.013, 0.011, 0.013), strict=True
            )
        ],
        "fashion-mnist/README.md",
    ),
    Claim(
        "On Fashion-MNIST the methods detect MNIST better than SVGD.",
        PAPER,
        CLOTHES,
        lambda: [
            higher(f"AUROC, {name}", fashion(DIGITS, name), fashion(DIGITS, "svgd"))
            for name in WASSERSTEIN
        ],
        "fashion-mnist/README.md",
    ),
    Claim(
        "On Fashion-MNIST f-SVGD is less accurate than deep ensembles.",
        PAPER,
        CLOTHES,
        lambda: [lower("accuracy", fashion(ACCURACY, "f-svgd"), fashion(ACCURACY), **PERCENT)],
        "fashion-mnist/README.md",
    ),
    Claim(
        "The reported NLL of the plain ensemble on Fashion-MNIST is 0.129.",
        PAPER,
        CLOTHES,
        lambda: [
            same("NLL minus 0.129", fashion(NLL), 0.129, NEAR),
            same(
                "-log of the mean probability minus 0.129", fashion("test.nll_legacy"), 0.129, NEAR
            ),
        ],
        "fashion-mnist/README.md",
    ),
    Claim(
        "Low accuracy on CIFAR-10 comes from missing BatchNorm and augmentation.",
        STUDY,
        "CIFAR-10, 25,000 images; the networks differ in more than that",
        lambda: [
            fact(
                f"five ResNet18 with both have {_percent('cifar10/results.csv')} %, five "
                f"ResNet32 with crops alone {_percent('cifar10/resnet32/results.csv')} %",
                None,
            )
        ],
        "cifar10/resnet32/README.md",
    ),
]


POSTERIORS = [
    Claim(
        "Repulsive ensembles converge to the Bayes posterior.",
        PAPER,
        f"{POSTERIOR}, as published",
        lambda: [
            same(
                f"kde minus exact draws, {problem}",
                distance(problem, "kde:legacy"),
                distance(problem, "posterior draws"),
                Margin(0.1, "at most a quarter of the plain ensemble's distance"),
            )
            for problem in ("linear", *CURVED)
        ],
        "fidelity/README.md",
    ),
    Claim(
        "Repulsive ensembles are closer to the posterior than plain ensembles.",
        PAPER,
        f"{POSTERIOR}, as published",
        lambda: [
            lower(f"kde, {problem}", distance(problem, "kde:legacy"), distance(problem, "ensemble"))
            for problem in ("linear", *CURVED)
        ],
        "fidelity/README.md",
    ),
    Claim(
        "In 1-D regression functional methods capture epistemic uncertainty better.",
        PAPER,
        f"{POSTERIOR}, as published",
        lambda: with_outputs("legacy"),
        "fidelity/README.md",
    ),
    Claim(
        "The same with calibrated repulsion.",
        "our hypothesis",
        f"{POSTERIOR}, calibrated",
        lambda: with_outputs("calibrated"),
        "fidelity/README.md",
    ),
    Claim(
        "Function space avoids the false diversity of weights: functions differ more.",
        PAPER,
        "MNIST, 17 perceptrons, strength 1",
        lambda: [
            higher(
                f"effective number of functions, f-{name} minus {name}, {words}",
                *(mnist(f"{split}.effective_functions", each) for each in (f"f-{name}", name)),
            )
            for name in ("kde", "sge", "ssge")
            for split, words in (("test", "digits"), ("ood.notmnist", "letters"))
        ],
        "mnist/README.md",
    ),
    Claim(
        "Calibrated repulsion in function space is closer to the posterior than deep ensembles.",
        "our hypothesis",
        POSTERIOR,
        lambda: f_svgd(distance),
        "fidelity/README.md",
    ),
    Claim(
        "The same by the kernel Stein discrepancy of the weights.",
        "our hypothesis",
        POSTERIOR,
        lambda: f_svgd(stein),
        "fidelity/README.md",
    ),
    Claim(
        "Calibrated repulsion in function space is closer, for last layers on a trained network.",
        "our hypothesis",
        HEADS,
        lambda: on_and_off("f-svgd, ", "f-svgd:calibrated"),
        "fidelity/README.md",
    ),
    Claim(
        "Published repulsion is closer to the posterior than plain ensembles, for last layers.",
        "D'Angelo & Fortuin (2021)",
        HEADS,
        lambda: [
            lower(f"{name}, on the data", head("frechet/on", name), head("frechet/on", "ensemble"))
            for name in ("kde", "f-kde")
        ],
        "fidelity/README.md",
    ),
    Claim(
        "Last-layer Laplace is closer to the posterior than deep ensembles.",
        "our hypothesis",
        HEADS,
        lambda: on_and_off("", "last-layer Laplace"),
        "fidelity/README.md",
    ),
    Claim(
        "Members need not be trained together: new ones can repel frozen ones.",
        STUDY,
        "digits, five frozen and five new members",
        lambda: [
            same(
                f"NLL, {name}, grown minus at once",
                grown("nll", name, "grown"),
                grown("nll", name, "at once"),
                HALF,
                **FOUR,
            )
            for name in ("kde:300", "f-kde:100")
        ],
        "grow/README.md",
    ),
    Claim(
        "Sequential training loses diversity.",
        "our hypothesis",
        "digits, five frozen and five new members",
        lambda: [
            lower(
                f"effective number of functions, {name}",
                grown("effective_functions", name, "grown"),
                grown("effective_functions", name, "at once"),
                **FOUR,
            )
            for name in ("kde:300", "f-kde:100")
        ],
        "grow/README.md",
    ),
    Claim(
        "More than a million weights slow down repulsion in weight space.",
        STUDY,
        "ten ResNet18 of 11 million weights, one H200",
        lambda: [
            fact(
                f"a step takes {_times('resnet18'):.2f} times the plain step",
                _times("resnet18") > 1.5,
            )
        ],
        "../benchmarks/README.md",
    ),
    Claim(
        "Repulsion costs extra computation.",
        STUDY,
        "20 perceptrons, one H200",
        lambda: [
            fact(
                f"a step takes {_times('mlp'):.2f} (weights) and "
                f"{times_plain('h200-mlp-kernels.json', 'f-kde', 'mlp'):.2f} (outputs) times "
                "the plain step",
                _times("mlp") > 1,
            )
        ],
        "../benchmarks/README.md",
    ),
]

GROUPS = {
    "Repulsion on Fashion-MNIST and CIFAR-10": IMAGES,
    "The posterior, and the price": POSTERIORS,
}

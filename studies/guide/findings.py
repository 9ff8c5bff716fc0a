"""What our studies found, each finding with its interval, its price and the advice that follows."""

from typing import Any, NamedTuple

from shoal.prediction.statistics import Pairs, decide
from studies.guide.evidence import (
    PERCENT,
    RESULTS,
    by_seed,
    compared,
    difference,
    interval,
    largest,
    noise_share,
    rows,
    significant,
    size,
    strength_row,
    times_plain,
)
from studies.guide.figure import Counts, Interval

WASSERSTEIN = ("kde", "sge", "ssge", "f-kde", "f-sge", "f-ssge")
MNIST, FASHION = "mnist/results.csv", "fashion-mnist/results.csv"
CIFAR, QUARTER = "cifar10/results.csv", "cifar10/quarter/results.csv"
RESNET32, WEAK = "cifar10/resnet32/results.csv", "cifar10/published-strength/results.csv"
TABLES, DIGITS, FIDELITY = (
    "forde/tables/runs.csv",
    "forde/digits/runs.csv",
    "fidelity/results.csv",
)
PRETRAINED = ("pretrained/raw.csv", "pretrained/raw-gpu-1.csv", "pretrained/raw-gpu-2.csv")
STRENGTH, CHOSEN = "mnist/strength/raw.csv", "mnist/strength/chosen.csv"
AUTO = "auto/chosen.csv"
NOT_WORSE = 0.02
"""Margin of `auto` in nats: a quarter of the mean gain of the five sets that gain, 0.083."""
EQUAL = 0.002
"""Margin of equal accuracy: 1.4 standard errors of 10,000 test images at 98 %."""
OPENED_LAST = ("diabetes", "wine-cultivars", "protein", "naval")
LETTERS = "ood.notmnist.auroc_entropy"
CORRUPTED = "corrupted.all.accuracy"


class Setting(NamedTuple):
    """What a finding rests on; `study` is a row of studies.csv. Seeds may be words with a noun."""

    data: str
    methods: str
    seeds: int | str
    study: str

    def __str__(self):
        noun = "" if isinstance(self.seeds, str) else " seed" if self.seeds == 1 else " seeds"
        return f"{self.data}, {self.methods}, {self.seeds}{noun}"


class Finding(NamedTuple):
    """One line of evidence.

    Attributes:
        question: what was asked.
        setting: data, methods, seeds and study.
        gain: what was found, with its interval.
        price: what it costs.
        link: page of the study, from docs/.
        wish: what a practitioner wants; empty if the finding leads to no advice.
        advice: what to do then.
        answer: what that brings, in one sentence.
        figure: the lines of the figure below the answer.
    """

    question: str
    setting: Setting
    gain: str
    price: str
    link: str
    wish: str = ""
    advice: str = ""
    answer: str = ""
    figure: tuple[Interval | Counts, ...] = ()


def decided(metric, margin, cases):
    """Decisions about methods and the plain ensemble; a case is a file, a method and columns."""
    pairs = {}
    for place, (path, method, where) in enumerate(cases):
        values, plain = (by_seed(path, metric, method=m, **where) for m in (method, "ensemble"))
        seeds = sorted(values.keys() & plain.keys())
        pairs[place] = Pairs([values[s] for s in seeds], [plain[s] for s in seeds], margin=margin)
    return decide("the comparisons of a finding", pairs).values()


def sizes():
    """More members of a plain ensemble."""
    found = {m: by_seed(MNIST, "test.nll", method="ensemble", members=m) for m in (1, 5, 17)}
    letters = {m: by_seed(MNIST, LETTERS, method="ensemble", members=m) for m in (1, 5, 17)}
    nll, auroc = difference(found[5], found[1]), difference(letters[5], letters[1])
    yield Finding(
        "Are five networks better than one?",
        Setting("MNIST", "plain ensembles of perceptrons", 5, "mnist"),
        f"NLL {interval(nll, digits=4)}; AUROC on letters {interval(auroc)}",
        "5 times the weights",
        "results/mnist/README.md",
        "better probabilities than one network gives",
        '5 members, `method="ensemble"`',
        f"On MNIST, five networks lower the NLL of one by {size(nll, digits=4)}.",
        (Interval("NLL", nll, -1, digits=4), Interval("AUROC on letters", auroc, 1)),
    )
    nll, auroc = difference(found[17], found[5]), difference(letters[17], letters[5])
    yield Finding(
        "Are 17 networks better than five?",
        Setting("MNIST", "plain ensembles of perceptrons", 5, "mnist"),
        f"NLL {interval(nll, digits=4)}; AUROC on letters {interval(auroc)}",
        "3.4 times the weights of five",
        "results/mnist/README.md",
        "still lower NLL",
        "10 to 20 members",
        f"On MNIST, 17 networks lower the NLL of five by {size(nll, digits=4)}.",
        (Interval("NLL", nll, -1, digits=4), Interval("AUROC on letters", auroc, 1)),
    )


def published():
    """Repulsion at the published strength."""
    found = [
        compared(MNIST, "test.accuracy", method, members=m)
        for m in (5, 17)
        for method in WASSERSTEIN
    ]
    most = 100 * max(largest(MNIST, "test.accuracy", WASSERSTEIN, members=m) for m in (5, 17))
    cases = [(MNIST, method, {"members": m}) for m in (5, 17) for method in WASSERSTEIN]
    equal = sum(each.within for each in decided("test.accuracy", EQUAL, cases))
    yield Finding(
        "Does repulsion at the published strength change a perceptron?",
        Setting("MNIST", "six Wasserstein methods, 5 and 17 members", 5, "mnist"),
        f"accuracy differs significantly in {significant(found)} of 12 comparisons, "
        f"by at most {most:.2f} points; {equal} are equal within {100 * EQUAL:g} points",
        f"{times_plain('h200-mlp-kernels.json', 'f-kde', 'mlp'):.2f} (outputs) and "
        f"{times_plain('h200-mlp-kernels.json', 'kde', 'mlp'):.2f} times the step (weights)",
        "results/mnist/README.md",
        "repulsion as published (strength 1)",
        "a plain ensemble: the result is the same, and cheaper",
        f"On MNIST, none of six methods changes accuracy by more than {most:.2f} points; {equal} "
        f"of 12 comparisons are equal within {100 * EQUAL:g} points.",
        tuple(
            Interval(f"accuracy, {name}", change, 1, **PERCENT)
            for name, change in zip(WASSERSTEIN, found[len(WASSERSTEIN) :], strict=True)
        ),
    )
    found = [compared(FASHION, "test.accuracy", method, members=20) for method in WASSERSTEIN]
    nll = [compared(FASHION, "test.nll", method, members=20) for method in WASSERSTEIN]
    worse, better = (significant(nll, sign) for sign in (1, -1))
    most = 100 * largest(FASHION, "test.accuracy", WASSERSTEIN, members=20)
    cases = [(FASHION, method, {"members": 20}) for method in WASSERSTEIN]
    equal = sum(each.within for each in decided("test.accuracy", EQUAL, cases))
    yield Finding(
        "The same on Fashion-MNIST, in the published form?",
        Setting("Fashion-MNIST", "six Wasserstein methods, 20 members", 5, "fashion-mnist"),
        f"accuracy differs significantly in {significant(found)} of 6 comparisons, by at most "
        f"{most:.2f} points; {equal} are equal within {100 * EQUAL:g} points; NLL is worse in "
        f"{worse} and better in {better} of 6",
        "as above",
        "results/fashion-mnist/README.md",
    )
    yield Finding(
        "Does SVGD help?",
        Setting("MNIST", "17 members, 15 epochs", 5, "mnist"),
        f"NLL {interval(compared(MNIST, 'test.nll', 'svgd', members=17), digits=4)}",
        "members share gradients and need more epochs",
        "results/mnist/README.md",
    )
    auroc = compared(MNIST, LETTERS, "f-svgd", members=17)
    nll = compared(FASHION, "test.nll", "f-svgd", members=20)
    yield Finding(
        "Does f-SVGD help?",
        Setting("MNIST, Fashion-MNIST", "17 and 20 members", 5, "fashion-mnist"),
        f"AUROC on letters {interval(auroc)} on MNIST; NLL {interval(nll)} on Fashion-MNIST",
        "members with confident errors",
        "results/fashion-mnist/README.md",
    )


def corrupted():
    """Repelled input gradients under corruption."""
    clean = compared(CIFAR, "test.accuracy", "forde:16")
    accuracy = compared(CIFAR, CORRUPTED, "forde:16")
    ece = compared(CIFAR, "corrupted.all.ece", "forde:16")
    share, rest = noise_share(CIFAR, "forde:16")
    step = times_plain("h200-forde.json", "forde", "resnet18")
    yield Finding(
        "Do repelled input gradients at strength 16 help under corruption?",
        Setting("CIFAR-10, 19 corruptions", "five ResNet18", 4, "cifar10"),
        f"corrupted accuracy {interval(accuracy, **PERCENT)}; "
        f"corrupted ECE {interval(ece)}; four kinds "
        f"of noise bring {share:.0%} of the gain, the other 15 gain {100 * rest:.1f} points",
        f"clean accuracy {interval(clean, **PERCENT)}; {step:.2f} times the step",
        "results/cifar10/README.md",
        "accuracy and calibration of images under noise and blur",
        '`method="forde"`, `strength=16`, 5 members',
        f"On corrupted CIFAR-10, accuracy rises by {size(accuracy, **PERCENT)}, at {step:.1f} "
        "times the step.",
        (
            Interval("corrupted accuracy", accuracy, 1, **PERCENT),
            Interval("corrupted ECE", ece, -1),
            Interval("clean accuracy", clean, 1, **PERCENT),
        ),
    )
    method = "forde+fraction=0.25:16"
    accuracy = compared(QUARTER, CORRUPTED, method)
    clean = compared(QUARTER, "test.accuracy", method)
    step = times_plain("h200-forde.json", "forde+fraction=0.25", "resnet18")
    yield Finding(
        "Is a quarter of each batch enough?",
        Setting("CIFAR-10", "five ResNet18, fraction 0.25", 3, "cifar10-quarter"),
        f"corrupted accuracy {interval(accuracy, **PERCENT)}",
        f"clean accuracy {interval(clean, **PERCENT)}; {step:.2f} times the step",
        "results/cifar10/README.md",
        "most of this gain at less cost",
        'the same with `method={"name": "forde", "fraction": 0.25, "coupled": False}`',
        f"On corrupted CIFAR-10, accuracy rises by {size(accuracy, **PERCENT)}, at {step:.1f} "
        "times the step.",
        (
            Interval("corrupted accuracy", accuracy, 1, **PERCENT),
            Interval("clean accuracy", clean, 1, **PERCENT),
        ),
    )
    share, rest = noise_share(RESNET32, method)
    yield Finding(
        "Does it carry over to another network?",
        Setting("CIFAR-10", "five ResNet32, fraction 0.25", 3, "cifar10-resnet32"),
        f"corrupted accuracy {interval(compared(RESNET32, CORRUPTED, method), **PERCENT)}; noise "
        f"brings {share:.0%} of the gain, the other 15 corruptions gain {100 * rest:.1f} points",
        f"clean accuracy {interval(compared(RESNET32, 'test.accuracy', method), **PERCENT)}",
        "results/cifar10/resnet32/README.md",
    )
    yield Finding(
        "Is the published strength enough?",
        Setting("CIFAR-10", "five ResNet18, strength 1", 5, "cifar10-published-strength"),
        f"corrupted accuracy {interval(compared(WEAK, CORRUPTED, 'forde'), **PERCENT)}",
        "as at strength 16",
        "results/cifar10/README.md",
    )
    found = compared(DIGITS, "corrupted_accuracy", "forde strength=16", data="digits")
    worse = compared(DIGITS, "corrupted_nll", "forde strength=16", data="digits")
    yield Finding(
        "Does it help on very small images?",
        Setting("digits of 8 x 8 pixels", "five small CNNs, strength 16", 10, "forde-digits"),
        f"corrupted accuracy {interval(found, **PERCENT)}; corrupted NLL {interval(worse)}",
        "as on CIFAR-10",
        "results/forde/README.md",
    )


def tables():
    """Repelled input gradients on tables."""
    method = "forde strength=4"
    names = ("breast-cancer", "diabetes", "uci-concrete", "uci-energy", "wine")
    found = {name: compared(TABLES, "corrupted_nll", method, data=name) for name in names}
    words = ", ".join(f"{name.removeprefix('uci-')} {interval(d)}" for name, d in found.items())
    better = significant(list(found.values()), -1)
    yield Finding(
        "Do repelled input gradients help on tables with noisy inputs?",
        Setting("five tables", "five perceptrons, strength 4", 10, "forde-tables"),
        f"NLL on noisy inputs is lower on {better} of 5 tables: {words}",
        "on wine NLL is higher; strength 16 costs clean RMSE",
        "results/forde/README.md",
        "tables whose inputs get noisier in use",
        '`method="forde"`, `strength=4`; check it on your own noisy copies',
        f"With noisy inputs, NLL is lower on {better} of 5 tables.",
        tuple(
            Interval(f"NLL, {name.removeprefix('uci-')}", change, -1)
            for name, change in found.items()
        ),
    )


def detection():
    """Repulsion of weights for OOD detection."""
    yield from _chosen_strength() if (RESULTS / CHOSEN).exists() else _fixed_strength()


def _fixed_strength():
    """From the printed sweep, whose strength was looked at on the data that judge it."""
    plain, strong = strength_row("ensemble", 17), strength_row("kde:10000", 17)
    yield Finding(
        "Does strong repulsion of weights help OOD detection?",
        Setting("MNIST", "17 perceptrons, strength 10,000", 3, "mnist-sweep"),
        f"AUROC on letters {plain[3]} becomes {strong[3]}, on clothes {plain[4]} becomes "
        f"{strong[4]}; accuracy {plain[0]} becomes {strong[0]} %",
        f"{times_plain('h200-mlp-kernels.json', 'kde', 'mlp'):.2f} times the step; the strength "
        "was chosen on the data that judge it",
        "results/mnist/README.md",
        "OOD detection with a small dense network",
        '`method="kde"`, `strength=1e4`; check it on your own OOD data',
        f"On MNIST, the AUROC on letters {plain[3]} becomes {strong[3]}.",
    )


def _chosen_strength():
    """The strength is chosen on held-out images inside each seed."""
    where = {"rule": "AUROC of shuffled held-out images", "method": "kde", "members": 17}

    def gain(metric):
        plain = by_seed(STRENGTH, metric, method="ensemble", members=17)
        return difference(by_seed(CHOSEN, metric, **where), plain)

    seeds = gain("test_nll").seeds
    whole = [strength_row(label, 17) for label in ("ensemble", "kde:100000")]
    names = ("letters", "clothes", "characters")
    words = ", ".join(f"{name} {interval(gain(f'auroc_entropy_{name}'))}" for name in names)
    yield Finding(
        "Does strong repulsion of weights help OOD detection?",
        Setting("18,000 images of MNIST", "17 perceptrons, kde", seeds, "mnist-strength"),
        f"AUROC: {words}",
        f"accuracy {interval(gain('test_accuracy'), **PERCENT)}; NLL "
        f"{interval(gain('test_nll'), digits=4)}; six trainings to choose the strength; "
        f"{times_plain('h200-mlp-kernels.json', 'kde', 'mlp'):.2f} times the step; with all 60,000 "
        f"images NLL {whole[0][1]} becomes {whole[1][1]} and the AUROC on letters {whole[0][3]} "
        f"becomes {whole[1][3]} at strength 100,000",
        "results/mnist/strength/README.md",
        "OOD detection with a small dense network",
        '`method="kde"`, a strength between 1e3 and 1e6 chosen on held-out images',
        "On 18,000 images of MNIST, the AUROC on letters rises by "
        f"{size(gain('auroc_entropy_letters'))}. With all 60,000 images there is less to gain, and "
        "strength 100,000 raises NLL.",
        (
            *(Interval(f"AUROC, {name}", gain(f"auroc_entropy_{name}"), 1) for name in names),
            Interval("accuracy", gain("test_accuracy"), 1, **PERCENT),
        ),
    )


def pretrained():
    """Members on one pre-trained network."""
    where: dict[str, Any] = {"images": 0}
    names = ("fine-tuned-5", "lora", "heads")
    get = {n: by_seed(PRETRAINED, "test_accuracy", method=n, **where) for n in names}
    stored = {n: by_seed(PRETRAINED, "stored_bytes", method=n, **where) for n in names}
    stored = {n: f"{list(v.values())[0] / 1e6:.1f} MB" for n, v in stored.items()}
    one = by_seed(PRETRAINED, "test_accuracy", method="fine-tuned-1", **where)
    five = difference(get["fine-tuned-5"], one)
    nll = compared(PRETRAINED, "corrupted_nll", "fine-tuned-5", "fine-tuned-1", **where)
    setting = Setting("16,000 images of CIFAR-10", "EfficientNet-lite0", 5, "pretrained")
    yield Finding(
        "Are five fine-tuned networks better than one?",
        setting,
        f"accuracy {interval(five, **PERCENT)}; corrupted NLL {interval(nll)}",
        f"five trainings; {stored['fine-tuned-5']} stored",
        "results/pretrained/README.md",
        "the best predictions from a pre-trained network",
        "5 fine-tuned members",
        f"On corrupted CIFAR-10, five networks lower the NLL of one by {size(nll)}.",
        (Interval("accuracy", five, 1, **PERCENT), Interval("corrupted NLL", nll, -1)),
    )
    auroc = compared(PRETRAINED, "auroc_entropy", "lora", "fine-tuned-5", **where)
    accuracy = difference(get["lora"], get["fine-tuned-5"])
    yield Finding(
        "What do LoRA members cost against fine-tuning?",
        setting,
        f"AUROC on SVHN {interval(auroc)}; accuracy {interval(accuracy, **PERCENT)}",
        f"{stored['lora']} stored instead of {stored['fine-tuned-5']}",
        "results/pretrained/README.md",
        "many members of a large network in little memory",
        "`shoal.adapters.lora`, 5 members",
        f"{stored['lora']} replace {stored['fine-tuned-5']}, and accuracy falls by "
        f"{size(accuracy, **PERCENT)} against fine-tuning.",
        (Interval("AUROC on SVHN", auroc, 1), Interval("accuracy", accuracy, 1, **PERCENT)),
    )
    auroc = compared(PRETRAINED, "auroc_entropy", "heads", "fine-tuned-5", **where)
    accuracy = difference(get["heads"], get["fine-tuned-5"])
    yield Finding(
        "What do a hundred heads cost against fine-tuning?",
        setting,
        f"AUROC on SVHN {interval(auroc)}; accuracy {interval(accuracy, **PERCENT)}",
        f"{stored['heads']} stored; trains in seconds on two CPU cores",
        "results/pretrained/README.md",
        "uncertainty from a frozen network within seconds",
        "`shoal.adapters.last_layer`, 100 members, `cache=True`",
        f"The AUROC on SVHN rises by {size(auroc)} and accuracy falls by "
        f"{size(accuracy, **PERCENT)} against fine-tuning.",
        (Interval("AUROC on SVHN", auroc, 1), Interval("accuracy", accuracy, 1, **PERCENT)),
    )
    for name, plain in (("heads-repelled", "heads"), ("lora-repelled", "lora")):
        entropy = compared(PRETRAINED, "auroc_entropy", name, plain, **where)
        information = compared(PRETRAINED, "auroc_mutual_information", name, plain, **where)
        yield Finding(
            f"Should {'heads' if plain == 'heads' else 'LoRA members'} repel each other?",
            setting,
            f"AUROC on SVHN by entropy {interval(entropy, digits=4)}, by mutual information "
            f"{interval(information, digits=4)}",
            "1.5 to 1.7 times the training time",
            "results/pretrained/README.md",
        )


def fidelity():
    """Distance to the true posterior."""
    found = {
        problem: compared(FIDELITY, "frechet", "f-svgd:calibrated", problem=problem)
        for problem in ("linear", "regression", "classification", "digits")
    }
    words = ", ".join(f"{problem} {interval(near)}" for problem, near in found.items())
    accuracy = compared(FIDELITY, "accuracy", "f-svgd:calibrated", problem="digits")
    yield Finding(
        "Which method is closest to the true posterior?",
        Setting("four known posteriors", "f-SVGD, calibrated, 20 members", 5, "fidelity"),
        f"Fréchet distance of predictions: {words}",
        f"accuracy on digits {interval(accuracy, **PERCENT)}",
        "results/fidelity/README.md",
        "members that are samples of the posterior",
        '`method="f-svgd"`, `calibrated=True`; tested on small networks only',
        f"On {significant(list(found.values()), -1)} of 4 known posteriors, predictions are closer "
        "to the true ones.",
        tuple(Interval(f"Fréchet, {problem}", near, -1) for problem, near in found.items()),
    )


def not_worse(sets):
    """On how many sets the NLL of `auto` is shown not to be higher by the margin or more."""
    found = decided("nll", NOT_WORSE, [(AUTO, "auto", {"set": name}) for name in sets])
    return sum(decision.not_worse for decision in found)


def chosen():
    """Method and strength from a search on held-out data."""
    sets = dict.fromkeys(row["set"] for row in rows(AUTO))
    found = {m: [compared(AUTO, m, "auto", set=s) for s in sets] for m in ("nll", "shifted_nll")}
    auroc = [compared(AUTO, "auroc", "auto", set=s) for s in sets]
    worse = significant(found["nll"], sign=1)
    better = [significant(each, sign=-1) for each in found.values()] + [significant(auroc, sign=1)]
    last = [compared(AUTO, "nll", "auto", set=s) for s in OPENED_LAST]
    margin = f"by {NOT_WORSE:g} nats or more (non-inferiority, Holm over the sets)"
    rise = max(zip(found["nll"], sets, strict=True), key=lambda pair: pair[0].low)
    yield Finding(
        "Can method and strength be chosen on held-out training data?",
        Setting(f"{len(sets)} data sets", 'method="auto", 10 small networks', 5, "auto"),
        f"NLL is significantly better on {better[0]} sets and worse on {worse}; it is shown not to "
        f"be worse {margin} on {not_worse(sets)}; the clearest rise is {rise[1]} "
        f"{interval(rise[0])}; NLL under shift is better on {better[1]}, AUROC on {better[2]}; on "
        f"the {len(last)} sets that were opened after the rule was committed, NLL is worse on "
        f"{significant(last, sign=1)} and better on {significant(last, sign=-1)}",
        "2 to 3 times the training; more with small networks on a GPU",
        "results/auto/README.md",
        "repulsion where it pays, without knowing its strength",
        '`method="auto"`',
        f"On {len(sets)} data sets, NLL is significantly better on {better[0]} and worse on "
        f"{worse}; that it is not worse by {NOT_WORSE:g} is shown on {not_worse(sets)}.",
        (
            Counts("NLL", better[0], worse, len(sets)),
            Counts("NLL under shift", better[1], significant(found["shifted_nll"], 1), len(sets)),
            Counts("AUROC", better[2], significant(auroc, sign=-1), len(sets)),
        ),
    )


def findings():
    """All findings, in the order of the guide."""
    for part in (sizes, published, corrupted, tables, detection, chosen, pretrained, fidelity):
        yield from part()

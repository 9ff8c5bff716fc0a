"""Findings of studies that lead to no advice: few seeds, toy problems, or nothing significant."""

import json

from shoal.prediction.statistics import FEWEST
from studies import draws_large
from studies.decided import headline, weights
from studies.draws_corners import PROBLEMS
from studies.draws_page import posteriors, scores
from studies.draws_uci import SMALL as SMALL_UCI
from studies.guide.claims_cifar import ELEVEN, SMALL
from studies.guide.claims_landscape import seen
from studies.guide.evidence import (
    PERCENT,
    RESULTS,
    by_seed,
    compared,
    difference,
    interval,
    rows,
    significant,
)
from studies.guide.findings import CORRUPTED, Finding, Setting
from studies.uci.tables import OVERLAP

POINTS = "points/results.csv"


def repeated():
    """The published study of MNIST."""
    path, name = "mnist-published/results.csv", "test.accuracy"
    found = compared(path, name, "f-kde")
    yield Finding(
        "Is repulsion better with the published settings?",
        Setting("MNIST", "kde, sge and f-kde as published, 5 members", 5, "mnist-published"),
        f"accuracy of kde {interval(compared(path, name, 'kde'), **PERCENT)}, of sge "
        f"{interval(compared(path, name, 'sge'), **PERCENT)}, of f-kde "
        f"{interval(found, **PERCENT)}",
        "1.2 to 1.6 times the step",
        "results/mnist-published/README.md",
    )


def axes():
    """The axes of input gradients, one seed."""
    path = "cifar10/bases/results.csv"
    cells = [
        f"{words} {interval(compared(path, CORRUPTED, name), **PERCENT)}"
        for words, name in (
            ("components", "forde:16"),
            ("cosines", "forde-dct:16"),
            ("pixels", "forde-identity:16"),
        )
    ]
    yield Finding(
        "Along which axes should input gradients repel?",
        Setting("CIFAR-10", "five ResNet18, strength 16", 1, "cifar10-bases"),
        f"corrupted accuracy: {', '.join(cells)}",
        "as at strength 16; one seed decides nothing",
        "results/cifar10/README.md",
    )


def residual_networks():
    """ResNet32 and PreAct-ResNet18 on CIFAR-10."""
    path, strong = "cifar10/weights/raw.csv", "kde:1000"
    tuned = weights()[1][2][1]
    found, against = compared(path, "nll", strong), compared(path, "nll", strong, tuned)
    yield Finding(
        "Does strong repulsion of weights help ResNet32?",
        Setting("10,000 images of CIFAR-10", "five ResNet32, kde:1000", found.seeds,
                "cifar10-weights"),
        f"NLL {interval(found)}; corrupted accuracy "
        f"{interval(compared(path, 'corrupted_accuracy', strong), **PERCENT)}; against a random "
        f"push: NLL {interval(compared(path, 'nll', strong, 'kde+placebo:1000'))}; against a plain "
        f"ensemble with a tuned learning rate: NLL {interval(against)}",
        "no extra time; eight trainings tuned the plain ensemble",
        "results/cifar10/weights/README.md",
    )  # fmt: skip
    arms, ((first, second), *_), _ = headline()
    seeds = sorted(arms[first].keys() & arms[second].keys())
    gains = [
        100 * (float(arms[first][s][CORRUPTED]) - float(arms[second][s][CORRUPTED])) for s in seeds
    ]
    yield Finding(
        "Do repelled input gradients pay at equal cost?",
        Setting("25,000 images of CIFAR-10", "five ResNet18, forde:16; eleven plain members",
                len(seeds), "cifar10-equal"),
        f"corrupted accuracy {' and '.join(f'{gain:+.1f}' for gain in gains)} points, seed by seed",
        "two seeds decide nothing",
        "results/cifar10/equal-cost/README.md",
    )  # fmt: skip
    path, more = "cifar10/preact/raw.csv", "ensemble+members=22"
    yield Finding(
        "The same with ten members and all images?",
        Setting("all images of CIFAR-10", "ten PreAct-ResNet18, forde:16; 22 plain members", 1,
                "cifar10-preact"),
        "corrupted accuracy "
        f"{interval(compared(path, 'corrupted_accuracy', 'forde:16', more), **PERCENT)}; NLL "
        f"{interval(compared(path, 'nll', 'forde:16', more))}",
        f"clean accuracy {interval(compared(path, 'accuracy', 'forde:16', more), **PERCENT)}; "
        "six epochs",
        "results/cifar10/preact/README.md",
    )  # fmt: skip


def landscape():
    """The landscape over seeds."""
    case = "cifar10/medium-cnn"
    found = [
        (name, difference(*(seen(case, "diversity", n, "equal") for n in ("members", name))))
        for name in ("low-rank", "diagonal", "swag", "dropout")
    ]
    yield Finding(
        "Are random starts more diverse than samples around one member?",
        Setting("10,000 images of CIFAR-10", "five medium CNNs", found[0][1].seeds,
                "landscape-seeds"),
        "disagreement / error rate, members minus samples: "
        + ", ".join(f"{name} {interval(each)}" for name, each in found),
        "five trainings instead of one; not so for perceptrons on Fashion-MNIST",
        "results/landscape/seeds/README.md",
    )  # fmt: skip


def small():
    """Toy problems and growing."""

    def gap(kind, metric):
        return by_seed(POINTS, metric, toy="regression", kind=kind, strength="10.0")

    spread = difference(gap("uniform", "std_gap"), gap("batch", "std_gap"))
    loss = difference(gap("uniform", "nll_gap"), gap("batch", "nll_gap"))
    yield Finding(
        "Should members be compared between the data?",
        Setting("1-D regression with a gap", "f-kde at uniform points, strength 10", 5, "points"),
        f"standard deviation in the gap {interval(spread)}; NLL there {interval(loss)}",
        "NLL; seed 0 took part in choosing the settings",
        "results/points/README.md",
    )
    held = json.loads((RESULTS / "grow/digits.json").read_text(encoding="utf-8"))["results"]
    name = "f-kde:100"
    values = {
        how: {m: dict(enumerate(held[name][how][m])) for m in ("nll", "effective_functions")}
        for how in ("grown", "at once")
    }
    found = {m: difference(values["grown"][m], values["at once"][m]) for m in values["grown"]}
    yield Finding(
        "Can an ensemble grow instead of being trained at once?",
        Setting("digits", "5 frozen and 5 new members, f-kde:100", 3, "grow"),
        f"NLL {interval(found['nll'], digits=4)}; effective number of functions "
        f"{interval(found['effective_functions'], digits=4)}",
        "none: the first five are not trained again",
        "results/grow/README.md",
    )


def small_networks():
    """Every method with small CNNs on a part of CIFAR-10."""
    words = ("kde:KDE", "f-kde:F-KDE", "forde:FORDE", "hyper", ELEVEN)
    found = [(SMALL.arm(word), SMALL.change("nll", word)) for word in words]
    yield Finding(
        "Does repulsion, or a baseline, lower the NLL of a small CNN?",
        Setting("2,000 images of CIFAR-10 at 8 x 8 pixels",
                "five small CNNs, strengths chosen on validation images", found[0][1].seeds,
                "cifar10-small"),
        "NLL: " + ", ".join(f"{name} {interval(each)}" for name, each in found),
        "hyper: 12 trainings instead of 5; a check of direction, not of the published scale",
        "results/cifar10/small/README.md",
    )  # fmt: skip


def surrogates():
    """Bayesian optimisation."""
    path = "botorch/results.csv"
    cells = []
    for function in ("Branin", "Hartmann6"):
        last = max(int(row["evaluation"]) for row in rows(path) if row["function"] == function)
        where = {"function": function, "evaluation": last}
        found = compared(path, "best", "f-kde", "ensemble", **where)
        cells.append(f"{function} {interval(found)}")
    yield Finding(
        "Does repulsion help Bayesian optimisation?",
        Setting("Branin, Hartmann6", "8 perceptrons, f-kde at uniform points", 5, "botorch"),
        f"best value found, f-kde minus plain: {', '.join(cells)}",
        "1.3 to 1.5 times the time; a Gaussian process is better on both",
        "results/botorch/README.md",
    )


def tables_of_the_field():
    """UCI regression."""
    path = "uci/raw.csv"
    names = "boston concrete energy kin8nm naval power protein wine yacht".split()
    pairs = [
        [by_seed(path, "nll", by="split", problem=name, column=column)
         for column in ("uci", "uci-published")]
        for name in names
    ]  # fmt: skip
    found = [difference(*pair, overlap=OVERLAP) for pair in pairs]
    splits = sorted({each.seeds for each in found}, reverse=True)
    able = [each for each in found if each.seeds >= FEWEST]
    few = ", ".join(n for n, each in zip(names, found, strict=True) if each.seeds < FEWEST)
    yield Finding(
        "Is our default better than the published settings on tables?",
        Setting("nine UCI problems", "five networks, `uci` and `uci-published`",
                f"{', '.join(map(str, splits[:-1]))} or {splits[-1]} splits", "uci"),
        f"NLL is lower on {significant(able, -1)} and higher on {significant(able, 1)} of "
        f"{len(able)} problems (Holm over them, corrected for overlapping splits); {few} has too "
        "few splits",
        "in the study",
        "results/uci/README.md",
    )  # fmt: skip


def metrics_of_outputs():
    """The Jacobian in function space."""
    cells = []
    for problem in ("linear", "regression", "classification", "digits"):
        where = {"problem": problem, "form": "calibrated", "steps": 400}
        pair = [
            by_seed("jacobian/raw.csv", "frechet", rule=rule, **where)
            for rule in ("gauss-newton", "transpose")
        ]
        cells.append((problem, difference(*pair)))
    yield Finding(
        "Does Gauss-Newton bring members closer to the posterior?",
        Setting("four known posteriors", "calibrated f-kde, 20 members", cells[0][1].seeds,
                "jacobian"),
        "Fréchet distance: " + ", ".join(f"{name} {interval(found)}" for name, found in cells),
        "a linear system per step",
        "results/jacobian/README.md",
    )  # fmt: skip


def kernels_of_particles():
    """Particles on densities."""
    pair = [
        by_seed("particles/raw.csv", "mmd", part=part, problem="gaussian", method=method)
        for part, method in (("kernels", "kde+laplace"), ("densities", "kde"))
    ]
    found = difference(*pair)
    yield Finding(
        "Is the Laplace kernel better than the RBF kernel?",
        Setting("Gaussian in the plane", "kde, 100 particles", found.seeds, "particles"),
        f"MMD {interval(found)}",
        "none",
        "results/particles/README.md",
    )


def _away(values, first, second, problems):
    """The difference of two arms on some problems, paired by problem and split or seed."""
    return difference(
        *(
            {key: v for key, v in values[arm].items() if key[0] in problems}
            for arm in (first, second)
        )
    )


def draws_of_small_networks():
    """Draws beside as many seconds of plain members, on tables and digits."""
    uci, digits = (scores(RESULTS / "draws" / name) for name in ("uci.csv", "digits.csv"))
    small = _away(uci, "draws", "more members", SMALL_UCI)
    start = _away(uci, "repelled draws", "draws", SMALL_UCI)
    yield Finding(
        "Do draws predict better than as many seconds of plain members?",
        Setting("five UCI problems", "draws by mclmc of five networks", "3 splits", "draws-uci"),
        f"NLL {interval(small)}; repelled members as starts change it by {interval(start)}",
        "none: equal seconds; predictions take as long as those of 5,000 networks",
        "results/draws/corners.md",
    )
    cells = [
        f"{network}, {sampler} {interval(_away(digits, sampler, 'more members', (network,)))}"
        for network, sampler in (
            ("perceptron", "mclmc"), ("perceptron", "sghmc"), ("convolutions", "sghmc")
        )
    ]  # fmt: skip
    seeds = {key[1] for key in digits["sghmc"]}
    yield Finding(
        "The same on images?",
        Setting("digits", "draws of five perceptrons or small CNNs", len(seeds), "draws-digits"),
        f"NLL: {'; '.join(cells)}",
        "none: equal seconds",
        "results/draws/digits.md",
    )


def draws_of_a_residual_network():
    """Draws of a residual network beside as many seconds of plain members."""
    values, cells = draws_large.by_network(rows("draws/large.csv")), []
    for part, model in (("whole", "draws"), ("whole", "swag"), ("last blocks", "draws")):
        mine = {key[3]: row for key, row in values.items() if key[:2] == (part, model)}
        beside = {seed: draws_large.as_long(row, values) for seed, row in mine.items()}
        nll = ({seed: float(r["nll"]) for seed, r in each.items()} for each in (mine, beside))
        cells.append(f"{model}, {part} {interval(difference(*nll))}")
    yield Finding(
        "The same for a residual network?",
        Setting("Fashion-MNIST, 8,000 images", "draws of four networks of 14 layers", len(mine),
                "draws-large"),
        f"NLL: {'; '.join(cells)}",
        "none: equal seconds",
        "results/draws/large.md",
    )  # fmt: skip


def draws_of_known_posteriors():
    """Draws beside as many seconds of plain members, on known posteriors."""
    near = posteriors()["frechet"]
    cells = [
        f"{problem} {interval(_away(near, 'ensemble + hmc', 'more ensemble', (problem,)))}"
        for problem in PROBLEMS
    ]
    seeds = {key[1] for key in near["ensemble + hmc"]}
    yield Finding(
        "Are draws nearer to the posterior than as many seconds of plain members?",
        Setting("four known posteriors", "draws by hmc of 20 members", len(seeds),
                "draws-posteriors"),
        f"Fréchet distance of predictions: {', '.join(cells)}",
        "none: equal seconds",
        "results/draws/corners.md",
    )  # fmt: skip


def _there(part):
    """The findings of a part; none if its raw file is missing."""
    try:
        yield from part()
    except (KeyError, FileNotFoundError):
        return


def more_findings():
    """All of them; a study that has no raw file yet has no line."""
    for part in (repeated, axes, residual_networks, landscape, small, surrogates):
        yield from part()
    for part in (
        small_networks, tables_of_the_field, metrics_of_outputs, kernels_of_particles,
        draws_of_small_networks, draws_of_a_residual_network, draws_of_known_posteriors,
    ):  # fmt: skip
        yield from _there(part)

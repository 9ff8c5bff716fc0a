"""Claims about the loss landscape (Fort et al., 2019) and empirical Bayes (2025)."""

import json
from functools import partial

from studies.guide.claims import Claim, Margin, fact, higher, lower, same
from studies.guide.evidence import PERCENT, RESULTS, by_seed, rows
from studies.guide.findings import PRETRAINED

FORT = "Fort et al. (2019)"
BAYES = "Loaiza-Ganem et al. (2025)"
SEEDS, EVIDENCE = "landscape/seeds/raw.csv", "evidence/raw.csv"
MAXIMUM = "prior/point masses at the maximum, last layer/log evidence"
KNOWN = ("digits", "mnist", "heads", "uci-concrete", "uci-energy", "uci-yacht")
WIDER = {
    "Gaussians of the last layer": "Gaussians at the members, last layer",
    "a flow on the last layer": "flow, last layer",
}
"""Words and names of the priors that are not point masses."""
POLISHED = ("heads", "digits")
"""Data sets whose last layers were moved to the maximum, with at least three seeds."""
CIFAR, SMALL = "all of CIFAR-10, five medium CNNs, one seed", "digits, five small CNNs, one seed"
CASES = {
    "cifar10/medium-cnn": "10,000 images of CIFAR-10, five medium CNNs",
    "fashion-mnist/small-cnn": "10,000 images of Fashion-MNIST, five small CNNs",
    "fashion-mnist/mlp": "10,000 images of Fashion-MNIST, five perceptrons",
}
"""Cases of the study over seeds, in words."""
SHIFTS = ("gaussian-noise-3", "motion-blur-3", "fog-3", "jpeg-compression-3")


def once(data):
    """The analyses of one seed."""
    path = RESULTS / "landscape" / data / "parts.json"
    return json.loads(path.read_text(encoding="utf-8"))["parts"]


def equal(data):
    """Diversity at equal accuracy: members, and the best sampler around one member."""
    found = dict(once(data)["diversity"]["at_equal_accuracy"])
    members = found.pop("members")
    best = max((v, k) for k, v in found.items() if v is not None)
    return members, best


def nll(data, split, treatment, modes):
    """NLL of a treatment within modes."""
    return once(data)["averaging"]["parts"][split][treatment]["nll"][modes - 1]


def seen(case, analysis, treatment, metric, split="test"):
    """Values by seed of the study over seeds."""
    where = {"case": case, "analysis": analysis, "treatment": treatment, "split": split}
    return by_seed(SEEDS, metric, **where)


def listed(case, analysis, metric, wanted):
    """All values by seed of the rows that are `wanted`."""
    found = {}
    for row in rows(SEEDS):
        here = row["case"], row["analysis"], row["metric"]
        if here == (case, analysis, metric) and wanted(row):
            found.setdefault(int(row["seed"]), []).append(float(row["value"]))
    return found


def shifted(case, treatment):
    """Mean NLL over all corruptions, by seed."""

    def corrupted(row):
        return row["treatment"] == treatment and row["split"] != "test"

    found = listed(case, "averaging", "nll", corrupted)
    return {seed: sum(values) / len(values) for seed, values in found.items()}


def gained(case, under):
    """NLL that five members gain over one, by seed; `under` corruption or on test images."""
    one, five = (
        shifted(case, name) if under else seen(case, "averaging", name, "nll")
        for name in ("1 member", "5 member")
    )
    return {seed: one[seed] - five[seed] for seed in one}


def known(metric, data, method="ensemble"):
    """Values by seed of the study on evidence."""
    return by_seed(EVIDENCE, metric, data=data, method=method)


def _diverse(data):
    members, (best, name) = equal(data)
    return fact(f"other members {members:.2f}, best sampler ({name}) {best:.2f}", members > best)


def _trajectory(data):
    found = once(data)["trajectories"]
    between, within = found["between_ends"], found["last_snapshots"]
    words = f"labels that differ: members {between:.1%}, last snapshots {within:.1%}"
    return fact(words, between > within)


def _more_modes(splits):
    first = [nll("cifar10", s, "solution", 1) for s in splits]
    modes = [a - nll("cifar10", s, "solution", 5) for a, s in zip(first, splits, strict=True)]
    average = [a - nll("cifar10", s, "swa", 1) for a, s in zip(first, splits, strict=True)]
    pairs = ", ".join(f"{m:.3f} and {a:.3f}" for m, a in zip(modes, average, strict=True))
    better = all(m > a for m, a in zip(modes, average, strict=True))
    return fact(f"NLL gained by five members and by one average: {pairs}", better)


def _both(data, splits):
    pairs = [(nll(data, s, "swa", 5), nll(data, s, "solution", 5)) for s in splits]
    words = ", ".join(f"{a:.3f} and {b:.3f}" for a, b in pairs)
    return fact(f"NLL of five averages and of five members: {words}", all(a < b for a, b in pairs))


def _tunnel(data):
    path = once(data)["tunnel"]["paths"]["tunnel"]
    words = f"loss within {path['uneven']:.1%} (enforced), labels differ by {path['apart']:.1%}"
    return fact(words, path["uneven"] < 0.02 and path["apart"] > 0.02)


def _within(data):
    one, swag = nll(data, "test", "solution", 1), nll(data, "test", "swag x 10", 1)
    return fact(f"NLL of one member {one:.3f}, of SWAG around it {swag:.3f}", swag < one)


LANDSCAPE = [
    Claim(
        "Random starts are more diverse at equal accuracy than samples around one solution.",
        FORT,
        CIFAR,
        lambda: [_diverse("cifar10")],
        "landscape/README.md",
    ),
    Claim(
        "The same on another network and data set.",
        FORT,
        SMALL,
        lambda: [_diverse("digits")],
        "landscape/README.md",
    ),
    Claim(
        "Functions along one trajectory are more similar than those of two trajectories.",
        FORT,
        CIFAR,
        lambda: [_trajectory("cifar10")],
        "landscape/README.md",
    ),
    Claim(
        "The same on another network and data set.",
        FORT,
        SMALL,
        lambda: [_trajectory("digits")],
        "landscape/README.md",
    ),
    Claim(
        "Identical loss does not mean identical functions: a low-loss tunnel.",
        FORT,
        "CIFAR-10 and digits, one seed each",
        lambda: [_tunnel("cifar10"), _tunnel("digits")],
        "landscape/README.md",
    ),
    Claim(
        "The straight line between two members has a loss barrier.",
        FORT,
        "CIFAR-10 and digits, one seed each",
        lambda: [
            fact(f"{data}: {_barrier(data):.2f} nats", _barrier(data) > 0.1)
            for data in ("cifar10", "digits")
        ],
        "landscape/README.md",
    ),
    Claim(
        "Ensembling helps more than weight averaging.",
        FORT,
        CIFAR,
        lambda: [_more_modes(("test",))],
        "landscape/README.md",
    ),
    Claim(
        "Ensembling helps more than weight averaging under dataset shift.",
        FORT,
        f"{CIFAR}, four corruptions",
        lambda: [_more_modes(SHIFTS)],
        "landscape/README.md",
    ),
    Claim(
        "Ensembles of weight averages are the best of both worlds.",
        FORT,
        CIFAR,
        lambda: [_both("cifar10", ("test", *SHIFTS))],
        "landscape/README.md",
    ),
    Claim(
        "The same on another network and data set.",
        FORT,
        SMALL,
        lambda: [_both("digits", ("test", "rotated-30"))],
        "landscape/README.md",
    ),
    Claim(
        "Subspace methods average uncertainty within a mode.",
        FORT,
        CIFAR,
        lambda: [_within("cifar10")],
        "landscape/README.md",
    ),
]


def _more_diverse(case):
    """Members against the sampler that is most diverse in each seed."""
    found = listed(case, "diversity", "equal", lambda row: row["treatment"] != "members")
    best = {seed: max(values) for seed, values in found.items()}
    members = seen(case, "diversity", "members", "equal")
    return [higher("disagreement / error rate, members minus the best sampler", members, best)]


def _two_members(case):
    ends = seen(case, "trajectories", "two members", "apart")
    return [
        higher(f"other labels, two members minus {name}",
               ends, seen(case, "trajectories", name, "apart"), **PERCENT)
        for name in ("last two snapshots", "snapshots of the second half")
    ]  # fmt: skip


def _nll(first, second):
    """The first treatment has a lower NLL than the second, on test and on corrupted images."""
    return lambda case: [
        lower("NLL", *(seen(case, "averaging", name, "nll") for name in (first, second))),
        lower("corrupted NLL", *(shifted(case, name) for name in (first, second))),
    ]


def _more_than_field(case):
    pair = (seen(case, "diversity", name, "full") for name in ("members", "mean-field"))
    return [higher("disagreement / error rate", *pair)]


def _variance(case):
    """What averaging removes from the Brier score."""
    return [
        higher(f"variance, members minus {name}",
               *(seen(case, "bias-variance", each, "variance") for each in ("members", name)))
        for name in ("SWAG", "mean-field")
    ]  # fmt: skip


def _straight(case):
    return [higher("nats", seen(case, "line", "straight", "barrier", "train"), 0.0)]


def _under_shift(case):
    return [higher("gain in NLL", gained(case, under=True), gained(case, under=False))]


OVER_SEEDS = [
    Claim(words, FORT, CASES[case], partial(found, case), "landscape/seeds/README.md")
    for words, found in (
        ("Random starts are more diverse than samples around one solution.", _more_diverse),
        ("Snapshots of one trajectory are more similar than two members.", _two_members),
        ("The straight line between two members has a loss barrier.", _straight),
        ("Ensembling helps more than weight averaging.", _nll("5 member", "1 average")),
        ("Ensembling helps more than SWAG around one member.", _nll("5 member", "1 SWAG")),
        ("Weight averages in every mode are better than members.", _nll("5 average", "5 member")),
        ("The gain of ensembling is larger under dataset shift.", _under_shift),
        ("Members have more variance to average than samples of one mode.", _variance),
        ("Members are more diverse than a mean-field posterior.", _more_than_field),
        ("Deep ensembles are better than mean-field inference.", _nll("5 member", "mean-field")),
    )
    for case in CASES
]


def _barrier(data):
    return once(data)["line"]["paths"]["straight"]["barrier"]


def _single(metric, images):
    return tuple(
        by_seed(PRETRAINED, metric, method=f"fine-tuned-{k}", images=images) for k in (5, 1)
    )


EMPIRICAL = [
    Claim(
        "Bayesian averaging over members is better than a single MAP estimate.",
        BAYES,
        "EfficientNet-lite0 on CIFAR-10, five fine-tuned members and one",
        lambda: [
            lower(f"corrupted NLL, {words} images", *_single("corrupted_nll", images))
            for images, words in ((1000, "1,000"), (0, "16,000"))
        ],
        "pretrained/README.md",
    ),
    Claim(
        "Point masses have a higher evidence than wider priors, if they are at the maximum.",
        BAYES,
        "plain ensembles of heads on features and of digits, last layers at the maximum",
        lambda: [
            higher(
                f"log evidence, point masses minus {words}, {name}",
                by_seed("evidence/maximum.csv", MAXIMUM, data=name),
                known(f"prior/{prior}/log evidence", name),
                digits=2,
            )
            for words, prior in WIDER.items()
            for name in POLISHED
        ],
        "evidence/README.md",
        missing="evidence of every prior, with seeds",
    ),
    Claim(
        "Averaging with equal weights is exact Bayesian averaging.",
        BAYES,
        "plain ensembles: digits, MNIST, heads on features, three UCI problems",
        lambda: [
            same(
                f"total variation of the two predictions, {name}",
                known("weights/posterior/total variation", name),
                0.0,
                Margin(0.001, "a thousandth of the probability"),
                digits=4,
            )
            for name in KNOWN
        ],
        "evidence/README.md",
        missing="weights by evidence, with seeds",
    ),
    Claim(
        "Diversity of the members correlates with predictive performance.",
        BAYES,
        "subsets of members of plain ensembles",
        lambda: [
            lower(
                f"rank correlation with NLL, {name}",
                known("subsets/correlation", name),
                0.0,
                digits=2,
            )
            for name in KNOWN
        ],
        "evidence/README.md",
        missing="correlation over subsets, with seeds",
    ),
]

GROUPS = {
    "The loss landscape: one seed, all images": LANDSCAPE,
    "The loss landscape over seeds": OVER_SEEDS,
    "Empirical Bayes": EMPIRICAL,
}

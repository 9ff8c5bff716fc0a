"""From numbers to sentences. Numbers that differ by less than their noise are called equal."""

import math
from collections.abc import Mapping

from shoal.core.text import joined, number, percent
from shoal.page.verdicts import Calibration, Coverage, Repulsion, Verdict
from shoal.page.verdicts import calibration as calibration_of
from shoal.page.verdicts import coverage as coverage_of
from shoal.page.verdicts import repulsion as repulsion_of
from shoal.page.verdicts import verdict as verdict_of
from shoal.prediction.statistics import Difference

__all__ = [
    "accuracy_sentence",
    "calibration_sentence",
    "comparison_sentence",
    "coverage_sentence",
    "doubt_sentence",
    "error_sentence",
    "halves_sentence",
    "members_sentence",
    "recognition_sentence",
    "repulsion_sentence",
    "shift_sentence",
]


def accuracy_sentence(accuracy: float, error: float, count: int, inputs: str = "inputs") -> str:
    """How often it is right, with the noise of that number.

    >>> accuracy_sentence(0.978, 0.0066, 500, "images")
    'Right on 97.8 % of 500 test images, give or take 0.7 %.'
    """
    noise = f", give or take {percent(error)}" if math.isfinite(error) and error > 0 else ""
    return f"Right on {percent(accuracy, error)} of {count:,} test {inputs}{noise}."


def error_sentence(rmse: float, spread: float, count: int) -> str:
    """How far off a predicted number is, beside how far the targets themselves spread.

    >>> error_sentence(0.5, 2.0, 100)
    'Off by 0.5 on average (root mean square over 100 test inputs), where the targets spread by 2.'
    """
    text = f"Off by {rmse:.3g} on average (root mean square over {count:,} test inputs)"
    return f"{text}, where the targets spread by {spread:.3g}." if spread > 0 else f"{text}."


def calibration_sentence(
    says: float, right: float, noise: float, near: tuple[float, float] | None = None
) -> str:
    """Whether its confidence can be taken at its word.

    Args:
        says: mean confidence.
        right: accuracy.
        noise: standard error of the difference.
        near: confidence and accuracy among the answers that are about 90 % sure, when they are
            enough to tell.

    >>> calibration_sentence(0.97, 0.975, 0.006)
    'It says 97 % on average and is right 97.5 % of the time: equal within noise.'
    """
    text = f"It says {percent(says)} on average and is right {percent(right)} of the time"
    if near is not None:
        text = (
            f"When it says {percent(near[0])}, it is right {percent(near[1])} of the time. {text}"
        )
    found = calibration_of(says, right, noise)
    if found is Calibration.CALIBRATED:
        return f"{text}: equal within noise."
    points = percent(abs(says - right)).removesuffix(" %")
    return f"{text}: {found} by {points} points."


def coverage_sentence(level: float, found: float, count: int) -> str:
    """Whether its intervals hold what they should.

    >>> coverage_sentence(0.9, 0.91, 200)
    'Its 90 % intervals hold 91 % of the targets: equal within noise.'
    """
    text = f"Its {percent(level)} intervals hold {percent(found)} of the targets"
    held = coverage_of(level, found, count)
    return f"{text}: {'equal within noise' if held is Coverage.HELD else held}."


def recognition_sentence(name: str, share: float, auroc: float) -> str:
    """How much of the foreign data it recognises.

    >>> recognition_sentence("letters", 0.96, 0.991)
    'It recognises 96 % of letters as unknown while doubting 5 % of the test data (AUROC 0.991).'
    """
    return (
        f"It recognises {percent(share)} of {name} as unknown while doubting 5 % of the test data "
        f"(AUROC {auroc:.3f})."
    )


def doubt_sentence(ratios: Mapping[str, float]) -> str:
    """How its entropy on foreign data compares with that on the test.

    >>> doubt_sentence({"letters": 4.0, "noise": 0.6})
    'Its entropy is 4 times that of the test on letters but only 0.6 times on noise.'
    """
    known = {name: value for name, value in ratios.items() if not math.isnan(value)}
    more = [f"{value:.2g} times {{}} on {name}" for name, value in known.items() if value >= 1]
    less = [f"only {value:.2g} times {{}} on {name}" for name, value in known.items() if value < 1]
    text = " but ".join(joined(part) for part in (more, less) if part)
    if not text:
        return "There are no foreign data here to compare with the test."
    text = text.replace("{}", "that of the test", 1).replace(" {}", "")
    return f"Its entropy is {text}."


def halves_sentence(sure: float, unsure: float) -> str:
    """Whether errors are larger where it is unsure: root mean squares over the two halves.

    >>> halves_sentence(0.2, 0.6)
    'Where it is less sure than usual, its errors are 3 times as large as elsewhere.'
    """
    if not sure > 0 or not math.isfinite(unsure):
        return "Its uncertainty should grow where it has seen no data."
    times = f"{unsure / sure:.2g}"
    compare = (
        "no larger than elsewhere" if unsure <= sure else f"{times} times as large as elsewhere"
    )
    return f"Where it is less sure than usual, its errors are {compare}."


def members_sentence(members: int, effective: float, foreign: Mapping[str, float]) -> str:
    """How many different functions the members amount to, here and on foreign data.

    >>> members_sentence(10, 6.4, {})
    'Its 10 members behave like 6.4 different functions on the test data.'
    """
    if members == 1:
        return "It has a single member, so it cannot disagree with itself."
    here = f"Its {members} members behave like {_few(effective)} on the test data"
    there = [f"{_few(value)} on {name}" for name, value in foreign.items()]
    return f"{here} and like {joined(there)}." if there else f"{here}."


def _few(effective: float) -> str:
    text = f"{effective:.2g}" if effective < 10 else f"{effective:.0f}"
    return "one function" if text == "1" else f"{text} different functions"


def repulsion_sentence(method: str, ratio: float) -> str:
    """What part repulsion played.

    Args:
        method: name of the method.
        ratio: length of the push over that of the drive.

    >>> repulsion_sentence("kde", 0.0002)
    'Repulsion was 0.02 % of the force, so this is a plain ensemble in effect.'
    """
    found = repulsion_of(method.split(" ")[0] == "ensemble", ratio)
    share = percent(ratio / (1 + ratio))
    return {
        Repulsion.NONE: "Members were trained independently, without repulsion.",
        Repulsion.UNKNOWN: "How strong repulsion was is not on record.",
        Repulsion.NEGLIGIBLE: f"Repulsion was {share} of the force, so this is a plain ensemble in "
        f"effect.",
        Repulsion.LIGHT: f"Repulsion was {share} of the force: a light touch, so expect little "
        f"difference from a plain ensemble.",
        Repulsion.ACTIVE: f"Repulsion was {share} of the force: enough to keep members apart.",
    }[found]


def comparison_sentence(
    metric: str, better: str, differences: Mapping[str, Difference], baseline: str, seeds: int
) -> str:
    """Which methods differ from the baseline by more than the noise.

    >>> equal = Difference(0.0, -0.1, 0.1)
    >>> comparison_sentence("NLL", "lower", {"kde": equal, "sge": equal}, "the plain ensemble", 3)
    'In NLL, kde and sge equal the plain ensemble within noise (3 seeds).'
    """
    verdicts = {label: verdict_of(difference, better) for label, difference in differences.items()}
    equal = [label for label, found in verdicts.items() if found is Verdict.EQUAL]
    parts = []
    if equal:
        verb = "equals" if len(equal) == 1 else "equal"
        parts.append(f"{joined(equal)} {verb} {baseline} within noise")
    for word in (Verdict.BETTER, Verdict.WORSE, Verdict.DIFFERENT):
        found = {name: differences[name] for name, given in verdicts.items() if given is word}
        told = [f"{name} (by {_size(found[name])})" for name in found]
        if told:
            than = "" if parts else f" than {baseline}"
            parts.append(f"{word}{than} {'is' if len(told) == 1 else 'are'} {joined(told)}")
    if not parts:
        return f"One seed does not tell whether methods differ in {metric}."
    return f"In {metric}, {'; '.join(parts)} ({seeds} seeds)."


def _size(difference: Difference) -> str:
    return number(abs(difference.difference), _width(difference))


def _width(difference: Difference) -> float:
    return (difference.high - difference.low) / 4


def shift_sentence(name: str, accuracy: float, confidence: float, noise: float) -> str:
    """What happens when the data move.

    >>> shift_sentence("rotated-60", 0.41, 0.62, 0.02)
    'Under rotated-60 it is right 41 % of the time and says 62 %: overconfident.'
    """
    right, says = percent(accuracy), percent(confidence)
    text = f"Under {name} it is right {right} of the time and says {says}"
    found = calibration_of(confidence, accuracy, noise)
    still = "still calibrated within noise"
    return f"{text}: {still if found is Calibration.CALIBRATED else found}."

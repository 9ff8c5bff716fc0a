"""Claims of the papers as differences between arms, with a verdict by rule.

A claim is confirmed if its difference has the claimed sign and a p value below 0.05 after Holm's
correction over all claims. It is refuted if the difference has the other sign at that level.
Otherwise these seeds cannot tell.
"""

from typing import NamedTuple

from tables import Row, compared

from shoal.core.text import markdown_table
from shoal.prediction.statistics import holm, paired_difference, paired_p_value

__all__ = ["CLAIMS", "Claim", "table", "verdict"]


class Claim(NamedTuple):
    """The first arm minus the second has the sign, in this metric."""

    source: str
    words: str
    first: str
    second: str
    metric: str
    sign: int


FORDE, RDE, OURS = "Trinh et al. 2024", "D'Angelo & Fortuin 2021", "our question"
CORRUPTED = "corrupted_accuracy"
CLAIMS = (
    Claim(
        FORDE,
        "FoRDE is more accurate under corruption, strength 1",
        "forde",
        "ensemble",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE,
        "FoRDE is more accurate under corruption, strength 16",
        "forde:16",
        "ensemble",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE,
        "FoRDE has a lower corrupted ECE, strength 1",
        "forde",
        "ensemble",
        "corrupted_ece",
        -1,
    ),
    Claim(
        FORDE,
        "FoRDE has a lower corrupted ECE, strength 16",
        "forde:16",
        "ensemble",
        "corrupted_ece",
        -1,
    ),
    Claim(
        FORDE, "FoRDE loses no clean accuracy, strength 16", "forde:16", "ensemble", "accuracy", 1
    ),
    Claim(
        FORDE,
        "components are more robust than pixels",
        "forde:16",
        "forde-identity:16",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE, "pixels are better on clean images", "forde-identity:16", "forde:16", "accuracy", 1
    ),
    Claim(
        FORDE,
        "tuned scales are better than components on clean images",
        "forde-tuned:16",
        "forde:16",
        "accuracy",
        1,
    ),
    Claim(
        FORDE,
        "tuned scales are more robust than pixels",
        "forde-tuned:16",
        "forde-identity:16",
        CORRUPTED,
        1,
    ),
    Claim(FORDE, "FoRDE is more robust than LIT", "forde:16", "lit:128", CORRUPTED, 1),
    Claim(
        FORDE,
        "FoRDE is more robust than SWAG in every mode",
        "forde:16",
        "ensemble+swag",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE,
        "FoRDE is more robust than the EmpCov prior",
        "forde:16",
        "ensemble+empcov",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE, "FoRDE is more robust than repelled weights", "forde:16", "kde:1000", CORRUPTED, 1
    ),
    Claim(
        FORDE, "FoRDE is more robust than repelled outputs", "forde:16", "f-kde:30", CORRUPTED, 1
    ),
    Claim(
        FORDE,
        "input gradients differ more than in a plain ensemble",
        "forde:16",
        "ensemble+swag",
        "gradient_cosine",
        -1,
    ),
    Claim(
        FORDE, "class-activation maps of 8 x 8 differ more", "forde:16", "ensemble+swag", "cam_8", 1
    ),
    Claim(
        FORDE,
        "class-activation maps of 16 x 16 differ more",
        "forde:16",
        "ensemble+swag",
        "cam_16",
        1,
    ),
    Claim(
        OURS,
        "at equal cost FoRDE is more robust than eleven plain members",
        "forde:16",
        "ensemble+members=11",
        CORRUPTED,
        1,
    ),
    Claim(
        OURS, "at equal cost FoRDE has a lower NLL", "forde:16", "ensemble+members=11", "nll", -1
    ),
    Claim(RDE, "repelled weights beat repelled outputs, strength 1", "kde", "f-kde", "nll", -1),
    Claim(
        RDE,
        "repelled weights beat repelled outputs, strengths 1,000 and 30",
        "kde:1000",
        "f-kde:30",
        "nll",
        -1,
    ),
    Claim(
        RDE, "the Laplace kernel beats the RBF kernel", "kde+laplace:1000", "kde:1000", "nll", -1
    ),
    Claim(
        RDE,
        "adversarial training raises accuracy",
        "ensemble+adversarial",
        "ensemble",
        "accuracy",
        1,
    ),
    Claim(RDE, "annealing lowers NLL", "kde+hyperbolic:1000", "kde:1000", "nll", -1),
    Claim(OURS, "repelled weights at strength 1,000 lower NLL", "kde:1000", "ensemble", "nll", -1),
    Claim(
        OURS,
        "five repelled members have a lower NLL than eleven plain members",
        "kde:1000",
        "ensemble+members=11",
        "nll",
        -1,
    ),
)
"""`ensemble+swag` has the members of the plain ensemble, and recorded their gradients and maps."""


def verdict(change: float, sign: int, p: float) -> str:
    """
    >>> verdict(0.3, 1, 0.01), verdict(0.3, -1, 0.01), verdict(0.3, 1, 0.2)
    ('confirmed', 'refuted', 'cannot be told')
    """
    if p >= 0.05:
        return "cannot be told"
    return "confirmed" if change * sign > 0 else "refuted"


def table(rows: list[Row]) -> str:
    """One line per claim that has at least two seeds."""
    found = [(claim, compared(rows, claim.first, claim.second, claim.metric)) for claim in CLAIMS]
    known = [(claim, both) for claim, both in found if len(both[0]) > 1]
    adjusted = holm([paired_p_value(*both) for _, both in known])
    lines = []
    for (claim, both), p in zip(known, adjusted, strict=True):
        change = paired_difference(*both)
        scale, digits = (100, 2) if claim.metric.endswith("accuracy") else (1, 3)
        mean, low, high = (f"{scale * value:+.{digits}f}" for value in change)
        measured = f"{claim.metric.replace('_', ' ')} {mean} ({low} to {high})"
        arms = f"`{claim.first}` - `{claim.second}`"
        what = verdict(change.difference, claim.sign, p)
        lines.append([claim.words, claim.source, arms, measured, str(len(both[0])), what])
    titles = ["claim", "source", "arms", "measured, with 95 % interval", "seeds", "verdict"]
    missing = [claim.words for claim, both in found if len(both[0]) < 2]
    note = f"\n\nNot measured: {'; '.join(missing)}." if missing else ""
    return markdown_table(titles, lines).strip() + note

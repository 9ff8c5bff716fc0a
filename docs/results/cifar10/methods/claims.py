"""Claims of the papers as differences between arms, with a verdict by rule.

A claim is confirmed if its difference has the claimed sign and a p value below 0.05 after Holm's
correction over all claims. It is refuted if the difference has the other sign at that level.
Otherwise these seeds cannot tell.
"""

from typing import NamedTuple

from arms import SIZES, named
from tables import Row, compared, maps

from shoal.core.text import markdown_table
from shoal.prediction.statistics import holm, paired_difference, paired_p_value, verdict

__all__ = ["CLAIMS", "Claim", "table"]


class Claim(NamedTuple):
    """The first arm minus the second has the sign, in this metric."""

    source: str
    words: str
    first: str
    second: str
    metric: str
    sign: int


FORDE, RDE, OURS = "Trinh et al. 2024", "D'Angelo & Fortuin 2021", "our question"
HYPER = "Wenzel et al. 2020"
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
        "FoRDE is more accurate under corruption, larger strength",
        "forde:FORDE",
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
        "FoRDE has a lower corrupted ECE, larger strength",
        "forde:FORDE",
        "ensemble",
        "corrupted_ece",
        -1,
    ),
    Claim(
        FORDE,
        "FoRDE loses no clean accuracy, larger strength",
        "forde:FORDE",
        "ensemble",
        "accuracy",
        1,
    ),
    Claim(
        FORDE,
        "components are more robust than pixels",
        "forde:FORDE",
        "forde-identity:FORDE",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE,
        "pixels are better on clean images",
        "forde-identity:FORDE",
        "forde:FORDE",
        "accuracy",
        1,
    ),
    Claim(
        FORDE,
        "tuned scales are better than components on clean images",
        "forde-tuned:FORDE",
        "forde:FORDE",
        "accuracy",
        1,
    ),
    Claim(
        FORDE,
        "tuned scales are more robust than pixels",
        "forde-tuned:FORDE",
        "forde-identity:FORDE",
        CORRUPTED,
        1,
    ),
    Claim(FORDE, "FoRDE is more robust than LIT", "forde:FORDE", "lit:LIT", CORRUPTED, 1),
    Claim(
        FORDE,
        "FoRDE is more robust than SWAG in every mode",
        "forde:FORDE",
        "ensemble+swag",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE,
        "FoRDE is more robust than the EmpCov prior",
        "forde:FORDE",
        "ensemble+empcov",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE, "FoRDE is more robust than repelled weights", "forde:FORDE", "kde:KDE", CORRUPTED, 1
    ),
    Claim(
        FORDE,
        "FoRDE is more robust than repelled outputs",
        "forde:FORDE",
        "f-kde:F-KDE",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE,
        "input gradients differ more than in a plain ensemble",
        "forde:FORDE",
        "ensemble+swag",
        "gradient_cosine",
        -1,
    ),
    Claim(
        FORDE,
        "class-activation maps of the last size differ more",
        "forde:FORDE",
        "ensemble+swag",
        "cam:-1",
        1,
    ),
    Claim(
        FORDE,
        "class-activation maps of the size before differ more",
        "forde:FORDE",
        "ensemble+swag",
        "cam:-2",
        1,
    ),
    Claim(
        OURS,
        "at equal cost FoRDE is more robust than eleven plain members",
        "forde:FORDE",
        "ensemble+members=11",
        CORRUPTED,
        1,
    ),
    Claim(
        OURS, "at equal cost FoRDE has a lower NLL", "forde:FORDE", "ensemble+members=11", "nll", -1
    ),
    Claim(RDE, "repelled weights beat repelled outputs, strength 1", "kde", "f-kde", "nll", -1),
    Claim(
        RDE,
        "repelled weights beat repelled outputs, larger strengths",
        "kde:KDE",
        "f-kde:F-KDE",
        "nll",
        -1,
    ),
    Claim(RDE, "the Laplace kernel beats the RBF kernel", "kde+laplace:KDE", "kde:KDE", "nll", -1),
    Claim(
        RDE,
        "adversarial training raises accuracy",
        "ensemble+adversarial",
        "ensemble",
        "accuracy",
        1,
    ),
    Claim(
        RDE,
        "the linear kernel is no substitute for the RBF kernel",
        "kde+linear-kernel:KDE",
        "kde:KDE",
        "nll",
        1,
    ),
    Claim(RDE, "annealing lowers NLL", "kde+hyperbolic:KDE", "kde:KDE", "nll", -1),
    Claim(
        OURS, "repelled weights at a larger strength lower NLL", "kde:KDE", "ensemble", "nll", -1
    ),
    Claim(
        OURS,
        "five repelled members have a lower NLL than eleven plain members",
        "kde:KDE",
        "ensemble+members=11",
        "nll",
        -1,
    ),
    Claim(
        HYPER,
        "hyper-deep ensembles have a lower NLL than plain ensembles",
        "hyper",
        "ensemble",
        "nll",
        -1,
    ),
    Claim(
        HYPER,
        "hyper-deep ensembles are more accurate than plain ensembles",
        "hyper",
        "ensemble",
        "accuracy",
        1,
    ),
    Claim(
        OURS,
        "repelled weights have a lower NLL than a hyper-deep ensemble",
        "kde:KDE",
        "hyper",
        "nll",
        -1,
    ),
    Claim(
        OURS,
        "FoRDE is more robust than a hyper-deep ensemble",
        "forde:FORDE",
        "hyper",
        CORRUPTED,
        1,
    ),
    Claim(
        FORDE,
        "FoRDE is more robust than private nodes with shared weights",
        "forde:FORDE",
        "ensemble+nodes",
        CORRUPTED,
        1,
    ),
    Claim(
        OURS,
        "batches of their own lower the NLL of plain members",
        "ensemble+own-batches",
        "ensemble",
        "nll",
        -1,
    ),
    *(
        Claim(
            OURS,
            f"FoRDE is more robust than a plain ensemble, {size} members",
            *pair,
            CORRUPTED,
            1,
        )
        for size, pair in SIZES.items()
    ),
)
"""`ensemble+swag` has the members of the plain ensemble, and recorded their gradients and maps."""


def resolved(rows: list[Row], strengths: dict[str, float]) -> list[Claim]:
    """The claims with numbers as strengths, and with the sizes of this network's maps."""
    sizes, found = maps(rows), []
    for claim in CLAIMS:
        kind, _, place = claim.metric.partition(":")
        metric = sizes[int(place)] if place and len(sizes) >= -int(place) else kind
        ends = [named(word, strengths) for word in (claim.first, claim.second)]
        found.append(claim._replace(first=ends[0], second=ends[1], metric=metric))
    return found


def table(rows: list[Row], strengths: dict[str, float]) -> str:
    """One line per claim that has at least two seeds."""
    claims = resolved(rows, strengths)
    found = [(claim, compared(rows, claim.first, claim.second, claim.metric)) for claim in claims]
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

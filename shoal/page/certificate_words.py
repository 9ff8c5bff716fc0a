"""Sentences, table and figure of a run's certificate."""

from typing import Any

from shoal import plots
from shoal.analysis.fidelity.certificate import LAPLACE, RUN, Certificate
from shoal.analysis.fidelity.reference import LIMIT
from shoal.analysis.fidelity.study import ALWAYS
from shoal.core.display.text import number, table

__all__ = ["COLUMNS", "certificate_figure", "certificate_sentences", "certificate_text", "shown"]

COLUMNS = {
    "frechet/on": "Fréchet, test",
    "tv/on": "total variation, test",
    "frechet/off": "Fréchet, OOD",
    "tv/off": "total variation, OOD",
    "weights/sliced": "weights, sliced W2",
}
"""Distances of the table and the figure, with their titles."""


def certificate_sentences(found: Certificate) -> list[str]:
    """What was sampled, whether to trust it, and how close the run is."""
    return [_sampled(found), _quality(found), _closeness(found), *_caveats(found)]


def _sampled(found: Certificate) -> str:
    weights = found.outputs * (found.features + 1)
    trunk = "the trunk of all members" if found.shared_trunk else "the trunk of member 0"
    return (
        f"The posterior is that of the last layer '{found.layer}' ({weights:,} weights) given "
        f"{trunk}, on {found.points:,} training points."
    )


def _quality(found: Certificate) -> str:
    facts = found.reference
    if "rhat" not in facts:
        return "The posterior is known in closed form."
    text = (
        f"{facts['method']}: {facts['chains']} chains of {facts['draws']:,} draws, largest R-hat "
        f"{facts['rhat']:.3f}, at least {facts['effective']:,.0f} effective draws, "
        f"{facts['divergences']} divergences."
    )
    if found.converged:
        return text
    return f"{text} The chains disagree (R-hat must be below {LIMIT}); use more draws."


def _closeness(found: Certificate) -> str:
    rows = {label: row["frechet/on"] for label, row in found.distances.items()}
    others = {label: v for label, v in rows.items() if label not in (RUN, ALWAYS, LAPLACE)}
    text = (
        f"The Fréchet distance of this run on test inputs is {number(rows[RUN], 0.005)} posterior "
        f"standard deviations. {found.members} exact draws have {number(rows[ALWAYS], 0.005)}, and "
        f"Laplace has {number(rows[LAPLACE], 0.005)}."
    )
    if not others:
        return text
    best = min(others, key=lambda label: others[label])
    return f"{text} The closest trained method is {best} ({number(others[best], 0.005)})."


def _caveats(found: Certificate) -> list[str]:
    notes = []
    if not found.shared_trunk:
        notes.append(
            "Members of this run have trunks of their own, so their distance also counts how "
            "trunks differ."
        )
    if found.points < found.all_points:
        notes.append(
            f"The posterior uses {found.points:,} of {found.all_points:,} training points, and "
            f"this run used all: its own row is not comparable, the other rows are."
        )
    return notes


def shown(found: Certificate) -> list[str]:
    """Columns that at least one method has."""
    return [name for name in COLUMNS if any(name in row for row in found.distances.values())]


def certificate_text(found: Certificate) -> str:
    """Sentences and the table, closest method first below the run."""
    names = shown(found)
    order = sorted(found.distances, key=lambda m: (m != RUN, found.distances[m]["frechet/on"]))
    rows = [
        [label, *(_cell(found.distances[label].get(name)) for name in names)] for label in order
    ]
    lines = table(rows, ["method", *(COLUMNS[name] for name in names)])
    return "\n\n".join(["\n".join(certificate_sentences(found)), lines])


def _cell(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def certificate_figure(found: Certificate) -> Any:
    """All methods and distances as shades with numbers."""
    names = [n for n in shown(found) if all(n in row for row in found.distances.values())]
    titles = {name: COLUMNS[name].replace(", ", ",\n") for name in names}
    rows = {
        label: {titles[name]: row[name] for name in names} for label, row in found.distances.items()
    }
    return plots.distances(rows, "distance")

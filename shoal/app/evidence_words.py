"""Evidence in sentences, for the command line and the page."""

import math

from shoal.analysis.evidence.whole import Evidence
from shoal.app.outcome import counted
from shoal.app.words import joined, number, percent

__all__ = ["answers", "degenerate", "exact", "tied", "widths"]

COLLAPSED = 1e-3
"""A scale below this, beside weights of usual size, is a point."""


def answers(told: Evidence) -> list[str]:
    """Everything that the numbers say, a sentence each."""
    found = [evidence_sentence(told), tied(told), exact(told), degenerate(told), optimal(told)]
    found += [widths(told)] if told.rungs else []
    found += [f"Left out: {name} ({why})." for name, why in told.missing.items()]
    return found


def evidence_sentence(told: Evidence) -> str:
    """The evidence of equal point masses and the bounds around it."""
    return (
        f"With equal point masses at its members as the prior, the log evidence is "
        f"{told.log_evidence:.2f} nats, between {told.lower:.2f} and {told.upper:.2f}, "
        f"as it must be."
    ).replace("-", "−")


def tied(told: Evidence) -> str:
    """How many members the posterior leaves, and how hot it would have to be for half of them."""
    posterior = told.weightings["posterior"].effective
    if len(told.living) == 1:
        return "A single member has all the weight there is."
    text = (
        f"The members' log likelihoods spread over {told.spread:.3g} nats "
        f"({told.spread / told.points:.2g} a data point), where {told.tolerance:.2g} would be a "
        f"tie: the exact posterior counts {number(posterior, 0.05)} of {len(told.living)} members"
    )
    if told.half_temperature == 0:
        return f"{text}, at least half of them at any temperature."
    return f"{text}; half of them would count at temperature {told.half_temperature:.3g}."


def exact(told: Evidence) -> str:
    """What uniform averaging costs or gains beside the posterior's and the stacked one."""
    uniform, posterior = told.weightings["uniform"], told.weightings["posterior"]
    if math.isnan(uniform.nll):
        return "There are no test data to compare weightings on."
    words = [f"{posterior.nll:.4f} with posterior weights"]
    if "stacking" in told.weightings:
        fitted = told.weightings["stacking"]
        words.append(f"{fitted.nll:.4f} with stacking weights fitted on {told.held_out}")
    return (
        f"On {told.judged} the uniform average has a loss of {uniform.nll:.4f} nats, against "
        f"{joined(words)}; uniform and posterior predictions differ by "
        f"{percent(posterior.total_variation)} of probability."
    )


def degenerate(told: Evidence) -> str:
    """How many members there really are."""
    count = len(told.in_function)
    if count == len(told.living):
        return f"No two members are the same: the ensemble really has {counted(count, 'member')}."
    same = [group for group in told.in_function if len(group) > 1]
    groups = joined([" = ".join(str(i + 1) for i in group) for group in same])
    copies = sum(len(group) - 1 for group in told.in_weights)
    how = f" ({counted(copies, 'copy').replace('copys', 'copies')} in weights)" if copies else ""
    return (
        f"Members {groups} are the same function{how}: the ensemble really has "
        f"{counted(count, 'member')}, not {len(told.living)}."
    )


def optimal(told: Evidence) -> str:
    """How far the members are from the top of their posterior."""
    norms = told.gradient_norms
    return (
        f"Divided by the number of data, the gradient of the log posterior has a length of "
        f"{min(norms):.2g} to {max(norms):.2g} at the members; at a maximum it would be 0."
    )


def widths(told: Evidence) -> str:
    """What the richer priors say: a width, or that points are best."""
    at_members = [rung for rung in told.rungs if rung.centre == "members" and rung.scales]
    widest = max((max(rung.scales.values()) for rung in at_members), default=0.0)
    gap = told.rungs[0].log_evidence - told.rungs[-1].log_evidence
    best = (
        "points are the best prior that Gaussians at the members can be"
        if widest < COLLAPSED
        else f"Gaussians at the members want a width of {widest:.2g}"
    )
    return (
        f"From the most to the least flexible prior the log evidence falls by {gap:.4g} nats, and "
        f"{best}."
    )

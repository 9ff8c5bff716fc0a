"""In what sense is it Bayesian? Weights of the members, their likelihoods, and learned priors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.plots.registry import plot
from shoal.plots.style import COLOURS, INK, blank, legend, tip

__all__ = ["ladder", "likelihoods", "weights"]

_SHADES = {"uniform": INK, "posterior": COLOURS["kde"], "stacking": COLOURS["forde"]}


@plot("weights", cite=("loaizaganem2025deep", "yao2018stacking"))
def weights(found: Mapping[str, Sequence[float]], title: str = "") -> Any:
    """Weight of every member, under each way to weigh them.

    Args:
        found: weights [M] by "uniform", "posterior" and "stacking", as far as there are.
        title: written above.
    """
    figure, axes = blank()
    names = [name for name in _SHADES if name in found and name != "uniform"]
    members = np.arange(1, len(next(iter(found.values()))) + 1)
    width = 0.8 / max(len(names), 1)
    for place, name in enumerate(names):
        across = members + (place - (len(names) - 1) / 2) * width
        bars = axes.bar(across, found[name], 0.9 * width, color=_SHADES[name], label=name)
        for bar, weight in zip(bars, found[name], strict=True):
            tip(bar, f"{name}: {weight:.3g}")
    axes.axhline(1 / len(members), color=INK, linestyle="--", linewidth=1.2, label="uniform")
    axes.set_xticks(members[:: -(-len(members) // 12)])
    axes.set_ylim(0, 1.02)
    axes.grid(visible=False, axis="x")
    axes.set(xlabel="member", ylabel="weight", title=title)
    legend(figure, axes)
    return figure


@plot("likelihoods", cite=("loaizaganem2025deep",))
def likelihoods(log_likelihoods: Sequence[float], evidence: float, title: str = "") -> Any:
    """How far each member's log likelihood is below the best, and where the evidence lies.

    Args:
        log_likelihoods: of the members [M], in nats for all data.
        evidence: log of the marginal likelihood of equal point masses.
        title: written above.
    """
    figure, axes = blank()
    values = np.asarray(log_likelihoods, dtype=float)
    best = values.max()
    order = np.argsort(-values)
    for place, index in enumerate(order):
        (spot,) = axes.plot(
            [best - values[index]], [place], "o", color=COLOURS["kde"], clip_on=False
        )
        tip(spot, f"member {index + 1}: {values[index]:.2f} nats")
    axes.axvspan(0, np.log(len(values)), color=INK, alpha=0.12, linewidth=0)
    axes.axvline(best - evidence, color=COLOURS["forde"], label="evidence")
    axes.plot([], [], "o", color=COLOURS["kde"], label="member")
    ticks = range(0, len(order), -(-len(order) // 12))
    axes.set_yticks(ticks, [str(order[place] + 1) for place in ticks])
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set(xlabel="nats below the best member", ylabel="member", title=title)
    legend(figure, axes)
    return figure


@plot("ladder", cite=("loaizaganem2025deep",))
def ladder(rungs: Sequence[tuple[str, float, float]], title: str = "") -> Any:
    """Log evidence of every learned prior, and beside it the loss on judged data.

    Args:
        rungs: name, log evidence and loss of each prior, the largest evidence first.
        title: written above.
    """
    figure, (left, right) = blank(height=0.45 + 0.16 * len(rungs), ncols=2, sharey=True)
    places = np.arange(len(rungs))
    names = [name.replace(", ", ",\n", 1) for name, _, _ in rungs]
    shown = ((left, [-r[1] for r in rungs], "− log evidence (nats)"), (right, [r[2] for r in rungs], "loss (nats)"))
    for axes, values, words in shown:
        axes.plot(values, places, "o", color=COLOURS["kde"], clip_on=False)
        axes.set(xlabel=words)
        finite = [value for value in values if np.isfinite(value) and value > 0]
        if len(finite) == len(values) and max(finite) > 20 * min(finite):
            axes.set_xscale("log")
        axes.margins(x=0.15)
    left.set_yticks(places, names)
    left.tick_params(axis="y", labelsize=9.5)
    left.set_ylim(len(rungs) - 0.5, -0.5)
    left.set(ylabel="prior", title=title)
    return figure

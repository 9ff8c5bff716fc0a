"""Weights and log-likelihoods of the members, and learned priors."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shoal.plots.figure import COLOURS, INK, blank, legend, plot, tip

__all__ = ["likelihoods", "prior_comparison", "weights"]

_SHADES = {"uniform": INK, "posterior": COLOURS["kde"], "stacking": COLOURS["forde"]}


@plot("weights", cite=("loaizaganem2025deep", "yao2018stacking"))
def weights(found: Mapping[str, Sequence[float]], title: str = "") -> Any:
    """Weight of every member, by each weighting.

    Args:
        found: weights [M] by "uniform", "posterior" and "stacking", where known.
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
    """Each member's log-likelihood below the best, and the log evidence.

    Args:
        log_likelihoods: log-likelihoods of all data [M], in nats.
        evidence: log evidence of equal point masses.
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
    axes.axvline(best - evidence, color=COLOURS["forde"], label="log evidence")
    axes.plot([], [], "o", color=COLOURS["kde"], label="member")
    ticks = range(0, len(order), -(-len(order) // 12))
    axes.set_yticks(ticks, [str(order[place] + 1) for place in ticks])
    axes.set_ylim(len(order) - 0.5, -0.5)
    axes.set_xlim(left=0)
    axes.set(xlabel="nats below the best member", ylabel="member", title=title)
    legend(figure, axes)
    return figure


@plot("prior-comparison", cite=("loaizaganem2025deep",))
def prior_comparison(priors: Sequence[tuple[str, float, float]], title: str = "") -> Any:
    """Prior comparison: log evidence of each learned prior below the best, with the NLL.

    Args:
        priors: name, log evidence and NLL of each prior, the largest evidence first.
        title: written above.
    """
    figure, axes = blank(height=0.5 + 0.13 * len(priors))
    best = priors[0][1]
    for place, (name, value, nll) in enumerate(priors):
        axes.hlines(place, 0, best - value, color=COLOURS["kde"], linewidth=2, alpha=0.5)
        (spot,) = axes.plot([best - value], [place], "o", color=COLOURS["kde"], clip_on=False)
        tip(spot, f"{name}: {value:.2f} nats")
        words = "–" if np.isnan(nll) else f"{nll:.3f}"
        axes.annotate(words, (1.02, place), xycoords=axes.get_yaxis_transform(), va="center")
    axes.annotate("NLL", (1.02, -0.75), xycoords=axes.get_yaxis_transform(), weight="bold")
    axes.set_xscale("symlog", linthresh=1.0)
    axes.set_xlim(left=0)
    axes.margins(x=0.1)
    decades = range(1 + int(np.log10(max(best - priors[-1][1], 1.0))))
    ticks = [0, *(10**k for k in decades)]
    axes.set_xticks(ticks, [f"{tick:,}" for tick in ticks], minor=False)
    axes.set_xticks([], minor=True)
    names = [name.replace(", ", ",\n", 1) for name, _, _ in priors]
    axes.set_yticks(range(len(priors)), names, fontsize=10)
    axes.set_ylim(len(priors) - 0.5, -0.5)
    axes.set(xlabel="log evidence below the best prior (nats)", title=title)
    return figure

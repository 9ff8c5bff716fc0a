"""How strong should repulsion be? One number against its strength."""

from collections.abc import Mapping
from typing import Any

from shoal.plots.comparison import Curve
from shoal.plots.registry import plot
from shoal.plots.style import INK, blank, legend, looks, percent, power, tip

__all__ = ["strength"]


@plot("strength")
def strength(
    curves: Mapping[str, Curve],
    metric: str,
    falls: Mapping[str, float] | None = None,
    plain: tuple[float, float] | None = None,
    share: bool = False,
    title: str = "",
) -> Any:
    """One metric against the strength of the repulsion, with error bars.

    A cross marks the strength at which a method becomes less accurate than the plain ensemble.

    Args:
        curves: for each method; x is the strength.
        metric: its name.
        falls: for each method, the strength at which accuracy falls, where it does.
        plain: mean and standard error of the plain ensemble, drawn as a band.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank()
    styles, falls = looks(curves), falls or {}
    if plain is not None:
        _band(axes, *plain)
    for index, (label, curve) in enumerate(curves.items()):
        # a little aside by a factor, for the axis is logarithmic
        aside = 1.04 ** (index - (len(curves) - 1) / 2)
        _curve(axes, label, curve, aside, styles[label], falls.get(label))
    axes.set_xscale("log")
    power(axes.xaxis)
    axes.set(xlabel="strength of the repulsion", ylabel=metric, title=title)
    if share:
        percent(axes.yaxis)
    legend(figure, axes)
    return figure


def _band(axes: Any, mean: float, error: float) -> None:
    error = error if error == error else 0.0
    line = axes.axhline(mean, color=INK, linewidth=1.2, linestyle=":", label="plain ensemble")
    tip(line, f"plain ensemble: {mean:.4g} ± {error:.2g}")
    axes.axhspan(mean - error, mean + error, color=INK, alpha=0.12, linewidth=0)


def _curve(
    axes: Any, label: str, curve: Curve, aside: float, style: Any, falls: float | None
) -> None:
    places = [x * aside for x in curve.x]
    errors = [error if error == error else 0.0 for error in curve.error]
    how = {"color": style.colour, "linestyle": style.linestyle}
    axes.errorbar(places, curve.mean, yerr=errors, capsize=3, **how)
    axes.plot([], [], label=label, **how | style.spot)
    for place, x, mean in zip(places, curve.x, curve.mean, strict=True):
        (spot,) = axes.plot([place], [mean], **style.spot)
        tip(spot, f"{label}, strength {x:g}: {mean:.4g}")
        if x == falls:
            (cross,) = axes.plot([place], [mean], "x", color=INK, markersize=11, zorder=5)
            tip(cross, f"{label}: accuracy falls from strength {x:g} on")

"""Which method, how many members, how severe a shift? One number against each of them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from shoal.plots.registry import plot
from shoal.plots.style import SIZE, blank, legend, looks, percent, tip

__all__ = ["Curve", "comparison", "severity", "sizes"]


class Curve(NamedTuple):
    """Means with their standard errors, NaN where there is a single seed."""

    x: Sequence[float]
    mean: Sequence[float]
    error: Sequence[float]


def _finite(error: float) -> float:
    return error if math.isfinite(error) else 0.0


@plot("comparison")
def comparison(
    rows: Mapping[str, tuple[float, float]],
    metric: str,
    better: str = "",
    share: bool = False,
    title: str = "",
) -> Any:
    """One metric for every method, with error bars.

    Args:
        rows: mean and standard error of each method.
        metric: its name.
        better: "lower" or "higher", written on the axis.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank(height=(0.95 + 0.34 * len(rows)) / SIZE[1])
    styles = looks(rows)
    for place, (label, (mean, error)) in enumerate(rows.items()):
        style = styles[label]
        axes.errorbar([mean], [place], xerr=[_finite(error)], color=style.colour, capsize=4)
        (spot,) = axes.plot([mean], [place], markersize=7, **style.spot)
        tip(spot, f"{label}: {mean:.4g} ± {error:.2g}")
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel=f"{metric} ({better} is better)" if better in ("lower", "higher") else metric)
    axes.set(title=title, ylim=(len(rows) - 0.5, -0.5))
    axes.xaxis.get_major_locator().set_params(nbins=4)
    if share:
        percent(axes.xaxis)
    axes.margins(x=0.12)
    return figure


def _curves(figure: Any, axes: Any, curves: Mapping[str, Curve], words: str, apart: float) -> None:
    """Draw every curve, each a little aside so that error bars do not cover each other."""
    places = [x for curve in curves.values() for x in curve.x]
    apart *= max(places) - min(places)
    styles = looks(curves)
    for index, (label, curve) in enumerate(curves.items()):
        style = styles[label]
        how = {"color": style.colour, "linestyle": ("-", "--", "-.", ":")[index % 4]}
        aside = apart * (index - (len(curves) - 1) / 2)
        error = [_finite(e) for e in curve.error]
        axes.errorbar([x + aside for x in curve.x], curve.mean, yerr=error, capsize=3, **how)
        axes.plot([], [], label=label, **how | style.spot)
        for x, mean in zip(curve.x, curve.mean, strict=True):
            (spot,) = axes.plot([x + aside], [mean], **style.spot)
            tip(spot, f"{label}, {words} {x:g}: {mean:.4g}")
    legend(figure, axes)


@plot("sizes")
def sizes(curves: Mapping[str, Curve], metric: str, share: bool = False, title: str = "") -> Any:
    """One metric against the number of members.

    Args:
        curves: for each method; x is the number of members.
        metric: its name.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank()
    _curves(figure, axes, curves, "members", 0.012)
    known = sorted({float(x) for curve in curves.values() for x in curve.x})
    axes.set_xticks(known, [f"{x:g}" for x in known])
    axes.set(xlabel="members", ylabel=metric, title=title)
    if share:
        percent(axes.yaxis)
    return figure


@plot("severity")
def severity(
    curves: Mapping[str, Curve],
    metric: str,
    kind: str = "severity",
    names: Mapping[float, str] | None = None,
    share: bool = False,
    title: str = "",
) -> Any:
    """One metric against how far the data have moved from the training data.

    Args:
        curves: for each method; x is the severity, 0 the test data themselves.
        metric: its name.
        kind: what moved, written on the axis.
        names: words for the places on the axis where the numbers mean nothing.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank()
    _curves(figure, axes, curves, kind, 0.004)
    if names is not None:
        axes.set_xticks(list(names), list(names.values()), rotation=30, ha="right")
    else:
        axes.set_xticks(sorted({float(x) for curve in curves.values() for x in curve.x}))
    axes.set(xlabel=kind, ylabel=metric, title=title)
    if share:
        percent(axes.yaxis)
    return figure

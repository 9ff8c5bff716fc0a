"""One metric against the method, the ensemble size, the shift severity or the strength."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from shoal.plots.figure import (
    INK,
    SIZE,
    blank,
    legend,
    look,
    method_styles,
    percent,
    plot,
    power,
    tip,
)
from shoal.prediction.worth import SizeCurve

__all__ = [
    "MetricCurve",
    "comparison",
    "heatmap",
    "outliers",
    "severity",
    "sizes",
    "strength",
    "worth",
]

_FAR = 4.0


class MetricCurve(NamedTuple):
    """Means with standard errors; an error is NaN for a single seed."""

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
    styles, beyond = method_styles(rows), outliers(rows)
    for place, (label, (mean, error)) in enumerate(rows.items()):
        style = styles[label]
        if label in beyond:
            _beyond(axes, place, (mean, error), beyond[label], style.colour, share)
            continue
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


def outliers(rows: Mapping[str, tuple[float, float]]) -> dict[str, int]:
    """Methods so far from the others that a common axis would hide the differences.

    >>> outliers({"a": (0.29, 0.01), "b": (0.31, 0.01), "c": (0.3, 0.01), "d": (1.6, 0.4)})
    {'d': 1}

    Returns:
        1 for a method above the others, -1 for a method below.
    """
    left = {label: row for label, row in rows.items() if math.isfinite(row[0])}
    beyond: dict[str, int] = {}
    while len(left) > max(2, 2 * len(rows) / 3):
        means = [mean for mean, _ in left.values()]
        middle = float(np.median(means))
        far = max(left, key=lambda label: abs(left[label][0] - middle))
        rest = [row for label, row in left.items() if label != far]
        wide = max(m + _finite(e) for m, e in rest) - min(m - _finite(e) for m, e in rest)
        if abs(left[far][0] - middle) < _FAR * max(wide, 1e-12):
            break
        beyond[far] = 1 if left.pop(far)[0] > middle else -1
    return beyond


def _beyond(
    axes: Any, place: int, row: tuple[float, float], side: int, colour: str, share: bool
) -> None:
    """Draw an arrow at the edge, with the number that lies beyond the axis."""
    scale, unit = (100, " %") if share else (1, "")
    error = f" ± {scale * row[1]:.2g}" if math.isfinite(row[1]) else ""
    number = f"{scale * row[0]:.3g}{error}{unit}"
    text = f"{number} →" if side > 0 else f"← {number}"
    how = {"ha": "right" if side > 0 else "left", "va": "center", "color": colour}
    axes.text(0.99 if side > 0 else 0.01, place, text, transform=axes.get_yaxis_transform(), **how)


def _curves(
    figure: Any, axes: Any, curves: Mapping[str, MetricCurve], words: str, offset: float
) -> None:
    """Draw every curve with a small offset, so that error bars do not overlap."""
    places = [x for curve in curves.values() for x in curve.x]
    offset *= max(places) - min(places)
    styles = method_styles(curves)
    for index, (label, curve) in enumerate(curves.items()):
        style = styles[label]
        how = {"color": style.colour, "linestyle": ("-", "--", "-.", ":")[index % 4]}
        shift = offset * (index - (len(curves) - 1) / 2)
        error = [_finite(e) for e in curve.error]
        axes.errorbar([x + shift for x in curve.x], curve.mean, yerr=error, capsize=3, **how)
        axes.plot([], [], label=label, **how | style.spot)
        for x, mean in zip(curve.x, curve.mean, strict=True):
            (spot,) = axes.plot([x + shift], [mean], **style.spot)
            tip(spot, f"{label}, {words} {x:g}: {mean:.4g}")
    legend(figure, axes)


@plot("sizes")
def sizes(
    curves: Mapping[str, MetricCurve], metric: str, share: bool = False, title: str = ""
) -> Any:
    """One metric against the ensemble size.

    Args:
        curves: for each method; x is the ensemble size.
        metric: its name.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank()
    _curves(figure, axes, curves, "members", 0.012)
    known = sorted({float(x) for curve in curves.values() for x in curve.x})
    axes.set_xticks(known, [f"{x:g}" for x in known])
    axes.set(xlabel="ensemble size M", ylabel=metric, title=title)
    if share:
        percent(axes.yaxis)
    return figure


@plot("worth")
def worth(
    curve: SizeCurve, metric: str, method: str = "", share: bool = False, title: str = ""
) -> Any:
    """One metric of ensembles of some of the members, continued to twice as many members.

    Args:
        curve: expected scores by ensemble size.
        metric: its name.
        method: method that gives the colour.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank()
    style, M = look(method), curve.members
    sizes = np.arange(M, 2 * M + 1)
    gains = [curve.gain(int(size - M)) for size in sizes[1:]]
    axes.plot(curve.sizes, curve.shown, label="mean over subsets", **style.spot)
    for size, value in zip(curve.sizes, curve.shown, strict=True):
        (spot,) = axes.plot([size], [value], **style.spot)
        tip(spot, f"{size:g} members: {value:.4g}")
    axes.plot(sizes, [curve.at(int(m)) for m in sizes], "--", color=style.colour, label="continued")
    sign = 1 if curve.better == "higher" else -1
    ends = [curve.at(M) + sign * np.array([0.0, *(getattr(g, e) for g in gains)]) for e in _ENDS]
    how = {"color": style.colour, "alpha": 0.2, "linewidth": 0}
    axes.fill_between(sizes, *ends, label="95 % of growths", **how)
    axes.set(xlabel="members", ylabel=metric, title=title)
    axes.xaxis.get_major_locator().set_params(integer=True)
    if share:
        percent(axes.yaxis)
    legend(figure, axes)
    return figure


_ENDS = ("low", "high")


@plot("heatmap")
def heatmap(
    rows: Mapping[str, Mapping[int, float]],
    metric: str,
    better: str = "",
    share: bool = False,
    title: str = "",
) -> Any:
    """One metric for every method and ensemble size; bright is better.

    Args:
        rows: for each method, the metric by ensemble size.
        metric: its name.
        better: "lower" or "higher": the bright end.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank(height=(1.1 + 0.36 * len(rows)) / SIZE[1])
    columns = sorted({members for row in rows.values() for members in row})
    values = np.array([[row.get(m, math.nan) for m in columns] for row in rows.values()])
    values = 100 * values if share else values
    bright = "cividis_r" if better == "lower" else "cividis"
    image = axes.imshow(values, aspect="auto", cmap=bright, interpolation="none")
    digits = _digits(values)
    for (i, j), value in np.ndenumerate(values):
        if math.isfinite(value):
            red, green, blue, _ = image.cmap(image.norm(value))
            dark = 0.3 * red + 0.59 * green + 0.11 * blue < 0.5
            colour = "white" if dark else "black"
            axes.text(j, i, f"{value:.{digits}f}", color=colour, ha="center", va="center")
    axes.set_xticks(range(len(columns)), [str(m) for m in columns])
    axes.set_yticks(range(len(rows)), list(rows))
    axes.set(xlabel="ensemble size M", title=title or f"{metric}{' (%)' if share else ''}")
    axes.grid(visible=False)
    return figure


def _digits(values: np.ndarray) -> int:
    """Decimals that show differences of a hundredth of the range."""
    known = values[np.isfinite(values)]
    width = float(known.max() - known.min()) if known.size else 0.0
    return 2 if width <= 0 else int(min(max(0, math.ceil(-math.log10(width / 30))), 5))


@plot("severity")
def severity(
    curves: Mapping[str, MetricCurve],
    metric: str,
    kind: str = "severity",
    names: Mapping[float, str] | None = None,
    share: bool = False,
    title: str = "",
) -> Any:
    """One metric against the severity of a shift.

    Args:
        curves: for each method; x is the severity, 0 the test set.
        metric: its name.
        kind: label of the axis.
        names: labels of the ticks, where severities are not numbers.
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


@plot("strength")
def strength(
    curves: Mapping[str, MetricCurve],
    metric: str,
    falls: Mapping[str, float] | None = None,
    plain: tuple[float, float] | None = None,
    share: bool = False,
    title: str = "",
) -> Any:
    """One metric against the strength of the repulsion, with error bars.

    A cross marks the first strength with a significantly lower accuracy than the plain ensemble.

    Args:
        curves: for each method; x is the strength.
        metric: its name.
        falls: for each method, the first strength with lower accuracy, where there is one.
        plain: mean and standard error of the plain ensemble, drawn as a band.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank()
    styles, falls = method_styles(curves), falls or {}
    if plain is not None:
        _band(axes, *plain)
    for index, (label, curve) in enumerate(curves.items()):
        # a factor, since the axis is logarithmic
        shift = 1.04 ** (index - (len(curves) - 1) / 2)
        _curve(axes, label, curve, shift, styles[label], falls.get(label))
    axes.set_xscale("log")
    power(axes.xaxis)
    axes.set(xlabel="strength of repulsion", ylabel=metric, title=title)
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
    axes: Any, label: str, curve: MetricCurve, shift: float, style: Any, falls: float | None
) -> None:
    places = [x * shift for x in curve.x]
    errors = [error if error == error else 0.0 for error in curve.error]
    how = {"color": style.colour, "linestyle": style.linestyle}
    axes.errorbar(places, curve.mean, yerr=errors, capsize=3, **how)
    axes.plot([], [], label=label, **how | style.spot)
    for place, x, mean in zip(places, curve.x, curve.mean, strict=True):
        (spot,) = axes.plot([place], [mean], **style.spot)
        tip(spot, f"{label}, strength {x:g}: {mean:.4g}")
        if x == falls:
            (cross,) = axes.plot([place], [mean], "x", color=INK, markersize=11, zorder=5)
            tip(cross, f"{label}: significantly lower accuracy from strength {x:g} on")

"""Calibration: reliability of classes, coverage of intervals, and metrics under corruption."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from shoal.core.errors import DataError
from shoal.plots.figure import (
    INK,
    SIZE,
    MethodStyle,
    blank,
    legend,
    method_styles,
    percent,
    plot,
    tip,
)
from shoal.prediction.metrics.calibration import Reliability

__all__ = ["Spread", "contact_sheet", "corrupted", "coverage", "reliability", "wilson"]

_FEW = 5


def wilson(share: np.ndarray, count: np.ndarray, z: float = 1.96) -> tuple[np.ndarray, np.ndarray]:
    """Wilson's 95 % interval of a fraction: lower and upper end, within 0 and 1.

    >>> [round(float(end), 3) for end in wilson(np.array(0.5), np.array(100))]
    [0.404, 0.596]
    """
    scale = 1 + z**2 / count
    centre = (share + z**2 / (2 * count)) / scale
    reach = z * np.sqrt(share * (1 - share) / count + z**2 / (4 * count**2)) / scale
    return np.clip(centre - reach, 0, 1), np.clip(centre + reach, 0, 1)


@plot("reliability", cite=("guo2017calibration",))
def reliability(curves: Mapping[str, Reliability], title: str = "") -> Any:
    """Accuracy against confidence in bins, with the share of the data in each bin below.

    A single curve has a 95 % interval per bin. With several curves, bins with fewer than 5 inputs
    are omitted.

    Args:
        curves: the reliability of each method.
        title: written above.
    """
    figure, (above, below) = blank(2, 1.4, sharex=True, height_ratios=(3.2, 1))
    above.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", label="perfect")
    styles = method_styles(curves)
    for label, curve in curves.items():
        _reliability(above, below, label, curve, styles[label], intervals=len(curves) == 1)
    above.set(ylabel="accuracy", title=title, xlim=(-0.02, 1.03), ylim=(-0.02, 1.03))
    below.set(xlabel="confidence", ylabel="share of inputs")
    below.set_ylim(bottom=0)
    for axis in (above.yaxis, below.xaxis, below.yaxis):
        percent(axis)
    legend(figure, above)
    return figure


def _reliability(
    above: Any,
    below: Any,
    label: str,
    curve: Reliability,
    style: MethodStyle,
    intervals: bool,
) -> None:
    filled = curve.count >= (1 if intervals else _FEW)
    count, confidence, accuracy = (
        values[filled].numpy() for values in (curve.count, curve.confidence, curve.accuracy)
    )
    if intervals:
        low, high = wilson(accuracy, count)
        above.vlines(confidence, low, high, color=style.colour, alpha=0.45, linewidth=5)
    above.plot(
        confidence, accuracy, label=label, linewidth=1.5, linestyle=style.linestyle, **style.spot
    )
    for n, x, y in zip(count, confidence, accuracy, strict=True):
        (spot,) = above.plot([x], [y], linestyle="", **style.spot)
        tip(spot, f"{label}: confidence {x:.1%}, accuracy {y:.1%} ({n:.0f} inputs)")
    share, edges = curve.count / curve.count.sum(), curve.edges.numpy()
    below.stairs(share.numpy(), edges, color=style.colour, fill=intervals, alpha=0.8)


@plot("coverage")
def coverage(curves: Mapping[str, Tensor], title: str = "") -> Any:
    """Share of targets inside central intervals, against the level of the intervals.

    Args:
        curves: for each method, the predictive distribution function at the targets, `metrics.pit`.
        title: written above.
    """
    figure, axes = blank(height=1.1)
    axes.plot([0, 1], [0, 1], color=INK, linewidth=1, linestyle=":", label="perfect")
    levels = np.linspace(0, 1, 21)
    styles = method_styles(curves)
    for label, pit in curves.items():
        inside = 2 * np.abs(np.asarray(pit, dtype=float).ravel() - 0.5)
        shares = (inside[:, None] <= levels).mean(0) if inside.size else np.full(21, math.nan)
        style = styles[label]
        axes.plot(levels, shares, label=label, color=style.colour, linestyle=style.linestyle)
        for level, share in zip(levels[2::4], shares[2::4], strict=True):
            (spot,) = axes.plot([level], [share], **style.spot)
            tip(spot, f"{label}: the {level:.0%} interval contains {share:.1%}")
    percent(axes.xaxis)
    percent(axes.yaxis)
    axes.set(xlabel="level of the interval", ylabel="targets inside", title=title)
    legend(figure, axes)
    return figure


_GAP = 2
"""Pixels between the images of a sheet."""

_LETTER = 0.0165
"""Width of a letter beside a sheet, as a share of the figure."""


class Spread(NamedTuple):
    """A metric at each severity: mean and quartiles over the corruptions."""

    x: Sequence[float]
    mean: Sequence[float]
    low: Sequence[float]
    high: Sequence[float]


@plot("corrupted", cite=("hendrycks2019benchmarking",))
def corrupted(
    curves: Mapping[str, Spread], metric: str, share: bool = False, title: str = ""
) -> Any:
    """One metric against the corruption severity: mean and middle half over the corruptions.

    Args:
        curves: for each method; x is the severity, 0 the test set.
        metric: its name.
        share: the metric is a share, shown in per cent.
        title: written above.
    """
    figure, axes = blank()
    styles = method_styles(curves)
    for index, (label, curve) in enumerate(curves.items()):
        style, shift = styles[label], 0.09 * (index - (len(curves) - 1) / 2)
        x = [place + shift for place in curve.x]
        axes.vlines(x, curve.low, curve.high, color=style.colour, alpha=0.35, linewidth=4)
        axes.plot(x, curve.mean, label=label, linestyle=style.linestyle, **style.spot)
        for place, severity, mean, low, high in zip(x, *curve, strict=True):
            (spot,) = axes.plot([place], [mean], linestyle="", **style.spot)
            half = "" if math.isclose(low, high) else f", middle half {low:.4g} to {high:.4g}"
            tip(spot, f"{label}, severity {severity:g}: {mean:.4g}{half}")
    axes.set_xticks(sorted({float(x) for curve in curves.values() for x in curve.x}))
    axes.set(xlabel="corruption severity (0 is none)", ylabel=metric, title=title)
    if share:
        percent(axes.yaxis)
    legend(figure, axes)
    return figure


@plot("contact-sheet", cite=("hendrycks2019benchmarking",))
def contact_sheet(
    rows: Mapping[str, Tensor], columns: Sequence[str] = ("1", "2", "3", "4", "5"), title: str = ""
) -> Any:
    """One image under every corruption: one row per corruption, one column per severity.

    Args:
        rows: for each corruption, images [n, 1 or 3, H, W] from 0 to 1.
        columns: labels above the columns.
        title: written above.
    """
    shapes = {tuple(images.shape) for images in rows.values()}
    shape = next(iter(shapes), ())
    if len(shapes) != 1 or len(shape) != 4 or shape[1] not in (1, 3) or shape[0] != len(columns):
        raise DataError(
            f"a contact sheet needs rows of {len(columns)} images [n, 1 or 3, H, W], "
            f"all of one shape, not {sorted(map(list, shapes))}"
        )
    sheet = np.concatenate([_strip(images) for images in rows.values()])
    tall, wide = shape[2] + _GAP, shape[3] + _GAP
    room = 0.4 + 0.25 * bool(title)
    left = 0.02 + _LETTER * max(map(len, rows))
    high = (1 - left) * SIZE[0] * sheet.shape[0] / sheet.shape[1]
    figure, axes = blank(height=(high + room) / SIZE[1])
    figure.set_layout_engine("none")
    axes.set_position((left, 0, 1 - left, high / (high + room)))
    axes.imshow(sheet, interpolation="none", aspect="auto")
    axes.set_yticks([tall * row + (shape[2] - 1) / 2 for row in range(len(rows))], list(rows))
    axes.set_xticks(
        [wide * column + (shape[3] - 1) / 2 for column in range(len(columns))], list(columns)
    )
    axes.tick_params(length=0, labelsize=10, top=False, labeltop=True, labelbottom=False)
    axes.xaxis.set_label_position("top")
    axes.set(xlabel="corruption severity", title=title)
    axes.grid(False)
    axes.spines[:].set_visible(False)
    return figure


def _strip(images: Tensor) -> np.ndarray:
    """Images beside each other as RGBA; the gaps are transparent."""
    pixels = images.detach().cpu().float().clamp(0, 1).permute(0, 2, 3, 1).numpy()
    colours = np.repeat(pixels, 3, -1) if pixels.shape[-1] == 1 else pixels
    framed = np.zeros((len(images), images.shape[2] + _GAP, images.shape[3] + _GAP, 4))
    framed[:, : images.shape[2], : images.shape[3], :3] = colours
    framed[:, : images.shape[2], : images.shape[3], 3] = 1
    return np.concatenate(list(framed), axis=1)

"""Figures of small problems: one input, two inputs, targets against predictions, particles."""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from shoal.core.errors import DataError
from shoal.data.targets import Target
from shoal.plots.figure import INK, blank, legend, look, plot

__all__ = ["band", "parity", "particles", "plane"]

Points = tuple[Tensor, Tensor]


@plot("band")
def band(
    x: Tensor,
    mean: Tensor,
    stddev: Tensor,
    data: Points | None = None,
    method: str = "",
    title: str = "",
    which: str = "training data",
) -> Any:
    """Predicted curve with a band of two standard deviations, over one input.

    Args:
        x: inputs [B], in any order.
        mean: predicted mean [B].
        stddev: predicted standard deviation [B].
        data: inputs and targets to draw as points.
        method: method that gives the colour.
        title: written above.
        which: legend label of the points.
    """
    figure, axes = blank()
    order = torch.as_tensor(x).flatten().argsort()
    x, mean, stddev = (torch.as_tensor(values).flatten()[order] for values in (x, mean, stddev))
    colour = look(method).colour
    ends = (mean - 2 * stddev).numpy(), (mean + 2 * stddev).numpy()
    axes.fill_between(
        x.numpy(), *ends, color=colour, alpha=0.3, linewidth=0, label="± 2 standard dev."
    )
    axes.plot(x, mean, color=colour, label="mean")
    if data is not None:
        inputs, targets = (values.flatten() for values in data)
        axes.plot(inputs, targets, ".", color=INK, alpha=0.6, markersize=4, label=which)
    axes.set(xlabel="input x", ylabel="target y", title=title)
    legend(figure, axes)
    return figure


@plot("parity")
def parity(y: Tensor, mean: Tensor, stddev: Tensor, method: str = "", title: str = "") -> Any:
    """Predicted mean against the target, each with a bar of two standard deviations.

    Args:
        y: targets [B].
        mean: predicted mean [B].
        stddev: predicted standard deviation [B].
        method: method that gives the colour.
        title: written above.
    """
    figure, axes = blank(height=1.1)
    y, mean, stddev = (torch.as_tensor(values).flatten() for values in (y, mean, stddev))
    step = -(-len(y) // 300)
    colour = look(method).colour
    how = {"color": colour, "ecolor": colour, "elinewidth": 0.6, "markersize": 3}
    axes.errorbar(y[::step], mean[::step], yerr=2 * stddev[::step], fmt="o", alpha=0.5, **how)
    ends = [float(y.min()), float(y.max())]
    axes.plot(ends, ends, color=INK, linewidth=1, linestyle=":")
    axes.set(xlabel="target y", ylabel="predicted y", title=title)
    return figure


@plot("plane")
def plane(
    across: Tensor, up: Tensor, values: Tensor, data: Points | None = None, title: str = ""
) -> Any:
    """Predictive entropy over a plane of inputs, with the training data.

    Args:
        across: first coordinate of the grid [W].
        up: second coordinate of the grid [H].
        values: predictive entropy at the grid points [H, W].
        data: inputs [N, 2] and labels [N] of the training data.
        title: written above.
    """
    figure, axes = blank(height=1.05)
    extent = (float(across[0]), float(across[-1]), float(up[0]), float(up[-1]))
    image = axes.imshow(
        values.numpy(), origin="lower", extent=extent, aspect="auto", interpolation="bilinear"
    )
    if data is not None:
        points, labels = data
        for label in labels.unique():
            here = points[labels == label]
            marker = "osD^vPXphd"[int(label) % 10]
            how = {"markerfacecolor": "white", "markeredgecolor": "black", "markeredgewidth": 0.6}
            axes.plot(here[:, 0], here[:, 1], marker, markersize=4, **how)
    axes.grid(visible=False)
    axes.set(xlabel="input 1", ylabel="input 2", title=title)
    figure.colorbar(image, ax=axes, label="predictive entropy (nats)").outline.set_visible(False)
    return figure


@plot("particles", cite=("dangelo2021repulsive",))
def particles(
    target: Target,
    found: Tensor,
    start: Tensor | None = None,
    method: str = "",
    title: str = "",
) -> Any:
    """Particles on the contours of the target density in the plane.

    Args:
        target: a density in two dimensions, such as `shoal.data.targets.Mixture()`.
        found: final positions of the particles [M, 2].
        start: initial positions [M, 2].
        method: method that gives the colour.
        title: written above.
    """
    if found.ndim != 2 or found.shape[1] != 2 or target.dimension != 2:
        raise DataError(f"particles in the plane are [M, 2], not {list(found.shape)}")
    figure, axes = blank(height=1.15)
    across, up = (torch.linspace(low, high, 120) for low, high in target.bounds)
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1)
    log = torch.vmap(torch.vmap(target.log_density))(grid).numpy()
    # a 2-D Gaussian is 0.5, 2, 4.5 and 8 nats below its maximum at 1 to 4 standard deviations
    levels = np.sort(log.max() - np.array([0.125, 0.5, 1.125, 2.0, 3.125, 4.5, 8.0]))
    how = {"colors": INK, "alpha": 0.45, "linewidths": 0.9, "linestyles": "solid"}
    axes.contour(across, up, log, levels=levels, **how)
    if start is not None:
        axes.plot(start[:, 0], start[:, 1], "x", color=INK, markersize=4, label="start")
    style = look(method)
    axes.plot(
        found[:, 0], found[:, 1], "o", color=style.colour, markersize=5, label=method or "particles"
    )
    axes.grid(visible=False)
    axes.set(xlabel="x₁", ylabel="x₂", title=title)
    legend(figure, axes)
    return figure

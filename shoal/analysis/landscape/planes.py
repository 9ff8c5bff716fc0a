"""Lines, planes and paths of level loss between members, as coefficients of the members."""

from typing import NamedTuple

import torch
from torch import Tensor

from shoal.analysis.landscape.points import gram, only_group
from shoal.analysis.landscape.survey import Tick, outputs, survey
from shoal.core.errors import ConfigError
from shoal.core.structure import Inputs
from shoal.data.dataset import Split
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Likelihood

__all__ = [
    "Plane",
    "levelled",
    "line",
    "plane_through_origin",
    "plane_through_three",
    "with_midpoints",
]

FLATTEST = 1e-5
"""Height of a triangle over its longest side, below which its corners lie on a line."""


class Plane(NamedTuple):
    """A rectangle of weight space.

    Attributes:
        across: distances along the first axis [W], in units of weight.
        up: distances along the second axis [H].
        coefficients: coefficients of the basis at the points [H W, R], row by row.
        marks: positions of the members of the basis [R, 2].
    """

    across: Tensor
    up: Tensor
    coefficients: Tensor
    marks: Tensor

    def image(self, values: Tensor) -> Tensor:
        """Values [..., H W] as images [..., H, W]."""
        return values.reshape(*values.shape[:-1], len(self.up), len(self.across))


def line(count: int = 21, beyond: float = 0.0) -> Tensor:
    """Coefficients [count, 2] of points from one member to another, and a share beyond both.

    >>> line(3)
    tensor([[1.0000, 0.0000],
            [0.5000, 0.5000],
            [0.0000, 1.0000]], dtype=torch.float64)
    """
    t = torch.linspace(-beyond, 1 + beyond, count, dtype=torch.float64)
    return torch.stack([1 - t, t], -1)


def plane_through_origin(pair: Ensemble, points: int = 41, margin: float = 0.25) -> Plane:
    """The plane through the origin and two members; the first axis points to the first.

    Fort et al. (2019), arXiv 1912.02757.

    Args:
        pair: two members.
        points: points along each side.
        margin: margin around the origin and the members, as a share of their extent.
    """
    _check(pair, 2)
    return _plane(gram(only_group(pair).weights).cpu(), torch.zeros(2).double(), points, margin)


def plane_through_three(three: Ensemble, points: int = 41, margin: float = 0.25) -> Plane:
    """The plane through three members; the first axis points from the first to the second."""
    _check(three, 3)
    products = gram(only_group(three).weights).cpu()
    # Inner products of the two edges that start at the first member.
    edges = torch.tensor([[-1.0, 1, 0], [-1, 0, 1]], dtype=torch.float64)
    plane = _plane(edges @ products @ edges.T, torch.zeros(2).double(), points, margin)
    first = torch.tensor([1.0, 0, 0], dtype=torch.float64)
    marks = torch.cat([torch.zeros(1, 2, dtype=torch.float64), plane.marks])
    return plane._replace(coefficients=first + plane.coefficients @ edges, marks=marks)


def _plane(products: Tensor, start: Tensor, points: int, margin: float) -> Plane:
    """A grid around the origin and two vectors with these inner products.

    By Gram and Schmidt the vectors are (l, 0) and (p, q); a point (a, b) is c of the vectors with
    c [[l, 0], [p, q]] = (a, b).
    """
    factor = torch.linalg.cholesky_ex(products)
    # Weights of members on a line are rounded to float32, so q need not be exactly 0.
    flat = factor.L[1, 1] < FLATTEST * products.diagonal().max().sqrt()
    if int(factor.info) or bool(flat):
        raise ConfigError("the members lie on one line, so they span no plane")
    corners = torch.cat([start[None], factor.L])
    low, high = corners.amin(0), corners.amax(0)
    reach = margin * (high - low).max()
    across, up = (
        torch.linspace(float(a - reach), float(b + reach), points, dtype=torch.float64)
        for a, b in zip(low, high, strict=True)
    )
    grid = torch.stack(torch.meshgrid(across, up, indexing="xy"), -1).reshape(-1, 2)
    coefficients = torch.linalg.solve_triangular(factor.L, grid, upper=False, left=False)
    return Plane(across, up, coefficients, factor.L)


def _check(ensemble: Ensemble, wanted: int) -> None:
    if ensemble.members != wanted:
        raise ConfigError(f"this plane needs {wanted} members, not {ensemble.members}")


_HALVINGS = 12


def levelled(
    basis: Ensemble,
    coefficients: Tensor,
    split: Split,
    likelihood: Likelihood,
    train: Inputs | None = None,
    tick: Tick = lambda count: None,
) -> Tensor:
    r"""Coefficients [K, R] of the low-loss tunnel: the valley raised to the loss of its ends.

    The loss of the valley $v(t)$ is below the level, the loss of the straight line $l(t)$ through
    the same ends usually above it. On $(1 - s) v(t) + s l(t)$ bisection finds the point with loss
    $(1 - t) L(v(0)) + t L(v(1))$. Points of the valley above the level do not change.

    Args:
        basis: R networks; the first and the last are the ends.
        coefficients: coefficients of the valley at K evenly spaced points [K, R].
        split: labelled data of the loss.
        likelihood: likelihood of the outputs.
        train: inputs for the statistics of batch normalisation at each point.
        tick: called with the number of points evaluated.
    """
    valley, along = coefficients.double(), line(len(coefficients))
    straight = torch.zeros_like(valley)
    straight[:, [0, -1]] = along
    nobody = outputs(basis, split.x[:1])[:0]

    def loss(share: Tensor) -> Tensor:
        points = valley + share[:, None] * (straight - valley)
        return survey(basis, points, split, likelihood, nobody, train, tick).loss

    low, high = torch.zeros(len(valley)).double(), torch.ones(len(valley)).double()
    level = along @ loss(low)[[0, -1]]
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        below = loss(middle) <= level
        low, high = torch.where(below, middle, low), torch.where(below, high, middle)
    return valley + low[:, None] * (straight - valley)


def with_midpoints(coefficients: Tensor) -> Tensor:
    """The points of a path and the midpoints of neighbours [2 K - 1, R].

    >>> with_midpoints(torch.tensor([[0.0], [1.0], [4.0]])).flatten().tolist()
    [0.0, 0.5, 1.0, 2.5, 4.0]
    """
    halves = (coefficients[1:] + coefficients[:-1]) / 2
    woven = torch.stack([coefficients[:-1], halves], 1).flatten(0, 1)
    return torch.cat([woven, coefficients[-1:]])

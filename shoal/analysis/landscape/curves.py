"""Curves of low loss between two members.

A curve is a sum of fixed functions of t times pivots, theta(t) = sum_r c_r(t) P_r. The first and
the last pivot are the members; the pivots between them are trained on the loss at random t.
"""

import math
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from shoal.core.registry import Registry

__all__ = ["Bezier", "Curve", "Polygon", "Tunnel", "registry"]

registry = Registry("curve")


class Curve(Protocol):
    """A curve as a function of its pivots."""

    @property
    def pivots(self) -> int:
        """Number of pivots between the ends."""
        ...

    @property
    def constrained(self) -> bool:
        """Whether pivots stay in their initial hyperplanes."""
        ...

    def coefficients(self, t: Tensor) -> Tensor:
        """c [K, pivots + 2] at t [K] in [0, 1]."""
        ...


@registry.register("bezier", cite=("garipov2018loss",))
@dataclass(frozen=True)
class Bezier:
    r"""A Bezier curve, $c_r(t) = {n \choose r} t^r (1 - t)^{n - r}$.

    Attributes:
        pivots: number of pivots between the ends; one pivot gives a parabola.
    """

    pivots: int = 1
    constrained: bool = False

    def coefficients(self, t: Tensor) -> Tensor:
        """Bernstein polynomials."""
        n = self.pivots + 1
        return torch.stack([math.comb(n, r) * t**r * (1 - t) ** (n - r) for r in range(n + 1)], -1)


@registry.register("polygon", cite=("garipov2018loss",))
@dataclass(frozen=True)
class Polygon:
    """Line segments between neighbouring pivots, c_r(t) = max(0, 1 - |n t - r|).

    Attributes:
        pivots: number of pivots between the ends.
    """

    pivots: int = 3
    constrained: bool = False

    def coefficients(self, t: Tensor) -> Tensor:
        """Hat functions."""
        n = self.pivots + 1
        return (1 - (n * t[:, None] - torch.arange(n + 1).to(t)).abs()).clamp_min(0)


@registry.register("tunnel", cite=("fort2019large",))
@dataclass(frozen=True)
class Tunnel(Bezier):
    """A Bezier curve whose pivots move only orthogonally to the straight line.

    Each pivot moves in its own hyperplane, theta . (theta_2 - theta_1) fixed, so t remains the
    share of the distance between the members. The result is a valley; `levelled` raises it to the
    loss of the ends.
    """

    constrained: bool = True

r"""Shrinkage of the estimated score: its formula and its measurement.

For M members drawn from $N(μ, s² 1)$ in d dimensions and the median bandwidth, the estimated score
is a share of the true score: $\ln(M + 1) / 2d$ for KDE, $\ln(M + 1) / d$ for the Stein estimates. A
calibrated estimate is correct in the directions that the members span, min(d, M - 1) of d, up to
the factor M / (M - 1) of the sample variance.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch

from shoal.interaction.methods import get
from shoal.interaction.repulsion import interact

__all__ = ["Measurement", "measure", "predicted"]

_FACTOR = {"kde": 0.5, "sge": 1.0, "ssge": 1.0}


class Measurement(NamedTuple):
    """One measured share.

    Attributes:
        label: method and form.
        members: M.
        dimension: d.
        share: estimated score / true score, by projection on the true score.
        predicted: the share by the formula.
    """

    label: str
    members: int
    dimension: int
    share: float
    predicted: float


def predicted(name: str, form: str, members: int, dimension: int) -> float:
    """The share by the formula."""
    if form == "calibrated":
        return members / (members - 1) * min(1.0, (members - 1) / dimension)
    return _FACTOR[name] * math.log(members + 1) / dimension


def measure(
    members: int = 20,
    dimensions: Sequence[int] = (10, 30, 100, 300, 1000, 3000, 10000),
    seed: int = 0,
) -> list[Measurement]:
    """Shares of KDE, SGE and SSGE, published and calibrated, for growing dimension."""
    measurements = []
    for dimension in dimensions:
        random = torch.Generator().manual_seed(seed)
        x = torch.randn(members, dimension, generator=random, dtype=torch.float64)
        x = x - x.mean(0)
        alive = torch.ones(members, dtype=torch.bool)
        for form in ("legacy", "calibrated"):
            for name in _FACTOR:
                repulsion = get(name, form == "legacy", form == "calibrated").repulsion
                assert repulsion is not None
                B = interact(repulsion, [x.unsqueeze(1)], alive).B[0]
                share = float(-(B @ x * x).sum() / x.square().sum())
                law = predicted(name, form, members, dimension)
                measurements.append(Measurement(f"{name} ({form})", members, dimension, share, law))
    return measurements

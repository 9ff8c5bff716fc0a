"""Figures: each a function that takes numbers and returns a matplotlib figure.

`svg` turns a figure into text for a page; `registry` lists them all. matplotlib is imported when
the first figure is drawn.
"""

from shoal.plots.calibration import coverage, reliability
from shoal.plots.comparison import Curve, comparison, severity, sizes
from shoal.plots.diversity import members, pairwise
from shoal.plots.doubt import accuracy_confidence, uncertainty
from shoal.plots.fidelity import distances, posterior_bands, score_law, stein_growth
from shoal.plots.gallery import gallery
from shoal.plots.history import bandwidth, forces, loss
from shoal.plots.registry import plot, registry
from shoal.plots.style import COLOURS, look
from shoal.plots.svg import svg
from shoal.plots.toys import band, parity, particles, plane

__all__ = [
    "COLOURS",
    "Curve",
    "accuracy_confidence",
    "band",
    "bandwidth",
    "comparison",
    "coverage",
    "distances",
    "forces",
    "gallery",
    "look",
    "loss",
    "members",
    "pairwise",
    "parity",
    "particles",
    "plane",
    "plot",
    "posterior_bands",
    "registry",
    "reliability",
    "score_law",
    "severity",
    "sizes",
    "stein_growth",
    "svg",
    "uncertainty",
]

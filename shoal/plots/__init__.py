"""Figures: each a function that takes numbers and returns a matplotlib figure.

`svg` turns a figure into text for a page; `registry` lists them all. matplotlib is imported when
the first figure is drawn.
"""

from shoal.plots.attention import attention
from shoal.plots.calibration import coverage, reliability
from shoal.plots.comparison import Curve, comparison, heatmap, severity, sizes
from shoal.plots.corruptions import Spread, contact_sheet, corrupted
from shoal.plots.diversity import members, pairwise
from shoal.plots.doubt import accuracy_confidence, uncertainty, uncertainty_by_size
from shoal.plots.evidence import ladder, likelihoods, weights
from shoal.plots.fidelity import distances, posterior_bands, score_law, stein_growth
from shoal.plots.gallery import gallery
from shoal.plots.history import bandwidth, bandwidths, forces, loss
from shoal.plots.landscape import diversity_plane, profile, surface
from shoal.plots.modes import curvature, effective
from shoal.plots.png import png
from shoal.plots.registry import plot, registry
from shoal.plots.strength import strength
from shoal.plots.style import COLOURS, look
from shoal.plots.svg import svg
from shoal.plots.toys import band, parity, particles, plane
from shoal.plots.trajectories import function_map, similarity

__all__ = [
    "COLOURS",
    "Curve",
    "Spread",
    "accuracy_confidence",
    "attention",
    "band",
    "bandwidth",
    "bandwidths",
    "comparison",
    "contact_sheet",
    "corrupted",
    "coverage",
    "curvature",
    "distances",
    "diversity_plane",
    "effective",
    "forces",
    "function_map",
    "gallery",
    "heatmap",
    "ladder",
    "likelihoods",
    "look",
    "loss",
    "members",
    "pairwise",
    "parity",
    "particles",
    "plane",
    "plot",
    "png",
    "posterior_bands",
    "profile",
    "registry",
    "reliability",
    "score_law",
    "severity",
    "similarity",
    "sizes",
    "stein_growth",
    "strength",
    "surface",
    "svg",
    "uncertainty",
    "uncertainty_by_size",
    "weights",
]

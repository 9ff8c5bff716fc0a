"""Figures: each function takes numbers and returns a matplotlib figure.

`svg` makes a figure text for a page; `registry` lists all figures. The first figure imports
matplotlib.
"""

from shoal.plots.calibration import Spread, contact_sheet, corrupted, coverage, reliability
from shoal.plots.chains import autocorrelations, traces
from shoal.plots.columns import dependence, importances
from shoal.plots.comparison import (
    MetricCurve,
    comparison,
    heatmap,
    severity,
    sizes,
    strength,
    worth,
)
from shoal.plots.diversity import curvature, effective, members, pairwise
from shoal.plots.errors import confusion, coverage_over_prediction, residuals
from shoal.plots.evidence import likelihoods, prior_comparison, weights
from shoal.plots.fidelity import distances, posterior_bands, score_law, stein_growth
from shoal.plots.figure import COLOURS, look, plot, png, registry, svg
from shoal.plots.gallery import attention, gallery
from shoal.plots.history import bandwidth, bandwidths, forces, loss
from shoal.plots.landscape import diversity_plane, function_map, profile, similarity, surface
from shoal.plots.predictive_uncertainty import accuracy_confidence, uncertainty, uncertainty_by_size
from shoal.plots.toys import band, parity, particles, plane

__all__ = [
    "COLOURS",
    "MetricCurve",
    "Spread",
    "accuracy_confidence",
    "attention",
    "autocorrelations",
    "band",
    "bandwidth",
    "bandwidths",
    "comparison",
    "confusion",
    "contact_sheet",
    "corrupted",
    "coverage",
    "coverage_over_prediction",
    "curvature",
    "dependence",
    "distances",
    "diversity_plane",
    "effective",
    "forces",
    "function_map",
    "gallery",
    "heatmap",
    "importances",
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
    "prior_comparison",
    "profile",
    "registry",
    "reliability",
    "residuals",
    "score_law",
    "severity",
    "similarity",
    "sizes",
    "stein_growth",
    "strength",
    "surface",
    "svg",
    "traces",
    "uncertainty",
    "uncertainty_by_size",
    "weights",
    "worth",
]

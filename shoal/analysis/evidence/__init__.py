"""In what sense an ensemble is Bayesian: the empirical-Bayes view of trained members.

found = evidence(run, data)
found.log_evidence, found.weightings["posterior"].effective, found.rungs
"""

from shoal.analysis.evidence.ladder import Rung
from shoal.analysis.evidence.store import (
    keep_evidence,
    kept_evidence,
    load_evidence,
    member_weights,
    save_evidence,
)
from shoal.analysis.evidence.whole import Evidence, Weighting, evidence

__all__ = [
    "Evidence",
    "Rung",
    "Weighting",
    "evidence",
    "keep_evidence",
    "kept_evidence",
    "load_evidence",
    "member_weights",
    "save_evidence",
]

"""Evidence of an ensemble: the empirical-Bayes view of trained members.

found = evidence(run, data)
found.log_evidence, found.weightings["posterior"].effective, found.learned_priors
"""

from shoal.analysis.evidence.compute_evidence import (
    Evidence,
    Weighting,
    evidence,
    keep_evidence,
    kept_evidence,
    load_evidence,
    member_weights,
    save_evidence,
)
from shoal.analysis.evidence.prior_comparison import PriorResult

__all__ = [
    "Evidence",
    "PriorResult",
    "Weighting",
    "evidence",
    "keep_evidence",
    "kept_evidence",
    "load_evidence",
    "member_weights",
    "save_evidence",
]

"""From predictions to decisions: calibrated probabilities, sets, intervals, abstention, alarms.

Every rule is fitted to predictions for *validation data*, which the ensemble was not trained on,
and is then called with new predictions:

    val = shoal.predict(run, x_val)
    sets = shoal.decisions.conformal_sets(val, y_val, level=0.9)
    inside = sets(shoal.predict(run, x_new))        # [B, C], True for the classes of each set

The guarantees need new data that are *exchangeable* with the validation data: drawn from the same
distribution, in any order. Under shift or on OOD data they do not hold.
"""

from shoal.prediction.decisions.alarm import Alarm, ood_alarm
from shoal.prediction.decisions.binomial import clopper_pearson
from shoal.prediction.decisions.conformal import (
    ConformalIntervals,
    ConformalSets,
    conformal_intervals,
    conformal_sets,
)
from shoal.prediction.decisions.cross_conformal import (
    CrossConformalIntervals,
    CrossConformalSets,
    cross_conformal_intervals,
    cross_conformal_sets,
)
from shoal.prediction.decisions.scaling import Temperature, temperature
from shoal.prediction.decisions.selection import (
    Choice,
    RiskCoverage,
    SelectiveRule,
    cheapest,
    risk_coverage,
    selective,
)

__all__ = [
    "Alarm",
    "Choice",
    "ConformalIntervals",
    "ConformalSets",
    "CrossConformalIntervals",
    "CrossConformalSets",
    "RiskCoverage",
    "SelectiveRule",
    "Temperature",
    "cheapest",
    "clopper_pearson",
    "conformal_intervals",
    "conformal_sets",
    "cross_conformal_intervals",
    "cross_conformal_sets",
    "ood_alarm",
    "risk_coverage",
    "selective",
    "temperature",
]

"""Ensembles as estimators of scikit-learn.

from shoal.sklearn import EnsembleRegressor

model = EnsembleRegressor(members=10).fit(X_train, y_train)
low, high = model.predict_interval(X_test, level=0.9)
"""

from shoal.core.optional import require

require("sklearn", extra="sklearn")

from shoal.integrations.sklearn import EnsembleClassifier, EnsembleRegressor  # noqa: E402

__all__ = ["EnsembleClassifier", "EnsembleRegressor"]

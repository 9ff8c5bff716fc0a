"""Every check of scikit-learn for its estimators, with no expected failure."""

import os
import subprocess
import sys

import pytest
from sklearn.utils.estimator_checks import parametrize_with_checks

from shoal.integrations.sklearn import NUMBERS
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

# The checks warn on purpose, for example by data of one class.
pytestmark = pytest.mark.filterwarnings("ignore")

FEW = {"epochs": 20, "members": 3, "hidden": (32,)}


@parametrize_with_checks([EnsembleClassifier(**FEW), EnsembleRegressor(**FEW)])
def test_check_of_scikit_learn(estimator, check):
    check(estimator)


OTHERS = [
    kind(**FEW, numbers=numbers)
    for kind in (EnsembleClassifier, EnsembleRegressor)
    for numbers in NUMBERS
    if numbers != kind().numbers
]


OTHERS += [kind(**FEW, conformal=True) for kind in (EnsembleClassifier, EnsembleRegressor)]


@pytest.mark.nightly
@parametrize_with_checks(OTHERS)
def test_check_of_scikit_learn_for_other_settings(estimator, check):
    check(estimator)


ARRAY_API = """
import warnings
warnings.simplefilter("ignore")
from sklearn.utils.estimator_checks import check_array_api_input
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor
for kind in (EnsembleClassifier, EnsembleRegressor):
    estimator = kind(epochs=3, members=2, hidden=(8,))
    check_array_api_input(
        kind.__name__, estimator, array_namespace="numpy", expect_only_array_outputs=False
    )
print("done")
"""


@pytest.mark.nightly
def test_check_that_scikit_learn_leaves_out_without_the_array_api():
    """SciPy reads the variable when it is imported, so the check needs a process of its own."""
    command = [sys.executable, "-c", ARRAY_API]
    environment = os.environ | {"SCIPY_ARRAY_API": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.stdout.strip() == "done", done.stderr

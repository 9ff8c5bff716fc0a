"""Ensembles beside scikit-learn's own networks and forests; writes README.md.

python -m studies.sklearn [--splits 5]

Every model has the default settings of its class. Networks of scikit-learn get standardised inputs
and targets, which the ensembles do by themselves.
"""

import argparse
import time
import warnings

import numpy as np
import torch
from sklearn.compose import TransformedTargetRegressor
from sklearn.datasets import load_diabetes, load_digits
from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor
from sklearn.metrics import accuracy_score, log_loss, root_mean_squared_error
from sklearn.model_selection import train_test_split
from sklearn.neural_network import MLPClassifier, MLPRegressor
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

import shoal
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor
from studies import RESULTS
from studies.common import test_of

PLACE = RESULTS / "sklearn/README.md"


def concrete():
    """Inputs and compressive strength in MPa."""
    data = shoal.data.load({"name": "uci", "problem": "concrete"})
    test = test_of(data)
    assert data.scaling is not None
    x = torch.cat([data.train.x, test.x]).numpy()
    y = torch.cat([data.train.y, test.y]).flatten()
    return x, data.scaling.original(y).numpy()


def regressors(seed):
    network = make_pipeline(StandardScaler(), MLPRegressor(random_state=seed))
    return {
        "EnsembleRegressor": EnsembleRegressor(random_state=seed),
        "EnsembleRegressor, early_stopping=False": EnsembleRegressor(
            random_state=seed, early_stopping=False
        ),
        "MLPRegressor": TransformedTargetRegressor(network, transformer=StandardScaler()),
        "RandomForestRegressor": RandomForestRegressor(random_state=seed),
    }


def classifiers(seed):
    return {
        "EnsembleClassifier": EnsembleClassifier(random_state=seed),
        "EnsembleClassifier, early_stopping=False": EnsembleClassifier(
            random_state=seed, early_stopping=False
        ),
        "MLPClassifier": make_pipeline(StandardScaler(), MLPClassifier(random_state=seed)),
        "RandomForestClassifier": RandomForestClassifier(random_state=seed),
    }


def regression_scores(model, X, y):
    found = {"RMSE": root_mean_squared_error(y, model.predict(X))}
    if isinstance(model, EnsembleRegressor):
        low, high = model.predict_interval(X, level=0.9)
        found["NLL"] = shoal.evaluate(model.predictive(X), y)["nll"]
        found["coverage of 90 % intervals"] = float(((low <= y) & (y <= high)).mean())
    return found


def classification_scores(model, X, y):
    return {
        "accuracy": accuracy_score(y, model.predict(X)),
        "NLL": log_loss(y, model.predict_proba(X), labels=model.classes_),
    }


PROBLEMS = {
    "concrete (1,030 points, MPa)": (concrete, regressors, regression_scores),
    "diabetes (442 points)": (
        lambda: load_diabetes(return_X_y=True),
        regressors,
        regression_scores,
    ),
    "digits (1,797 points)": (
        lambda: load_digits(return_X_y=True),
        classifiers,
        classification_scores,
    ),
}


def measured(problem, splits):
    """Scores of each model in each split, by model and name."""
    load, models, scores = problem
    X, y = load()
    found = {}
    for seed in range(splits):
        X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=0.2, random_state=seed)
        for name, model in models(seed).items():
            start = time.perf_counter()
            model.fit(X_train, y_train)
            values = {"seconds to fit": time.perf_counter() - start}
            for key, value in (scores(model, X_test, y_test) | values).items():
                found.setdefault(name, {}).setdefault(key, []).append(value)
    return found


def shown(values):
    """Mean and standard error over splits; a dash for what a model does not have."""
    if values is None:
        return "–"
    return f"{np.mean(values):.3g} ± {np.std(values, ddof=1) / len(values) ** 0.5:.2g}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--splits", type=int, default=5)
    splits = parser.parse_args().splits
    warnings.simplefilter("ignore")
    lines = [
        "# Default models of scikit-learn and Shoal",
        "",
        f"Mean ± standard error over {splits} random splits, 80 % for training. All models have",
        "default settings. `python -m studies.sklearn` repeats the tables. Times are of",
        "one CPU core that other work shared.",
    ]
    for title, problem in PROBLEMS.items():
        found = measured(problem, splits)
        names = list(dict.fromkeys(key for values in found.values() for key in values))
        names = [name for name in names if name != "seconds to fit"] + ["seconds to fit"]
        lines += ["", f"## {title}", "", f"| model | {' | '.join(names)} |"]
        lines += [f"|{' --- |' * (len(names) + 1)}"]
        for model, values in found.items():
            lines += [f"| {model} | {' | '.join(shown(values.get(n)) for n in names)} |"]
        PLACE.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

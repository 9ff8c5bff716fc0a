"""`EnsembleClassifier`: an ensemble of networks that classifies."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import (
    ClassifierMixin,
)
from sklearn.metrics import accuracy_score
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import (
    assert_all_finite,
    column_or_1d,
)

from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.arrays import first_gap
from shoal.data.batches.batch import check_same_rows
from shoal.inference.likelihoods import Bernoulli, Categorical, Likelihood
from shoal.integrations.sklearn.estimator import EnsembleEstimator, Network
from shoal.integrations.sklearn.presets import PRESETS_FOR_CLASSES, Recipe
from shoal.prediction.predictive import Predictive

__all__ = ["EnsembleClassifier"]


class EnsembleClassifier(ClassifierMixin, EnsembleEstimator):
    """An ensemble of networks that classifies, as an estimator of scikit-learn.

    Labels may be numbers or texts, of two or more classes. A matrix of 0 and 1 [N, K] holds
    several labels at once; its columns then are independent (`shoal.likelihoods.Bernoulli`).

    Parameters:
        preset: "fast", "default" or "best": what the parameters mean that are None. "best" also
            searches among encodings, widths and dropout on out-of-fold data.
        time_limit: seconds that `fit` may take; fewer epochs, then fewer members, keep to it.
        members: ensemble size.
        hidden: widths of the hidden layers of each member.
        dropout: dropout probability of hidden units.
        method: a name from `shoal list methods`, or a `shoal.Repulsion`.
        strength: factor of the repulsive force; None for the default of the method, "auto" to
            choose it on held-out data.
        epochs: most passes over the data.
        batch_size: data points per batch; "auto" for a sixteenth of them, from 16 to 256.
        batches: "common" for batches that all members share; "own" for networks that are trained as
            if alone, each on its own order of the data points. With folds they are own batches.
        learning_rate: learning rate of Adam.
        prior_std: standard deviation of the Gaussian prior of the weights; smaller values give
            smoother functions.
        folds: parts of the data of which each member holds out one, so that every training point
            has a prediction by members that did not see it. "auto" for 8, where there are 40
            data points, 10 of every class, and a method that can have folds; None for no folds.
        calibrate: scale the noise, or the logits, by the out-of-fold predictions.
        conformal: let `predict_set` use CV+ on the out-of-fold predictions of the fit: a
            guarantee at any level, without validation data, which `conformal_.guarantee` says.
            Weights of data points then must be whole numbers.
        draws: let every member become a chain after its training, and keep so many draws of the
            posterior (`shoal.draw`); or a dict of arguments of `shoal.draw`, such as {"draws": 100,
            "sampler": "sghmc"}. Chains see all training data, so there is no calibration, no
            out-of-fold prediction and no conformal rule. `time_limit` is that of the training.
        early_stopping: keep the members of the best epoch on held-out data: their folds, or
            without folds a part of the training data. "auto" does so for 40 data points or more
            (100 without folds), if every class has at least 10.
        validation_fraction: share of the training data to hold out, without folds.
        n_iter_no_change: epochs without improvement before training stops, with early stopping;
            with folds, that of the mean over members by 0.5 %.
        network: networks of your own: a function of (input_shape, outputs), or an object with such
            a method `build`, as in `shoal.models`. None for a perceptron.
        preprocess: "auto" standardises numbers and dates, fills gaps and encodes categories. A
            transformer of your own replaces this; None gives X to the networks as it is.
        numbers: what "auto" does with numbers and dates. "standard" standardises them. "robust"
            puts columns with heavy tails on a logarithmic scale first (`HeavyTails`). "piecewise"
            does so, and adds a piecewise-linear encoding by quantiles (`PiecewiseLinear`).
            "periodic" learns sines and cosines of each number (`shoal.models.PeriodicMLP`).
        device: device to train on; None for the CPU.
        out: folder that stores the run; it must not hold a run already.
        options: more arguments of `shoal.fit`, such as {"prior": ..., "schedule": "cosine"}.
        random_state: seed, generator or None, as in scikit-learn.
        verbose: show progress.
        class_weight: weights of the classes, by label, or "balanced", as in scikit-learn.

    Attributes:
        run_: the run: `shoal.report`, `shoal.landscape` and `shoal.evidence` take it.
        classes_: the labels, in the order of the probabilities.
        preprocessing_: the fitted preprocessing; None without.
        oof_predictive_: predictions for the training points, each by the members that held it out,
            in the order of `fit` without points of weight 0; None without folds or with draws.
        oof_score_: what `score` gives, of these predictions; no validation set is needed.
        conformal_: the rule of conformal=True, with scores of the training points and no data;
            None without.
        n_iter_: number of epochs.
        n_features_in_, feature_names_in_: number and names of the columns.
    """

    presets: ClassVar[Mapping[str, Recipe]] = PRESETS_FOR_CLASSES

    def __init__(
        self,
        *,
        preset: str = "default",
        time_limit: float | None = None,
        members: int | None = None,
        hidden: Sequence[int] | None = None,
        dropout: float | None = None,
        method: Any = "ensemble",
        strength: float | str | None = None,
        epochs: int | None = None,
        batch_size: int | str = "auto",
        batches: str = "common",
        learning_rate: float | None = None,
        prior_std: float | None = None,
        folds: int | str | None = "auto",
        calibrate: bool = True,
        conformal: bool = False,
        draws: int | Mapping[str, Any] | None = None,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int | None = None,
        class_weight: Mapping[Any, float] | str | None = None,
        network: Network | None = None,
        preprocess: Any = "auto",
        numbers: str | None = None,
        device: Any = None,
        out: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.preset = preset
        self.time_limit = time_limit
        self.members = members
        self.hidden = hidden
        self.dropout = dropout
        self.method = method
        self.strength = strength
        self.epochs = epochs
        self.batch_size = batch_size
        self.batches = batches
        self.learning_rate = learning_rate
        self.prior_std = prior_std
        self.folds = folds
        self.calibrate = calibrate
        self.conformal = conformal
        self.draws = draws
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.class_weight = class_weight
        self.network = network
        self.preprocess = preprocess
        self.numbers = numbers
        self.device = device
        self.out = out
        self.options = options
        self.random_state = random_state
        self.verbose = verbose

    def partial_fit(self, X: Any, y: Any, classes: Any = None, sample_weight: Any = None) -> Self:
        """Train all members with one more pass, over these data points.

        The first call fits the preprocessing; later calls keep it. After `fit`, members go on from
        its solution. Nothing is held out.

        Args:
            X: inputs, an array [N, D] or a DataFrame.
            y: labels [N], or several at once [N, K].
            classes: all labels that may come; needed in the first call for labels [N].
            sample_weight: weight of each data point [N].
        """
        if isinstance(self.class_weight, str):
            raise ConfigError(
                f"class_weight={self.class_weight!r} needs the labels of all data, which "
                f"partial_fit does not have; give a dict of weights"
            )
        fitted = hasattr(self, "run_")
        if classes is not None:
            classes = np.unique(classes)
            if fitted and not np.array_equal(classes, self.classes_):
                raise DataError(
                    f"classes={classes.tolist()} came, but training began with "
                    f"{self.classes_.tolist()}; give the same, or leave classes out"
                )
        elif not fitted and np.ndim(y) < 2:
            raise DataError(
                "the first call of partial_fit needs all labels that may come; "
                "type partial_fit(X, y, classes=[...])"
            )
        return self._continued(X, y, sample_weight, classes)

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label [N]; for several labels at once 0 or 1 [N, K]."""
        probs = self.predict_proba(X)
        return (probs > 0.5).astype(int) if self._several else self.classes_[probs.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class [N, C]; for several labels at once that of 1 [N, K]."""
        pred = self.predictive(X)
        return (pred.mean if self._several else pred.probs).numpy()

    def predict_set(self, X: Any, level: float = 0.9) -> np.ndarray:
        """Which classes are in the set of each data point [N, C], in the order of `classes_`.

        About a share `level` of the sets contains the true class; see `conformal_.guarantee`. The
        most probable class is in every set. The model needs conformal=True.
        """
        rule = self._rule("predict_set").at(level)
        return rule(self.predictive(X)).numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Accuracy."""
        check_same_rows(X, y, sample_weight)
        return super().score(X, y, sample_weight)

    def predict_log_proba(self, X: Any) -> np.ndarray:
        """Logarithm of `predict_proba`."""
        return np.log(self.predict_proba(X))

    def decision_function(self, X: Any) -> np.ndarray:
        """Log odds of the second of two classes [N], or of 1 in each column [N, K].

        For more classes the logarithm of their probabilities [N, C].
        """
        probs = self.predict_proba(X)
        least = np.finfo(probs.dtype).tiny
        logs = np.log(np.maximum(probs, least))
        if self._several:
            return logs - np.log(np.maximum(1 - probs, least))
        return logs[:, 1] - logs[:, 0] if len(self.classes_) == 2 else logs

    @property
    def _several(self) -> bool:
        return isinstance(self.run_.likelihood, Bernoulli)

    def _checked_targets(self, y: Any) -> np.ndarray:
        values = np.asarray(y)
        gap = first_gap(values) if values.ndim == 1 else None
        if gap is not None:
            raise DataError(
                f"y has a gap, {values[gap]} at y[{gap}]; leave out such rows: "
                f"keep = pandas.notna(y), then X[keep] and y[keep]"
            )
        check_classification_targets(y)
        kind = type_of_target(y, input_name="y", raise_unknown=True)
        if kind == "multiclass-multioutput":
            raise DataError(
                "y has several columns with more than two classes; give each column of classes "
                "to an EnsembleClassifier of its own"
            )
        if kind == "multilabel-indicator":
            return np.asarray(y.toarray() if hasattr(y, "toarray") else y)
        labels = column_or_1d(y, warn=True)
        assert_all_finite(labels, input_name="y")
        return labels

    def _encoded(self, y: np.ndarray, learn: bool = False) -> np.ndarray:
        if y.ndim == 2:
            if learn:
                self.classes_ = np.arange(y.shape[1])
            return y.astype(np.int64)
        if learn:
            self.classes_ = np.unique(y) if self._classes_ahead is None else self._classes_ahead
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise DataError(
                f"y holds {unknown.tolist()[0]!r}, which is no class of the training data"
            )
        return np.searchsorted(self.classes_, y)

    def _likelihood(self, recipe: Recipe, y: np.ndarray) -> Likelihood:
        return Bernoulli() if y.ndim == 2 else Categorical()

    def _scored(self, oof: Predictive, y: np.ndarray, weight: np.ndarray | None) -> float:
        several = isinstance(oof.likelihood, Bernoulli)
        probs = (oof.mean if several else oof.probs).numpy()
        labels = probs > 0.5 if several else self.classes_[probs.argmax(1)]
        return float(accuracy_score(y, labels, sample_weight=weight))

    def _weighted(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        if self.class_weight is None:
            return weight
        weight = np.ones(len(y)) if weight is None else weight
        if isinstance(self.class_weight, str) and y.ndim == 1:
            if self.class_weight != "balanced":
                raise ConfigError(
                    f'class_weight must be a dict, "balanced" or None, not {self.class_weight!r}'
                )
            counts = np.bincount(y, weights=weight)  # repetition counts, so that weights do too
            return weight * (weight.sum() / (len(counts) * counts))[y]
        labels = y if y.ndim == 2 else self.classes_[y]
        return weight * compute_sample_weight(self.class_weight, labels)

    def _class_names(self) -> tuple[str, ...] | None:
        return tuple(map(str, self.classes_))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = not self.conformal
        return tags

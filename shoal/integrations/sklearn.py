"""Ensembles as estimators of scikit-learn; users import them from `shoal.sklearn`."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.base import ClassifierMixin, RegressorMixin
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import assert_all_finite, check_array, column_or_1d
from torch import Tensor

from shoal.core.errors import ConfigError, DataError
from shoal.inference.likelihoods import Bernoulli, Categorical, HomoscedasticGaussian, Likelihood
from shoal.inference.likelihoods import registry as likelihoods
from shoal.integrations.sklearn_estimator import EnsembleEstimator, Network

__all__ = ["EnsembleClassifier", "EnsembleRegressor"]


class EnsembleClassifier(ClassifierMixin, EnsembleEstimator):
    """An ensemble of networks that classifies, as an estimator of scikit-learn.

    Labels may be numbers or texts, of two or more classes. A matrix of 0 and 1 [N, K] holds
    several labels at once; its columns then are independent (`shoal.likelihoods.Bernoulli`).

    Parameters:
        members: ensemble size.
        hidden: widths of the hidden layers of each member.
        method: a name from `shoal list methods`, or a `shoal.Repulsion`.
        strength: factor of the repulsive force; None for the default of the method, "auto" to
            choose it on held-out data.
        epochs: number of passes over the data.
        batch_size: data points per batch; "auto" for 200, or all data points if there are fewer.
        learning_rate: learning rate of Adam.
        prior_std: standard deviation of the Gaussian prior of the weights; smaller values give
            smoother functions.
        early_stopping: hold out a part of the training data, stop when its NLL does not improve,
            and keep the members of the best epoch. "auto" does so for 100 data points or more, if
            every class has at least 10.
        validation_fraction: share of the training data to hold out.
        n_iter_no_change: epochs without improvement before training stops.
        network: networks of your own: a function of (input_shape, outputs), or an object with such
            a method `build`, as in `shoal.models`. None for a perceptron.
        preprocess: "auto" standardises numbers, fills gaps and encodes categories. A transformer
            of your own replaces this; None gives X to the networks as it is.
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
        n_iter_: number of epochs.
        n_features_in_, feature_names_in_: number and names of the columns.
    """

    def __init__(
        self,
        *,
        members: int = 5,
        hidden: Sequence[int] = (64, 64),
        method: Any = "f-kde",
        strength: float | str | None = None,
        epochs: int = 100,
        batch_size: int | str = "auto",
        learning_rate: float = 0.01,
        prior_std: float = 0.5,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        class_weight: Mapping[Any, float] | str | None = None,
        network: Network | None = None,
        preprocess: Any = "auto",
        device: Any = None,
        out: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.members = members
        self.hidden = hidden
        self.method = method
        self.strength = strength
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.prior_std = prior_std
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.class_weight = class_weight
        self.network = network
        self.preprocess = preprocess
        self.device = device
        self.out = out
        self.options = options
        self.random_state = random_state
        self.verbose = verbose

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label [N]; for several labels at once 0 or 1 [N, K]."""
        probs = self.predict_proba(X)
        return (probs > 0.5).astype(int) if self._several else self.classes_[probs.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class [N, C]; for several labels at once that of 1 [N, K]."""
        pred = self.predictive(X)
        return (pred.mean if self._several else pred.probs).numpy()

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
            self.classes_ = np.unique(y)
        unknown = np.setdiff1d(y, self.classes_)
        if len(unknown):
            raise DataError(f"y holds {unknown[0]!r}, which is no class of the training data")
        return np.searchsorted(self.classes_, y)

    def _likelihood(self, y: np.ndarray) -> Likelihood:
        return Bernoulli() if y.ndim == 2 else Categorical()

    def _weighted(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        if self.class_weight is None:
            return weight
        own = np.ones(len(y)) if weight is None else weight
        if isinstance(self.class_weight, str) and y.ndim == 1:
            if self.class_weight != "balanced":
                raise ConfigError(
                    f'class_weight must be a dict, "balanced" or None, not {self.class_weight!r}'
                )
            counts = np.bincount(y, weights=own)  # repetition counts, so that weights do too
            return own * (own.sum() / (len(counts) * counts))[y]
        labels = y if y.ndim == 2 else self.classes_[y]
        return own * compute_sample_weight(self.class_weight, labels)

    def _class_names(self) -> tuple[str, ...] | None:
        return tuple(map(str, self.classes_))

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.classifier_tags.multi_label = True
        return tags


class EnsembleRegressor(RegressorMixin, EnsembleEstimator):
    """An ensemble of networks that predicts numbers, as an estimator of scikit-learn.

    Targets are standardised inside; predictions and intervals are in the units of y. One or
    several target columns are allowed.

    Parameters:
        members: ensemble size.
        hidden: widths of the hidden layers of each member.
        method: a name from `shoal list methods`, or a `shoal.Repulsion`.
        strength: factor of the repulsive force; None for the default of the method, "auto" to
            choose it on held-out data.
        epochs: number of passes over the data.
        batch_size: data points per batch; "auto" for 200, or all data points if there are fewer.
        learning_rate: learning rate of Adam.
        prior_std: standard deviation of the Gaussian prior of the weights; smaller values give
            smoother functions.
        early_stopping: hold out a part of the training data, stop when its NLL does not improve,
            and keep the members of the best epoch. "auto" does so for 100 data points or more, if
            every class has at least 10.
        validation_fraction: share of the training data to hold out.
        n_iter_no_change: epochs without improvement before training stops.
        network: networks of your own: a function of (input_shape, outputs), or an object with such
            a method `build`, as in `shoal.models`. None for a perceptron.
        preprocess: "auto" standardises numbers, fills gaps and encodes categories. A transformer
            of your own replaces this; None gives X to the networks as it is.
        device: device to train on; None for the CPU.
        out: folder that stores the run; it must not hold a run already.
        options: more arguments of `shoal.fit`, such as {"prior": ..., "schedule": "cosine"}.
        random_state: seed, generator or None, as in scikit-learn.
        verbose: show progress.
        likelihood: distribution of the targets. None for Gaussian noise of one learned size;
            "heteroscedastic" for noise that depends on X; or another one of `shoal.likelihoods`.

    Attributes:
        run_: the run: `shoal.report`, `shoal.landscape` and `shoal.evidence` take it.
        preprocessing_: the fitted preprocessing; None without.
        n_iter_: number of epochs.
        n_features_in_, feature_names_in_: number and names of the columns.
    """

    def __init__(
        self,
        *,
        members: int = 5,
        hidden: Sequence[int] = (64, 64),
        method: Any = "f-kde",
        strength: float | str | None = None,
        likelihood: Any = None,
        epochs: int = 100,
        batch_size: int | str = "auto",
        learning_rate: float = 0.01,
        prior_std: float = 0.5,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        network: Network | None = None,
        preprocess: Any = "auto",
        device: Any = None,
        out: str | Path | None = None,
        options: Mapping[str, Any] | None = None,
        random_state: Any = None,
        verbose: bool = False,
    ) -> None:
        self.members = members
        self.hidden = hidden
        self.method = method
        self.strength = strength
        self.likelihood = likelihood
        self.epochs = epochs
        self.batch_size = batch_size
        self.learning_rate = learning_rate
        self.prior_std = prior_std
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.network = network
        self.preprocess = preprocess
        self.device = device
        self.out = out
        self.options = options
        self.random_state = random_state
        self.verbose = verbose

    def predict(self, X: Any, return_std: bool = False) -> Any:
        """Mean of the targets [N] or [N, K]; with `return_std` also `predict_std`."""
        pred = self.predictive(X)
        mean = self._as_targets(pred.mean)
        return (mean, self._as_targets(pred.stddev)) if return_std else mean

    def predict_std(self, X: Any) -> np.ndarray:
        """Standard deviation of the targets: noise and disagreement of the members."""
        return self._as_targets(self.predictive(X).stddev)

    def predict_interval(self, X: Any, level: float = 0.9) -> tuple[np.ndarray, np.ndarray]:
        """Both ends of the central interval that holds a target with probability `level`."""
        low, high = self.predictive(X).interval(level)
        return self._as_targets(low), self._as_targets(high)

    def predict_quantile(self, X: Any, q: float | Sequence[float] = 0.5) -> np.ndarray:
        """Quantile of the targets; for several q, one more axis at the end."""
        pred = self.predictive(X)
        found = [self._as_targets(pred.quantile(float(level))) for level in np.atleast_1d(q)]
        return found[0] if np.ndim(q) == 0 else np.stack(found, axis=-1)

    def _as_targets(self, values: Tensor) -> np.ndarray:
        found = values.numpy()
        return found if self._columns else found[:, 0]

    def _checked_targets(self, y: Any) -> np.ndarray:
        targets = check_array(
            y,
            ensure_2d=False,
            dtype=np.float64,  # pyright: ignore[reportArgumentType]
            input_name="y",
        )
        return column_or_1d(targets, warn=True) if targets.shape[1:] == (1,) else targets

    def _encoded(self, y: np.ndarray, learn: bool = False) -> np.ndarray:
        if learn:
            self._columns = y.ndim > 1
        return y

    def _likelihood(self, y: np.ndarray) -> Likelihood:
        if self.likelihood is None:
            return HomoscedasticGaussian()
        return likelihoods.make(self.likelihood)

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

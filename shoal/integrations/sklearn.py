"""Ensembles as estimators of scikit-learn; users import them from `shoal.sklearn`.

Tables are prepared for the networks by parts of scikit-learn, so that a fitted model keeps them and
pickles with them:

    numbers      StandardScaler, then SimpleImputer with the mean and an indicator of gaps;
                 `HeavyTails` before and `PiecewiseLinear` between, where `numbers` says so
    categories   OneHotEncoder; a gap is a category of its own, an unknown category has only zeros
    dates        `DateParts`: days, and the time of the day, week and year; then as numbers
"""

import inspect
import threading
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from sklearn import config_context
from sklearn.base import (
    BaseEstimator,
    ClassifierMixin,
    OneToOneFeatureMixin,
    RegressorMixin,
    TransformerMixin,
    clone,
)
from sklearn.compose import ColumnTransformer
from sklearn.impute import SimpleImputer
from sklearn.model_selection import train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer, OneHotEncoder, StandardScaler
from sklearn.utils import check_random_state
from sklearn.utils.class_weight import compute_sample_weight
from sklearn.utils.multiclass import check_classification_targets, type_of_target
from sklearn.utils.validation import (
    assert_all_finite,
    check_array,
    check_consistent_length,
    check_is_fitted,
    column_or_1d,
    validate_data,
)
from torch import Tensor, nn

from shoal.core.caller import calling
from shoal.core.errors import ConfigError, DataError
from shoal.core.optional import require
from shoal.data.batches.arrays import first_gap
from shoal.data.batches.batch import check_same_rows
from shoal.data.batches.sources import as_split
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.predict import predict
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Bernoulli, Categorical, HomoscedasticGaussian, Likelihood
from shoal.inference.likelihoods import registry as likelihoods
from shoal.inference.priors import Gaussian
from shoal.models.blueprint import Architecture, Blueprint
from shoal.models.mlp import MLP, PeriodicMLP
from shoal.prediction.predictive import Predictive
from shoal.training.fit import fit
from shoal.training.folder.own_data import OWN_DATA, PREPARED_BY
from shoal.training.folder.run import Run

__all__ = [
    "DateParts",
    "EnsembleClassifier",
    "EnsembleEstimator",
    "EnsembleRegressor",
    "HeavyTails",
    "Network",
    "PiecewiseLinear",
    "as_categories",
    "as_numbers",
    "as_seconds",
    "fitted",
    "is_table",
    "merged",
    "preprocessing_for",
    "rows_of",
    "transformed",
]

Network = Callable[[tuple[int, ...], int], nn.Module] | Architecture
"""Makes a network for inputs of a shape and a number of outputs, or has a method that does."""

LARGEST_BATCH = 200
"""Data points per batch for batch_size="auto", as in scikit-learn's networks."""

ENOUGH_POINTS, ENOUGH_OF_A_CLASS = 100, 10
"""Data points, and data points of each class, from which early_stopping="auto" holds out some."""

NUMBERS = ("standard", "robust", "piecewise", "periodic")
"""What the argument `numbers` may be."""

_ONE_FIT = threading.RLock()
"""Threads of joblib train in turn: torch's random generators belong to the whole process."""


@dataclass(frozen=True)
class _OwnNetwork:
    """The user's function with its arguments; unlike a closure it can be pickled."""

    network: Callable[[tuple[int, ...], int], nn.Module]
    input_shape: tuple[int, ...]
    outputs: int

    def __post_init__(self) -> None:
        # the name under which a run folder stores a network that it cannot rebuild
        name = getattr(self.network, "__qualname__", type(self.network).__qualname__)
        object.__setattr__(self, "__qualname__", name)

    def __call__(self) -> nn.Module:
        return self.network(self.input_shape, self.outputs)


class _Points(NamedTuple):
    """Data points with their weights, None for equal weights."""

    X: Any
    y: np.ndarray
    weight: np.ndarray | None

    def rows(self, rows: np.ndarray) -> "_Points":
        weight = None if self.weight is None else self.weight[rows]
        return _Points(rows_of(self.X, rows), self.y[rows], weight)


class EnsembleEstimator(BaseEstimator):
    """What both estimators have in common: preprocessing, training, predictions."""

    members: int
    hidden: Sequence[int]
    method: Any
    strength: float | str | None
    epochs: int
    batch_size: int | str
    batches: str
    learning_rate: float
    prior_std: float
    early_stopping: bool | str
    validation_fraction: float
    n_iter_no_change: int
    network: Network | None
    preprocess: Any
    numbers: str
    device: Any
    out: str | Path | None
    options: Mapping[str, Any] | None
    random_state: Any
    verbose: bool
    run_: Run
    preprocessing_: Any

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit preprocessing and ensemble.

        Args:
            X: inputs, an array [N, D] or a DataFrame.
            y: targets [N] or [N, K].
            sample_weight: weight of each data point [N]. A whole number equals repetition, to the
                bit. The total weight counts as N beside the prior.
        """
        if y is None:
            name = type(self).__name__
            raise ValueError(f"{name} requires y to be passed, but the target y is None")
        check_same_rows(X, y, sample_weight)
        X, y = self._checked_inputs(X, reset=True), self._checked_targets(y)
        check_consistent_length(X, y)
        weight = None
        if sample_weight is not None:
            weight = _checked_weights(sample_weight, len(y))
            kept = np.flatnonzero(weight)
            X, y, weight = rows_of(X, kept), y[kept], weight[kept]
        X, targets, weight = merged(X, self._encoded(y, learn=True), weight)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        self._train(_Points(X, targets, self._weighted(targets, weight)), seed)
        return self

    def predictive(self, X: Any) -> Predictive:
        """The prediction with all uncertainties, for the functions of Shoal."""
        check_is_fitted(self)
        return predict(self.run_, self._prepared(self._checked_inputs(X, reset=False)))

    def dataset(self, X: Any, y: Any, train: tuple[Any, Any] | None = None) -> Dataset:
        """Test data as the networks take them, for `shoal.report`, `shoal.evaluate` and others.

        Args:
            X: inputs of the test set.
            y: targets of the test set.
            train: a pair (X, y) of training data, for `shoal.evidence` and `shoal.landscape`.
        """
        check_is_fitted(self)
        test = self._split(X, y)
        known = Split(test.x[:0], test.y[:0]) if train is None else self._split(*train)
        return Dataset(OWN_DATA, known, test, classes=self._class_names())

    @abstractmethod
    def _checked_targets(self, y: Any) -> np.ndarray:
        """Refuse unsuitable targets."""

    @abstractmethod
    def _encoded(self, y: np.ndarray, learn: bool = False) -> np.ndarray:
        """Targets as the likelihood takes them; `learn` the classes first."""

    @abstractmethod
    def _likelihood(self, y: np.ndarray) -> Likelihood:
        """The likelihood of the encoded targets."""

    def _weighted(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        return weight

    def _class_names(self) -> tuple[str, ...] | None:
        return None

    def _checked_inputs(self, X: Any, reset: bool) -> Any:
        if is_table(X):
            X = X if hasattr(X, "iloc") else X.to_pandas()
            validate_data(self, X, reset=reset, skip_check_array=True)
            if 0 not in X.shape:
                return X
        several_axes = self.network is not None and self.preprocess is None
        return validate_data(
            self,
            X,
            reset=reset,
            dtype=np.float64,
            order="C",  # sums do not depend on the layout of the caller's array
            ensure_all_finite="allow-nan" if self.preprocess is not None else True,
            allow_nd=several_axes,
        )

    def _prepared(self, X: Any) -> np.ndarray:
        if self.preprocessing_ is not None:
            return transformed(self.preprocessing_, X)
        return as_numbers(X)

    def _split(self, X: Any, y: Any) -> Split:
        check_same_rows(X, y)
        x = self._prepared(self._checked_inputs(X, reset=False))
        return as_split((x, self._encoded(self._checked_targets(y))), self.run_.ensemble.dtype)

    def _fit_preprocessing(self, points: "_Points") -> np.ndarray:
        if self.preprocess is None:
            self.preprocessing_ = None
            return self._prepared(points.X)
        self.preprocessing_ = (
            preprocessing_for(points.X, self.numbers) if self._automatic else clone(self.preprocess)
        )
        return fitted(self.preprocessing_, *points)

    @property
    def _automatic(self) -> bool:
        return isinstance(self.preprocess, str) and self.preprocess == "auto"

    def _check_numbers(self) -> None:
        if self.numbers not in NUMBERS:
            raise ConfigError(f"numbers must be one of {NUMBERS}, not {self.numbers!r}")
        default = inspect.signature(type(self)).parameters["numbers"].default
        if not self._automatic and self.numbers not in ("standard", default):
            raise ConfigError(
                f"numbers={self.numbers!r} is a part of preprocess='auto'; leave out numbers or "
                f"preprocess"
            )
        if self.network is not None and self.numbers == "periodic":
            raise ConfigError(
                "numbers='periodic' is a layer of the perceptron; leave out network, or give "
                "network=shoal.models.PeriodicMLP() alone"
            )

    def _train(self, points: "_Points", seed: int) -> None:
        self._check_numbers()
        held_out, stops_early = {}, self._stops_early(points.y)
        if stops_early and (self.options or {}).get("folds") is not None:
            held_out, stops_early = {"patience": self.n_iter_no_change}, False
        if stops_early:
            points, others = self._divided(points, seed)
        x = self._fit_preprocessing(points)
        if stops_early:
            weight = () if others.weight is None else (others.weight,)
            validation = (self._prepared(others.X), others.y, *weight)
            patience = self.n_iter_no_change
            held_out = {"validation": validation, "patience": patience, "keep": "best"}
        likelihood = self._likelihood(points.y)
        targets = as_split((x, points.y)).y
        outputs = likelihood.width_for(targets, len(getattr(self, "classes_", ())))
        build = self._build(x.shape[1:], outputs)
        options: dict[str, Any] = self._options(points, seed) | {"likelihood": likelihood}
        options |= held_out | dict(self.options or {})
        source = {"custom": OWN_DATA}
        if self.preprocessing_ is not None:
            source[PREPARED_BY] = type(self).__name__
        split, classes, names = Split(x, points.y), self._class_names(), self._column_names()
        data = Dataset(OWN_DATA, split, classes=classes, columns=names, spec=source)
        with _ONE_FIT, calling("estimator", name=type(self).__name__, parameters=self._changed()):
            ensemble = Ensemble.init(build, self.members, seed)
            # a fitted estimator does not keep its data
            self.run_ = replace(fit(ensemble, data, **options), given=None)
        self.n_iter_ = len(self.run_.history)

    def _changed(self) -> dict[str, str]:
        """The parameters that differ from their defaults, as they are typed."""
        defaults = inspect.signature(type(self)).parameters
        changed = {
            name: _typed(value)
            for name, value in self.get_params(deep=False).items()
            if not _same(value, defaults[name].default)
        }
        return {name: text for name, text in changed.items() if text}

    def _column_names(self) -> tuple[str, ...] | None:
        """Names of prepared columns, of a table those of X; None for inputs as they came."""
        if self.preprocessing_ is None:
            return None
        try:
            names = self.preprocessing_.get_feature_names_out(vars(self)["feature_names_in_"])
        except Exception:  # an array, or a transformer without names
            return ()
        return tuple(str(name).partition("__")[2] or str(name) for name in names)

    def _stops_early(self, y: np.ndarray) -> bool:
        if isinstance(self.early_stopping, str):
            if self.early_stopping != "auto":
                raise ConfigError(
                    f'early_stopping must be True, False or "auto", not {self.early_stopping!r}'
                )
            labels = _labels(y)
            rarest = len(y) if labels is None else int(np.bincount(labels).min())
            return len(y) >= ENOUGH_POINTS and rarest >= ENOUGH_OF_A_CLASS
        return bool(self.early_stopping)

    def _divided(self, points: "_Points", seed: int) -> "tuple[_Points, _Points]":
        """Training and validation data; every class has its share of both."""
        rows, share, labels = np.arange(len(points.y)), self.validation_fraction, _labels(points.y)
        both = train_test_split(rows, test_size=share, random_state=seed, stratify=labels)
        return points.rows(np.asarray(both[0])), points.rows(np.asarray(both[1]))

    def _options(self, points: "_Points", seed: int) -> dict[str, Any]:
        """The arguments of `shoal.fit` that the parameters say."""
        batch = min(LARGEST_BATCH, len(points.y)) if self.batch_size == "auto" else self.batch_size
        # In double precision predictions do not depend on the other rows of X.
        on_cpu = self.device is None or torch.device(self.device).type == "cpu"
        return {
            "method": self.method,
            "strength": self.strength,
            "epochs": self.epochs,
            "batch_size": batch,
            "batches": self.batches,
            "lr": self.learning_rate,
            "prior": Gaussian(self.prior_std),
            "sample_weight": points.weight,
            "seed": seed,
            "device": self.device,
            "precision": "float64" if on_cpu else None,
            "out": self.out,
            "progress": bool(self.verbose),
        }

    def _build(self, input_shape: tuple[int, ...], outputs: int) -> Callable[[], nn.Module]:
        if self.network is None:
            hidden, perceptron = tuple(self.hidden), MLP(hidden=tuple(self.hidden))
            if self.numbers == "periodic" and (
                columns := len(self.preprocessing_.transformers[0][2])
            ):
                perceptron = PeriodicMLP(hidden=hidden, columns=columns)
            return Blueprint(perceptron, input_shape, outputs)
        if hasattr(self.network, "build"):
            return Blueprint(self.network, input_shape, outputs)  # pyright: ignore
        return _OwnNetwork(self.network, input_shape, outputs)  # pyright: ignore

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.preprocess is not None
        return tags

    def __setstate__(self, state: dict[str, Any]) -> None:
        # pickles of former versions have not these parameters
        super().__setstate__({"batches": "common", "numbers": "standard"} | state)


def _labels(y: np.ndarray) -> np.ndarray | None:
    """The classes of encoded targets; None for numbers, and for several labels at once."""
    return y if np.issubdtype(y.dtype, np.integer) and y.ndim == 1 else None


def _same(value: Any, default: Any) -> bool:
    return value is default or (type(value) is type(default) and bool(value == default))


def _typed(value: Any) -> str:
    """A parameter as Python code, a function by its name; empty for what cannot be typed."""
    if callable(value) and not isinstance(value, BaseEstimator):
        return getattr(value, "__qualname__", "")
    return "" if " at 0x" in repr(value) else repr(value)


def _checked_weights(weight: Any, n: int) -> np.ndarray:
    weights = check_array(
        weight,
        ensure_2d=False,
        dtype=np.float64,  # pyright: ignore[reportArgumentType]
        input_name="sample_weight",
    )
    if weights.shape != (n,):
        raise DataError(
            f"sample_weight has shape {weights.shape}; wanted one number per point, ({n},)"
        )
    if (weights < 0).any() or not weights.any():
        raise DataError("sample_weight must be numbers from 0 on, and not all of them zero")
    return weights


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
        batches: "common" for batches that all members share; "own" for networks that are trained as
            if alone, each on its own order of the data points.
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
        n_iter_: number of epochs.
        n_features_in_, feature_names_in_: number and names of the columns.
    """

    def __init__(
        self,
        *,
        members: int = 5,
        hidden: Sequence[int] = (64, 64),
        method: Any = "ensemble",
        strength: float | str | None = None,
        epochs: int = 100,
        batch_size: int | str = "auto",
        batches: str = "common",
        learning_rate: float = 0.01,
        prior_std: float = 0.5,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        class_weight: Mapping[Any, float] | str | None = None,
        network: Network | None = None,
        preprocess: Any = "auto",
        numbers: str = "standard",
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
        self.batches = batches
        self.learning_rate = learning_rate
        self.prior_std = prior_std
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

    def predict(self, X: Any) -> np.ndarray:
        """The most probable label [N]; for several labels at once 0 or 1 [N, K]."""
        probs = self.predict_proba(X)
        return (probs > 0.5).astype(int) if self._several else self.classes_[probs.argmax(1)]

    def predict_proba(self, X: Any) -> np.ndarray:
        """Probability of each class [N, C]; for several labels at once that of 1 [N, K]."""
        pred = self.predictive(X)
        return (pred.mean if self._several else pred.probs).numpy()

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
        batches: "common" for batches that all members share; "own" for networks that are trained as
            if alone, each on its own order of the data points.
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
        method: Any = "ensemble",
        strength: float | str | None = None,
        likelihood: Any = None,
        epochs: int = 100,
        batch_size: int | str = "auto",
        batches: str = "common",
        learning_rate: float = 0.01,
        prior_std: float = 0.5,
        early_stopping: bool | str = "auto",
        validation_fraction: float = 0.1,
        n_iter_no_change: int = 10,
        network: Network | None = None,
        preprocess: Any = "auto",
        numbers: str = "standard",
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
        self.batches = batches
        self.learning_rate = learning_rate
        self.prior_std = prior_std
        self.early_stopping = early_stopping
        self.validation_fraction = validation_fraction
        self.n_iter_no_change = n_iter_no_change
        self.network = network
        self.preprocess = preprocess
        self.numbers = numbers
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

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """R², the share of the variance of y that the mean predicts."""
        check_same_rows(X, y, sample_weight)
        return super().score(X, y, sample_weight)

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
        columns = [self._as_targets(pred.quantile(float(level))) for level in np.atleast_1d(q)]
        return columns[0] if np.ndim(q) == 0 else np.stack(columns, axis=-1)

    def _as_targets(self, values: Tensor) -> np.ndarray:
        return values.numpy() if self._columns else values.numpy().reshape(len(values))

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


# Preprocessing of tables: numbers are standardised, gaps filled, categories encoded.


def is_table(X: Any) -> bool:
    """Whether X is a DataFrame."""
    return hasattr(X, "columns") and hasattr(X, "dtypes")


def rows_of(X: Any, rows: np.ndarray) -> Any:
    """Some rows of a table or an array."""
    return X.iloc[rows] if is_table(X) else X[rows]


def merged(
    X: Any, y: np.ndarray, weight: np.ndarray | None
) -> tuple[Any, np.ndarray, np.ndarray | None]:
    """Equal data points (x, y) as one point with the sum of their weights, in a fixed order.

    Weighted and repeated data become the same arrays. So whole weights equal repetition to the bit,
    in batches of any size. Without it, rounding would grow during training. Weights that are all
    1 become None.

    >>> sorted(merged(np.array([[1.0], [2.0], [1.0]]), np.array([0, 1, 0]), None)[2].tolist())
    [1.0, 2.0]
    """
    values = _codes(X) if is_table(X) else X.reshape(len(X), -1)
    points = np.column_stack([values, y]).astype(np.float64) + 0.0  # no negative zero
    points[np.isnan(points)] = np.nan
    as_bytes = np.ascontiguousarray(points).view(f"V{points.itemsize * points.shape[1]}").ravel()
    _, first, place = np.unique(as_bytes, return_index=True, return_inverse=True)
    total = np.bincount(place, weights=weight).astype(np.float64)
    return rows_of(X, first), y[first], None if (total == 1).all() else total


def _codes(X: Any) -> np.ndarray:
    """The columns of a table as numbers [N, K]: numbers stay, categories are counted in order."""
    factorize, codes = require("pandas", extra="frames").factorize, []
    for i, name in enumerate(X.columns):
        column = X.iloc[:, i]
        kind = _kind(column)
        if kind != "categories":
            codes.append((_numbers if kind == "numbers" else _seconds)(column, name))
            continue
        try:
            codes.append(factorize(column, sort=True)[0])
        except TypeError:  # values of several kinds have no order
            codes.append(factorize(column)[0])
    return np.stack(codes, axis=1)


def preprocessing_for(X: Any, numbers: str = "standard") -> ColumnTransformer:
    """The preprocessing of a table by the kinds of its columns; an array has numbers only.

    >>> preprocessing_for(np.zeros((3, 2))).transformers[0][2]
    [0, 1]
    """
    kinds = [_kind(X.iloc[:, i]) if is_table(X) else "numbers" for i in range(X.shape[1])]
    scaling = [StandardScaler()] if numbers == "standard" else [HeavyTails(), StandardScaler()]
    scaling += [PiecewiseLinear()] if numbers == "piecewise" else []
    with config_context(enable_metadata_routing=True):
        scaling = [each.set_fit_request(sample_weight=True) for each in scaling]
    # The mean of a standardised column is 0, with the weights of the data points.
    imputer = SimpleImputer(
        strategy="constant", fill_value=0.0, add_indicator=True, keep_empty_features=True
    )
    steps = {
        "numbers": (_columnwise(as_numbers), *scaling, imputer),
        "categories": (
            _columnwise(as_categories),
            OneHotEncoder(handle_unknown="ignore", sparse_output=False, dtype=np.float64),
        ),
        "dates": (_columnwise(as_seconds), DateParts(), *map(clone, scaling), clone(imputer)),
    }
    return ColumnTransformer(
        [
            (kind, make_pipeline(*parts), [i for i, each in enumerate(kinds) if each == kind])
            for kind, parts in steps.items()
        ]
    )


def _columnwise(function: Callable[[Any], np.ndarray]) -> FunctionTransformer:
    return FunctionTransformer(function, feature_names_out="one-to-one")


HEAVY = 10.0
"""Distance from the median, in robust standard deviations, from which a tail is heavy."""

BINS, SMALLEST_BIN = 16, 1e-3
"""Bins of a column, and the smallest width of a bin in standard deviations."""


class HeavyTails(OneToOneFeatureMixin, TransformerMixin, BaseEstimator):
    r"""Columns with heavy tails on a logarithmic scale; other columns stay as they are.

    With the median m and s = (upper - lower quartile) / 1.349, which is the standard deviation of a
    normal distribution, a tail is heavy if $\max |x - m| / s > 10$. The column then becomes
    $\mathrm{asinh}((x - m) / s)$: linear near m, logarithmic far from it, monotone. Where both
    quartiles are equal, s is that of the values other than m. A column of at most 17 values stays.

    Attributes:
        median_: m of each column; 0 for a column that stays.
        scale_: s of each column; NaN for a column that stays.
    """

    median_: np.ndarray
    scale_: np.ndarray

    def fit(self, X: np.ndarray, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the columns with heavy tails."""
        found = [_tails(*_known(column, sample_weight)) for column in X.T]
        self.median_, self.scale_ = np.array(found).reshape(-1, 2).T
        self.n_features_in_ = X.shape[1]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """asinh((x - m) / s) of the columns with heavy tails."""
        heavy = np.isfinite(self.scale_)
        return np.where(heavy, np.arcsinh((X - self.median_) / np.where(heavy, self.scale_, 1)), X)

    def inverse_transform(self, X: np.ndarray) -> np.ndarray:
        """m + s sinh(x) of the columns with heavy tails."""
        heavy = np.isfinite(self.scale_)
        return np.where(heavy, self.median_ + self.scale_ * np.sinh(np.where(heavy, X, 0)), X)


def _tails(values: np.ndarray, weight: np.ndarray) -> tuple[float, float]:
    """Median and robust standard deviation of a column with heavy tails; otherwise 0 and NaN."""
    if len(np.unique(values)) <= BINS + 1:
        return 0.0, np.nan
    low, median, high = _quantiles(values, weight, np.array([0.25, 0.5, 0.75]))
    others = values != median
    if low == high and others.any():
        low, high = _quantiles(values[others], weight[others], np.array([0.25, 0.75]))
    scale = (high - low) / 1.349
    heavy = scale > 0 and np.abs(values - median).max() > HEAVY * scale
    return (float(median), float(scale)) if heavy else (0.0, np.nan)


class PiecewiseLinear(TransformerMixin, BaseEstimator):
    r"""Standardised columns, and behind them the piecewise-linear encoding of each column.

    The edges $b_0 < \dots < b_K$ are quantiles of the training data at multiples of 1/16; a column
    of at most 17 values has them all as edges. Bin k has
    $e_k = \mathrm{clip}((x - b_{k-1}) / (b_k - b_{k-1}), 0, 1)$: ones before the bin that holds x,
    the fraction in it, zeros behind it. The first and the last bin go on linearly outside. A column
    of two values or fewer has no bins, and a gap has those of the mean, 0.
    Gorishniy et al. (2022), arXiv 2203.05556.

    Attributes:
        edges_: the edges of each column.
    """

    edges_: list[np.ndarray]

    def fit(self, X: np.ndarray, y: Any = None, sample_weight: Any = None) -> Self:
        """Find the edges of each column."""
        self.edges_ = [_edges(*_known(column, sample_weight)) for column in X.T]
        return self

    @property
    def bins(self) -> tuple[np.ndarray, ...]:
        """Of all bins: their column, left edge, width, and the ends of clipping."""
        counts = [len(edges) - 1 for edges in self.edges_]
        place = np.concatenate([np.arange(n) for n in counts]) if counts else np.zeros(0)
        last = np.repeat(counts, counts) - 1
        return (
            np.repeat(np.arange(len(counts)), counts),
            np.concatenate([edges[:-1] for edges in self.edges_]),
            np.concatenate([np.diff(edges) for edges in self.edges_]),
            np.where(place == 0, -np.inf, 0.0),
            np.where(place == last, np.inf, 1.0),
        )

    def transform(self, X: np.ndarray) -> np.ndarray:
        """The columns, gaps included, then the bins of each column."""
        column, left, width, low, high = self.bins
        values = np.nan_to_num(X, nan=0.0)[:, column]
        return np.hstack([X, np.clip((values - left) / width, low, high)])

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The columns' names, then those names with the number of the bin."""
        given = (
            [f"x{i}" for i in range(len(self.edges_))] if input_features is None else input_features
        )
        bins = [
            f"{name}_bin{k}"
            for name, edges in zip(given, self.edges_, strict=True)
            for k in range(1, len(edges))
        ]
        return np.asarray([*map(str, given), *bins], dtype=object)


def _edges(values: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """Edges of the bins of one column; a single number for a column without bins."""
    edges = np.unique(values)
    if len(edges) > BINS + 1:
        edges = np.unique(_quantiles(values, weight, np.arange(BINS + 1) / BINS))
    while (narrow := np.diff(edges) < SMALLEST_BIN).any():
        edges = np.delete(edges, 1 + np.argmax(narrow))
    return edges if len(edges) > 2 else np.zeros(1)


def _known(column: np.ndarray, weight: np.ndarray | None) -> tuple[np.ndarray, np.ndarray]:
    """The values of a column that are no gaps, and their weights."""
    known = ~np.isnan(column)
    return column[known], np.ones(known.sum()) if weight is None else np.asarray(weight)[known]


def _quantiles(values: np.ndarray, weight: np.ndarray, levels: np.ndarray) -> np.ndarray:
    """The smallest value whose share of the weight is at least the level: a value of the data."""
    order = np.argsort(values, kind="stable")
    total = np.cumsum(weight[order])
    places = np.searchsorted(total, levels * total[-1])
    return values[order][np.minimum(places, len(values) - 1)]


DAY = 86_400
PERIODS = {"day": DAY, "week": 7 * DAY, "year": 31_556_952}
"""Seconds of each period of a date; a year has 365.2425 days."""


class DateParts(TransformerMixin, BaseEstimator):
    r"""Dates as numbers: days since 1970, and the place on the circle of each period.

    A date of s seconds becomes s / 86,400 and, for each period p of `PERIODS`, the pair
    $\sin(2\pi s / p), \cos(2\pi s / p)$. A period counts if the training dates span it and are
    not all at the same place of it. A gap has NaN days, and lies at the centre of every circle.

    Attributes:
        periods_: names of the periods that count, for each column.
    """

    periods_: list[tuple[str, ...]]

    def fit(self, X: np.ndarray, y: Any = None) -> Self:
        """Find the periods of each column of seconds [N, K]."""
        self.periods_ = [_periods(column[~np.isnan(column)]) for column in X.T]
        return self

    def transform(self, X: np.ndarray) -> np.ndarray:
        """Seconds [N, K] as days and places on circles, column by column."""
        parts = []
        for seconds, periods in zip(X.T, self.periods_, strict=True):
            parts.append(seconds / DAY)
            for name in periods:
                angle = 2 * np.pi * (np.mod(seconds, PERIODS[name]) / PERIODS[name])
                parts += [np.nan_to_num(np.sin(angle)), np.nan_to_num(np.cos(angle))]
        return np.stack(parts, axis=1)

    def get_feature_names_out(self, input_features: Any = None) -> np.ndarray:
        """The columns' names, then those names with the period."""
        names: list[str] = []
        for i, periods in enumerate(self.periods_):
            name = f"x{i}" if input_features is None else str(input_features[i])
            circles = [f"{name}_{period}_{side}" for period in periods for side in ("sin", "cos")]
            names += [name, *circles]
        return np.asarray(names, dtype=object)


def _periods(seconds: np.ndarray) -> tuple[str, ...]:
    """The periods that these dates span, and within which they differ."""
    span = float(np.ptp(seconds)) if len(seconds) else 0.0
    return tuple(
        name
        for name, period in PERIODS.items()
        if span >= period and np.ptp(np.mod(seconds, period)) > 0
    )


def fitted(preprocessing: Any, X: Any, y: Any, weight: np.ndarray | None) -> np.ndarray:
    """Fit the preprocessing in place; returns X as the networks take it.

    Weights reach those parts that ask for them by scikit-learn's metadata routing.
    """
    weighted = weight is not None and isinstance(preprocessing, ColumnTransformer)
    routed = {"sample_weight": weight} if weighted else {}
    # a column without any number has no mean; its values become 0
    with _arrays(enable_metadata_routing=weighted), np.errstate(invalid="ignore"):
        return _dense(preprocessing.fit_transform(X, y, **routed))


def transformed(preprocessing: Any, X: Any) -> np.ndarray:
    """X as the networks take it."""
    with _arrays():
        return _dense(preprocessing.transform(X))


def _arrays(**settings: bool) -> Any:
    """Transformers return arrays, whatever the caller has set for their output."""
    return config_context(transform_output="default", **settings)


def as_numbers(X: Any) -> np.ndarray:
    """Columns as floats [N, K]; gaps are NaN."""
    if not is_table(X):
        return np.ascontiguousarray(X, dtype=np.float64)  # sums depend on the layout
    columns = [_numbers(X.iloc[:, i], X.columns[i]) for i in range(X.shape[1])]
    return np.stack(columns, axis=1)


def as_categories(X: Any) -> np.ndarray:
    """Columns as Python objects [N, K]; every kind of gap is NaN."""
    values = np.asarray(X, dtype=object).copy()
    values[np.asarray(require("pandas", extra="frames").isna(values))] = np.nan
    return values


def as_seconds(X: Any) -> np.ndarray:
    """Columns of dates as whole seconds since 1970 in UTC [N, K]; gaps are NaN."""
    return np.stack([_seconds(X.iloc[:, i], X.columns[i]) for i in range(X.shape[1])], axis=1)


_DURATIONS = {"timedelta", "timedelta64"}
_NUMBERS = {"integer", "floating", "mixed-integer-float", "boolean", "empty", *_DURATIONS}
_DATES = {"date", "datetime", "datetime64"}


def _kind(column: Any) -> str:
    """What a column holds: "numbers", "dates" or "categories".

    Categories are texts, a categorical type, or objects of several kinds.
    """
    kinds = require("pandas", extra="frames").api.types
    if isinstance(column.dtype, kinds.CategoricalDtype):
        return "categories"
    if kinds.is_datetime64_any_dtype(column):
        return "dates"
    if kinds.is_numeric_dtype(column) or kinds.is_bool_dtype(column):
        return "numbers"
    kind = kinds.infer_dtype(column, skipna=True)
    if kind in _DATES:
        return "dates"
    return "numbers" if kind in _NUMBERS else "categories"


def _numbers(column: Any, name: object) -> np.ndarray:
    """Numbers; a duration is its seconds."""
    pandas = require("pandas", extra="frames")
    kind = pandas.api.types.infer_dtype(column, skipna=True)
    try:
        if kind in _DATES:
            raise TypeError("it holds dates")
        if kind in _DURATIONS:
            column = pandas.to_timedelta(column).dt.total_seconds()
        numbers = column.to_numpy(dtype=np.float64, na_value=np.nan)
    except (TypeError, ValueError) as error:
        raise DataError(
            f"column {name!r} must hold numbers, but {error}; give numbers, or gaps as NaN"
        ) from None
    if np.isinf(numbers).any():
        raise DataError(f"column {name!r} holds infinity; replace it by a number or by NaN")
    return numbers


def _seconds(column: Any, name: object) -> np.ndarray:
    """Dates as whole seconds since 1970; dates without a time zone count as UTC."""
    pandas = require("pandas", extra="frames")
    if _kind(column) != "dates" and not column.isna().all():
        raise DataError(
            f"column {name!r} must hold dates, not {column.dtype}; type pandas.to_datetime(column)"
        )
    try:
        dates = pandas.to_datetime(column, utc=True).dt.tz_localize(None)
    except (TypeError, ValueError) as error:
        raise DataError(f"column {name!r} must hold dates, but {error}") from None
    whole = dates.to_numpy(dtype="datetime64[s]")
    return np.where(np.isnat(whole), np.nan, whole.astype(np.int64))


def _dense(values: Any) -> np.ndarray:
    values = values.toarray() if hasattr(values, "toarray") else values
    return np.ascontiguousarray(values, dtype=np.float64)

"""`EnsembleRegressor`: an ensemble of networks that predicts numbers."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, Self

import numpy as np
from sklearn.base import (
    RegressorMixin,
)
from sklearn.metrics import r2_score
from sklearn.utils.validation import (
    check_array,
    column_or_1d,
)
from torch import Tensor

from shoal.data.batches.batch import check_same_rows
from shoal.inference.likelihoods import HeteroscedasticGaussian, Likelihood, suggested
from shoal.inference.likelihoods import registry as likelihoods
from shoal.integrations.sklearn.estimator import EnsembleEstimator, Network
from shoal.integrations.sklearn.presets import PRESETS_FOR_NUMBERS, Recipe
from shoal.prediction.predictive import Predictive

__all__ = ["EnsembleRegressor"]


class EnsembleRegressor(RegressorMixin, EnsembleEstimator):
    """An ensemble of networks that predicts numbers, as an estimator of scikit-learn.

    Targets are standardised inside; predictions and intervals are in the units of y. One or
    several target columns are allowed.

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
        conformal: let `predict_interval` use CV+ on the out-of-fold predictions of the fit: a
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
        likelihood: distribution of the targets, one of `shoal.likelihoods`. None for noise that
            depends on X. Out-of-fold predictions then choose between Gaussian and Student's t
            tails, and for positive skewed targets between y and log y (not with "fast").

    Attributes:
        run_: the run: `shoal.report`, `shoal.landscape` and `shoal.evidence` take it.
        preprocessing_: the fitted preprocessing; None without.
        oof_predictive_: predictions for the training points, each by the members that held it out,
            in the order of `fit` without points of weight 0; None without folds or with draws.
        oof_score_: what `score` gives, of these predictions; no validation set is needed.
        conformal_: the rule of conformal=True, with scores of the training points and no data;
            None without.
        n_iter_: number of epochs.
        n_features_in_, feature_names_in_: number and names of the columns.
    """

    presets: ClassVar[Mapping[str, Recipe]] = PRESETS_FOR_NUMBERS

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
        likelihood: Any = None,
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
        self.likelihood = likelihood
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
        self.network = network
        self.preprocess = preprocess
        self.numbers = numbers
        self.device = device
        self.out = out
        self.options = options
        self.random_state = random_state
        self.verbose = verbose

    def partial_fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Train all members with one more pass, over these data points.

        The first call fits preprocessing and unit of the targets; later calls keep both. After
        `fit`, members go on from its solution. Nothing is held out.

        Args:
            X: inputs, an array [N, D] or a DataFrame.
            y: targets [N] or [N, K].
            sample_weight: weight of each data point [N].
        """
        return self._continued(X, y, sample_weight)

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
        """Both ends of the central interval that holds a target with probability `level`.

        With conformal=True the interval is that of CV+; see `conformal_.guarantee`.
        """
        pred = self.predictive(X)
        rule = self._rule("predict_interval").at(level) if self.conformal else None
        low, high = pred.interval(level) if rule is None else rule(pred)
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

    def _scored(self, oof: Predictive, y: np.ndarray, weight: np.ndarray | None) -> float:
        return float(r2_score(y, self._as_targets(oof.mean), sample_weight=weight))

    def _likelihood(self, recipe: Recipe, y: np.ndarray) -> Likelihood:
        named = recipe.likelihood if self.likelihood is None else self.likelihood
        return HeteroscedasticGaussian(damping=0.5) if named is None else likelihoods.make(named)

    def _notes_on(self, y: np.ndarray) -> tuple[str, ...]:
        found = suggested(y) if self.likelihood is None else None
        return () if found is None or found.name == "lognormal" else (f"{found.sentence}.",)

    def _with_candidates(self, recipe: Recipe, y: np.ndarray) -> Recipe:
        chooses = self.likelihood is None and self.preset != "fast"
        found = suggested(y) if chooses else None
        if found is None or found.name != "lognormal":
            return recipe
        noise = {"name": "lognormal", "damping": 0.5}
        return replace(
            recipe, candidates={**recipe.candidates, "log targets": {"likelihood": noise}}
        )

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.target_tags.multi_output = True
        return tags

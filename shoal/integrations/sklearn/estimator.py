"""What both estimators have in common: checks, preprocessing, training, predictions."""

import copy
import inspect
import threading
import warnings
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np
import torch
from sklearn.base import BaseEstimator, clone
from sklearn.model_selection import train_test_split
from sklearn.utils import check_random_state
from sklearn.utils.validation import (
    check_array,
    check_consistent_length,
    check_is_fitted,
    validate_data,
)
from torch import nn

from shoal.core.arguments import checked, share, whole
from shoal.core.caller import calling
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.core.registry import nearest
from shoal.data.batches.batch import check_same_rows
from shoal.data.batches.sources import as_split
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.calibrate import calibrate
from shoal.evaluation.columns import Importances, PartialDependence
from shoal.evaluation.cross_conformal import fitted_rule
from shoal.evaluation.evaluate import evaluate
from shoal.evaluation.out_of_fold import FoldPredictions, fold_predictions
from shoal.evaluation.predict import predict
from shoal.inference.ensemble import Ensemble
from shoal.inference.likelihoods import Categorical, HeteroscedasticGaussian, Likelihood
from shoal.inference.priors import Gaussian
from shoal.inference.samplers import known_sampler
from shoal.integrations.sklearn.columns import as_numbers, is_table, merged, rows_of
from shoal.integrations.sklearn.continued import LOOP, begun, next_pass
from shoal.integrations.sklearn.drift import Drift, drift_of, sketches
from shoal.integrations.sklearn.encodings import (
    NUMBERS,
    fitted,
    network_for,
    notes_on,
    preprocessing_for,
    transformed,
)
from shoal.integrations.sklearn.explain import (
    column_names,
    explained,
    fitted_importances,
    given_importances,
    importances_of_fit,
    partial_dependence,
)
from shoal.integrations.sklearn.presets import Clock, Patience, Recipe, batch_for, chosen, recipe_of
from shoal.models.blueprint import Architecture, Blueprint
from shoal.prediction.decisions import CrossConformalIntervals, CrossConformalSets
from shoal.prediction.predictive import Predictive
from shoal.training.draw import draw
from shoal.training.fit import fit
from shoal.training.folder.own_data import OWN_DATA, PREPARED_BY
from shoal.training.folder.run import Run
from shoal.training.options.options import AUTO, Options
from shoal.training.options.settings import Settings

__all__ = ["EnsembleEstimator", "Network"]

Network = Callable[[tuple[int, ...], int], nn.Module] | Architecture
"""Makes a network for inputs of a shape and a number of outputs, or has a method that does."""

ENOUGH_FOR_FOLDS, ENOUGH_TO_HOLD_OUT, ENOUGH_OF_A_CLASS = 40, 100, 10
"""Data points for folds, for a part that all members hold out, and of each class for both."""

UNWATCHED = 100
"""Most epochs where no held-out data end the training."""

MANY = 256
"""Members, such as draws, from which on predictions are in single precision."""

ANY_LEVEL = 0.5
"""A conformal rule is fitted at this level, which needs one data point, and used at others."""

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

    def counted(self) -> "_Points":
        """The points without those of weight 0."""
        return self if self.weight is None else self.rows(np.flatnonzero(self.weight))


class _Trained(NamedTuple):
    """A run with its preprocessing.

    `oof` has predictions for the training points, each by members that held it out, and
    `validation` the points that all members held out.
    """

    preprocessing: Any
    run: Run
    oof: FoldPredictions | None
    validation: _Points | None


class EnsembleEstimator(BaseEstimator):
    """What both estimators have in common: preprocessing, training, predictions."""

    preset: str
    time_limit: float | None
    members: int | None
    hidden: Sequence[int] | None
    dropout: float | None
    numbers: str | None
    folds: int | str | None
    calibrate: bool
    conformal: bool
    draws: int | Mapping[str, Any] | None
    method: Any
    strength: float | str | None
    epochs: int | None
    batch_size: int | str
    batches: str
    learning_rate: float | None
    prior_std: float | None
    early_stopping: bool | str
    validation_fraction: float
    n_iter_no_change: int | None
    network: Network | None
    preprocess: Any
    device: Any
    out: str | Path | None
    options: Mapping[str, Any] | None
    random_state: Any
    verbose: bool
    run_: Run
    preprocessing_: Any
    oof_predictive_: Predictive | None
    oof_score_: float | None
    conformal_: CrossConformalIntervals | CrossConformalSets | None
    _classes_ahead: Any = None

    def fit(self, X: Any, y: Any, sample_weight: Any = None) -> Self:
        """Fit preprocessing and ensemble.

        Args:
            X: inputs, an array [N, D] or a DataFrame.
            y: targets [N] or [N, K].
            sample_weight: weight of each data point [N]. A whole number equals repetition, to the
                bit. The total weight counts as N beside the prior.
        """
        drawing = self._drawing()
        given = self._checked(X, y, sample_weight, reset=True)
        self._sketches = sketches(given.X, column_names(self))
        X, y, weight = given.counted()
        X, targets, merged_weight, places = merged(X, self._encoded(y, learn=True), weight)
        if self.conformal:
            _check_conformal(targets, merged_weight)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        points = _Points(X, targets, self._weighted(targets, merged_weight))
        oof = self._train(points, seed, drawing)
        self.oof_predictive_ = self.oof_score_ = self.conformal_ = None
        if oof is not None:
            self.oof_predictive_ = replace(oof.pred, members=oof.pred.members[:, places])
            self.oof_score_ = self._scored(self.oof_predictive_, y, weight)
            if self.conformal:
                repeated = None if merged_weight is None else torch.from_numpy(merged_weight)
                self.conformal_ = fitted_rule(self.run_, oof._replace(weight=repeated), ANY_LEVEL)
        return self

    def _continued(self, X: Any, y: Any, sample_weight: Any, classes: Any = None) -> Self:
        """One pass over new data points; the first one also fits the preprocessing."""
        if self.draws is not None:
            raise ConfigError("partial_fit trains members, and draws do not train; leave out draws")
        if self.out is not None:
            raise ConfigError("partial_fit keeps its members in memory; leave out the folder, out")
        if not hasattr(self, "run_"):
            options = {key: v for key, v in (self.options or {}).items() if key not in LOOP}
            first: Any = clone(self)
            first.set_params(epochs=1, folds=None, early_stopping=False, time_limit=None)
            first.set_params(options=options, conformal=False)
            first._classes_ahead = classes
            fitted = vars(first.fit(X, y, sample_weight))
            vars(self).update({k: v for k, v in fitted.items() if k not in self.get_params()})
            inputs, targets = self._checked_inputs(X, reset=False), self._checked_targets(y)
            self.run_ = begun(self.run_, self._prepared(inputs), self._encoded(targets))
            return self
        X, y, weight = self._checked(X, y, sample_weight).counted()
        targets = self._encoded(y)
        weight = self._weighted(targets, weight)
        given = self.get_params(deep=False) | dict(self.options or {})
        self.run_ = next_pass(self.run_, self._prepared(X), targets, weight, given)
        self.conformal_ = None  # no member holds out the new points
        self.n_iter_ = len(self.run_.history)
        return self

    def predictive(self, X: Any) -> Predictive:
        """The prediction with all uncertainties, for the functions of Shoal."""
        check_is_fitted(self)
        return predict(self.precise_run, self._prepared(self._checked_inputs(X, reset=False)))

    @property
    def precise_run(self) -> Run:
        """The run with weights in double precision: predictions do not depend on other rows of X.

        On a GPU it is the run itself, and for many draws, of which a copy would be large.
        """
        ensemble = self.run_.ensemble
        if ensemble.device.type != "cpu" or ensemble.members > MANY:
            return self.run_
        return replace(self.run_, ensemble=copy.deepcopy(self.run_.ensemble).to(torch.float64))

    def importances(
        self,
        X: Any = None,
        y: Any = None,
        sample_weight: Any = None,
        *,
        repeats: int = 5,
        seed: int = 0,
    ) -> Importances:
        """How much worse predictions become if the values of a column are permuted.

        The score is the CRPS in units of y for real numbers, the NLL in nats for others. A column
        is permuted before preprocessing. Columns that say the same share their importance.

        Args:
            X: data to permute. None for the importances that `fit` has found, with one permutation
                of at most 500 training points: out-of-fold with folds, on the validation data
                with early stopping, and otherwise on the training data.
            y: targets of X. Training data of a model with folds are predicted out-of-fold.
            sample_weight: weights of the data points.
            repeats: permutations of each column of X.
            seed: fixes the permutations.
        """
        check_is_fitted(self)
        if X is None:
            return fitted_importances(self)
        given = self._checked(X, y, sample_weight)
        points = given._replace(y=self._encoded(given.y))
        return given_importances(self, points, whole("repeats", repeats), seed)

    @property
    def feature_importances_(self) -> np.ndarray:
        """Importances of the columns [D] without negative ones, with sum 1; see `importances`."""
        check_is_fitted(self)
        try:
            return fitted_importances(self).shares
        except ConfigError as error:
            raise AttributeError(str(error)) from None

    def partial_dependence(
        self, X: Any, column: str | int, *, grid: int | Sequence[Any] | np.ndarray = 50
    ) -> PartialDependence:
        """The mean prediction if all rows of X have the same value in one column.

        The band shows where members disagree; the noise of the targets is apart from it.

        Args:
            X: rows over which to average.
            column: name or number of the column: numbers, categories or dates.
            grid: how many values, between the quantiles 0.05 and 0.95 of X, or the values.
                Categories have all of X.
        """
        check_is_fitted(self)
        return partial_dependence(self, self._checked_inputs(X, reset=False), column, grid)

    @checked(level=share)
    def drift(self, X: Any, *, level: float = 0.05) -> Drift:
        """The columns of X whose distribution is not that of the training data.

        Numbers and dates are compared by the Kolmogorov-Smirnov test, categories and gaps by the
        chi-squared test, all columns together by Holm's correction. The result is true if any
        column has drifted, and has a sentence for each.

        Args:
            X: new data; no targets are needed.
            level: chance of any alarm, if no column has drifted.
        """
        check_is_fitted(self)
        known = getattr(self, "_sketches", ())  # a pickle of a former version has none
        return drift_of(known, self._checked_inputs(X, reset=False), level)

    def dataset(self, X: Any, y: Any, train: tuple[Any, Any] | None = None) -> Dataset:
        """Test data as the networks take them, for `shoal.report`, `shoal.evaluate` and others.

        The report also shows which columns matter.

        Args:
            X: inputs of the test set.
            y: targets of the test set.
            train: a pair (X, y) of training data, for `shoal.evidence` and `shoal.landscape`.
        """
        check_is_fitted(self)
        test = self._split(X, y)
        known = Split(test.x[:0], test.y[:0]) if train is None else self._split(*train)
        inputs, targets = self._checked_inputs(X, reset=False), self._checked_targets(y)
        points = _Points(inputs, self._encoded(targets), None)
        explain = partial(explained, self, points)
        return Dataset(OWN_DATA, known, test, classes=self._class_names(), explain=explain)

    presets: ClassVar[Mapping[str, Recipe]]
    """What each preset says."""

    @abstractmethod
    def _checked_targets(self, y: Any) -> np.ndarray:
        """Refuse unsuitable targets."""

    @abstractmethod
    def _encoded(self, y: np.ndarray, learn: bool = False) -> np.ndarray:
        """Targets as the likelihood takes them; `learn` the classes first."""

    @abstractmethod
    def _likelihood(self, recipe: Recipe, y: np.ndarray) -> Likelihood:
        """The likelihood of the encoded targets."""

    @abstractmethod
    def _scored(self, oof: Predictive, y: np.ndarray, weight: np.ndarray | None) -> float:
        """What `score` gives, of out-of-fold predictions."""

    def _loss(self, oof: FoldPredictions | None, points: "_Points") -> float:
        """CRPS of numbers, NLL of classes, of out-of-fold predictions."""
        assert oof is not None
        scores = evaluate(oof.pred, points.y, sample_weight=points.weight)
        return scores.get("crps", scores["nll"])

    def _rule(self, wanted: str) -> Any:
        """The cross-conformal rule of the fit, which `wanted` needs."""
        check_is_fitted(self)
        if not self.conformal or getattr(self, "conformal_", None) is None:
            name = type(self).__name__
            raise ConfigError(
                f"{wanted} needs the rule of fit with conformal=True, and partial_fit has none; "
                f"type model = {name}(conformal=True).fit(X, y)"
            )
        return self.conformal_

    def _notes_on(self, y: np.ndarray) -> tuple[str, ...]:
        """What users should know about their targets."""
        return ()

    def _with_candidates(self, recipe: Recipe, y: np.ndarray) -> Recipe:
        """The recipe with further candidates that the targets suggest."""
        return recipe

    def _weighted(self, y: np.ndarray, weight: np.ndarray | None) -> np.ndarray | None:
        return weight

    def _class_names(self) -> tuple[str, ...] | None:
        return None

    def _checked(self, X: Any, y: Any, sample_weight: Any, reset: bool = False) -> _Points:
        """The caller's data points with their weights."""
        if y is None:
            name = type(self).__name__
            raise ValueError(f"{name} requires y to be passed, but the target y is None")
        check_same_rows(X, y, sample_weight)
        X, y = self._checked_inputs(X, reset=reset), self._checked_targets(y)
        check_consistent_length(X, y)
        weight = None if sample_weight is None else _checked_weights(sample_weight, len(y))
        return _Points(X, y, weight)

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
        return _prepared(self.preprocessing_, X)

    def _split(self, X: Any, y: Any) -> Split:
        check_same_rows(X, y)
        x = self._prepared(self._checked_inputs(X, reset=False))
        return as_split((x, self._encoded(self._checked_targets(y))), self.run_.ensemble.dtype)

    def _fitted_preprocessing(self, recipe: Recipe, points: "_Points") -> tuple[Any, np.ndarray]:
        """The preprocessing, and the inputs of the networks."""
        if self.preprocess is None:
            return None, as_numbers(points.X)
        if not self._automatic:
            made = clone(self.preprocess)
        else:
            embed = self.network is None
            made = preprocessing_for(points.X, recipe.numbers, points.weight, embed=embed)
        return made, fitted(made, *points)

    @property
    def _automatic(self) -> bool:
        return isinstance(self.preprocess, str) and self.preprocess == "auto"

    def _recipe(self) -> Recipe:
        """The preset with the parameters that are given."""
        if self.numbers is not None and self.numbers not in NUMBERS:
            raise ConfigError(f"numbers must be one of {NUMBERS}, not {self.numbers!r}")
        if self.numbers is not None and not self._automatic and self.numbers != "standard":
            raise ConfigError(
                f"numbers={self.numbers!r} is a part of preprocess='auto'; leave out numbers or "
                f"preprocess"
            )
        if self.network is not None and self.numbers == "periodic":
            raise ConfigError(
                "numbers='periodic' is a layer of the perceptron; leave out network, or give "
                "network=shoal.models.PeriodicMLP() alone"
            )
        hidden = None if self.hidden is None else tuple(self.hidden)
        names = ("members", "dropout", "numbers", "epochs", "learning_rate", "prior_std")
        given = {name: getattr(self, name) for name in (*names, "n_iter_no_change")}
        recipe = recipe_of(self.presets, self.preset, given | {"hidden": hidden})
        if self.network is not None:
            recipe = replace(recipe, candidates={})
        return recipe

    def _fold_count(self, recipe: Recipe, points: "_Points") -> int:
        """The folds, 0 for none: where data are few, or the method needs what folds cannot give."""
        options = dict(self.options or {})
        wanted = options.get("folds", self.folds)
        if wanted != "auto":
            if isinstance(wanted, str):
                raise ConfigError(f'folds must be a number, "auto" or None, not {wanted!r}')
            if not wanted and self.conformal:
                raise ConfigError("conformal=True needs folds, and none came; leave out folds")
            return wanted or 0
        if self.conformal:
            return _folds_of_any(recipe, len(points.y))
        count = min(recipe.folds, recipe.members)
        if not _enough(points.y, ENOUGH_FOR_FOLDS) or count < 2:
            return 0
        if options.get("validation") is not None or AUTO in (self.method, self.strength):
            return 0
        asked = {"method": self.method, "strength": self.strength, "likelihood": Categorical()}
        Settings.resolve(Options.of(asked | options))  # what is wrong without folds is an error
        try:
            Settings.resolve(Options.of(asked | options | {"folds": count}))
        except ConfigError:
            return 0
        return count

    def _drawing(self) -> dict[str, Any] | None:
        """The arguments of `shoal.draw`; None without draws."""
        if self.draws is None:
            return None
        if self.conformal:
            raise ConfigError(
                "conformal=True needs members that held points out, and chains see all of them; "
                "leave out draws or conformal"
            )
        given = self.draws if isinstance(self.draws, Mapping) else {"draws": self.draws}
        allowed = [*inspect.signature(draw).parameters][2:]
        for name in given:
            if name not in allowed or name in ("out", "resume", "progress", "device"):
                raise ConfigError(f"draws has no setting {name!r}; {nearest(name, allowed)}")
        known_sampler("sampler", given.get("sampler", "mclmc"))
        whole("draws", given.get("draws", 1))
        return dict(given)

    def _drawn(self, run: Run, seed: int, arguments: Mapping[str, Any]) -> Run:
        """The run of draws, in the folder of the estimator."""
        out = (self.options or {}).get("out", self.out)
        return draw(run, **{"seed": seed, "out": out, "progress": bool(self.verbose), **arguments})

    def _train(
        self, points: "_Points", seed: int, drawing: Mapping[str, Any] | None = None
    ) -> FoldPredictions | None:
        """Choose the recipe, train it, and calibrate it by its out-of-fold predictions."""
        recipe, clock = self._recipe(), Clock(self.time_limit)
        recipe = replace(recipe, folds=self._fold_count(recipe, points))
        if self.epochs is None and not recipe.folds and not self._stops_early(points.y, 0):
            recipe = replace(recipe, epochs=UNWATCHED)

        def trial(small: Recipe, stop: Callable[..., None]) -> _Trained:
            with warnings.catch_warnings():  # the training itself repeats what it has to say
                warnings.simplefilter("ignore", ShoalWarning)
                return self._trained(small, points, seed, stop)

        def score(small: Recipe) -> float:
            return self._loss(trial(small, clock.stop).oof, points)

        with _ONE_FIT:
            recipe = self._with_candidates(recipe, points.y)
            if recipe.folds and recipe.candidates:
                recipe = chosen(clock.fitting(recipe, trial), score, self._say)
            recipe = clock.fitting(recipe, trial)
            name, parameters = type(self).__name__, self._changed()
            with calling("estimator", name=name, parameters=parameters):
                trained = self._trained(recipe, points, seed, clock.stop, last=True)
            self.preprocessing_, run, oof, validation = trained
            self.run_ = replace(run, given=None)  # a fitted estimator does not keep its data
            self.n_iter_ = len(run.history)
            self._importances = importances_of_fit(self, points, validation)
            if drawing is None:
                return oof
            with calling("estimator", name=name, parameters=parameters):
                self.run_ = replace(self._drawn(run, seed, drawing), given=None)
        return None  # chains have seen all points

    def _trained(
        self,
        recipe: Recipe,
        points: "_Points",
        seed: int,
        stop: Callable[..., None],
        last: bool = False,
    ) -> "_Trained":
        """Preprocessing, run and out-of-fold predictions of a recipe.

        The `last` training alone has a folder, and the caller's callbacks and loggers.
        """
        held_out: dict[str, Any] = {"folds": recipe.folds or None}
        others, stops_early = None, self._stops_early(points.y, recipe.folds)
        if recipe.folds:
            held_out["keep"] = "last"
        elif stops_early:
            points, others = self._divided(points, seed)
        preprocessing, x = self._fitted_preprocessing(recipe, points)
        if others is not None:
            weight = () if others.weight is None else (others.weight,)
            validation = (_prepared(preprocessing, others.X), others.y, *weight)
            held_out |= {"validation": validation, "keep": "best"}
        patience, callbacks = recipe.n_iter_no_change if stops_early else None, [stop]
        if patience is not None and recipe.folds:
            callbacks.append(Patience(whole("n_iter_no_change", patience)))
        elif patience is not None:
            held_out["patience"] = patience
        likelihood = self._likelihood(recipe, points.y)
        if recipe.folds and stops_early:
            ranked = {"ranked", "gaussian"} & {*likelihood.about.kinds}
            held_out["keep"] = "crps" if ranked else "best"
        outputs = likelihood.width_for(
            as_split((x, points.y)).y, len(getattr(self, "classes_", ()))
        )
        options: dict[str, Any] = self._options(recipe, points, seed) | held_out
        options["likelihood"] = likelihood
        options |= self.options or {}
        if last:
            callbacks += options.get("callbacks", ())
            options["out"] = options.get("out", self.out) if self.draws is None else None
        else:
            options |= {"loggers": (), "out": None}
        options["callbacks"] = callbacks
        source = {"custom": OWN_DATA}
        if preprocessing is not None:
            source[PREPARED_BY] = type(self).__name__
        split, classes, names = Split(x, points.y), self._class_names(), self._names(preprocessing)
        notes = notes_on(preprocessing if self._automatic else None) + self._notes_on(points.y)
        data = Dataset(OWN_DATA, split, classes=classes, columns=names, spec=source, notes=notes)
        build = self._build(recipe, preprocessing, x.shape[1:], outputs)
        run = fit(Ensemble.init(build, recipe.members, seed), data, **options)
        if not options["folds"]:
            return _Trained(preprocessing, run, None, others)
        if self._calibrates(likelihood):
            named = getattr(self, "likelihood", None) is not None
            free = type(likelihood) is HeteroscedasticGaussian and not named
            run = calibrate(run, shape="auto" if free else "trained")
        return _Trained(preprocessing, run, fold_predictions(run), others)

    def _calibrates(self, likelihood: Likelihood) -> bool:
        can = type(likelihood).calibrated is not Likelihood.calibrated
        return self.calibrate and self.draws is None and can

    def _changed(self) -> dict[str, str]:
        """The parameters that differ from their defaults, as they are typed."""
        defaults = inspect.signature(type(self)).parameters
        changed = {
            name: _typed(value)
            for name, value in self.get_params(deep=False).items()
            if not _same(value, defaults[name].default)
        }
        return {name: text for name, text in changed.items() if text}

    def _names(self, preprocessing: Any) -> tuple[str, ...] | None:
        """Names of prepared columns, of a table those of X; None for inputs as they came."""
        if preprocessing is None:
            return None
        try:
            names = preprocessing.get_feature_names_out(vars(self)["feature_names_in_"])
        except Exception:  # an array, or a transformer without names
            return ()
        return tuple(str(name).partition("__")[2] or str(name) for name in names)

    def _say(self, sentence: str) -> None:
        if self.verbose:
            print(sentence, flush=True)

    def _stops_early(self, y: np.ndarray, folds: int) -> bool:
        if isinstance(self.early_stopping, str):
            if self.early_stopping != "auto":
                raise ConfigError(
                    f'early_stopping must be True, False or "auto", not {self.early_stopping!r}'
                )
            return _enough(y, ENOUGH_FOR_FOLDS if folds else ENOUGH_TO_HOLD_OUT)
        return bool(self.early_stopping)

    def _divided(self, points: "_Points", seed: int) -> "tuple[_Points, _Points]":
        """Training and validation data; every class has its share of both."""
        rows, share, labels = np.arange(len(points.y)), self.validation_fraction, _labels(points.y)
        both = train_test_split(rows, test_size=share, random_state=seed, stratify=labels)
        return points.rows(np.asarray(both[0])), points.rows(np.asarray(both[1]))

    def _options(self, recipe: Recipe, points: "_Points", seed: int) -> dict[str, Any]:
        """The arguments of `shoal.fit` that recipe and parameters say."""
        batch = batch_for(len(points.y)) if self.batch_size == "auto" else self.batch_size
        return {
            "method": self.method,
            "strength": self.strength,
            "epochs": recipe.epochs,
            "batch_size": batch,
            "batches": self.batches,
            "lr": recipe.learning_rate,
            "prior": Gaussian(recipe.prior_std),
            "sample_weight": points.weight,
            "seed": seed,
            "device": self.device,
            "progress": bool(self.verbose),
        }

    def _build(
        self, recipe: Recipe, preprocessing: Any, input_shape: tuple[int, ...], outputs: int
    ) -> Callable[[], nn.Module]:
        if self.network is None:
            layers = {"hidden": recipe.hidden, "dropout": recipe.dropout}
            table = preprocessing if self._automatic else None
            return Blueprint(network_for(table, recipe.numbers, **layers), input_shape, outputs)
        if hasattr(self.network, "build"):
            return Blueprint(self.network, input_shape, outputs)  # pyright: ignore
        return _OwnNetwork(self.network, input_shape, outputs)  # pyright: ignore

    def __sklearn_tags__(self) -> Any:
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self.preprocess is not None
        return tags

    def __setstate__(self, state: dict[str, Any]) -> None:
        # pickles of former versions have not these parameters
        former = {"batches": "common", "numbers": "standard", "preset": "default", "dropout": 0.0}
        former |= {"time_limit": None, "folds": None, "calibrate": False, "conformal": False}
        former["draws"] = None
        super().__setstate__(former | state)


def _check_conformal(y: np.ndarray, weight: np.ndarray | None) -> None:
    """Refuse what has no guarantee, before training."""
    if y.ndim > 1 and np.issubdtype(y.dtype, np.integer):
        raise ConfigError(
            "conformal=True needs one label per data point, and several came; fit a model for "
            "each column of y, or leave out conformal"
        )
    if weight is not None and (weight != np.round(weight)).any():
        raise DataError(
            "conformal=True counts data points, so sample_weight must be whole numbers, which are "
            "repetitions; leave out conformal for other weights"
        )


def _folds_of_any(recipe: Recipe, n: int) -> int:
    """As many folds as data points and members allow."""
    if n < 2:
        raise ConfigError("conformal=True needs two data points or more, and 1 sample came")
    if recipe.members < 2:
        raise ConfigError(
            "conformal=True needs two members or more, which hold out different data points; "
            "type members=2"
        )
    return min(recipe.folds, recipe.members, n)


def _prepared(preprocessing: Any, X: Any) -> np.ndarray:
    """X as the networks take it."""
    return as_numbers(X) if preprocessing is None else transformed(preprocessing, X)


def _enough(y: np.ndarray, points: int) -> bool:
    """Whether there are so many data points, and enough of every class."""
    labels = _labels(y)
    return len(y) >= points and (
        labels is None or int(np.bincount(labels).min()) >= ENOUGH_OF_A_CLASS
    )


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

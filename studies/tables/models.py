"""The models of the suite: Shoal's estimators by settings, and other libraries.

A model is a function of a table and of `Run`. It fits, and returns a function that gives the
forecasts of the test points by name: more than one where a fit has two kinds of prediction.
"""

# Libraries of this study alone.
# pyright: reportMissingImports=false

from functools import partial
from typing import Any, NamedTuple

import numpy as np

from studies.tables.scores import (
    Classes,
    Mixture,
    Quantiles,
    class_scores,
    interval_scores,
    pinball_crps,
)

GP_POINTS = {"regression": 2000, "classification": 1000}
QUANTILES = np.arange(1, 20) / 20
TREES = {"rounds": 4000, "rate": 0.03, "patience": 100}
"""The usual settings of boosted trees: many small steps, stopped by a held-out tenth."""


NOISES = 0.1, 0.2, 0.3, 0.4, 0.5
"""Noise of numbers of the test points, as shares of the standard deviations of their columns."""


class Run(NamedTuple):
    """What every fit is given, and whether Shoal is also scored on noisy inputs."""

    seed: int
    threads: int
    device: str
    noisy: bool = False


def categories(frame):
    """Names of the columns of categories."""
    return [column for column in frame if str(frame[column].dtype) == "category"]


def named_gaps(frame):
    """Categories as text, a gap as a category of its own; gaps of numbers stay."""
    frame = frame.copy()
    for column in categories(frame):
        frame[column] = frame[column].astype("object").where(frame[column].notna(), "gap")
    return frame


def matrices(table, scaled=False):
    """Training and test inputs as numbers: medians in place of gaps, one column per category."""
    from sklearn.compose import make_column_transformer
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, StandardScaler

    chosen = categories(table.x)
    numbers = [column for column in table.x if column not in chosen]
    fill = SimpleImputer(strategy="median")
    both = make_column_transformer(
        (make_pipeline(fill, StandardScaler()) if scaled else fill, numbers),
        (OneHotEncoder(handle_unknown="ignore", sparse_output=False), chosen),
    )
    train, test = both.fit_transform(named_gaps(table.x)), both.transform(named_gaps(table.x_test))
    return np.asarray(train, float), np.asarray(test, float)


def held_out(table, seed, share):
    """Indices of training points that are held out, and of the others; by class for classes."""
    from sklearn.model_selection import train_test_split

    classes = table.y if table.classes else None
    rest, held = train_test_split(
        np.arange(len(table.y)), test_size=share, random_state=seed, stratify=classes
    )
    return held, rest


def one_gaussian(mean, std):
    """A Gaussian per point."""
    mean = np.asarray(mean, float)
    return Mixture(mean[None], np.broadcast_to(np.asarray(std, float), mean.shape)[None])


def shoal(table, run, name, **settings):
    """An estimator of Shoal; its own code gives the scores, its own intervals the coverage."""
    from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

    kind = EnsembleClassifier if table.classes else EnsembleRegressor
    model = kind(random_state=run.seed, device=run.device, **settings).fit(table.x, table.y)
    scored, first = (shoal_classes, "log_loss") if table.classes else (shoal_numbers, "crps")

    def predict():
        found = scored(model, table)
        if model.oof_predictive_ is not None:
            found["oof"] = predictive_scores(model.oof_predictive_, table.y, table.classes)[first]
        if run.noisy:
            each = [
                predictive_scores(model.predictive(x), table.y_test, table.classes)
                for x in noisy_inputs(table, run.seed)
            ]
            found["noisy"] = float(np.mean([scores[first] for scores in each]))
        return {name: found}

    return predict


def noisy_inputs(table, seed):
    """The test points with Gaussian noise on their numbers, one copy for each of `NOISES`."""
    chosen, random = categories(table.x), np.random.default_rng(seed)
    numbers = [column for column in table.x if column not in chosen]
    scale = table.x[numbers].std().to_numpy()
    for noise in NOISES:
        x = table.x_test.copy()
        x[numbers] = x[numbers] + noise * scale * random.standard_normal(x[numbers].shape)
        yield x


def predictive_scores(pred, y, classes):
    """Scores of a predictive of Shoal, whatever its likelihood is."""
    from shoal import evaluate

    if classes:
        return class_scores(np.asarray(pred.probs, float), y)
    found = evaluate(pred, y)
    kept = {name: found[name] for name in ("crps", "nll", "rmse") if name in found}
    if "crps" not in kept:  # no closed form
        levels = np.arange(1, 100) / 100
        values = np.stack([np.asarray(pred.quantile(q)).reshape(len(y)) for q in levels])
        kept["crps"] = pinball_crps(Quantiles(levels, values, values.mean(0)), y)
    return kept


def shoal_classes(model, table):
    """Scores of a classifier of Shoal; with `conformal=True`, also of its sets: their mean size."""
    found = predictive_scores(model.predictive(table.x_test), table.y_test, True)
    if not getattr(model, "conformal", False):
        return found
    inside = np.asarray(model.predict_set(table.x_test, level=0.9), bool)
    right = inside[np.arange(len(inside)), table.y_test]
    return found | {"coverage": float(right.mean()), "width": float(inside.sum(1).mean())}


def shoal_numbers(model, table):
    """Scores of a regressor of Shoal and of its intervals."""
    low, high = model.predict_interval(table.x_test, level=0.9)
    found = predictive_scores(model.predictive(table.x_test), table.y_test, False)
    return found | interval_scores(low, high, table.y_test)


def catboost(table, run, name, rounds=None, rate=None, patience=None):
    """CatBoost; the virtual ensembles of the same fit are a second row."""
    from catboost import CatBoostClassifier, CatBoostRegressor, Pool

    chosen = categories(table.x)
    x, x_test = named_gaps(table.x), named_gaps(table.x_test)
    settings = {"random_seed": run.seed, "thread_count": run.threads, "verbose": False}
    settings |= {"allow_writing_files": False}
    if rounds:
        settings |= {"iterations": rounds, "learning_rate": rate}
    if table.classes:
        model = CatBoostClassifier(**settings)
    else:
        model = CatBoostRegressor(loss_function="RMSEWithUncertainty", **settings)
    if rounds:
        held, rest = held_out(table, run.seed, 0.1)
        valid = Pool(x.iloc[held], table.y[held], cat_features=chosen)
        train = Pool(x.iloc[rest], table.y[rest], cat_features=chosen)
        model.fit(train, eval_set=valid, early_stopping_rounds=patience)
    else:
        model.fit(x, table.y, cat_features=chosen)

    def predict():
        test = Pool(x_test, cat_features=chosen)
        if table.classes:
            found = {name: Classes(model.predict_proba(test))}
            return found if rounds else found | {f"{name}-virtual": virtual_classes(model, test)}
        mean, variance = model.predict(test).T
        found = {name: one_gaussian(mean, np.sqrt(variance))}
        if rounds:
            return found
        mean, knowledge, noise = model.virtual_ensembles_predict(
            test, prediction_type="TotalUncertainty"
        ).T
        return found | {f"{name}-virtual": one_gaussian(mean, np.sqrt(knowledge + noise))}

    return predict


def virtual_classes(model, test):
    """Mean probabilities of the virtual ensembles."""
    from scipy.special import softmax

    raw = model.virtual_ensembles_predict(test, prediction_type="VirtEnsembles")
    if raw.shape[-1] == 1:  # the log-odds of the second class
        raw = np.concatenate([np.zeros_like(raw), raw], -1)
    return Classes(softmax(raw, -1).mean(1))


def lightgbm(table, run, name, rounds=None, rate=None, patience=None):
    """LightGBM: classes, or one model per quantile and one of the mean."""
    from lightgbm import LGBMClassifier, LGBMRegressor, early_stopping

    renamed = [f"x{i}" for i in range(table.x.shape[1])]
    x, x_test = table.x.set_axis(renamed, axis=1), table.x_test.set_axis(renamed, axis=1)
    settings = {"random_state": run.seed, "n_jobs": run.threads, "verbosity": -1}
    extra, rows = {}, np.arange(len(x))
    if rounds:
        settings |= {"n_estimators": rounds, "learning_rate": rate}
        held, rows = held_out(table, run.seed, 0.1)
        extra = {"eval_set": [(x.iloc[held], table.y[held])]}

    def fitted(model):
        stop = {"callbacks": [early_stopping(patience, verbose=False)]} if rounds else {}
        return model.fit(x.iloc[rows], table.y[rows], **extra, **stop)

    if table.classes:
        model = fitted(LGBMClassifier(**settings))
        return lambda: {name: Classes(np.asarray(model.predict_proba(x_test)))}
    quantile = [
        fitted(LGBMRegressor(objective="quantile", alpha=level, **settings)) for level in QUANTILES
    ]
    middle = fitted(LGBMRegressor(**settings))

    def predict():
        values = np.stack([model.predict(x_test) for model in quantile])
        return {name: Quantiles(QUANTILES, values, middle.predict(x_test))}

    return predict


def ngboost(table, run, name):
    """NGBoost: a Normal, or as many classes as there are."""
    from ngboost import NGBClassifier, NGBRegressor
    from ngboost.distns import k_categorical

    x, x_test = matrices(table)
    if table.classes:
        kind = NGBClassifier(
            Dist=k_categorical(table.classes), random_state=run.seed, verbose=False
        )
        model = kind.fit(x, table.y)
        return lambda: {name: Classes(model.predict_proba(x_test))}
    model = NGBRegressor(random_state=run.seed, verbose=False).fit(x, table.y)

    def predict():
        found = model.pred_dist(x_test)
        return {name: one_gaussian(found.loc, found.scale)}

    return predict


def forest(table, run, name):
    """A random forest; its noise is the RMSE out of bag."""
    from sklearn.ensemble import RandomForestClassifier, RandomForestRegressor

    x, x_test = matrices(table)
    settings = {"random_state": run.seed, "n_jobs": run.threads}
    if table.classes:
        model = RandomForestClassifier(**settings).fit(x, table.y)
        return lambda: {name: Classes(model.predict_proba(x_test))}
    model = RandomForestRegressor(oob_score=True, **settings).fit(x, table.y)
    noise = np.sqrt(np.mean((model.oob_prediction_ - table.y) ** 2))
    return lambda: {name: one_gaussian(model.predict(x_test), noise)}


def gaussian_process(table, run, name):
    """An exact Gaussian process on some of the points; own length scales up to 30 inputs."""
    from sklearn.gaussian_process import GaussianProcessClassifier, GaussianProcessRegressor
    from sklearn.gaussian_process.kernels import RBF, ConstantKernel, WhiteKernel

    x, x_test = matrices(table, scaled=True)
    wide = x.shape[1]
    rows = np.random.default_rng(run.seed).permutation(len(x))[: GP_POINTS[table.task]]
    if table.classes:
        kernel = ConstantKernel(1.0) * RBF(wide**0.5)
        classifier = GaussianProcessClassifier(kernel, random_state=run.seed)
        classifier.fit(x[rows], table.y[rows])
        return lambda: {name: Classes(classifier.predict_proba(x_test))}
    scales: Any = [wide**0.5] * (wide if wide <= 30 else 1)
    kernel = ConstantKernel(1.0) * RBF(scales, (1e-2, 1e4)) + WhiteKernel(0.1, (1e-6, 1e1))
    model = GaussianProcessRegressor(kernel, normalize_y=True, random_state=run.seed)
    model.fit(x[rows], table.y[rows])
    return lambda: {name: one_gaussian(*model.predict(x_test, return_std=True))}


def tabkit(table, run, name, kind):
    """A network of pytabkit; its noise is the RMSE on the fifth that it holds out."""
    import pytabkit

    made = getattr(pytabkit, f"{kind}_{'Classifier' if table.classes else 'Regressor'}")
    chosen = categories(table.x)
    middle = table.x.drop(columns=chosen).median()
    x, x_test = (named_gaps(frame).fillna(middle) for frame in (table.x, table.x_test))
    settings = {"random_state": run.seed, "n_threads": run.threads, "device": run.device}
    held, _ = held_out(table, run.seed, 0.2)
    model = made(**settings).fit(x, table.y, val_idxs=held, cat_col_names=chosen)
    if table.classes:
        return lambda: {name: Classes(model.predict_proba(x_test))}
    noise = np.sqrt(np.mean((model.predict(x.iloc[held]).ravel() - table.y[held]) ** 2))
    return lambda: {name: one_gaussian(model.predict(x_test).ravel(), noise)}


def bde(table, run, name):
    """Sampled ensembles of bde, with the settings of its documentation."""
    from bde import BdeClassifier, BdeRegressor
    from bde.loss import CategoricalCrossEntropy, GaussianNLL

    x, x_test = (part.astype("float32") for part in matrices(table, scaled=True))
    settings = {"hidden_layers": [16, 16], "n_members": 8, "seed": run.seed, "epochs": 200}
    settings |= {"validation_split": 0.15, "lr": 1e-3, "weight_decay": 1e-4, "patience": 10}
    settings |= {"warmup_steps": 5000, "n_samples": 2000, "n_thinning": 2}
    if table.classes:
        classifier = BdeClassifier(loss=CategoricalCrossEntropy(), **settings)
        classifier.fit(x=x, y=table.y.astype("int32"))
        return lambda: {name: Classes(np.asarray(classifier.predict_proba(x_test), float))}
    middle, unit = table.y.mean(), table.y.std()
    model = BdeRegressor(loss=GaussianNLL(), **settings)
    model.fit(x=x, y=((table.y - middle) / unit)[:, None].astype("float32"))

    def predict():
        raw = np.asarray(model.predict(x_test, raw=True), float)
        raw = raw.reshape(-1, *raw.shape[2:])
        raw = raw[:: max(1, len(raw) // 200)]  # a mixture of about 200 draws
        mean, std = raw[..., 0], np.logaddexp(0, raw[..., 1]) + 1e-6
        return {name: Mixture(middle + unit * mean, unit * std)}

    return predict


PEERS = {
    "catboost": catboost,
    "lightgbm": lightgbm,
    "ngboost": ngboost,
    "forest": forest,
    "gp": gaussian_process,
    "realmlp": partial(tabkit, kind="RealMLP_TD"),
    "tabm": partial(tabkit, kind="TabM_D"),
    "bde": bde,
    "catboost-tuned": partial(catboost, **TREES),
    "lightgbm-tuned": partial(lightgbm, **TREES),
}

ARMS = {
    "shoal": {},
    "shoal-fast": {"preset": "fast"},
    "shoal-best": {"preset": "best"},
    "shoal-conformal": {"conformal": True},
}
"""Settings of Shoal by name; a file of settings adds more."""

LIBRARIES = {"shoal": "shoal", "forest": "sklearn", "gp": "sklearn"}
LIBRARIES |= {name: name.split("-")[0] for name in PEERS if name not in LIBRARIES}
LIBRARIES |= {"realmlp": "pytabkit", "tabm": "pytabkit"}
"""The module of every model; it is imported before the fits."""


def models(settings):
    """All models by name, with arms of Shoal by further settings."""
    arms = {name: partial(shoal, **given) for name, given in (ARMS | settings).items()}
    return {name: partial(model, name=name) for name, model in (PEERS | arms).items()}

"""The next line of code under a number that needs attention, as the run's user types it.

A run that an estimator made gets estimator lines, a run that a command made gets commands. Names
stand for what only the user has: `build`, `(x, y)`, and validation data `(x_val, y_val)`.
"""

import math
import re
import shlex
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from shoal.core.storage.formats import to_toml
from shoal.page.report_data import RunRecord, shown_path
from shoal.page.rerun_commands import (
    call,
    estimator_call,
    init_call,
    is_from_estimator,
    settings_arguments,
)
from shoal.page.sentences import Calibration, Coverage, Repulsion, repulsion
from shoal.page.trend import still_falling
from shoal.plots.errors import PredictionBins
from shoal.training.folder.history import has_diverged
from shoal.training.folder.own_data import has_own_data, has_own_network

__all__ = [
    "Advice",
    "for_confidence",
    "for_divergence",
    "for_intervals",
    "for_ood",
    "for_repulsion",
    "interface",
    "refit",
    "report_again",
]

_WIDTH = 46
"""Letters of a line in a card."""

_PREPARES = re.compile(r"\b(x = .+?)(?:, (?:and|or) .+)?\.?$")
"""The line of a warning about the inputs, without the words that follow it."""

_NOISY = "model.dataset(X_noisy, y_test).test"

_ONE_NOISE = {"gaussian", "homoscedastic"}
"""Likelihoods with noise of one size for all inputs."""


class Advice(NamedTuple):
    """What to do next: a sentence, and the line to type."""

    sentence: str
    code: str


def interface(record: RunRecord) -> str:
    """How the run was started: "estimator", "command line" or "python".

    Runs of older versions do not record it. Their folder says whether commands can repeat them.
    """
    if is_from_estimator(record):
        return "estimator"
    if has_own_network(record.config) or has_own_data(record.config) or record.folder is None:
        return "python"
    known = (record.provenance.get("made_by") or {}).get("interface")
    typed = str(record.provenance.get("command") or "shoal").split(" ")[0]
    script = typed.endswith(".py") and typed != "__main__.py"
    return "python" if known is None and script else "command line"


def refit(record: RunRecord, **changes: Any) -> str:
    """The line that trains the run again, with changed settings."""
    if "method" in changes:
        changes.setdefault("strength", None)  # the run has the strength of another method
    how = interface(record)
    if how == "estimator":
        renamed = {"learning_rate" if name == "lr" else name: v for name, v in changes.items()}
        return estimator_call(record, renamed, _WIDTH)
    if how == "command line" and record.folder is not None:
        where = shown_path(record.folder)
        words = [f"{name}={value}" for name, value in changes.items() if value is not None]
        beside = where.parent if (where.parent / "grid.toml").exists() else where
        again = beside.with_name("-".join([where.name, *words]).replace("=", "-"))
        return shlex.join(["shoal", "fit", str(where / "config.toml"), *words, "-o", str(again)])
    config = {**record.trained, **changes}
    data = "(x, y)" if has_own_data(config) else f"shoal.data.load({config['data']!r})"
    arguments = [init_call(config), data, *settings_arguments(config)]
    return call("run = shoal.fit", arguments, _WIDTH)


def grow(record: RunRecord) -> str:
    """The line that adds as many members as there are."""
    more = max(record.members, 4)
    if interface(record) == "estimator":
        return refit(record, members=record.members + more)
    if interface(record) == "command line" and record.folder is not None:
        return f"shoal grow {shlex.quote(str(shown_path(record.folder)))} --more {more}"
    method = ", method='ensemble'" if record.adopted else ""
    data = ", data=(x, y)" if has_own_data(record.config) else ""
    return f"{_loaded(record)}run = shoal.grow(run, {more}{data}{method})"


def decide(record: RunRecord, rule: str, result: str, **settings: float) -> str:
    """The lines that fit a rule of `shoal.decisions` to validation data and apply it.

    Args:
        record: the run.
        rule: a function of `shoal.decisions`.
        result: the name of what the rule returns.
        settings: further arguments of the function.
    """
    how = interface(record)
    if how == "command line" and record.folder is not None:
        return f"shoal decide {shlex.quote(str(shown_path(record.folder)))}"
    if how == "estimator":
        classes = record.assessment is not None and record.assessment.about.has_classes
        targets = "model.dataset(X_val, y_val).test.y" if classes else "y_val"
        held, new, first = "model.predictive(X_val)", "model.predictive(X_test)", ""
    else:
        held, new = "shoal.predict(run, x_val)", "shoal.predict(run, x_test)"
        targets, first = "y_val", _loaded(record)
    arguments = [held, targets, *(f"{name}={value}" for name, value in settings.items())]
    fitted = call(f"rule = shoal.decisions.{rule}", arguments, _WIDTH)
    return f"{first}{fitted}\n{result} = rule({new})"


def _crossed(record: RunRecord) -> str | None:
    """The lines that fit intervals to the folds of a run; None where that is not possible."""
    how = interface(record)
    if not record.config.get("folds") or record.config.get("frozen") or how == "command line":
        return None
    if how == "estimator":
        again = refit(record, conformal=True)
        return f"{again}\nlow, high = model.predict_interval(X_test, level=0.9)"
    data = ", data=(x, y)" if has_own_data(record.config) and record.folder is not None else ""
    fitted = f"rule = shoal.cross_conformal(run, 0.9{data})"
    return f"{_loaded(record)}{fitted}\nlow, high = rule(shoal.predict(run, x_test))"


def _loaded(record: RunRecord) -> str:
    """The line before, which loads a run from its folder."""
    if record.folder is None:
        return ""
    build = ", build" if has_own_network(record.config) else ""
    return f"run = shoal.load({str(shown_path(record.folder))!r}{build})\n"


def report_again(record: RunRecord, kind: str) -> str:
    """The line that makes the page with OOD data or shifted data.

    Args:
        record: the run.
        kind: "ood" or "shifts".
    """
    facts = {} if record.assessment is None else record.assessment.scores["data"]
    images = facts.get("inputs") == "images"
    how, own = interface(record), has_own_data(record.config)
    if how == "command line" and record.folder is not None and (kind == "ood" or images):
        named = record.config["data"]
        table = dict(named) if isinstance(named, Mapping) else {"name": named}
        table |= {"ood": "other.npz"} if kind == "ood" else {"corruptions": "standard"}
        spec = to_toml({"value": table}).partition("=")[2].strip()
        return shlex.join(["shoal", "report", str(shown_path(record.folder)), "--data", spec])
    prepared, data, source = "x_other", "(x_test, y_test)" if own else "", "run"
    pair = "(x_noisy, y_test)"
    if how == "estimator":
        source, data, pair = "model.run_", "model.dataset(X_test, y_test)", _NOISY
        prepared = "model.preprocessing_.transform(X_other)"
    value = f"{{'other': {prepared}}}" if kind == "ood" else f"{{'noisy': {pair}}}"
    value = "'standard'" if kind == "shifts" and images else value
    given = [f"data={data}"] if data else []
    first = "" if how == "estimator" else _loaded(record)
    arguments = [source, "'report.html'", *given, f"{kind}={value}"]
    return first + call("shoal.report", arguments, _WIDTH)


def _longer(record: RunRecord) -> Advice:
    steps, epochs = record.config.get("steps"), record.config.get("epochs")
    longer = {"steps": 2 * steps} if steps else {"epochs": 2 * int(epochs or len(record.history))}
    return Advice("The training loss still falls: train longer.", refit(record, **longer))


def _warned(record: RunRecord) -> Advice | None:
    """What the first warning of the run says to do, which comes before any other advice."""
    if not record.warnings:
        return None
    if has_diverged(record.history):
        return for_divergence(record)
    remedy = record.warnings[0].rpartition("; ")[2]
    line = _PREPARES.search(remedy)
    if line is not None:
        return Advice("First prepare the inputs, also those of later predictions.", line[1])
    return Advice(f"First: {remedy}", "")


def for_confidence(record: RunRecord, verdict: Calibration) -> Advice:
    """Where mean confidence differs from accuracy."""
    if (first := _warned(record)) is not None:
        return first
    if verdict is Calibration.UNDERCONFIDENT and _may_train_longer(record):
        return _longer(record)
    return Advice(
        "A temperature, fitted to validation data, corrects the confidence.",
        decide(record, "temperature", "calibrated"),
    )


def for_intervals(record: RunRecord, verdict: Coverage) -> Advice:
    """Where intervals contain too few or too many targets."""
    if (first := _warned(record)) is not None:
        return first
    if verdict is Coverage.TOO_WIDE and _may_train_longer(record):
        return _longer(record)
    one_noise = _name(record.config.get("likelihood")) in _ONE_NOISE
    own = has_own_network(record.config) or not _trainable(record)
    if one_noise and not own and noise_varies(record):
        return Advice(
            "The size of the noise varies: let it depend on the input.",
            refit(record, likelihood="heteroscedastic"),
        )
    if (folds := _crossed(record)) is not None:
        return Advice("Cross-conformal intervals, fitted to the folds, hold their level.", folds)
    return Advice(
        "Conformal intervals, fitted to validation data, hold their level.",
        decide(record, "conformal_intervals", "low, high", level=0.9),
    )


def _name(spec: Any) -> str:
    return str(spec.get("name") if isinstance(spec, Mapping) else spec)


def noise_varies(record: RunRecord) -> bool:
    """Whether coverage differs over the prediction, or residuals have heavy tails.

    Gaussian intervals of one noise size, under noise of several sizes, contain too many targets at
    level 0.5 and too few at 0.9.
    """
    test = {} if record.assessment is None else record.assessment.split_samples("test")
    if not {"mean", "pit"} <= test.keys() or test["pit"].ndim > 1 or test["mean"].ndim > 1:
        return False
    inside = 2 * np.abs(test["pit"].double().numpy() - 0.5)
    half, most = float((inside <= 0.5).mean()), float((inside <= 0.9).mean())
    noise = 0.5 / math.sqrt(len(inside))
    if half - 0.5 > 2 * noise and half - 0.5 > most - 0.9:
        return True
    bins = [inside[rows] <= 0.9 for rows in PredictionBins.of(test["mean"], most=5).rows]
    chi2 = sum(
        len(part) * (part.mean() - most) ** 2 / max(most * (1 - most), 1e-9) for part in bins
    )
    free = len(bins) - 1
    return free > 0 and chi2 > free + 3 * math.sqrt(2 * free)


def for_ood(record: RunRecord) -> Advice:
    """Where OOD inputs are not detected."""
    if (first := _warned(record)) is not None:
        return first
    strength = repulsion(record.config.get("method") == "ensemble", record.ratio)
    if record.members > 1 and _trainable(record) and record.choice is None:
        words = "may detect more: a search chooses its strength on held-out data."
        if strength is Repulsion.NONE:
            line = refit(record, method="kde", strength="auto")
            return Advice(f"Repulsion of the weights {words}", line)
        if strength is Repulsion.NEGLIGIBLE:
            return Advice(f"Stronger repulsion {words}", refit(record, strength="auto"))
    return Advice("More members may detect more.", grow(record))


def for_repulsion(record: RunRecord) -> Advice:
    """Where repulsion was negligible."""
    if (first := _warned(record)) is not None:
        return first
    if record.choice is not None:
        plain = "The search found no strength that helps: use the plain ensemble."
        return Advice(plain, refit(record, method="ensemble"))
    search = "Let a search choose the strength on held-out data."
    return Advice(search, refit(record, strength="auto"))


def for_divergence(record: RunRecord) -> Advice:
    """Where training diverged."""
    rate = float(record.config.get("lr") or 1e-3)
    return Advice("Train again with a lower learning rate.", refit(record, lr=rate / 10))


def _may_train_longer(record: RunRecord) -> bool:
    return _trainable(record) and still_falling(record.history)


def _trainable(record: RunRecord) -> bool:
    return not record.adopted and not record.config.get("frozen")

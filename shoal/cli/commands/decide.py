"""`shoal decide`: rules for decisions from a run, fitted on held-out data and checked on others."""

import warnings
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for
from shoal.core.display.text import number, percent
from shoal.core.errors import DataError, ShoalWarning
from shoal.core.storage.files import write_json
from shoal.core.structure import parted
from shoal.data.dataset import Dataset
from shoal.engine.resources.autotune import set_threads
from shoal.experiment.build import check_device
from shoal.prediction import Predictive, decisions, metrics, predict
from shoal.prediction.metrics.regression import in_units

__all__ = ["run"]

LEAST = 20
"""Labelled data points below which a rule says nothing."""


@dataclass(frozen=True)
class Finding:
    """A fitted rule and what it does on the other half of the data.

    Attributes:
        name: name of the rule.
        rule: the fitted rule.
        setting: what to use, such as the threshold.
        check: result on the other half, in words.
        checked: the same as numbers.
    """

    name: str
    rule: Any
    setting: str
    check: str
    checked: dict[str, float]


def run(options: Namespace) -> Outcome:
    """Fit rules on a random half of the labelled data, and check them on the other half."""
    check_device(options.device)
    opened = opened_for("decide", options.run, options.model)
    set_threads(options.threads, opened.ensemble.weights, 1024)
    data = evaluation_dataset(opened, options.run, options.data, "evaluate")
    pred, y = _predicted(opened, data, options.device)
    order = torch.randperm(len(pred), generator=torch.Generator().manual_seed(options.seed))
    half = len(pred) // 2
    fitted, other = order[:half], order[half:]
    ood = {
        name: in_units(predict(opened, split.x, device=options.device), data.scaling)
        for name, split in data.ood.items()
    }
    halves = (pred[fitted], y[fitted]), (pred[other], y[other])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ShoalWarning)  # the text has the same sentence
        kind = _of_classes if pred.likelihood.about.has_classes else _of_numbers
        findings = [*kind(*halves, options), *_alarm(*halves, ood, options)]
    value = {
        "run": options.run,
        "data": data.name,
        "fitted_points": half,
        "checked_points": len(other),
        "rules": {f.name: {**asdict(f.rule), "checked": f.checked} for f in findings},
    }
    if options.out is not None:
        write_json(options.out, value)
    return Outcome(_text(findings, options, data.name, half, len(other)), value)


def _predicted(run: Any, data: Dataset, device: Any) -> tuple[Predictive, Tensor]:
    """The prediction for the labelled data that count, and their targets in their own units."""
    split = data.test
    if split is None or split.y is None:
        raise DataError(f"'{data.name}' has no labelled test set; name held-out data with --data")
    y = parted(split.y)[0]
    y = y if data.scaling is None else data.scaling.original(y)
    pred, targets = in_units(predict(run, split.x, device=device), data.scaling).points(y)
    if len(pred) < LEAST:
        raise DataError(
            f"'{data.name}' has {len(pred)} test points, too few for decisions; "
            f"name at least {LEAST} held-out points with --data"
        )
    return pred, pred.check(targets)


Half = tuple[Predictive, Tensor]


def _of_classes(fit: Half, check: Half, options: Namespace) -> Iterator[Finding]:
    (pred, y), (new, truth) = fit, check
    if "ordinal" not in pred.likelihood.about.kinds:
        scaling = decisions.temperature(pred, y)
        errors = [metrics.ece(p, truth) for p in (new, scaling(new))]
        yield Finding(
            "temperature",
            scaling,
            f"T = {scaling.value:.3g}",
            f"ECE {number(errors[0], 5e-5)} becomes {number(errors[1], 5e-5)}",
            {"ece_before": errors[0], "ece": errors[1]},
        )
    rule = decisions.selective(pred, y, options.error, confidence=options.confidence)
    kept = rule(new)
    wrong = new.labels() != new.likelihood.labels(truth)
    share, error = float(kept.double().mean()), float(wrong[kept].double().mean())
    yield Finding(
        "selective",
        rule,
        f"answer if confidence ≥ {rule.threshold:.4g}" if share else "answer nothing",
        f"answers {percent(share)}, {percent(error)} of them wrong" if share else "answers 0 %",
        {"answered": share, "error": error},
    )
    sets = decisions.conformal_sets(pred, y, options.level, score=options.score)
    inside = sets(new)
    covered = float(inside.gather(1, new.likelihood.labels(truth).view(-1, 1)).double().mean())
    size = float(inside.sum(1).double().mean())
    yield Finding(
        "sets",
        sets,
        f"{options.score} score ≤ {sets.threshold:.4g}",
        f"contain the class in {percent(covered)}, {size:.2f} classes on average",
        {"coverage": covered, "size": size},
    )


def _of_numbers(fit: Half, check: Half, options: Namespace) -> Iterator[Finding]:
    (pred, y), (new, truth) = fit, check
    if not {"intervals", "gaussian"} & {*pred.likelihood.about.kinds}:
        return
    rule = decisions.conformal_intervals(pred, y, options.level)
    low, high = rule(new)
    covered = float(((truth >= low) & (truth <= high)).double().mean())
    width = float((high - low).mean())
    margins = ", ".join(number(margin) for margin in rule.margin)
    yield Finding(
        "intervals",
        rule,
        f"move both ends of the {percent(options.level)} interval outwards by {margins}",
        f"contain {percent(covered)} of the targets, width {number(width)} on average",
        {"coverage": covered, "width": width},
    )


def _alarm(
    fit: Half, check: Half, ood: dict[str, Predictive], options: Namespace
) -> Iterator[Finding]:
    alarm = decisions.ood_alarm(fit[0], options.alarms)
    rates = {"false alarms": float(alarm(check[0]).double().mean())}
    rates |= {f"{name} detected": float(alarm(p).double().mean()) for name, p in ood.items()}
    yield Finding(
        "alarm",
        alarm,
        f"alarm if {alarm.score.replace('_', ' ')} > {alarm.threshold:.4g}",
        ", ".join(f"{percent(rate)} {name}" for name, rate in rates.items()),
        rates,
    )


def _text(findings: list[Finding], options: Namespace, data: str, half: int, other: int) -> str:
    rows = [[f.name, f.setting] for f in findings]
    promises = [f.rule.guarantee for f in findings if hasattr(f.rule, "guarantee")]
    checks = "\n".join(f"{f.name}: {f.check}" for f in findings)
    parts = [
        f"{options.run} on {data}: rules from {half} points, checked on {other} others",
        _aligned(rows),
        f"On the {other} other points:\n{checks}",
        "\n".join(promises),
    ]
    return "\n\n".join([*parts, *([f"Written to {options.out}"] if options.out else [])])


def _aligned(rows: list[list[str]]) -> str:
    width = max(len(name) for name, _ in rows) + 2
    return "\n".join(f"{name.ljust(width)}{setting}" for name, setting in rows)

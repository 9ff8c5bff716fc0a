"""Can I trust it? A few sentences, each made from its numbers."""

import math

import numpy as np

from shoal.core.display.text import counted, percent
from shoal.page import advice, sentences
from shoal.page.blocks import Section, Statement, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, RunRecord, SeedGroup
from shoal.page.sentences import Calibration, Coverage, Repulsion, calibration, coverage, repulsion
from shoal.prediction.metrics.similarity import COMPARED
from shoal.prediction.statistics import mean_and_error

__all__ = ["trust_section"]

_ENOUGH = 50

_DETECTED = 0.9
"""Share of an OOD set above which its detection needs no attention."""


@section("trust", order=10)
def trust_section(report_data: ReportData) -> Section:
    """The first run's main numbers, in three to five sentences."""
    about = report_data.assessment.about
    describe = _classes if about.has_classes else _loss if "loss" in about.kinds else _numbers
    statements = [
        *describe(report_data),
        *_ood(report_data),
        _members(report_data),
        Statement("training", "not known", sentences.ADOPTED)
        if report_data.lead.first.adopted
        else _repulsion(report_data),
    ]
    seeds = len(report_data.lead.entries)
    where = f"{_subject(report_data.lead)} on {report_data.lead.first.data}"
    answer = f"About {where}" + (f", mean of {seeds} seeds." if seeds > 1 else ".")
    return Section("Can I trust it?", answer, statements)


def _subject(lead: SeedGroup) -> str:
    if lead.first.adopted:
        return counted(lead.members, "adopted network")
    name = f"the plain {lead.label}" if lead.first.plain else lead.label
    return f"{name} with {lead.first.many}"


def _mean(group: SeedGroup, key: str, split: str = "test") -> tuple[float, float]:
    return Measure(key, split).summary(group)


def _classes(report_data: ReportData) -> list[Statement]:
    facts = report_data.assessment.scores["data"]
    count = facts["counts"]["test"]
    accuracy, error = _mean(report_data.lead, "accuracy")
    confidence, _ = _mean(report_data.lead, "confidence")
    # all seeds share the test inputs, so the error is at least that of the inputs
    noise = math.sqrt(accuracy * (1 - accuracy) / count)
    error = max(noise, error) if math.isfinite(error) else noise
    first = report_data.lead.first
    gap = calibration_noise(first)
    sentence = sentences.calibration_sentence(confidence, accuracy, gap, near_ninety(first))
    verdict = calibration(confidence, accuracy, gap)
    good = verdict is Calibration.CALIBRATED
    next_step = ("", "") if good else advice.for_confidence(first, verdict)
    return [
        Statement(
            "accuracy",
            percent(accuracy, error),
            sentences.accuracy_sentence(accuracy, error, count, facts.get("inputs", "inputs")),
        ),
        Statement("confidence", percent(confidence), sentence, _tone(good), *next_step),
    ]


def calibration_noise(record: RunRecord) -> float:
    """Standard error of mean confidence minus accuracy, over the test inputs.

    Without stored predictions, the standard error of the accuracy takes its place: an upper bound.
    """
    stored = record.confidences()
    if stored is None:
        accuracy = (
            record.assessment.test.get("accuracy", math.nan) if record.assessment else math.nan
        )
        count = record.assessment.scores["data"]["counts"]["test"] if record.assessment else 1
        return math.sqrt(accuracy * (1 - accuracy) / count)
    confidence, correct = stored
    return mean_and_error((confidence - correct.double()).numpy())[1]


def near_ninety(record: RunRecord) -> tuple[float, float] | None:
    """Confidence and accuracy of the predictions with 85 to 95 % confidence, if they are many."""
    stored = record.confidences()
    if stored is None:
        return None
    confidence, correct = stored
    near = (confidence - 0.9).abs() <= 0.05
    if int(near.sum()) < _ENOUGH:
        return None
    accuracy = float(correct[near].double().mean())
    return round(float(confidence[near].mean()), 2), round(accuracy, 2)


def _numbers(report_data: ReportData) -> list[Statement]:
    kept = report_data.assessment.split_samples("test")
    count = report_data.assessment.scores["data"]["counts"]["test"]
    rmse, _ = _mean(report_data.lead, "rmse")
    share, _ = _mean(report_data.lead, "coverage_90")
    stddev = float(np.std(kept["y"].double().numpy())) if "y" in kept else 0.0
    error = Statement("RMSE", f"{rmse:.3g}", sentences.error_sentence(rmse, stddev, count))
    if math.isnan(share):
        return [error]
    held = sentences.coverage_sentence(0.9, share, count)
    verdict = coverage(0.9, share, count)
    good = verdict is Coverage.HELD
    next_step = ("", "") if good else advice.for_intervals(report_data.lead.first, verdict)
    inside = f"{percent(share)} inside"
    return [error, Statement("intervals", inside, held, _tone(good), *next_step)]


def _tone(good: bool) -> str:
    return "good" if good else "mind"


def _loss(report_data: ReportData) -> list[Statement]:
    count = report_data.assessment.scores["data"]["counts"]["test"]
    loss, _ = _mean(report_data.lead, "loss")
    return [Statement("mean loss", f"{loss:.3g}", sentences.loss_sentence(loss, count))]


def _ood(report_data: ReportData) -> list[Statement]:
    """About the OOD set with the lowest detection rate."""
    shares = {
        name: _mean(report_data.lead, "recognised", f"ood:{name}")[0]
        for name in report_data.assessment.ood
    }
    shares = {name: share for name, share in shares.items() if not math.isnan(share)}
    if not shares:
        return []
    name = min(shares, key=lambda key: shares[key])
    auroc, _ = _mean(
        report_data.lead, f"auroc_{report_data.assessment.about.uncertainty}", f"ood:{name}"
    )
    sentence = sentences.ood_sentence(name, shares[name], auroc)
    good = shares[name] > _DETECTED
    next_step = ("", "") if good else advice.for_ood(report_data.lead.first)
    found = f"{percent(shares[name])} detected"
    return [Statement("OOD detection", found, sentence, _tone(good), *next_step)]


def _members(report_data: ReportData) -> Statement:
    effective, _ = _mean(report_data.lead, "effective_functions")
    ood = {
        name: value
        for name in list(report_data.assessment.ood)[:2]
        if not math.isnan(value := _mean(report_data.lead, "effective_functions", f"ood:{name}")[0])
    }
    size = report_data.lead.members
    sentence = sentences.members_sentence(size, effective, ood)
    return Statement("functions", f"{effective:.2g} of {min(size, COMPARED)}", sentence)


def _repulsion(report_data: ReportData) -> Statement:
    record = report_data.lead.first
    trained = record.config.get("method")  # after a search, the method that it chose
    alone = trained == "ensemble"
    name = "ensemble" if alone else record.method
    sentence = sentences.repulsion_sentence(name, record.ratio)
    plain = alone or math.isnan(record.ratio)
    share = "none" if plain else percent(record.ratio / (1 + record.ratio))
    negligible = repulsion(alone, record.ratio) is Repulsion.NEGLIGIBLE
    if not negligible:
        return Statement("repulsion", share, sentence)
    return Statement("repulsion", share, sentence, "mind", *advice.for_repulsion(record))

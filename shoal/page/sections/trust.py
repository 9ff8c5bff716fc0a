"""Can I trust it? A handful of sentences made from the numbers."""

import math

import numpy as np

from shoal.core.text import percent
from shoal.page import sentences
from shoal.page.blocks import Section, Statement, section
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, RunRecord, SeedGroup
from shoal.page.verdicts import Calibration, Coverage, Repulsion, calibration, coverage, repulsion
from shoal.prediction.statistics import mean_and_error

__all__ = ["trust"]

_ENOUGH = 50


@section("trust", order=10)
def trust(story: ReportData) -> Section:
    """What the numbers say about the first run, in three to five sentences."""
    judge = _classes if story.assessment.about.has_classes else _numbers
    said = [*judge(story), *_recognition(story), _members(story), _repulsion(story)]
    seeds = len(story.lead.entries)
    plain = story.lead.first.plain
    name = f"the plain {story.lead.label}" if plain else story.lead.label
    where = f"{name} with {story.lead.members} members on {story.lead.first.data}"
    answer = f"About {where}" + (f", the mean of {seeds} seeds." if seeds > 1 else ".")
    return Section("Can I trust it?", answer, said)


def _mean(group: SeedGroup, key: str, part: str = "test") -> tuple[float, float]:
    return Measure(key, part).summary(group)


def _classes(story: ReportData) -> list[Statement]:
    facts = story.assessment.scores["data"]
    count = facts["counts"]["test"]
    right, error = _mean(story.lead, "accuracy")
    says, _ = _mean(story.lead, "confidence")
    # seeds share their test inputs, so the noise is never below that of the inputs
    noise = math.sqrt(right * (1 - right) / count)
    error = max(noise, error) if math.isfinite(error) else noise
    gap = calibration_noise(story.lead.first)
    sure = sentences.calibration_sentence(says, right, gap, near_ninety(story.lead.first))
    calibrated = calibration(says, right, gap) is Calibration.CALIBRATED
    return [
        Statement(
            "accuracy",
            percent(right, error),
            sentences.accuracy_sentence(right, error, count, facts.get("inputs", "inputs")),
        ),
        Statement("confidence", f"{percent(says)} sure", sure, "good" if calibrated else "mind"),
    ]


def calibration_noise(entry: RunRecord) -> float:
    """Standard error of mean confidence minus accuracy, over the inputs of the test.

    Where the answers to single inputs are not kept, that of the accuracy alone is as large or more.
    """
    part = entry.assessment.split_samples("test") if entry.assessment else {}
    if not {"confidence", "prediction", "label"} <= part.keys():
        right = entry.assessment.test.get("accuracy", math.nan) if entry.assessment else math.nan
        count = entry.assessment.scores["data"]["counts"]["test"] if entry.assessment else 1
        return math.sqrt(right * (1 - right) / count)
    gap = part["confidence"].double() - (part["prediction"] == part["label"]).double()
    return mean_and_error(gap.numpy())[1]


def near_ninety(entry: RunRecord) -> tuple[float, float] | None:
    """Confidence and accuracy among the answers that are 85 to 95 % sure, if they are many."""
    part = entry.assessment.split_samples("test") if entry.assessment else {}
    if not {"confidence", "prediction", "label"} <= part.keys():
        return None
    sure = part["confidence"].double()
    near = (sure - 0.9).abs() <= 0.05
    if int(near.sum()) < _ENOUGH:
        return None
    right = (part["prediction"] == part["label"])[near].double()
    return round(float(sure[near].mean()), 2), round(float(right.mean()), 2)


def _numbers(story: ReportData) -> list[Statement]:
    part = story.assessment.split_samples("test")
    count = story.assessment.scores["data"]["counts"]["test"]
    rmse, _ = _mean(story.lead, "rmse")
    found, _ = _mean(story.lead, "coverage_90")
    spread = float(np.std(part["y"].double().numpy())) if "y" in part else 0.0
    error = Statement("error", f"± {rmse:.3g}", sentences.error_sentence(rmse, spread, count))
    if math.isnan(found):
        return [error]
    held = sentences.coverage_sentence(0.9, found, count)
    tone = "good" if coverage(0.9, found, count) is Coverage.HELD else "mind"
    return [error, Statement("intervals", f"{percent(found)} held", held, tone)]


def _recognition(story: ReportData) -> list[Statement]:
    """About the foreign set that is recognised worst: a chain is as strong as that."""
    found = {
        name: _mean(story.lead, "recognised", f"ood:{name}")[0] for name in story.assessment.ood
    }
    found = {name: share for name, share in found.items() if not math.isnan(share)}
    if not found:
        return []
    name = min(found, key=lambda key: found[key])
    auroc, _ = _mean(story.lead, f"auroc_{story.assessment.about.uncertainty}", f"ood:{name}")
    sentence = sentences.recognition_sentence(name, found[name], auroc)
    tone = "good" if found[name] > 0.9 else "mind"
    return [Statement("the unknown", f"{percent(found[name])} found", sentence, tone)]


def _members(story: ReportData) -> Statement:
    effective, _ = _mean(story.lead, "effective_functions")
    foreign = {
        name: value
        for name in list(story.assessment.ood)[:2]
        if not math.isnan(value := _mean(story.lead, "effective_functions", f"ood:{name}")[0])
    }
    size = story.lead.members
    sentence = sentences.members_sentence(size, effective, foreign)
    return Statement("members", f"{max([effective, *foreign.values()]):.2g} of {size}", sentence)


def _repulsion(story: ReportData) -> Statement:
    entry = story.lead.first
    sentence = sentences.repulsion_sentence(entry.method, entry.ratio)
    plain = entry.plain or math.isnan(entry.ratio)
    share = "none" if plain else percent(entry.ratio / (1 + entry.ratio))
    negligible = repulsion(entry.plain, entry.ratio) is Repulsion.NEGLIGIBLE
    return Statement("repulsion", share, sentence, "mind" if negligible else "plain")

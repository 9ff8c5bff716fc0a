"""Answer only where confidence is high enough: the numbers behind the slider of the page."""

from collections.abc import Iterator

import torch
from torch import Tensor

from shoal.core.display.text import percent
from shoal.page.blocks import Block, Slider, SliderRow
from shoal.page.report_data import ReportData, SeedGroup
from shoal.prediction.decisions import clopper_pearson

__all__ = ["THRESHOLDS", "answering_slider"]

THRESHOLDS = [*(k / 100 for k in range(100)), 0.995, 0.999, 0.9995, 0.9999]
"""The confidences of the slider, finer near 1, where networks put most of their predictions."""

_START = THRESHOLDS.index(0.9)


def answering_slider(report_data: ReportData) -> Iterator[Block]:
    """A slider for the least confidence of an answer, with accuracy and share of every method."""
    rows = [
        row
        for label, group in report_data.peers().items()
        if (row := _row(label, group)) is not None
    ]
    if not rows:
        return
    count = report_data.assessment.scores["data"]["counts"].get("test")
    inputs = f"{count} test inputs" if count else "test inputs"
    yield Slider(
        "How many answers, and how accurate?",
        "Answer only when confidence is at least",
        [_shown(threshold) for threshold in THRESHOLDS],
        _START,
        ["answered", "accuracy", "95 % interval", "wrong answers"],
        rows,
        f"Move the slider: the numbers are those of the {inputs}. A threshold that is chosen here "
        f"promises nothing for new data. `shoal decide RUN --error 0.01` finds one that does.",
    )


def _row(label: str, group: SeedGroup) -> SliderRow | None:
    found = group.first.assessment
    samples = {} if found is None else found.split_samples("test")
    if not {"confidence", "prediction", "label"} <= samples.keys():
        return None
    right = samples["prediction"] == samples["label"]
    return SliderRow(label, [_cells(*at) for at in _counts(samples["confidence"], right)])


def _counts(sure: Tensor, right: Tensor) -> list[tuple[int, int, int]]:
    """Answered and accurate predictions at every threshold, and the number of predictions."""
    kept = sure.double() >= torch.tensor(THRESHOLDS, dtype=torch.float64).unsqueeze(1) - 1e-9
    answered, accurate = kept.sum(1).tolist(), (kept & right).sum(1).tolist()
    return [(n, k, len(sure)) for n, k in zip(answered, accurate, strict=True)]


def _cells(answered: int, accurate: int, count: int) -> list[str]:
    share = percent(answered / count)
    if answered == 0:
        return [share, "–", "–", "0"]
    low, high = clopper_pearson(accurate, answered)
    span = f"{percent(low).removesuffix(' %')} to {percent(high)}"
    return [share, percent(accurate / answered), span, str(answered - accurate)]


def _shown(threshold: float) -> str:
    """A threshold in per cent; `percent` would round 99.99 %.

    >>> _shown(0.9), _shown(0.9995)
    ('90 %', '99.95 %')
    """
    return f"{100 * threshold:.4g} %"

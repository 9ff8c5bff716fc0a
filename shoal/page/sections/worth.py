"""What is one more member worth? Scores of ensembles of some of the members, continued."""

import math
from collections.abc import Iterator

from shoal import plots
from shoal.core.display.text import counted, number, plus_minus
from shoal.evaluation.evaluate import stored_curves
from shoal.evaluation.worth import (
    Worth,
    cost,
    interval,
    last_epochs,
    member_seconds,
    titled,
    unit_of,
)
from shoal.page.blocks import (
    Block,
    Figure,
    Remark,
    Section,
    Statement,
    Table,
    TableCell,
    folded,
    rest_folded,
    section,
)
from shoal.page.report_data import ReportData, RunRecord
from shoal.prediction.worth import Gain

__all__ = ["worth_section"]

_SHOWN = ("nll", "accuracy", "rmse")
_STATED = (1, 2)


@section("worth", order=52)
def worth_section(report_data: ReportData) -> Section | None:
    """More members of the first run, if its evaluation has at least three."""
    record = report_data.subject
    curves = stored_curves(report_data.assessment)
    if not curves:
        return None
    found = _worth(record, report_data.assessment.scores["data"].get("name") or "", curves)
    blocks: list[Block] = [*_statements(found, record)]
    blocks += rest_folded(_figures(found, report_data.lead.label), "Other scores", shown=2)
    blocks.append(folded(_table(found), rows=8))
    blocks.append(Remark(found.how))
    return Section(f"What is one more {found.unit} worth?", _answer(found), blocks)


def _worth(record: RunRecord, data: str, curves: dict) -> Worth:
    longer = last_epochs(record.history)
    price = member_seconds(record.config, record.provenance)
    beside = () if longer is None else (longer,)
    return Worth(data, curves, price, beside, unit_of(record.config))


def _answer(found: Worth) -> str:
    """What one more member and any number of members are expected to gain."""
    one, limit = found.gain(1), found.gain(math.inf)
    price = "" if math.isnan(found.seconds) else f", for {cost(found.seconds)} of training"
    text = f"One more {found.unit} changes the NLL by {_changed(one)} nats in expectation{price}."
    return f"{text} Infinitely many change it by {_changed(limit)} nats."


def _changed(gain: Gain) -> str:
    return plus_minus(-gain.value, gain.error)


def _statements(found: Worth, record: RunRecord) -> Iterator[Statement]:
    """One sentence for a few numbers of new members, then for longer training."""
    for more in (*_STATED, found.members):
        gain, price = found.gain(more), more * found.seconds
        spent = "" if math.isnan(price) else f", for {cost(price)} of training"
        text = (
            f"Expected change of the NLL: {_changed(gain)} nats{spent}. One growth may change it "
            f"by {interval(-gain.high, -gain.low)} (95 % interval)."
        )
        yield Statement(counted(more, f"more {found.unit}"), number(-gain.value, gain.error), text)
    for each in found.beside:
        text = (
            f"Change of the validation NLL in nats, for {cost(each.seconds)} of training of all "
            f"{counted(record.members, 'member')}."
        )
        yield Statement(each.name, number(-each.gain), text)


def _figures(found: Worth, method: str) -> Iterator[Figure]:
    for score in sorted(found.curves, key=lambda name: name not in _SHOWN):
        share = score == "accuracy"
        yield Figure(
            plots.worth(found.curves[score], titled(score), method, share),
            f"{titled(score)[0].upper()}{titled(score)[1:]} by number of members",
            "Each point is the mean over subsets of the members. The dashed line continues the "
            "points. The area holds 95 % of what growing by new members brings.",
        )


def _table(found: Worth) -> Table:
    rows = []
    for score, curve in found.curves.items():
        for more in (*_STATED, found.members, math.inf):
            gain = curve.gain(more)
            name = "infinitely many" if math.isinf(more) else f"+{more}"
            known = TableCell(plus_minus(gain.value, gain.error), gain.value)
            ends = TableCell(interval(gain.low, gain.high), gain.low)
            rows.append([TableCell(titled(score), score), TableCell(name, more), known, ends])
    columns = ["score", "new members", "expected gain", "95 % of growths"]
    reading = "A positive gain is an improvement. ± is the standard error of the expectation."
    return Table("Gains of more members", columns, rows, reading)

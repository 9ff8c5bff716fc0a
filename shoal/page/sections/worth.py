"""What is one more member worth? Scores of ensembles of some of the members, continued."""

import math
from collections.abc import Iterator

from shoal import plots
from shoal.core.display.text import counted, number, plus_minus, seconds
from shoal.evaluation.evaluate import stored_curves
from shoal.evaluation.worth import Worth, last_epochs, member_seconds, titled
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
    return Section("What is one more member worth?", _answer(found), blocks)


def _worth(record: RunRecord, data: str, curves: dict) -> Worth:
    longer = last_epochs(record.history)
    price = member_seconds(record.config, record.provenance)
    return Worth(data, curves, price, () if longer is None else (longer,))


def _answer(found: Worth) -> str:
    """What one more member and any number of members are expected to gain."""
    one, all_ = found.gain(1), found.gain(math.inf)
    price = "" if math.isnan(found.seconds) else f", in {seconds(found.seconds)} of training"
    text = f"One more member is expected to lower the NLL by {_nats(one)} nats{price}."
    return f"{text} Infinitely many would lower it by {_nats(all_)} nats."


def _nats(gain: object) -> str:
    return plus_minus(gain.value, gain.error)  # pyright: ignore[reportAttributeAccessIssue]


def _statements(found: Worth, record: RunRecord) -> Iterator[Statement]:
    """One sentence for a few numbers of new members, then for longer training."""
    for more in (*_STATED, found.members):
        gain, width = found.gain(more), (found.gain(more).high - found.gain(more).low) / 4
        price = more * found.seconds
        cost = "" if math.isnan(price) else f" for {seconds(price)}"
        text = (
            f"{counted(more, 'more member')}: {_nats(gain)} nats{cost}. One growth brings "
            f"{number(gain.low, width)} to {number(gain.high, width)} nats (95 % interval)."
        )
        yield Statement(f"+{more}", f"−{number(gain.value, gain.error)}", text)
    for each in found.beside:
        text = f"{each.name[0].upper()}{each.name[1:]} changed the NLL by this, in "
        text += f"{seconds(each.seconds)} of training of all {counted(record.members, 'member')}."
        yield Statement("longer", number(-each.gain), text)


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
            width = (gain.high - gain.low) / 4
            interval = f"{number(gain.low, width)} to {number(gain.high, width)}"
            cells = [TableCell(name, more), TableCell(_nats(gain), gain.value)]
            rows.append([TableCell(titled(score), score), *cells, TableCell(interval, gain.low)])
    columns = ["score", "new members", "expected gain", "95 % of growths"]
    reading = "A positive gain is an improvement. ± is the standard error of the expectation."
    return Table("Gains of more members", columns, rows, reading)

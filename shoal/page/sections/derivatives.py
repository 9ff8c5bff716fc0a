"""How good are the derivatives? Errors and coverage of values and derivatives, such as forces."""

import math
from collections.abc import Mapping

import torch

from shoal import plots
from shoal.core.display.text import number, percent
from shoal.evaluation.evaluate import Evaluation
from shoal.page.blocks import Block, Figure, Section, Table, TableCell, section
from shoal.page.report_data import ReportData

__all__ = ["derivatives_section"]

_PARTS = {"values": "", "derivatives": "derivatives_"}
_COLUMNS = ("part", "RMSE", "MAE", "RMSE of a member", "members from, to", "in the 90 % interval")


@section("derivatives", order=45)
def derivatives_section(report_data: ReportData) -> Section | None:
    """Errors of the lead, and coverage of all methods, if runs were trained on derivatives."""
    evaluation = report_data.assessment
    scores = evaluation.test
    if "derivatives_rmse" not in scores:
        return None
    rmse, alone = scores["derivatives_rmse"], scores["derivatives_member_rmse"]
    inside = scores.get("derivatives_coverage_90", math.nan)
    answer = (
        f"Derivatives have an RMSE of {number(rmse)}, and those of a single member {number(alone)}."
    )
    if math.isfinite(inside):
        answer += f" {percent(inside)} of them lie in the 90 % interval."
    blocks: list[Block] = [_table(evaluation, scores)]
    curves = report_data.of_peers(lambda each: each.samples.get("derivatives/pit"))
    if curves:
        blocks.append(
            Figure(
                plots.coverage(curves),
                "Coverage of the derivatives",
                "On the dotted line, intervals contain the expected share of derivatives. Below "
                "the line, intervals are too narrow.",
            )
        )
    return Section("How good are the derivatives?", answer, blocks)


def _table(evaluation: Evaluation, scores: Mapping[str, float]) -> Table:
    rows = []
    for name, prefix in _PARTS.items():
        if f"{prefix}rmse" not in scores:
            continue
        found = [scores[f"{prefix}{key}"] for key in ("rmse", "mae", "member_rmse")]
        split = "test" if name == "values" else name
        each = evaluation.samples.get(f"{split}/member_rmse", torch.tensor([found[-1]]))
        ends = " to ".join(number(float(end)) for end in each.aminmax())
        inside = scores.get(f"{prefix}coverage_90", math.nan)
        share = percent(inside) if math.isfinite(inside) else ""
        rows.append([
            TableCell(name), *(TableCell(number(value), value) for value in found),
            TableCell(ends, float(each.min())), TableCell(share, inside),
        ])  # fmt: skip
    return Table(
        "Errors of values and derivatives",
        _COLUMNS,
        rows,
        "The first two errors are of the mean prediction, the others of members alone.",
    )

"""Is it worth its price? Methods against plain ensembles with the same seconds."""

from shoal.core.display.text import counted, seconds
from shoal.experiment.equal_cost import load_plan
from shoal.page.blocks import Block, Fold, Remark, Section, Table, TableCell, section
from shoal.page.equal_cost import Cell, EqualCost
from shoal.page.report_data import ReportData
from shoal.page.verdicts import MARGINS
from shoal.prediction.statistics import Verdict

__all__ = ["equal_cost_section"]

_TONES: dict[Verdict | None, str] = {Verdict.BETTER: "good", Verdict.WORSE: "mind"}


@section("equal-cost", order=18)
def equal_cost_section(report_data: ReportData) -> Section | None:
    """The arms of the plan beside the runs, where there is one."""
    folders = {record.folder.parent for record in report_data.entries if record.folder is not None}
    plans = [plan for folder in folders if (plan := load_plan(folder)) is not None]
    if len(plans) != 1:
        return None
    found = EqualCost.of(
        plans[0], report_data.entries, report_data.margins.get("nll", MARGINS["nll"])
    )
    if not found.methods or not found.plains:
        return None
    plan = found.plan
    lengths = (
        f"Every arm gets the {seconds(plan.seconds)} of {plan.dearest}, measured before the runs. "
        f"The plain ensemble of the config takes less, and a placebo is as long as its method."
    )
    blocks: list[Block] = [
        _table("Differences at equal cost", *found.differences, found.reading),
        *map(Remark, found.against_placebos),
        _table("Arms", *found.arms, lengths),
        *(Remark(text, "mind") for text in found.far),
        *map(Remark, found.tuned),
        *_tuning(found),
    ]
    return Section("Is repulsion worth its price?", " ".join(found.answers), blocks)


def _table(title: str, header: list[str], rows: list[list[Cell]], reading: str) -> Table:
    cells = [
        [TableCell(cell.text, cell.value, _TONES.get(cell.verdict, "")) for cell in row]
        for row in rows
    ]
    return Table(title, header, cells, reading)


def _tuning(found: EqualCost) -> list[Block]:
    """The trials of the tuned arm, folded."""
    trials = found.plan.tuning
    if not trials:
        return []
    rows = [
        [TableCell(trial["label"], trial["label"]),
         TableCell("failed" if trial["nll"] is None else f"{trial['nll']:.4f}", trial["nll"] or ""),
         TableCell(seconds(trial["seconds"]), trial["seconds"])]
        for trial in trials
    ]  # fmt: skip
    price = seconds(sum(trial["seconds"] for trial in trials))
    title = f"How the tuned arm was chosen: {counted(len(trials), 'trial')}, {price}"
    reading = "Trials train on a part of the training data. The NLL is that of the rest."
    return [Fold(title, [Table("Trials", ["variant", "held-out NLL", "time"], rows, reading)])]

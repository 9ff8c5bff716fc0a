"""Is it worth its price? Methods against plain ensembles with the same seconds."""

from shoal.core.display.text import counted, seconds
from shoal.experiment.equal_cost import load_plan
from shoal.page.blocks import Block, Fold, Remark, Section, Table, TableCell, section
from shoal.page.equal_cost import EqualCost
from shoal.page.report_data import ReportData
from shoal.page.verdicts import MARGINS
from shoal.prediction.statistics import Verdict

__all__ = ["equal_cost_section"]

_TONES = {Verdict.BETTER: "good", Verdict.WORSE: "mind"}


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
    rows = [
        [TableCell(text, value, _TONES.get(verdict, "") if verdict else "") for text, value, verdict
         in row]
        for row in found.rows
    ]  # fmt: skip
    family = next((decision.family for decision in found.decisions.values()), "")
    table = Table(
        "Arms of equal cost",
        found.header,
        rows,
        f"Every arm gets the {seconds(found.plan.seconds)} of {found.plan.dearest}, measured "
        f"before the runs. A placebo has the length of its method. Differences are paired by seed, "
        f"with 95 % intervals. Verdicts are corrected over a family: {family}. The margin is "
        f"{found.margin:g} {found.measure.unit}.",
    )
    blocks: list[Block] = [*map(Remark, found.sentences[len(found.methods) :]), table]
    answers = " ".join(found.sentences[: len(found.methods)])
    return Section("Is repulsion worth its price?", answers, [*blocks, *_tuning(found)])


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

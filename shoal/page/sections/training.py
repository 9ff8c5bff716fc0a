"""Did training go well? Losses, forces, bandwidth, and messages of the training."""

import math
import re
from collections.abc import Iterator

from shoal import plots
from shoal.core.display.text import joined, number, percent, seconds
from shoal.page import advice
from shoal.page.blocks import (
    Block,
    Figure,
    Fold,
    Remark,
    Section,
    Table,
    TableCell,
    folded,
    section,
)
from shoal.page.measures import SIGNS, diverged
from shoal.page.report_data import ReportData, RunRecord
from shoal.page.sentences import ADOPTED
from shoal.page.trend import loss_sentence
from shoal.training.folder.history import NEGLIGIBLE, best_epoch, held_out_loss

__all__ = ["training_section"]


_FOLDS = 8

_WARNING = re.compile(
    "diverged|explodes|collapsed|predicts the same|in effect a plain|stalls|straggles"
)
"""Words of warnings, for runs that do not tell them apart from other notes."""


@section("training", order=70, evaluated=False)
def training_section(report_data: ReportData) -> Section | None:
    """Losses, forces and bandwidths over the epochs."""
    trained = [record for record in report_data.entries if record.history]
    if not trained:
        return _not_known([record for record in report_data.entries if record.adopted])
    first, others = _shown(trained, report_data)
    blocks: list[Block] = [*_diverged(trained), *_notes(trained, report_data), *_figures(first)]
    blocks += [
        Fold(f"Training of {record.method} ({record.name})", list(_figures(record)))
        for record in others[:_FOLDS]
    ]
    if len(others) > _FOLDS:
        names = joined([record.method for record in others[_FOLDS:]])
        alone = "shoal report RUN" if first.folder else 'shoal.report(run, "page.html")'
        blocks.append(
            Remark(f"This page has no training figures of {names}. Type `{alone}` for one run.")
        )
    if len(trained) > 1:
        blocks += [*_seeds(trained), folded(_table(trained))]
    blocks += [
        Remark(f"{record.name}: {ADOPTED}") for record in report_data.entries if record.adopted
    ]
    return Section("Did training go well?", answer(first), blocks)


def _not_known(adopted: list[RunRecord]) -> Section | None:
    """Adopted networks have no history; their notes are shown."""
    if not adopted:
        return None
    blocks = [
        Remark(f"{record.name}: {note}" if len(adopted) > 1 else note)
        for record in adopted
        for note in record.notes
    ]
    return Section("Did training go well?", ADOPTED, blocks)


def answer(record: RunRecord) -> str:
    """Whether the loss converged, and the range of the members' losses."""
    last = [loss for loss in record.history[-1].get("member_loss") or [] if _finite(loss)]
    course = loss_sentence(record.history, advise=not record.warnings)
    epochs = len(record.history)
    if not last:
        return course or "The history of this run is too short for a trend."
    span = f"After {epochs} epochs, member losses are {min(last):.3g} to {max(last):.3g} nats."
    return f"{course} {span} {_best(record)}".strip()


def _best(record: RunRecord) -> str:
    """The epoch with the lowest validation NLL, in words; empty without validation data."""
    epoch = best_epoch(record.history)
    if epoch is None:
        return ""
    row = next(row for row in record.history if row.get("epoch") == epoch)
    name = "NLL" if "nll" in row["validation"] else "loss"
    what = "out-of-fold" if row.get("member_validation") else "validation"
    return f"The {what} {name} is lowest after epoch {epoch} ({held_out_loss(row):.3g} nats)."


def _about_validation(record: RunRecord) -> str:
    if best_epoch(record.history) is None:
        return ""
    folds = any(row.get("member_validation") for row in record.history)
    where = "on the folds that members hold out" if folds else "on validation data"
    return (
        f" The dashed line is the NLL of the ensemble {where}. Members overfit where it "
        "rises while the training loss falls."
    )


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _shown(records: list[RunRecord], report_data: ReportData) -> tuple[RunRecord, list[RunRecord]]:
    """The page's subject, and one run of every other method, of a similar ensemble size."""
    peers = [group.first for group in report_data.peers().values()] if report_data.groups else []
    chosen: dict[str, RunRecord] = {}
    for record in [*(peer for peer in peers if peer in records), *records]:
        chosen.setdefault(record.method, record)
    first, *others = chosen.values()
    return first, others


def _diverged(records: list[RunRecord]) -> Iterator[Block]:
    """The runs that diverged."""
    diverging = [record for record in records if diverged(record)]
    if diverging:
        names = joined([record.name for record in diverging])
        text = f"Training diverged in {len(diverging)} of {len(records)} runs: {names}. "
        step = advice.for_divergence(diverging[0])
        yield Remark(f"{text}{SIGNS.capitalize()}. {step.sentence}", "mind", step.code)


def _notes(records: list[RunRecord], report_data: ReportData) -> Iterator[Block]:
    """The messages of the first run, and of one run of every other method.

    Warnings of the page's subject are at the top of the page.
    """
    first, *others = records
    shown = report_data.subject.warnings if first is report_data.subject else []
    for note in (note for note in first.notes if note not in shown):
        yield Remark(f"{first.name}: {note}" if others else note, _tone(first, note))
    noted: dict[str, list[RunRecord]] = {}
    for record in others:
        if record.notes:
            noted.setdefault(f"{record.method}, {record.members} members", []).append(record)
    rest = [
        Remark(f"{label}, {_which(runs)}: {note}", _tone(runs[0], note))
        for label, runs in noted.items()
        for note in runs[0].notes
    ]
    if rest:
        yield Fold(f"Messages of the other runs ({len(rest)})", rest)


def _tone(record: RunRecord, note: str) -> str:
    """Warnings look like warnings, other notes do not."""
    return "mind" if note in record.warnings or _WARNING.search(note) else "info"


def _which(runs: list[RunRecord]) -> str:
    more = len(runs) - 1
    return runs[0].name + (f" (and {more} similar)" if more else "")


def _figures(record: RunRecord) -> Iterator[Block]:
    yield Figure(
        plots.loss(record.history, record.method),
        "Training loss of each member",
        "All lines should fall and level out; a line that stays high is a member that did not "
        f"converge.{_about_validation(record)}",
    )
    if not any((row.get("push") or 0) > 0 for row in record.history):
        return
    yield Figure(
        plots.forces(record.history, record.method, NEGLIGIBLE),
        "Driving force and repulsive force",
        f"Drive is the log-posterior gradient, push the repulsive force. Below the dotted line "
        f"(force ratio {NEGLIGIBLE:g}), repulsion is negligible.",
    )
    yield Figure(
        plots.bandwidth(record.history, record.method),
        "Bandwidth of the kernel",
        "Above: squared kernel length scale. Below: effective number of members in the kernel. "
        "Near 1, members are too similar; near M, members hardly interact.",
    )


def _seeds(records: list[RunRecord]) -> Iterator[Block]:
    """Bandwidth of repulsive methods, where one of them has several seeds."""
    runs: dict[str, list[list]] = {}
    for record in records:
        if any((row.get("push") or 0) > 0 for row in record.history):
            runs.setdefault(record.method, []).append(record.history)
    if any(len(histories) > 1 for histories in runs.values()):
        yield Figure(
            plots.bandwidths(runs),
            "Bandwidth of every seed",
            "One thin line per run, one thick line for the mean of a method. Close lines mean that "
            "the bandwidth does not depend on the seed.",
        )


def _table(records: list[RunRecord]) -> Table:
    rows = []
    for record in records:
        last = record.history[-1]
        loss = last.get("loss")
        loss = math.nan if loss is None else loss
        time = float(record.provenance.get("seconds") or math.nan)
        share = record.ratio / (1 + record.ratio)
        rows.append(
            [
                TableCell(record.name, record.name),
                TableCell(str(len(record.history)), len(record.history)),
                TableCell(number(loss), loss),
                TableCell(percent(share) if share > 0 else "–", share),
                TableCell(seconds(time), time),
            ]
        )
    headings = ["run", "epochs", "last loss (nats)", "repulsion, share of force", "training time"]
    return Table("All runs", headings, rows, "Repulsion is the median over the epochs.")

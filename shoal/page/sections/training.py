"""Did training go well? Losses, forces, bandwidth, and what the training itself had to say."""

import math
from collections.abc import Iterator

from shoal import plots
from shoal.core.text import joined, number, percent, seconds
from shoal.page.blocks import (
    Block,
    Fold,
    Picture,
    Remark,
    Section,
    Table,
    TableCell,
    folded,
    section,
)
from shoal.page.convergence import loss_sentence
from shoal.page.measures import SIGNS, diverged
from shoal.page.report_data import ReportData, RunRecord
from shoal.training.history import NEGLIGIBLE

__all__ = ["went"]

_FOLDS = 8


@section("training", order=70, judged=False)
def went(story: ReportData) -> Section | None:
    """The course of training."""
    told = [entry for entry in story.entries if entry.history]
    if not told:
        return None
    first, others = _shown(told, story)
    blocks: list[Block] = [*_lost(told), *_notes(told), *_pictures(first)]
    blocks += [
        Fold(f"Training of {entry.method} ({entry.name})", list(_pictures(entry)))
        for entry in others[:_FOLDS]
    ]
    if len(others) > _FOLDS:
        names = joined([entry.method for entry in others[_FOLDS:]])
        alone = "shoal report RUN" if first.folder else 'shoal.report(run, "page.html")'
        blocks.append(Remark(f"Not drawn here: {names}; `{alone}` shows a run alone."))
    if len(told) > 1:
        blocks += [*_seeds(told), folded(_table(told))]
    return Section("Did training go well?", answer(first), blocks)


def answer(entry: RunRecord) -> str:
    """Whether the loss converged, and the range of the members' losses."""
    last = [loss for loss in entry.history[-1].get("member_loss") or [] if _finite(loss)]
    course, epochs = loss_sentence(entry.history), len(entry.history)
    if not last:
        return course or "The history of this run is too short to tell."
    span = f"After {epochs} epochs members have losses from {min(last):.3g} to {max(last):.3g}."
    return f"{course} {span}".strip()


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)


def _shown(entries: list[RunRecord], story: ReportData) -> tuple[RunRecord, list[RunRecord]]:
    """The page's subject and one run of every other method, of its size where there is one."""
    peers = [group.first for group in story.peers().values()] if story.groups else []
    chosen: dict[str, RunRecord] = {}
    for entry in [*(peer for peer in peers if peer in entries), *entries]:
        chosen.setdefault(entry.method, entry)
    first, *others = chosen.values()
    return first, others


def _lost(entries: list[RunRecord]) -> Iterator[Block]:
    """Runs that are not worth the name of their method."""
    lost = [entry for entry in entries if diverged(entry)]
    if lost:
        names = joined([entry.name for entry in lost])
        yield Remark(
            f"Training diverged in {len(lost)} of {len(entries)} runs: {names}. "
            f"{SIGNS.capitalize()}."
        )


def _notes(entries: list[RunRecord]) -> Iterator[Block]:
    """The notes of the first run; of every other method, those of one run for all of its kind."""
    first, *others = entries
    for note in first.notes:
        yield Remark(f"{first.name}: {note}" if others else note)
    speaking: dict[str, list[RunRecord]] = {}
    for entry in others:
        if entry.notes:
            speaking.setdefault(f"{entry.method}, {entry.members} members", []).append(entry)
    rest = [
        Remark(f"{label}, {_which(runs)}: {note}")
        for label, runs in speaking.items()
        for note in runs[0].notes
    ]
    if rest:
        yield Fold(f"What the other runs had to say ({len(rest)})", rest)


def _which(runs: list[RunRecord]) -> str:
    more = len(runs) - 1
    return runs[0].name + (f" (and {more} more with notes like it)" if more else "")


def _pictures(entry: RunRecord) -> Iterator[Block]:
    yield Picture(
        plots.loss(entry.history, entry.method),
        "Loss of each member",
        "Lines should fall and level out together; one that stays above is a member left behind.",
    )
    if not any((row.get("push") or 0) > 0 for row in entry.history):
        return
    yield Picture(
        plots.forces(entry.history, entry.method, NEGLIGIBLE),
        "Drive and push",
        f"Drive pulls towards the data, push keeps members apart. Below the dotted line, "
        f"{percent(NEGLIGIBLE)}, the push does nothing.",
    )
    yield Picture(
        plots.bandwidth(entry.history, entry.method),
        "Bandwidth of the kernel",
        "Above: how far members see each other. Below: how many of them the kernel tells apart; "
        "near one they are too alike, near their number they hardly meet.",
    )


def _seeds(entries: list[RunRecord]) -> Iterator[Block]:
    """Bandwidth of methods that repel, where one of them was trained from several seeds."""
    runs: dict[str, list[list]] = {}
    for entry in entries:
        if any((row.get("push") or 0) > 0 for row in entry.history):
            runs.setdefault(entry.method, []).append(entry.history)
    if any(len(histories) > 1 for histories in runs.values()):
        yield Picture(
            plots.bandwidths(runs),
            "Bandwidth from every seed",
            "A thin line a run, a thick one for the mean of a method. Lines that stay together say "
            "that what members see of each other does not depend on chance.",
        )


def _table(entries: list[RunRecord]) -> Table:
    rows = []
    for entry in entries:
        last = entry.history[-1]
        loss = last.get("loss")
        loss = math.nan if loss is None else loss
        time = float(entry.provenance.get("seconds") or math.nan)
        share = entry.ratio / (1 + entry.ratio)
        rows.append(
            [
                TableCell(entry.name, entry.name),
                TableCell(str(len(entry.history)), len(entry.history)),
                TableCell(number(loss), loss),
                TableCell(percent(share) if share > 0 else "–", share),
                TableCell(seconds(time), time),
            ]
        )
    headings = ["run", "epochs", "last loss (nats)", "repulsion, share of force", "time"]
    return Table("Every run", headings, rows, "Repulsion is the median over the epochs.")

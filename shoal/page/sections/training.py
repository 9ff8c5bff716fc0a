"""Did training go well? Losses, forces, bandwidth, and messages of the training."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple

from shoal import plots
from shoal.core.display.text import joined, number, percent, seconds
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
from shoal.prediction.statistics import linear_change
from shoal.training.folder.history import NEGLIGIBLE, best_epoch, divergence_sentence, held_out_loss

__all__ = ["Trend", "loss_sentence", "loss_trend", "training_section"]


_FOLDS = 8


@section("training", order=70, evaluated=False)
def training_section(report_data: ReportData) -> Section | None:
    """Losses, forces and bandwidths over the epochs."""
    trained = [record for record in report_data.entries if record.history]
    if not trained:
        return _not_known([record for record in report_data.entries if record.adopted])
    first, others = _shown(trained, report_data)
    blocks: list[Block] = [*_diverged(trained), *_notes(trained), *_figures(first)]
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
    course, epochs = loss_sentence(record.history), len(record.history)
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
    return f"The validation {name} is lowest after epoch {epoch} ({held_out_loss(row):.3g} nats)."


def _about_validation(record: RunRecord) -> str:
    if best_epoch(record.history) is None:
        return ""
    return (
        " The dashed line is the NLL of the ensemble on validation data. Members overfit where it "
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
        yield Remark(
            f"Training diverged in {len(diverging)} of {len(records)} runs: {names}. "
            f"{SIGNS.capitalize()}."
        )


def _notes(records: list[RunRecord]) -> Iterator[Block]:
    """The messages of the first run, and of one run of every other method."""
    first, *others = records
    for note in first.notes:
        yield Remark(f"{first.name}: {note}" if others else note)
    noted: dict[str, list[RunRecord]] = {}
    for record in others:
        if record.notes:
            noted.setdefault(f"{record.method}, {record.members} members", []).append(record)
    rest = [
        Remark(f"{label}, {_which(runs)}: {note}")
        for label, runs in noted.items()
        for note in runs[0].notes
    ]
    if rest:
        yield Fold(f"Messages of the other runs ({len(rest)})", rest)


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


_FEWEST = 8
"""A trend needs at least this many epochs."""

_SHARE = 0.03
"""A converged loss changes by less than this share in the last third of training."""

_NATS = 0.01
"""Losses closer to 0 than this count as this value."""


class Trend(NamedTuple):
    """The trend of a loss at the end of training.

    Attributes:
        kind: the verdict.
        change: change of the loss in the last third of training, by a linear fit, in nats.
    """

    kind: Literal["short", "falling", "rising", "converged", "unclear"]
    change: float = math.nan


def loss_trend(losses: Sequence[float], began: float | None = None) -> Trend:
    """The trend of the loss over the last third of the epochs.

    "converged" is an equivalence test: the 95 % interval of the change must lie within 3 % of the
    total fall of the loss, and within 3 % of the loss. "falling" and "rising" are significant
    changes larger than 3 %. Any other change is "unclear".

    >>> loss_trend([2.0 * 0.5**epoch + 1.0 for epoch in range(30)]).kind
    'converged'
    >>> loss_trend([2.0 * 0.97**epoch for epoch in range(30)]).kind
    'falling'

    Args:
        losses: mean loss of each epoch.
        began: loss before the first step; None takes the first epoch's.
    """
    if len(losses) < _FEWEST or not all(map(math.isfinite, losses)):
        return Trend("short")
    last = losses[-max(5, math.ceil(len(losses) / 3)) :]
    level = sum(last) / len(last)
    fallen = max(losses[0] if began is None else began, losses[0]) - level
    change, low, high = linear_change(last)
    margin = _SHARE * min(max(fallen, 0.0), max(abs(level), _NATS))
    if -margin <= low and high <= margin and margin > 0:
        return Trend("converged", change)
    if high < 0:
        return Trend("falling", change)
    return Trend("rising" if low > 0 else "unclear", change)


def loss_sentence(history: Sequence[Mapping[str, Any]]) -> str:
    """Whether the loss diverged, converged, fell or rose; empty for a short history.

    >>> loss_sentence([{"loss": 2.0 * 0.5**epoch + 1.0} for epoch in range(30)])
    'The training loss converged.'
    """
    diverged = divergence_sentence(history)
    if diverged is not None:
        return diverged
    losses = [math.nan if row.get("loss") is None else float(row["loss"]) for row in history]
    kind, change = loss_trend(losses, history[0].get("initial_loss") if history else None)
    size = f"by {abs(change):.2g} nats in the last third of training"
    # A longer training helps only if the validation NLL falls too.
    longer = "" if best_epoch(history) not in (None, len(history)) else ": train longer"
    return {
        "converged": "The training loss converged.",
        "falling": f"The training loss was still falling, {size}{longer}.",
        "rising": f"The training loss was rising, {size}: lower the learning rate.",
        "unclear": "The training loss has no significant trend in the last third of training.",
        "short": "",
    }[kind]

"""How was the method chosen? Candidates of a search, their scores, its price and its result."""

from collections import Counter

from shoal.core.display.text import counted, joined, number, plus_minus, seconds
from shoal.page.blocks import Block, Fold, Remark, Section, Table, TableCell, folded, section
from shoal.page.report_data import ReportData, RunRecord
from shoal.training.folder.choice import CandidateResult, Choice, Trial

__all__ = ["choice_section"]

_FOLDS = 8


@section("choice", order=25, evaluated=False)
def choice_section(report_data: ReportData) -> Section | None:
    """What a search saw, where method or strength was left to one."""
    searches = [
        (record, record.choice) for record in report_data.entries if record.choice is not None
    ]
    if not searches:
        return None
    both = any(record.asked.get("strength") is None for record, _ in searches)
    question = f"How {'were method and strength' if both else 'was the strength'} chosen?"
    (first, choice), *others = searches
    blocks: list[Block] = [*_summary(searches), *_blocks(first, choice, bool(others))]
    blocks += [
        Fold(f"Search of {record.name}: {each.chosen}", _blocks(record, each, True))
        for record, each in others[:_FOLDS]
        if each.points
    ]
    answer = f"{choice.why} {_price(choice)}".strip() if not others else _several(searches)
    return Section(question, answer, blocks)


def _price(choice: Choice) -> str:
    if not choice.points:
        return ""
    return f"The search cost {choice.cost:.2g} trainings ({seconds(choice.seconds)})."


def _several(searches: list[tuple[RunRecord, Choice]]) -> str:
    """What the searches of several runs chose."""
    methods: dict[str, list[Choice]] = {}
    for record, choice in searches:
        methods.setdefault(record.method, []).append(choice)
    return " ".join(
        f"{method} chose {joined(_counts(choices))}, at a mean price of "
        f"{sum(choice.cost for choice in choices) / len(choices):.2g} trainings."
        for method, choices in methods.items()
    )


def _counts(choices: list[Choice]) -> list[str]:
    counts = Counter(choice.chosen for choice in choices)
    return [f"{label} in {counted(count, 'run')}" for label, count in counts.most_common()]


def _summary(searches: list[tuple[RunRecord, Choice]]) -> list[Block]:
    """One row per run, where there are several."""
    if len(searches) == 1:
        return []
    rows = [
        [
            TableCell(record.name, record.name),
            TableCell(choice.chosen, choice.chosen),
            TableCell(f"{choice.cost:.2g}", choice.cost),
            TableCell(seconds(choice.seconds), choice.seconds),
        ]
        for record, choice in searches
    ]
    return [folded(Table("All searches", ["run", "chosen", "price (trainings)", "time"], rows))]


def _blocks(record: RunRecord, choice: Choice, several: bool) -> list[Block]:
    if not choice.points:
        return []
    shifts = f" Shifts: {joined(choice.shifts)}." if choice.shifts else ""
    reading = (
        f"Judged on {choice.points:,} points of {choice.judge}, on which no candidate trained."
        f"{shifts} Changes are differences from the plain ensemble of the same length, ± one "
        f"standard error. The test set took no part."
    )
    columns = ["candidate", "steps", "NLL", "change", "NLL, shifted", "change, shifted", "result"]
    rows = [_row(candidate, choice) for candidate in choice.candidates]
    title = f"Candidates of {record.name}" if several else "Candidates"
    table = Table(title, columns, rows, reading)
    return [table, *([Remark(choice.why)] if several else [])]


def _row(candidate: CandidateResult, choice: Choice) -> list[TableCell]:
    chosen = candidate.label == choice.chosen
    trial, plain = candidate.last, candidate.strength is None
    longest = max((t.steps for each in choice.candidates for t in each.trials), default=0)
    result = "chosen" if chosen else candidate.failed or _left(trial, longest)
    cells = [TableCell(candidate.label, candidate.label, "good" if chosen else "")]
    if trial is None:
        cells += [TableCell("–")] * 5
    else:
        cells += [
            TableCell(f"{trial.steps:,}", trial.steps),
            TableCell(number(trial.nll), trial.nll),
            TableCell("–" if plain else plus_minus(*trial.nll_change), trial.nll_change[0]),
            TableCell(number(trial.shifted_nll), trial.shifted_nll),
            TableCell("–" if plain else plus_minus(*trial.shifted_change), trial.shifted_change[0]),
        ]
    return [*cells, TableCell(result, result, "good" if chosen else "")]


def _left(trial: Trial | None, longest: int) -> str:
    early = trial is not None and trial.steps < longest
    return "left out early" if early else "not chosen"

"""In what sense is it Bayesian? How far methods are from true posteriors, when it was measured."""

from collections.abc import Iterator

from shoal.analysis.fidelity.study import Row, summarise
from shoal.app.blocks import Block, Cell, Picture, Section, Table, section
from shoal.app.fidelity.figures import heat_map
from shoal.app.fidelity.results import FILE, closest, read_rows
from shoal.app.story import Story

__all__ = ["faithful"]

_COLUMNS = (
    "frechet/on",
    "frechet/off",
    "tv/on",
    "tv/off",
    "mean/on",
    "std/on",
    "mean/off",
    "std/off",
    "ksd2",
)


@section("fidelity", order=62)
def faithful(story: Story) -> Section | None:
    """The study that was kept in a run's folder, or beside the runs."""
    rows = _kept(story)
    if not rows:
        return None
    blocks = [
        Picture(
            heat_map(rows),
            "Distance to the posterior",
            "How far mean and spread of each method's predictions are from the posterior's, in the "
            "posterior's standard deviations. Dark is close; as many exact draws are at the top.",
        ),
        *_tables(rows),
    ]
    return Section("How close is each method to the true posterior?", answer(rows), blocks)


def answer(rows: list[Row]) -> str:
    """On how many problems a calibrated method is the closest."""
    best = closest(rows)
    won = [name for name, facts in best.items() if facts["distance"] < facts["other_distance"]]
    if not best:
        return "Measured on small problems whose posterior is known."
    return (
        f"On {len(won)} of {len(best)} problems with a known posterior, a calibrated method "
        f"predicts more like it than every other."
    )


def _kept(story: Story) -> list[Row]:
    for entry in story.entries:
        folder = entry.folder
        for place in () if folder is None else (folder, folder.parent):
            if (place / FILE).is_file():
                return read_rows(place)
    return []


def _tables(rows: list[Row]) -> Iterator[Block]:
    summary = summarise(rows)
    for problem in dict.fromkeys(problem for problem, _ in summary):
        lines = []
        for (name, method), found in summary.items():
            if name == problem:
                cells = [_cell(*found[column]) for column in _COLUMNS]
                lines.append([Cell(method, method), *cells])
        yield Table(
            f"Every distance: {problem}",
            ["method", *_COLUMNS],
            lines,
            "Zero is the posterior itself. On: at inputs like the data; off: where there is none. "
            "Errors of mean and std are shares of the posterior's standard deviation.",
        )


def _cell(mean: float, error: float) -> Cell:
    return Cell(f"{mean:.3f}" if error != error else f"{mean:.3f} ± {error:.3f}", mean)

"""`shoal report`: an HTML report about one or several runs."""

import re
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from shoal.cli.outcome import Outcome, opened_for
from shoal.core.display.text import counted
from shoal.core.errors import StorageError
from shoal.data import load as load_data
from shoal.data.dataset import Dataset
from shoal.evaluation.evaluate import kept_evaluation
from shoal.experiment.config import parse_value
from shoal.page.report import report
from shoal.training.folder.own_data import has_own_data, own_data
from shoal.training.folder.run import Run, RunFolder

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Write the report; a folder of runs, such as a comparison's, stands for all its runs."""
    folders = [folder for name in options.runs for folder in _runs_in(Path(name))]
    out = options.out or "report.html"
    how = {"title": options.title, "figures": options.figures, "progress": not options.quiet}
    how["margin"] = options.margin
    how["classes"] = None if options.classes is None else options.classes.split(",")
    if options.data is None and options.model is None:
        page = report(folders, out, **how)
    else:
        runs = [opened_for("report", str(folder), options.model) for folder in folders]
        page = report(runs, out, data=_data(runs, options.data), **how)
    value = {"page": str(page), "runs": [str(folder) for folder in folders]}
    return Outcome(f"Report about {counted(len(folders), 'run')}: {page}", value)


def _data(runs: list[Run], asked: str | None) -> Dataset | None:
    """The data set of `--data`; without it, that of runs that are not evaluated yet."""
    if asked is not None:
        return load_data(parse_value(asked, "--data"))
    waiting = [run for run in runs if kept_evaluation(run) is None and not has_own_data(run.config)]
    return own_data(waiting[0], "the run", "name the data with --data") if waiting else None


def _runs_in(folder: Path) -> Iterator[Path]:
    if RunFolder(folder).holds_run or not folder.is_dir():
        yield folder
        return
    inner = sorted((path.parent for path in folder.glob("*/scores.json")), key=_counting)
    if not inner:
        raise StorageError(f"{folder} is not a run: it has no config.toml and contains no runs")
    yield from inner


def _counting(folder: Path) -> list[tuple[int, str]]:
    """Sort key that orders numbers by size: kde-m5-s2 before kde-m5-s10 and kde-m20-s0."""
    words = re.split(r"(\d+)", folder.name)
    return [(int(word), "") if word.isdigit() else (-1, word) for word in words]

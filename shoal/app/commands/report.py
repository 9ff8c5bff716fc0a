"""`shoal report`: one page about one or several runs."""

from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path

from shoal.app.api import report
from shoal.app.outcome import Outcome, counted
from shoal.core.errors import StorageError
from shoal.training.run import RunFolder

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Write the page; a folder of runs, such as that of a comparison, stands for all of them."""
    folders = [folder for given in options.runs for folder in _runs_in(Path(given))]
    out = options.out or "report.html"
    page = report(folders, out, title=options.title, figures=options.figures)
    value = {"page": str(page), "runs": [str(folder) for folder in folders]}
    return Outcome(f"A page about {counted(len(folders), 'run')}: {page}", value)


def _runs_in(folder: Path) -> Iterator[Path]:
    if RunFolder(folder).holds_run or not folder.is_dir():
        yield folder
        return
    inner = sorted(path.parent for path in folder.glob("*/scores.json"))
    if not inner:
        raise StorageError(f"{folder} is not a run: it has no config.toml, nor runs inside it")
    yield from inner

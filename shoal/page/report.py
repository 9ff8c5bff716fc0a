"""The report: one self-contained HTML page about one or several runs."""

import base64
import hashlib
import html
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from shoal.core.arguments import checked, items
from shoal.core.arguments import path as path_of
from shoal.core.display.progress import Ticker
from shoal.core.optional import require
from shoal.core.storage.files import write_bytes, write_text
from shoal.data.dataset import Dataset, class_names
from shoal.engine.resources.memory import garbage_kept
from shoal.evaluation.data_arguments import Inputs, Labelled, Shifts, evaluation_data, opened
from shoal.evaluation.evaluate import (
    Evaluation,
    evaluate_run,
    is_current,
    kept_evaluation,
    splits_ticker,
)
from shoal.page.blocks import Block, Figure, Fold, Listing, Section
from shoal.page.report_data import ReportData, load_report_data
from shoal.page.sections import builders
from shoal.page.verdicts import parse_margins
from shoal.plots.figure import PAPER, png, svg
from shoal.training.folder.own_data import OWN_DATA
from shoal.training.folder.run import Run

__all__ = ["Reported", "render", "report", "section_figures", "slug", "write_figures"]

BLACK = "#1a1a1a"
"""Text colour of a figure file, on white."""


def write_figures(
    sections: Mapping[str, Section],
    folder: Path,
    after: Callable[[Section], None] = lambda section: None,
) -> list[Path]:
    """Write every figure as `SECTION-NN-title.png` and `.svg`, and return the PNG paths.

    Args:
        sections: the sections of a page, by name.
        folder: where to write.
        after: called when the figures of a section are written.
    """
    written = []
    for name, section in sections.items():
        for number, figure in enumerate(section_figures(section.blocks), 1):
            stem = f"{name}-{number:02d}-{slug(figure.title)}"
            write_bytes(folder / f"{stem}.png", png(figure.figure, 150))
            drawn = svg(figure.figure, "figure", figure.title).replace("currentColor", BLACK)
            drawn = drawn.replace("<svg ", f'<svg style="background:{PAPER}" ', 1)
            write_text(folder / f"{stem}.svg", drawn)
            written.append(folder / f"{stem}.png")
        after(section)
    return written


def section_figures(blocks: Iterable[Block]) -> Iterator[Figure]:
    """Every figure of the blocks, folds included."""
    for block in blocks:
        if isinstance(block, Figure):
            yield block
        elif isinstance(block, Fold):
            yield from section_figures(block.blocks)


def slug(title: str) -> str:
    """A title as part of a file name.

    >>> slug("Diverse and accurate?")
    'diverse-and-accurate'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60]


Reported = Run | str | os.PathLike[str] | tuple[Run, Evaluation]
"""A run, its folder, or a run with its evaluation."""


@checked(path=path_of, figures=path_of)
def report(
    runs: Reported | Iterable[Reported],
    path: str | Path,
    *,
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    ood: Mapping[str, Inputs] | None = None,
    shifts: Shifts | None = None,
    classes: Sequence[str] | None = None,
    title: str | None = None,
    margin: str | Mapping[str, float] | None = None,
    figures: str | Path | None = None,
    progress: bool = False,
) -> Path:
    """Write an HTML page about the runs: one question per section, with sentences and figures.

        shoal.report(run, "report.html", data=(x_test, y_test), ood={"letters": x_letters})

    The page is one file that loads nothing. It follows the reader's light or dark setting.

    Args:
        runs: a run or its folder, or several; or pairs of a run and its evaluation.
        path: the file to write.
        data: test data, as `shoal.evaluate` takes them. Runs that were not evaluated on these data
            are evaluated first. By default the page shows the stored evaluation; a run in memory
            is evaluated on the test set of its `Dataset`, if it has one.
        ood: out-of-distribution inputs by name, as `shoal.evaluate` takes them.
        shifts: changed test data by name, or names of corruptions, as `shoal.evaluate` takes them.
        classes: names of the classes in the order of the labels. By default those of the data
            set, such as `Dataset(..., classes=...)`, or of the estimator that made the run.
        title: heading of the page.
        margin: differences that do not matter, by metric, as `shoal.compare` takes them.
        figures: folder that gets every figure as a PNG and an SVG file.
        progress: report on standard error how many figures are drawn.
    """
    margins = parse_margins(margin)
    entries, asked = _several(runs), not data is ood is shifts is None
    entries = [
        _evaluated(run, data, ood, shifts, progress) if asked or _can_evaluate(run) else run
        for run in entries
    ]
    names = class_names(data) if classes is None and isinstance(data, Dataset) else classes
    report_data = replace(load_report_data(entries, title, names), margins=margins)
    # Figures live until the page is written, and collecting garbage takes a sixth of the time.
    with garbage_kept():
        sections = _built_sections(report_data)
        counts = {id(s): len(list(section_figures(s.blocks))) for s in sections.values()}
        total = sum(counts.values()) * (1 if figures is None else 2)
        with Ticker(total, show=progress) as ticker:

            def after(section: Section) -> None:
                if counts[id(section)]:
                    ticker.tick(section.question, counts[id(section)])

            write_text(path, render(report_data, sections, after))
            if figures is not None:
                write_figures(sections, Path(figures), after)
    return Path(path)


def _several(runs: Any) -> list[Any]:
    """The runs as a list; one run, folder or pair becomes a list of one."""
    pair = isinstance(runs, tuple) and len(runs) == 2 and isinstance(runs[1], Evaluation)
    if pair or isinstance(runs, str | os.PathLike) or hasattr(runs, "history"):
        return [runs]
    return items("runs", runs)


def _can_evaluate(run: Any) -> bool:
    """Whether a run in memory has no evaluation yet, but a test set."""
    known = getattr(getattr(run, "given", None), "data", None)
    return getattr(known, "test", None) is not None and kept_evaluation(run) is None


def _evaluated(run: Any, data: Any, ood: Any, shifts: Any, progress: bool) -> Any:
    """The run, evaluated on these data unless the stored evaluation is current."""
    if isinstance(run, tuple):
        return run
    run = opened(run)
    dataset = evaluation_data(run, data, ood, shifts)
    if not is_current(kept_evaluation(run), run, dataset):
        with splits_ticker(dataset, not progress) as ticker:
            evaluate_run(run, dataset, after=ticker.tick)
    return run


def render(
    report_data: ReportData,
    sections: Mapping[str, Section] | None = None,
    after: Callable[[Section], None] = lambda section: None,
) -> str:
    """The page as text.

    Args:
        report_data: the runs of the page.
        sections: the sections, where they are already built.
        after: called when the figures of a section are drawn.
    """
    jinja2 = require("jinja2", extra="report")
    require("matplotlib", extra="report")
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(_page_file),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
    )
    environment.filters["whole"] = _unbroken
    script = _page_file("page.js").strip()
    return environment.get_template("page.html").render(
        title=report_data.title or _title(report_data),
        sections=_sections(_built_sections(report_data) if sections is None else sections, after),
        not_evaluated=_not_evaluated(report_data),
        bare=_bare(report_data),
        warnings=report_data.subject.warnings,
        style=_markup(_page_file("page.css")),
        script=_markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _page_file(name: str) -> str:
    return (files("shoal.page") / "template" / name).read_text(encoding="utf-8")


def _unbroken(text: str) -> Any:
    """Keep a number and its unit on one line, and mark `commands` as code."""
    safe = html.escape(text)
    for sign in ("%", "±"):
        safe = safe.replace(f" {sign}", f"\u00a0{sign}")
    safe = safe.replace("± ", "±\u00a0")
    return _markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", safe))


def _markup(text: str) -> Any:
    """Text that is already escaped."""
    return require("markupsafe", extra="report").Markup(text)


def _title(report_data: ReportData) -> str:
    record = report_data.entries[0]
    methods = dict.fromkeys(record.method for record in report_data.entries)
    sizes = sorted({record.members for record in report_data.entries})
    many = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    members = record.many if len(sizes) == 1 else f"{many} members"
    what = next(iter(methods)) if len(methods) == 1 else f"{len(methods)} methods"
    if len(methods) == 1 and record.adopted:
        members, what = f"{many} adopted network{'' if many == '1' else 's'}", ""
    form = f" ({record.shared})" if record.shared else ""
    about = "" if record.data == OWN_DATA else f"{record.data}: "
    return f"{about}{what}{form}, {members}" if what else f"{about}{members}"


def _not_evaluated(report_data: ReportData) -> str:
    """Which runs are not evaluated, and what to type."""
    missing = report_data.not_evaluated
    if not missing:
        return ""
    names = ", ".join(record.name for record in missing)
    return (
        f"Not evaluated yet, so absent from the sections about predictions: {names}. "
        f"Type `{missing[0].to_do('evaluate')}` and make this page again."
    )


def _bare(report_data: ReportData) -> str:
    """How many runs have no predictions of single inputs, which most figures need."""
    evaluated = [record for record in report_data.entries if record.assessment is not None]
    bare = [record for record in evaluated if record.assessment and not record.assessment.samples]
    if not bare:
        return ""
    which = "all runs" if len(bare) == len(evaluated) else f"{len(bare)} of {len(evaluated)} runs"
    return (
        f"This page has only the scores of {which}, without predictions of single inputs. "
        f"Type `{bare[0].to_do('evaluate')}` to get the missing figures."
    )


def _built_sections(report_data: ReportData) -> dict[str, Section]:
    """Every section that the runs have numbers for, by name."""
    built: dict[str, Section] = {}
    for name, builder in builders().items():
        if builder.evaluated and not report_data.groups:
            continue
        section: Section | None = builder.build(report_data)
        if section is not None:
            built[name] = section
    return built


def _sections(
    sections: Mapping[str, Section], after: Callable[[Section], None]
) -> list[dict[str, Any]]:
    names = (f"figure{index}" for index in count(1))
    shown = []
    for name, section in sections.items():
        groups = _adjacent(_blocks(section.blocks, names))
        shown.append({"name": name, "section": section, "groups": groups})
        after(section)
    return shown


def _blocks(blocks: Iterable[Block], names: Iterable[str]) -> list[dict[str, Any]]:
    """Each block with its kind for the template; figures as SVG, files as links."""
    names, shown = iter(names), []
    for block in blocks:
        facts: dict[str, Any] = {"kind": type(block).__name__.lower(), "block": block}
        if isinstance(block, Figure):
            facts["svg"] = _markup(svg(block.figure, next(names), block.title))
        elif isinstance(block, Fold):
            facts["groups"] = _adjacent(_blocks(block.blocks, names))
        elif isinstance(block, Listing) and block.file:
            coded = base64.b64encode(block.text.encode()).decode()
            facts["link"] = f"data:text/plain;charset=utf-8;base64,{coded}"
        shown.append(facts)
    return shown


def _adjacent(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Adjacent blocks of one kind, together: they share a row on the page."""
    groups: list[dict[str, Any]] = []
    for block in blocks:
        if not groups or groups[-1]["kind"] != block["kind"]:
            groups.append({"kind": block["kind"], "blocks": []})
        groups[-1]["blocks"].append(block)
    return groups

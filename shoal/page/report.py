"""One self-contained page about one or several runs."""

import base64
import gc
import hashlib
import html
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.resources import files
from itertools import count
from pathlib import Path
from typing import Any

from shoal.core.files import write_bytes, write_text
from shoal.core.optional import require
from shoal.core.progress import Ticker
from shoal.data.dataset import Dataset
from shoal.evaluation.evaluate import splits_ticker
from shoal.evaluation.evaluation import Evaluation, is_current, kept_evaluation
from shoal.evaluation.given_data import Inputs, Labelled, Shifts, evaluation_data, opened
from shoal.evaluation.scores import evaluate_run
from shoal.page.blocks import Block, Fold, Listing, Picture, Section
from shoal.page.report_data import ReportData, load_report_data
from shoal.page.sections import builders
from shoal.plots.figure import PAPER, png, svg
from shoal.training.own_data import OWN_DATA
from shoal.training.run import Run

__all__ = ["Reported", "pictures", "render", "report", "slug", "write_figures"]

BLACK = "#1a1a1a"
"""Ink of a file, on its white paper."""


def write_figures(
    sections: Mapping[str, Section],
    folder: Path,
    after: Callable[[Section], None] = lambda section: None,
) -> list[Path]:
    """Write every figure as `SECTION-NN-title.png` and `.svg`; the PNG files are returned.

    Args:
        sections: of a page, by name.
        folder: where to.
        after: called when the figures of a section are written.
    """
    written = []
    for name, section in sections.items():
        for number, picture in enumerate(pictures(section.blocks), 1):
            stem = f"{name}-{number:02d}-{slug(picture.title)}"
            write_bytes(folder / f"{stem}.png", png(picture.figure, 150))
            drawn = svg(picture.figure, "figure", picture.title).replace("currentColor", BLACK)
            drawn = drawn.replace("<svg ", f'<svg style="background:{PAPER}" ', 1)
            write_text(folder / f"{stem}.svg", drawn)
            written.append(folder / f"{stem}.png")
        after(section)
    return written


def pictures(blocks: Iterable[Block]) -> Iterator[Picture]:
    """Every figure, those in folds as well."""
    for block in blocks:
        if isinstance(block, Picture):
            yield block
        elif isinstance(block, Fold):
            yield from pictures(block.blocks)


def slug(title: str) -> str:
    """A title as part of the name of a file.

    >>> slug("Diverse and accurate?")
    'diverse-and-accurate'
    """
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")[:60]


Reported = Run | str | os.PathLike[str] | tuple[Run, Evaluation]
"""A run, its folder, or a run that is not kept with its evaluation."""


def report(
    runs: Reported | Iterable[Reported],
    path: str | Path,
    *,
    data: Dataset | Labelled | str | Mapping[str, Any] | None = None,
    ood: Mapping[str, Inputs] | None = None,
    shifts: Shifts | None = None,
    title: str | None = None,
    figures: str | Path | None = None,
    progress: bool = False,
) -> Path:
    """Write a page that answers the questions a reader has about the runs, from the top down.

        shoal.report(run, "report.html", data=(x_test, y_test), ood={"letters": x_letters})

    It is one file that loads nothing, follows the reader's light or dark setting, and prints.

    Args:
        runs: a run or its folder, or several; or pairs of a run and its evaluation.
        path: the file to write.
        data: test data, as `shoal.evaluate` takes them: runs that were not evaluated on them are
            evaluated first. By default the page shows what was evaluated before.
        ood: out-of-distribution inputs by name, as `shoal.evaluate` takes them.
        shifts: changed test data by name, or names of corruptions, as `shoal.evaluate` takes them.
        title: a heading of your own.
        figures: a folder for every figure as a file of its own, PNG and SVG.
        progress: say on standard error how many of the figures are drawn.
    """
    given = _several(runs)
    if data is not None or ood is not None or shifts is not None:
        given = [_evaluated(run, data, ood, shifts, progress) for run in given]
    path, story = Path(path), load_report_data(given, title)
    with _collecting_later():
        sections = _told(story)
        many = {id(told): len(list(pictures(told.blocks))) for told in sections.values()}
        total = sum(many.values()) * (1 if figures is None else 2)
        with Ticker(total, show=progress) as ticker:

            def after(section: Section) -> None:
                if many[id(section)]:
                    ticker.tick(section.question, many[id(section)])

            write_text(path, render(story, sections, after))
            if figures is not None:
                write_figures(sections, Path(figures), after)
    return path


def _several(runs: Any) -> list[Any]:
    """One run, its folder, or a pair of it and its evaluation, as a list of one."""
    pair = isinstance(runs, tuple) and len(runs) == 2 and isinstance(runs[1], Evaluation)
    if pair or isinstance(runs, str | os.PathLike) or hasattr(runs, "history"):
        return [runs]
    return list(runs)


def _evaluated(run: Any, data: Any, ood: Any, shifts: Any, progress: bool) -> Any:
    """The run, evaluated on these data unless what is kept is about them already."""
    if isinstance(run, tuple):
        return run
    run = opened(run)
    dataset = evaluation_data(run, data, ood, shifts)
    if not is_current(kept_evaluation(run), run, dataset):
        with splits_ticker(dataset, not progress) as ticker:
            evaluate_run(run, dataset, after=ticker.tick)
    return run


@contextmanager
def _collecting_later() -> Iterator[None]:
    """Figures are many small objects, all of which live until the page is written: to search
    them for garbage meanwhile takes a sixth of the time and finds none."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def render(
    story: ReportData,
    sections: Mapping[str, Section] | None = None,
    after: Callable[[Section], None] = lambda section: None,
) -> str:
    """The page as text.

    Args:
        story: what is told.
        sections: when they have been told already, they are not told again.
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
        title=story.title or _title(story),
        sections=_sections(_told(story) if sections is None else sections, after),
        unjudged=_unjudged(story),
        bare=_bare(story),
        style=_markup(_page_file("page.css")),
        script=_markup(script),
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _page_file(name: str) -> str:
    return (files("shoal.page") / "template" / name).read_text(encoding="utf-8")


def _unbroken(text: str) -> Any:
    """Keep a number and its unit on one line, and set `commands` as such."""
    safe = html.escape(text)
    for sign in ("%", "±"):
        safe = safe.replace(f" {sign}", f"\u00a0{sign}")
    safe = safe.replace("± ", "±\u00a0")
    return _markup(re.sub(r"`([^`]+)`", r"<code>\1</code>", safe))


def _markup(text: str) -> Any:
    """Text that is already safe to stand in a page."""
    return require("markupsafe", extra="report").Markup(text)


def _title(story: ReportData) -> str:
    entry = story.entries[0]
    methods = dict.fromkeys(entry.method for entry in story.entries)
    sizes = sorted({entry.members for entry in story.entries})
    many = f"{sizes[0]} to {sizes[-1]}" if len(sizes) > 1 else str(sizes[0])
    members = "1 member" if many == "1" else f"{many} members"
    what = next(iter(methods)) if len(methods) == 1 else f"{len(methods)} methods"
    form = f" ({entry.shared})" if entry.shared else ""
    about = "" if entry.data == OWN_DATA else f"{entry.data}: "
    return f"{about}{what}{form}, {members}"


def _unjudged(story: ReportData) -> str:
    """Which runs say nothing about predictions, and what to type for it."""
    missing = story.unjudged
    if not missing:
        return ""
    names = ", ".join(entry.name for entry in missing)
    return (
        f"Not evaluated yet, so left out of the sections about predictions: {names}. "
        f"Type `{missing[0].to_do('evaluate')}` and make this page again."
    )


def _bare(story: ReportData) -> str:
    """How many runs came without the answers to single inputs, which most figures need."""
    judged = [entry for entry in story.entries if entry.assessment is not None]
    bare = [entry for entry in judged if entry.assessment and not entry.assessment.samples]
    if not bare:
        return ""
    which = "all runs" if len(bare) == len(judged) else f"{len(bare)} of {len(judged)} runs"
    return (
        f"Only the scores of {which} are here, not the answers to single inputs, so that the "
        f"figures made from those are missing; `{bare[0].to_do('evaluate')}` makes them again."
    )


def _told(story: ReportData) -> dict[str, Section]:
    """Every section that the runs have something to say to, by name."""
    told: dict[str, Section] = {}
    for name, builder in builders().items():
        if builder.judged and not story.groups:
            continue
        section: Section | None = builder.build(story)
        if section is not None:
            told[name] = section
    return told


def _sections(
    told: Mapping[str, Section], after: Callable[[Section], None]
) -> list[dict[str, Any]]:
    names = (f"figure{index}" for index in count(1))
    shown = []
    for name, found in told.items():
        groups = _runs_of(_blocks(found.blocks, names))
        shown.append({"name": name, "section": found, "groups": groups})
        after(found)
    return shown


def _blocks(blocks: Iterable[Block], names: Iterable[str]) -> list[dict[str, Any]]:
    """What the template shows: each block with its kind, figures as SVG, files as links."""
    names, shown = iter(names), []
    for block in blocks:
        facts: dict[str, Any] = {"kind": type(block).__name__.lower(), "block": block}
        if isinstance(block, Picture):
            facts["svg"] = _markup(svg(block.figure, next(names), block.title))
        elif isinstance(block, Fold):
            facts["groups"] = _runs_of(_blocks(block.blocks, names))
        elif isinstance(block, Listing) and block.file:
            coded = base64.b64encode(block.text.encode()).decode()
            facts["link"] = f"data:text/plain;charset=utf-8;base64,{coded}"
        shown.append(facts)
    return shown


def _runs_of(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Blocks of one kind that follow each other, together: they share a row on the page."""
    groups: list[dict[str, Any]] = []
    for block in blocks:
        if not groups or groups[-1]["kind"] != block["kind"]:
            groups.append({"kind": block["kind"], "blocks": []})
        groups[-1]["blocks"].append(block)
    return groups

"""How was it made? Settings, versions, citations, the command that repeats it, the numbers."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.core.text import flat, plain, seconds
from shoal.interaction.methods import METHODS
from shoal.page.blocks import Block, Listing, Section, Table, TableCell, folded, section
from shoal.page.report_data import ReportData, RunRecord
from shoal.page.rerun_commands import commands

__all__ = ["bibtex", "made", "numbers_csv"]


@section("making", order=80, judged=False)
def made(story: ReportData) -> Section:
    """Everything that someone needs who wants to make it again."""
    entries = story.entries
    total = sum(float(entry.provenance.get("seconds") or 0) for entry in entries)
    count = "One run" if len(entries) == 1 else f"{len(entries)} runs"
    answer = f"{count} on {entries[0].data}, {seconds(total)} of training."
    blocks: list[Block] = [
        Listing("To make it again", "\n".join(commands(entries))),
        *_settings(entries),
        Listing("To cite it", bibtex(entries), "shoal.bib"),
    ]
    numbers = numbers_csv(entries)
    if numbers:
        blocks.append(Listing("All numbers, one a line", numbers, "shoal.csv", shown=False))
    return Section("How was it made?", answer, blocks)


def _settings(entries: list[RunRecord]) -> list[Block]:
    tables = [flat(plain(entry.config)) for entry in entries]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    same = [key for key in keys if len({table.get(key) for table in tables}) == 1]
    common = [[TableCell(key, key), TableCell(tables[0][key], tables[0][key])] for key in same]
    blocks: list[Block] = [
        Table("Settings", ["setting", "value"], common),
        _provenance(entries[0]),
    ]
    differing = [key for key in keys if key not in same]
    if differing:
        rows = [
            [TableCell(entry.name, entry.name)]
            + [TableCell(table.get(key, "–"), table.get(key, "")) for key in differing]
            for entry, table in zip(entries, tables, strict=True)
        ]
        blocks.append(folded(Table("Settings that differ", ["run", *differing], rows)))
    return blocks


def _provenance(entry: RunRecord) -> Table:
    known: Mapping[str, Any] = {k: v for k, v in entry.provenance.items() if k != "seconds"}
    rows = [[TableCell(key, key), TableCell(value, value)] for key, value in flat(known).items()]
    time = float(entry.provenance.get("seconds") or math.nan)
    rows.append([TableCell("wall time", "wall time"), TableCell(seconds(time), seconds(time))])
    return Table(f"Made by ({entry.name})", ["what", "which"], rows)


def bibtex(entries: list[RunRecord]) -> str:
    """The papers behind the methods of the runs, as a reference list."""
    methods = [entry.config.get("method") for entry in entries]
    names = dict.fromkeys(m.get("name") if isinstance(m, Mapping) else m for m in methods)
    keys = dict.fromkeys(k for name in names if name in METHODS for k in METHODS[name].cite)
    return "\n\n".join(BIBLIOGRAPHY[key].bibtex(key) for key in keys if key in BIBLIOGRAPHY)


def numbers_csv(entries: list[RunRecord]) -> str:
    """Every score of every run, one number a line."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["run", "data", "method", "members", "seed", "part", "metric", "value"])
    empty = True
    for entry in entries:
        own = [
            entry.name,
            entry.data,
            replace(entry, shared=None).method,
            entry.members,
            entry.seed,
        ]
        for part, scores in _parts(entry).items():
            for metric, value in scores.items():
                empty = False
                writer.writerow([*own, part, metric, repr(value)])
    return "" if empty else stream.getvalue()


def _parts(entry: RunRecord) -> dict[str, dict[str, float]]:
    found = entry.assessment
    if found is None:
        return {}
    parts = {"test": found.test}
    parts |= {f"shift:{name}": scores for name, scores in found.shifts.items()}
    parts |= {f"corrupted:{name}": scores for name, scores in found.corrupted.items()}
    return parts | {f"ood:{name}": scores for name, scores in found.ood.items()}

"""How was it made? Commands to repeat, settings, versions, citations and all numbers."""

import csv
import io
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.core.display.text import flat, plain, seconds
from shoal.interaction.methods import METHODS
from shoal.page.blocks import Block, Listing, Section, Table, TableCell, folded, section
from shoal.page.report_data import ReportData, RunRecord
from shoal.page.rerun_commands import commands
from shoal.page.sentences import ADOPTED

__all__ = ["bibtex", "making_section", "numbers_csv"]


@section("making", order=80, evaluated=False)
def making_section(report_data: ReportData) -> Section:
    """What a reader needs to repeat the runs."""
    records = report_data.entries
    total = sum(float(record.provenance.get("seconds") or 0) for record in records)
    count = "One run" if len(records) == 1 else f"{len(records)} runs"
    answer = f"{count} on {records[0].data}, {seconds(total)} of training."
    if all(record.adopted for record in records):
        answer = f"{count} of adopted networks on {records[0].data}. {ADOPTED}"
    blocks: list[Block] = [
        Listing("Commands to repeat the runs", "\n".join(commands(records))),
        *_settings(records),
    ]
    if references := bibtex(records):
        blocks.append(Listing("References", references, "shoal.bib"))
    numbers = numbers_csv(records)
    if numbers:
        blocks.append(Listing("All numbers, one per line", numbers, "shoal.csv", shown=False))
    return Section("How was it made?", answer, blocks)


def _settings(records: list[RunRecord]) -> list[Block]:
    tables = [flat(plain(record.config)) for record in records]
    keys = list(dict.fromkeys(key for table in tables for key in table))
    same = [key for key in keys if len({table.get(key) for table in tables}) == 1]
    common = [[TableCell(key, key), TableCell(tables[0][key], tables[0][key])] for key in same]
    blocks: list[Block] = [
        Table("Settings", ["setting", "value"], common),
        _provenance(records[0]),
    ]
    differing = [key for key in keys if key not in same]
    if differing:
        rows = [
            [TableCell(record.name, record.name)]
            + [TableCell(table.get(key, "–"), table.get(key, "")) for key in differing]
            for record, table in zip(records, tables, strict=True)
        ]
        blocks.append(folded(Table("Settings that differ", ["run", *differing], rows)))
    return blocks


def _provenance(record: RunRecord) -> Table:
    elsewhere = ("seconds", "warnings")  # the page has them in other places
    known: dict[str, Any] = {k: v for k, v in record.provenance.items() if k not in elsewhere}
    made_by = known.pop("made_by", {})  # its parameters are in the code that repeats the run
    known |= {"made by": made_by.get("name") or made_by["interface"]} if made_by else {}
    sources = known.pop("sources", {})
    inputs = (known.pop("inputs", None) or {}).get("tensors", {})
    for name, about in inputs.items():
        known[f"input {name}"] = f"{about['dtype']} {about['shape'] or ''}".strip()
    for key in ("input_range", "pixel_range"):
        if isinstance(known.get(key), list):
            known[key] = [_short(value) for value in known[key]]
    rows = [[TableCell(key, key), TableCell(value, value)] for key, value in flat(known).items()]
    if not record.adopted:
        time = float(record.provenance.get("seconds") or math.nan)
        rows.append([TableCell("wall time", "wall time"), TableCell(seconds(time), seconds(time))])
    for index, (file, digest) in enumerate(sources.items(), 1):
        name, held = f"member {index}", f"{file}, sha256 {digest}"
        rows.append([TableCell(name, name), TableCell(held, held)])
    return Table(f"Environment of run {record.name}", ["item", "value"], rows)


def _short(value: Any) -> Any:
    return float(f"{value:.4g}") if isinstance(value, float) else value


def bibtex(records: list[RunRecord]) -> str:
    """The papers of the methods, as BibTeX."""
    methods = [record.config.get("method") for record in records]
    names = dict.fromkeys(m.get("name") if isinstance(m, Mapping) else m for m in methods)
    keys = dict.fromkeys(k for name in names if name in METHODS for k in METHODS[name].cite)
    return "\n\n".join(BIBLIOGRAPHY[key].bibtex for key in keys if key in BIBLIOGRAPHY)


def numbers_csv(records: list[RunRecord]) -> str:
    """CSV of every score of every run, one number per line."""
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(["run", "data", "method", "members", "seed", "part", "metric", "value"])
    empty = True
    for record in records:
        columns = [
            record.name,
            record.data,
            replace(record, shared=None).method,
            record.members,
            "" if record.adopted else record.seed,
        ]
        for split, scores in _splits(record).items():
            for metric, value in scores.items():
                empty = False
                writer.writerow([*columns, split, metric, repr(value)])
    return "" if empty else stream.getvalue()


def _splits(record: RunRecord) -> dict[str, dict[str, float]]:
    evaluation = record.assessment
    if evaluation is None:
        return {}
    splits = {"test": evaluation.test}
    splits |= {f"shift:{name}": scores for name, scores in evaluation.shifts.items()}
    splits |= {f"corrupted:{name}": scores for name, scores in evaluation.corrupted.items()}
    return splits | {f"ood:{name}": scores for name, scores in evaluation.ood.items()}

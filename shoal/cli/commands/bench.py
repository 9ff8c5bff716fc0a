"""`shoal bench`: training speed on this machine, and agreement of all engines."""

from argparse import Namespace
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any

import torch

from shoal.cli.outcome import Outcome
from shoal.core.display.progress import Ticker
from shoal.core.display.text import counted, number, seconds, table
from shoal.core.storage.files import write_json
from shoal.experiment.bench.agreement import COMPARED, agreement
from shoal.experiment.bench.battery import EPOCHS, Row, measure, train_once
from shoal.experiment.bench.fits import measure_fits
from shoal.experiment.bench.measure import load, machine, versions
from shoal.experiment.bench.plan import BenchPlan
from shoal.experiment.bench.prediction import measure_predictions

__all__ = ["report", "run"]

_HEADER = (
    "", "ms per step", "±", "members x samples/s", "MiB", "x loop", "x products", "warm-up",
)  # fmt: skip


def report(value: Mapping[str, Any]) -> str:
    """The text of a benchmark result."""
    return "\n\n".join(
        [
            _title(value["machine"], value["versions"]),
            *_tables(value["steps"]),
            *_prediction_tables(value.get("predictions", [])),
            *_agreement(value.get("agreement", [])),
            *_trainings_table(value.get("training", [])),
        ]
    )


def _title(machine: Mapping[str, Any], versions: Mapping[str, Any]) -> str:
    where = machine.get("gpu") or machine["processor"]
    busy = machine.get("load")
    noise = f", load {busy[0]:g} at the start" if busy else ""
    threads = "1 thread" if machine["threads"] == 1 else f"{machine['threads']} threads"
    return f"{where}, {machine['cores']} cores, {threads}{noise}; torch {versions['torch']}"


def _tables(rows: Sequence[Row]) -> list[str]:
    blocks = []
    for heading, group in groupby(rows, _heading):
        lines = list(group)
        # Each baseline may have been timed with every engine, and is shown once.
        cells: dict[str, list[str]] = {}
        for row in lines:
            if "ms" in row:
                cells.setdefault(_label(row), _cells(row))
        notes = [f"{_label(row)}: {row['note']}" for row in lines if row.get("note")]
        failed = [f"{_label(row)} cannot run: {row['error']}" for row in lines if "error" in row]
        figures = [table([*cells.values()], _HEADER)] if cells else []
        blocks.append("\n".join([heading, *figures, *_floor(lines), *notes, *failed]))
    return blocks


_PREDICTED = ("", "ms per batch", "±", "points/s", "MiB", "x loop", "deviation")


def _prediction_tables(rows: Sequence[Row]) -> list[str]:
    blocks = []
    for heading, group in groupby(rows, _prediction_heading):
        lines = list(group)
        cells = [_prediction_cells(row) for row in lines if "ms" in row]
        failed = [f"{row['what']} cannot run: {row['error']}" for row in lines if "error" in row]
        blocks.append("\n".join([heading, *([table(cells, _PREDICTED)] if cells else []), *failed]))
    return blocks


def _prediction_heading(row: Row) -> str:
    sizes = f"{row['members']} members, batch {row['batch_size']}"
    return f"{row['model']} predicts, {sizes}, {row['precision']}"


def _prediction_cells(row: Row) -> list[str]:
    return [
        row["what"],
        f"{row['ms']:.4g}",
        f"{100 * row['spread']:.0f} %",
        f"{row['points_per_second']:,.0f}",
        "-" if row["memory_mib"] is None else f"{row['memory_mib']:,.0f}",
        _ratio(row["times_faster_than_loop"]),
        f"{row['deviation']:.1e}" if "deviation" in row else "-",
    ]


def _floor(rows: Sequence[Row]) -> list[str]:
    floors = [row["memory_floor_mib"] for row in rows if row.get("memory_floor_mib")]
    what = "activations of one member; weights, gradients and optimiser states of all"
    return [f"{floors[0]:,.0f} MiB: {what}"] if floors else []


def _heading(row: Row) -> str:
    sizes = f"{row['members']} members, batch {row['batch_size']}"
    return f"{row['model']}, {sizes}, {row['precision']}, {row['optimizer']}"


def _label(row: Row) -> str:
    own = ", own batches" if row.get("batches") == "own" else ""
    return row["what"] if row["method"] is None else f"{row['method']}, {row['engine']}{own}"


def _cells(row: Row) -> list[str]:
    return [
        _label(row),
        f"{row['ms']:.4g}",
        f"{100 * row['spread']:.0f} %",
        f"{row['member_samples_per_second']:,.0f}",
        "-" if row["memory_mib"] is None else f"{row['memory_mib']:,.0f}",
        _ratio(row["times_faster_than_loop"]),
        _ratio(row["times_bare_products"]),
        f"{row['setup_seconds']:.1f} s",
    ]


def _ratio(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _agreement(rows: Sequence[Row]) -> list[str]:
    """The largest deviation of every engine and precision, over networks and methods."""
    if not rows:
        return []
    keys = dict.fromkeys((row["engine"], row["precision"]) for row in rows)
    cells = []
    for key in keys:
        mine = [row for row in rows if (row["engine"], row["precision"]) == key]
        deviations = [row["deviation"] for row in mine if "deviation" in row]
        if deviations:
            cells.append([*key, f"{max(deviations):.1e}", str(len(deviations))])
    header = ("engine", "precision", "largest deviation", "cases")
    title = (
        "Deviation of each engine after ten steps from ten steps in float64 by a loop on the CPU"
    )
    return ["\n".join([title, *([table(cells, header)] if cells else []), *_remarks(rows)])]


def _remarks(rows: Sequence[Row]) -> list[str]:
    """Each reason once, with its count."""
    lines = [f"cannot run: {row['error']}" for row in rows if "error" in row]
    lines += [f"note: {row['note']}" for row in rows if row.get("note")]
    return [f"{lines.count(line)} of {len(rows)} {line}" for line in dict.fromkeys(lines)]


def _trainings_table(rows: Sequence[Row]) -> list[str]:
    lines = []
    for row in rows:
        what = f"{row['method']}, {row['engine']}, {row['precision']}"
        epochs = counted(row["epochs"], "epoch")
        size = f"{epochs} of {row['points']:,} points, {row['members']} members"
        if "error" in row:
            lines.append(f"{what}: {size} cannot be trained: {row['error']}")
        else:
            lines.append(
                f"{what}: {size} in {seconds(row['seconds'])} ({number(row['ms'])} ms per step)"
            )
    return ["\n".join(["Complete trainings with fit", *lines])] if lines else []


def run(options: Namespace) -> Outcome:
    """Run the requested benchmarks, and write and show the results."""
    plan, show = BenchPlan.of(options), not options.quiet
    device = torch.device(plan.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    value: dict[str, Any] = {
        "machine": machine(device),
        "versions": versions(),
        "settings": plan.settings(),
        "steps": [] if plan.predict else _steps(plan, show),
    }
    if plan.predict:
        value["predictions"] = _predictions(plan, show)
    if options.check:
        with Ticker(len(COMPARED) * len(plan.methods), 0, show) as ticker:
            value["agreement"] = agreement(plan.methods, plan.engines, device, say=ticker.tick)
    if options.train_mnist_like:
        value["training"] = _trainings(plan, options.methods is not None, show)
    value["machine"]["load_after"] = load()
    if options.out:
        write_json(options.out, value)
    return Outcome(report(value), value)


def _steps(plan: BenchPlan, show: bool) -> list[dict[str, Any]]:
    batteries, timed = plan.batteries(), measure_fits if plan.fit else measure
    with Ticker(sum(map(len, batteries)), 0, show) as ticker:
        return [row for each in batteries for row in timed(each, plan.seconds, ticker.tick)]


def _predictions(plan: BenchPlan, show: bool) -> list[dict[str, Any]]:
    cases = plan.predictions()
    with Ticker(2 * len(cases), 0, show) as ticker:
        tables = [measure_predictions(case, plan.seconds, ticker.tick) for case in cases]
    return [row for rows in tables for row in rows]


def _trainings(plan: BenchPlan, methods_given: bool, show: bool) -> list[dict[str, Any]]:
    methods = plan.methods if methods_given else ("f-kde",)
    wanted = [(case, method) for case in plan.whole_training() for method in methods]
    rows = []
    with Ticker(len(wanted), 0, show) as ticker:
        for case, method in wanted:
            rows.append(train_once(case, method, plan.engines[0], 1 if plan.quick else EPOCHS))
            ticker.tick(f"{method}, {case.precision}: complete training")
    return rows

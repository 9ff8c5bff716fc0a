"""`shoal bench`: how fast this machine trains, and whether every engine computes the same."""

from argparse import Namespace
from typing import Any

import torch

from shoal.app.bench.agreement import COMPARED, agreement
from shoal.app.bench.battery import measure
from shoal.app.bench.end_to_end import EPOCHS, train_once
from shoal.app.bench.machine import load, machine, versions
from shoal.app.bench.plan import Plan
from shoal.app.bench.text import report
from shoal.app.outcome import Outcome
from shoal.app.ticker import Ticker
from shoal.core.files import write_json

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Measure what was asked for, write it down, and show it."""
    plan, show = Plan.of(options), not options.quiet
    device = torch.device(plan.device)
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    value: dict[str, Any] = {
        "machine": machine(device),
        "versions": versions(),
        "settings": plan.settings(),
        "steps": _steps(plan, show),
    }
    if options.check:
        with Ticker(len(COMPARED) * len(plan.methods), 0, show) as ticker:
            value["agreement"] = agreement(plan.methods, plan.engines, device, say=ticker.tick)
    if options.train_mnist_like:
        value["training"] = _trainings(plan, options.methods is not None, show)
    value["machine"]["load_after"] = load()
    if options.out:
        write_json(options.out, value)
    return Outcome(report(value), value)


def _steps(plan: Plan, show: bool) -> list[dict[str, Any]]:
    batteries = plan.batteries()
    with Ticker(sum(map(len, batteries)), 0, show) as ticker:
        return [row for each in batteries for row in measure(each, plan.seconds, ticker.tick)]


def _trainings(plan: Plan, methods_given: bool, show: bool) -> list[dict[str, Any]]:
    methods = plan.methods if methods_given else ("f-kde",)
    wanted = [(case, method) for case in plan.whole_training() for method in methods]
    rows = []
    with Ticker(len(wanted), 0, show) as ticker:
        for case, method in wanted:
            rows.append(train_once(case, method, plan.engines[0], 1 if plan.quick else EPOCHS))
            ticker.tick(f"{method}, {case.precision}: a whole training")
    return rows

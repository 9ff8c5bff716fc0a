"""`shoal evidence`: in what sense is a run Bayesian?"""

from argparse import Namespace
from dataclasses import asdict
from shlex import quote

from shoal.analysis.evidence.compute_evidence import Evidence
from shoal.cli.outcome import Outcome, judged_data, opened_for
from shoal.core.errors import ConfigError
from shoal.core.text import number, table
from shoal.engine.autotune import set_threads
from shoal.evaluation.analyse import evidence
from shoal.page.findings import answers

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Compute everything, keep it in the folder of the run, and tell it in sentences."""
    if options.points < 1 or options.flow_steps < 0:
        raise ConfigError("--points must be 1 or more, and --flow-steps 0 or more")
    found = opened_for("evidence", options.run)
    data = judged_data(found, options.run, options.data, "evidence")
    set_threads(options.threads, found.ensemble.weights, 1024)
    told = evidence(
        found,
        data,
        priors=not options.no_priors,
        points=options.points,
        flow_steps=options.flow_steps,
        progress=not options.quiet,
    )
    text = [
        f"{options.run}: {told.members} members, {told.points:,} training points",
        "\n".join(answers(told)),
        _weightings(told),
        *([_rungs(told)] if told.rungs else []),
        f"Kept in {options.run}/evidence.json; `shoal report {quote(options.run)}` shows it",
    ]
    return Outcome("\n\n".join(text), asdict(told))


def _weightings(told: Evidence) -> str:
    rows = [
        [name, number(w.effective, 0.005), number(w.nll), number(w.total_variation)]
        for name, w in told.weightings.items()
    ]
    return table(rows, ["weights", "members that count", "nll", "distance from uniform"])


def _rungs(told: Evidence) -> str:
    rows = [
        [rung.name, number(rung.log_evidence, 0.05), number(rung.nll), number(rung.nll_posterior)]
        for rung in told.rungs
    ]
    return table(rows, ["learned prior", "log evidence", "nll", "nll by evidence"])

"""`shoal evidence`: log evidence, member weights and learned priors of a run."""

from argparse import Namespace
from dataclasses import asdict
from shlex import quote

from shoal.analysis.evidence.compute_evidence import Evidence
from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for
from shoal.core.display.text import number, table
from shoal.core.errors import ConfigError
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.analyse import evidence
from shoal.page.findings import answers

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Compute the evidence, keep it in the folder of the run, and describe it."""
    if (options.points is not None and options.points < 1) or options.flow_steps < 0:
        raise ConfigError("--points must be 1 or more, and --flow-steps 0 or more")
    opened = opened_for("evidence", options.run, options.model)
    data = evaluation_dataset(opened, options.run, options.data, "evidence")
    set_threads(options.threads, opened.ensemble.weights, 1024)
    result = evidence(
        opened,
        data,
        priors=not options.no_priors,
        points=options.points,
        flow_steps=options.flow_steps,
        progress=not options.quiet,
    )
    text = [
        f"{options.run}: {result.members} members, {result.points:,} training points",
        "\n".join(answers(result)),
        _weightings(result),
        *([_learned_priors(result)] if result.learned_priors else []),
        f"Kept in {options.run}/evidence.json; `shoal report {quote(options.run)}` shows it",
    ]
    return Outcome("\n\n".join(text), asdict(result))


def _weightings(result: Evidence) -> str:
    rows = [
        [name, number(w.effective, 0.005), number(w.nll), number(w.total_variation)]
        for name, w in result.weightings.items()
    ]
    return table(rows, ["weights", "effective members", "NLL", "total variation from uniform"])


def _learned_priors(result: Evidence) -> str:
    rows = [
        [
            prior.name,
            number(prior.log_evidence, 0.05),
            number(prior.nll),
            number(prior.nll_posterior),
        ]
        for prior in result.learned_priors
    ]
    return table(rows, ["learned prior", "log evidence", "NLL", "NLL by evidence"])

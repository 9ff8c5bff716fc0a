"""`shoal fit`: train one ensemble and evaluate it."""

from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from shlex import quote

from shoal.cli import ranks
from shoal.cli.outcome import Outcome, scores_text
from shoal.core.display.text import counted, seconds
from shoal.core.errors import ConfigError
from shoal.engine.processes.groups import restarted
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.evaluate import evaluate_run, splits_ticker
from shoal.experiment.build import default_folder, make_data, train
from shoal.experiment.config import Config, parse_value
from shoal.experiment.variants import variant_of
from shoal.inference.ensemble import Ensemble
from shoal.training.folder.run import Run, RunFolder

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Train, evaluate if the data set has a test set, and print the folder of the run."""
    config: Config = options.config
    ranks.together()
    resume = options.resume or restarted()
    device = ranks.own_device(options.device or config.device)
    if device is not None:
        config = replace(config, device=device)
    for key in ("memory", "validation", "patience", "keep"):
        if (typed := getattr(options, key)) is not None:
            config = replace(config, **{key: parse_value(typed, key)})
    folder = Path(options.out or config.out or default_folder(config))
    if RunFolder(folder).holds_run and not resume:
        raise ConfigError(
            f"{folder} already holds a run; add --resume to continue it, "
            f"or -o FOLDER to choose another folder"
        )
    data = ranks.prepare(lambda: make_data(config))

    def prepare(ensemble: Ensemble) -> None:
        set_threads(options.threads, ensemble.weights, config.batch_size)

    trained = train(
        config,
        data,
        folder,
        resume=resume,
        progress=not options.quiet,
        loggers=options.loggers,
        prepare=prepare,
    )
    scores = None
    if data.test is not None and ranks.speaks():
        with splits_ticker(data, options.quiet) as ticker:
            scores = evaluate_run(trained, data, after=ticker.tick).scores
    return _outcome(config, trained, scores)


def _outcome(config: Config, run: Run, scores: dict | None) -> Outcome:
    spent = float(run.provenance.get("seconds", 0.0))
    method = variant_of(config.method, config.strength).label
    members, epochs = run.ensemble.members, len(run.history)
    title = f"{config.name}, {method}, {counted(members, 'member')}, seed {config.seed}"
    table = scores_text(scores) if scores else "No scores: the data set has no test set."
    text = [
        f"{title}: {counted(epochs, 'epoch')} in {seconds(spent)}",
        *([] if run.choice is None else [run.choice.why]),
        table,
        f"Kept in {run.folder}; for a report type: shoal report {quote(str(run.folder))}",
    ]
    value = {
        "folder": str(run.folder),
        "config": run.config,
        "scores": scores,
        "notes": run.notes,
        "seconds": spent,
        **({} if run.choice is None else {"choice": run.choice.table()}),
    }
    return Outcome("\n\n".join(text), value)

"""`shoal grow`: more members for a trained run."""

from argparse import Namespace
from pathlib import Path
from shlex import quote
from typing import Any

from shoal.cli import ranks
from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for, scores_text
from shoal.core.display.text import counted, seconds
from shoal.core.errors import ConfigError
from shoal.engine.processes.groups import restarted
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.evaluate import evaluate_run
from shoal.experiment.build import check_device
from shoal.experiment.config import apply_override
from shoal.training.folder.run import Run, RunFolder
from shoal.training.grow import grow
from shoal.training.options.options import NAMES

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Train the new members, evaluate the grown run, and print its folder."""
    changes = _changes(options.changes)
    ranks.together()
    options.device = ranks.own_device(options.device)
    resume = options.resume or restarted()
    check_device(options.device)
    source = opened_for("grow", options.run, options.model)
    by_steps = {"until": options.until, "price": options.price, "most": options.most}
    folder = Path(options.out or _folder(options, source))
    if RunFolder(folder).holds_run and not resume:
        raise ConfigError(
            f"{folder} already holds a run; add --resume to continue it, "
            f"or -o FOLDER to choose another folder"
        )
    data = evaluation_dataset(source, options.run, options.data, "grow")
    if options.device is not None:
        changes["device"] = options.device
    set_threads(options.threads, source.ensemble.weights, int(source.config.get("batch_size", 128)))
    kept = {"out": folder, "resume": resume, "progress": not options.quiet}
    grown = grow(source, options.more, data=data, **by_steps, **changes, **kept)
    if grown.ensemble is source.ensemble:
        return Outcome(grown.notes[-1], {"folder": str(source.folder), "notes": grown.notes})
    scored = data.test is not None and ranks.speaks()
    scores = evaluate_run(grown, data).scores if scored else None
    return _outcome(source, grown, scores)


def _folder(options: Namespace, source: Run) -> str:
    start = f"{options.run.rstrip('/')}-grown"
    return start if options.until else f"{start}-{source.ensemble.members + options.more}"


def _changes(typed: list[str]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    allowed = {name: None for name in NAMES if name != "frozen"}
    for change in typed:
        table = apply_override(table, change, allowed)
    return table


def _outcome(source: Run, grown: Run, scores: dict[str, Any] | None) -> Outcome:
    old, new = source.ensemble.members, grown.ensemble.members - source.ensemble.members
    spent = float(grown.provenance.get("seconds", 0.0))
    text = [
        f"{counted(new, 'new member')} added to {counted(old, 'trained member')}: "
        f"{counted(len(grown.history), 'epoch')} in {seconds(spent)}",
        *(note for note in grown.notes if note.startswith("Growing stopped")),
        scores_text(scores) if scores else "No scores: the data set has no test set.",
        f"Kept in {grown.folder}; for a report type: shoal report {quote(str(grown.folder))}",
    ]
    value = {"folder": str(grown.folder), "config": grown.config, "scores": scores}
    return Outcome("\n\n".join(text), value | {"notes": grown.notes, "seconds": spent})

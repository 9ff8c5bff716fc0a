"""`shoal draw`: draws from the posterior, beginning at the members of a trained run."""

from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from shlex import quote
from typing import Any

from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for, scores_text
from shoal.core.display.text import counted, number, seconds, table
from shoal.core.errors import ConfigError
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.evaluate import evaluate_run, splits_ticker
from shoal.experiment.build import check_device
from shoal.experiment.config import apply_override
from shoal.training.draw import PIECE, draw
from shoal.training.folder.run import Run, RunFolder
from shoal.training.folder.run_folder import DRAWS

__all__ = ["run"]

_NAMES = ("sampler", "prior", "temperature", "batch_size", "seed", "precision", "save_every",
          "cache", "of")  # fmt: skip
_KEYS: dict[str, Any] = {name: None for name in _NAMES}
"""Arguments of `shoal.draw` that are typed as key=value."""


def run(options: Namespace) -> Outcome:
    """Draw, evaluate the mixture of all draws, and print its folder."""
    check_device(options.device)
    source = opened_for("draw", options.run, options.model)
    changes = _changes(options, source)
    folder = Path(options.out or f"{options.run.rstrip('/')}-drawn")
    if RunFolder(folder).holds_run and not options.resume:
        raise ConfigError(
            f"{folder} already holds a run; add --resume to continue it, "
            f"or -o FOLDER to choose another folder"
        )
    data = evaluation_dataset(source, options.run, options.data, "draw")
    set_threads(options.threads, source.ensemble.weights, min(len(data.train), PIECE))
    lengths = {name: getattr(options, name) for name in ("draws", "warmup", "thin")}
    kept = {"out": folder, "resume": options.resume, "progress": not options.quiet}
    drawn = draw(source, data, device=options.device, **lengths, **changes, **kept)
    scores = None
    if data.test is not None:
        with splits_ticker(data, options.quiet) as ticker:
            scores = evaluate_run(drawn, data, after=ticker.tick).scores
    return _outcome(drawn, scores, source.notes)


def _changes(options: Namespace, source: Run) -> dict[str, Any]:
    """The settings as they were typed; `prior.std=2` changes the prior of the run."""
    given = {"sampler": options.sampler, "prior": source.config.get("prior", "gaussian")}
    changes: dict[str, Any] = dict(given)
    for typed in options.changes:
        changes = apply_override(changes, typed, _KEYS)
    if changes.get("prior") == given["prior"]:
        del changes["prior"]
    return changes


def _outcome(drawn: Run, scores: dict[str, Any] | None, before: list[str]) -> Outcome:
    plan, known = drawn.config[DRAWS], dict(drawn.provenance[DRAWS])
    spent, steps = float(drawn.provenance.get("seconds", 0.0)), known.pop("steps")
    text = [
        f"{counted(plan['chains'], 'chain')} of {counted(plan['draws'], 'draw')}: "
        f"{counted(steps, 'step')} in {seconds(spent)}",
        _quality(known),
        *(note for note in drawn.notes if note not in before),
        scores_text(scores) if scores else "No scores: the data set has no test set.",
        f"Kept in {drawn.folder}; for a report type: shoal report {quote(str(drawn.folder))}",
    ]
    value = {"folder": str(drawn.folder), "config": drawn.config, "scores": scores}
    value |= {"notes": drawn.notes, "seconds": spent, "steps": steps, "diagnostics": known}
    return Outcome("\n\n".join(filter(None, text)), value)


def _quality(known: Mapping[str, list[float]]) -> str:
    """What the sampler says of its chains: lowest, mean and highest of every number."""
    rows = [
        [name, *(number(x, 0.0005) for x in (min(each), sum(each) / len(each), max(each)))]
        for name, each in known.items()
    ]
    return table(rows, ["over chains", "lowest", "mean", "highest"]) if rows else ""

"""`shoal compress`: a run with fewer members, and what that costs."""

from argparse import Namespace
from pathlib import Path
from shlex import quote

from shoal.cli.outcome import Outcome, opened_for
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.compress import compress
from shoal.experiment.config import parse_value

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Write the smaller run, and print the change of NLL with its interval."""
    opened = opened_for("compress", options.run, options.model)
    set_threads(options.threads, opened.ensemble.weights, 1024)
    data = None if options.data is None else parse_value(options.data, "--data")
    folder = Path(options.out or f"{options.run.rstrip('/')}-{options.by}-{options.to}")
    done = compress(opened, options.to, by=options.by, data=data, out=folder)
    value = {
        "folder": str(folder),
        "members": list(done.chosen),
        "weights": None if done.weights is None else list(done.weights),
        "nll": done.nll,
        "before": done.before,
        "cost": done.cost._asdict(),
        "mutual_information": list(done.mutual_information),
        "numbers": list(done.numbers),
    }
    text = f"{done}\n\nKept in {folder}; to evaluate it type: shoal evaluate {quote(str(folder))}"
    return Outcome(text, value)

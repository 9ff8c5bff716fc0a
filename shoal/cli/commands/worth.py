"""`shoal worth`: what more members of a run would add, and what they cost."""

from argparse import Namespace

from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.worth import worth
from shoal.experiment.build import check_device
from shoal.training.folder.run import load

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Print expected scores by ensemble size, and the gains of more members."""
    check_device(options.device)
    opened = opened_for("worth", options.run, options.model)
    set_threads(options.threads, opened.ensemble.weights, 1024)
    data = evaluation_dataset(opened, options.run, options.data, "worth")
    beside = {folder: load(folder) for folder in options.beside}
    found = worth(opened, data, beside=beside, device=options.device)
    return Outcome(str(found), found.plain)

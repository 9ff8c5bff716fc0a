"""`shoal evaluate`: evaluate a run on its own or on another data set."""

from argparse import Namespace

from shoal.cli.outcome import Outcome, evaluation_dataset, opened_for, scores_text
from shoal.core.storage.files import write_json
from shoal.engine.resources.autotune import set_threads
from shoal.evaluation.evaluate import evaluate
from shoal.experiment.build import check_device
from shoal.training.folder.own_data import has_own_data

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Evaluate a run; its folder keeps scores on its own data, or on any if it cannot load them."""
    check_device(options.device)
    opened = opened_for("evaluate", options.run, options.model)
    set_threads(options.threads, opened.ensemble.weights, 1024)
    data = evaluation_dataset(opened, options.run, options.data, "evaluate")
    keep = options.data is None or has_own_data(opened.config)
    how = {"device": options.device, "keep": keep, "progress": not options.quiet}
    scores = evaluate(opened, data, **how).scores
    if options.out is not None:
        write_json(options.out, scores)
    where = options.out or (f"{opened.folder}/scores.json" if keep else None)
    kept = [] if where is None else [f"Kept in {where}"]
    return Outcome(
        "\n\n".join([f"{options.run} on {data.name}", scores_text(scores), *kept]), scores
    )

"""`shoal evaluate`: judge a run on its test data, or on others."""

from argparse import Namespace

from shoal.cli.outcome import Outcome, judged_data, opened_for, scores_text
from shoal.core.files import write_json
from shoal.engine.autotune import set_threads
from shoal.evaluation.evaluate import evaluate
from shoal.experiment.build import check_device
from shoal.training.own_data import has_own_data

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Scores; its folder keeps those on the run's own data, or on any where it can load none."""
    check_device(options.device)
    found = opened_for("evaluate", options.run)
    set_threads(options.threads, found.ensemble.weights, 1024)
    data = judged_data(found, options.run, options.data, "evaluate")
    keep = options.data is None or has_own_data(found.config)
    how = {"device": options.device, "keep": keep, "progress": not options.quiet}
    scores = evaluate(found, data, **how).scores
    if options.out is not None:
        write_json(options.out, scores)
    where = options.out or (f"{found.folder}/scores.json" if keep else None)
    kept = [] if where is None else [f"Kept in {where}"]
    return Outcome(
        "\n\n".join([f"{options.run} on {data.name}", scores_text(scores), *kept]), scores
    )

"""`shoal evaluate`: judge a run on its test data, or on others."""

from argparse import Namespace
from dataclasses import replace

from shoal.app.assess import assess
from shoal.app.build import check_device
from shoal.app.judged_data import judged_data
from shoal.app.outcome import Outcome
from shoal.app.show import scores_text
from shoal.app.threads import set_threads
from shoal.app.ticker import parts_ticker
from shoal.core.files import write_json
from shoal.training.run import load

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """Scores; those on the run's own data are kept in its folder."""
    check_device(options.device)
    found = load(options.run)
    set_threads(options.threads, found.ensemble.weights, 1024)
    if options.device is not None:
        found.ensemble.to(options.device)
    data = judged_data(found, options.run, options.data)
    if options.data is not None:
        found = replace(found, folder=None)
    with parts_ticker(data, options.quiet) as ticker:
        scores = assess(found, data, after=ticker.tick).scores
    if options.out is not None:
        write_json(options.out, scores)
    where = options.out or (f"{found.folder}/scores.json" if found.folder else None)
    kept = [] if where is None else [f"Kept in {where}"]
    return Outcome(
        "\n\n".join([f"{options.run} on {data.name}", scores_text(scores), *kept]), scores
    )

"""`shoal evaluate`: judge a run on its test data, or on others."""

from argparse import Namespace
from dataclasses import replace
from typing import Any

from shoal.app.assess import assess
from shoal.app.build import check_device
from shoal.app.outcome import Outcome
from shoal.app.overrides import parse_value
from shoal.app.show import scores_text
from shoal.app.threads import set_threads
from shoal.app.ticker import parts_ticker
from shoal.core.errors import ConfigError
from shoal.core.files import write_json
from shoal.data import Dataset
from shoal.data import load as load_data
from shoal.training.run import load

__all__ = ["own_data", "run"]


def run(options: Namespace) -> Outcome:
    """Scores; those on the run's own data are kept in its folder."""
    check_device(options.device)
    found = load(options.run)
    set_threads(options.threads, found.ensemble, 1024)
    if options.device is not None:
        found.ensemble.to(options.device)
    if options.data is None:
        data = own_data(found.config.get("data"), options.run)
    else:
        data = load_data(parse_value(options.data, "--data"))
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


def own_data(spec: Any, folder: str) -> Dataset:
    """The data that a run was trained on, loaded again."""
    try:
        return load_data(spec)
    except ConfigError as error:
        raise ConfigError(
            f"the data of {folder} cannot be loaded again: {error}; say which with --data"
        ) from error

"""`shoal data`: which data sets there are, and whether they can be had."""

from argparse import Namespace

from shoal.app.listing import entries, listing_text, plain
from shoal.app.outcome import Outcome, table
from shoal.app.overrides import parse_value
from shoal.core.errors import ConfigError
from shoal.data import load
from shoal.data.dataset import Dataset
from shoal.data.folder import folder
from shoal.data.lazy import sizes

__all__ = ["run"]


def run(options: Namespace) -> Outcome:
    """List the data sets, say where files are kept, or load one and describe it."""
    if options.action == "list":
        found = entries("datasets")
        return Outcome(listing_text(found), plain(found))
    if options.action == "path":
        return Outcome(str(folder()), {"path": str(folder())})
    if options.name is None:
        raise ConfigError("say which data set to get, as in: shoal data get digits")
    data = load(parse_value(options.name, "the data set"))
    return Outcome(_described(data), {"name": data.name, "spec": data.spec, "parts": _parts(data)})


def _parts(data: Dataset) -> dict[str, int]:
    test = {} if data.test is None else {"test": len(data.test)}
    return {"train": len(data.train), **test, **sizes(data.shifts), **sizes(data.ood)}


def _described(data: Dataset) -> str:
    shape = " x ".join(map(str, data.input_shape))
    what = f"{data.outputs} classes" if data.task == "classification" else "real targets"
    rows = [[name, f"{count:,}"] for name, count in _parts(data).items()]
    return (
        f"{data.name} is here, nothing had to be downloaded: inputs of {shape}, {what}\n\n"
        f"{table(rows, ['part', 'points'])}"
    )

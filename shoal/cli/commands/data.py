"""`shoal data`: list, download and locate data sets."""

from argparse import Namespace
from typing import Any

from shoal.cli.commands.list import ListedName, entries, listing_text
from shoal.cli.outcome import Outcome
from shoal.core.display.text import table
from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.data import load, registry
from shoal.data.catalogue import COLLECTIONS
from shoal.data.dataset import Dataset, sizes
from shoal.data.files.store import cache, folders, path_of, present
from shoal.experiment.config import parse_value

__all__ = ["run"]

_BUILT_IN = "built in"


def run(options: Namespace) -> Outcome:
    """List data sets, print the paths of their files, or download and describe them."""
    if options.action == "list":
        return _list()
    if options.action == "path":
        return _path(options.names)
    if not options.names:
        raise ConfigError("name a data set to get, such as: shoal data get digits")
    specs = [parse_value(name, "the data set") for name in options.names]
    described = [_got(load(spec)) for spec in specs]
    texts, values = zip(*described, strict=True)
    return Outcome("\n\n".join(texts), values[0] if len(values) == 1 else list(values))


def _list() -> Outcome:
    rows = [_known(listed) for listed in entries("datasets")]
    shown = [ListedName(row["name"], f"{row['summary']} ({_remark(row)})") for row in rows]
    return Outcome(listing_text(shown), rows)


def _known(listed: ListedName) -> dict[str, Any]:
    held = COLLECTIONS.get(listed.name)
    return {
        "name": listed.name,
        "summary": listed.summary,
        "bytes": 0 if held is None else held.download,
        "licence": None if held is None else held.licence,
        "state": _BUILT_IN if held is None else present(listed.name),
    }


def _remark(row: dict[str, Any]) -> str:
    if row["state"] == _BUILT_IN:
        return _BUILT_IN
    return f"{_size(row['bytes'])}, {row['state']}; licence: {row['licence']}"


def _size(count: int) -> str:
    return f"{count / 1e6:.1f} MB" if count < 1e8 else f"{count / 1e6:.0f} MB"


def _path(names: list[str]) -> Outcome:
    if not names:
        first = str(folders()[0])
        return Outcome(first, {"path": first, "cache": str(cache())})
    paths = {name: _files(name) for name in names}
    return Outcome("\n".join(path for listed in paths.values() for path in listed), paths)


def _files(name: str) -> list[str]:
    """Present or future paths of the files of a data set."""
    registry[name]
    if name not in COLLECTIONS:
        raise ConfigError(f"'{name}' has no files; {nearest(name, COLLECTIONS)}")
    held = COLLECTIONS[name]
    files = []
    for file in held.files:
        other = held.instead.get(file.path, file.path)
        files.append(str(path_of(other) or path_of(file.path) or cache() / file.path))
    return files


def _got(data: Dataset) -> tuple[str, dict[str, Any]]:
    return _described(data), {"name": data.name, "spec": data.spec, "parts": _split_sizes(data)}


def _split_sizes(data: Dataset) -> dict[str, int]:
    splits = {"train": data.train, "validation": data.validation, "test": data.test}
    known = {name: len(split) for name, split in splits.items() if split is not None}
    return known | sizes(data.shifts) | sizes(data.ood)


def _described(data: Dataset) -> str:
    shape = " x ".join(map(str, data.input_shape))
    what = f"{data.outputs} classes" if data.has_classes else "real targets"
    rows = [[name, f"{count:,}"] for name, count in _split_sizes(data).items()]
    return f"{data.name} is ready: inputs of {shape}, {what}\n\n{table(rows, ['split', 'points'])}"

"""A data set from its name or from a table of settings, which it then remembers."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.values import check_spec, check_value
from shoal.data.corruptions import with_corruptions
from shoal.data.dataset import Dataset
from shoal.data.outsiders import outsiders
from shoal.data.registry import registry

__all__ = ["load"]

_CORRUPTED = {
    "corruptions": str | tuple[str, ...],
    "severities": tuple[int, ...],
    "corruption_files": bool,
}


def load(spec: str | Mapping[str, Any]) -> Dataset:
    """The data set that a name or a table describes; its `spec` is the complete table.

    Every data set takes `ood`, the foreign data to judge by instead of its own: names of its own
    foreign sets, of other data sets, or files and folders; see `outsiders`.

    >>> load({"name": "toy-regression", "points": 10}).spec["noise_std"]
    0.25

    Args:
        spec: a name from `shoal list datasets`, or {"name": ..., settings}. Beside its own, every
            set of images has the settings `corruptions` ("all", "standard" or names from `shoal
            list corruptions`: corrupted copies of the test images become shifts), `severities` (of
            1 to 5) and `corruption_files` (true for the published files of CIFAR-10-C).
    """
    table, corrupted = _parted(spec)
    check_spec("data", table, registry)
    settings = inspect.signature(registry[table["name"]]).parameters
    ood = table.get("ood") if "ood" not in settings else None
    check_value("data.ood", ood, str | tuple[str, ...] | None)
    data = registry.make({k: v for k, v in table.items() if k != "ood" or k in settings})
    if ood is not None:
        chosen = outsiders(ood, data.input_shape, data.pixel_range, data.ood)
        data = replace(data, ood=chosen)
    defaults = {name: setting.default for name, setting in settings.items()}
    data = replace(data, spec={"name": table["name"], **defaults, **table, **corrupted})
    return _corrupted(data, corrupted, table.get("seed", 0)) if corrupted else data


def _parted(spec: Any) -> tuple[Any, dict[str, Any]]:
    """The settings of the data set itself, and those that any set of images has."""
    if not isinstance(spec, Mapping):
        return ({"name": spec} if isinstance(spec, str) else spec), {}
    corrupted = {key: spec[key] for key in _CORRUPTED if key in spec}
    for key, value in corrupted.items():
        check_value(f"data.{key}", value, _CORRUPTED[key])
    if corrupted and "corruptions" not in corrupted:
        raise ConfigError(
            f"data.{next(iter(corrupted))} needs corruptions; write corruptions = 'all' beside it"
        )
    return {key: value for key, value in spec.items() if key not in corrupted}, corrupted


def _corrupted(data: Dataset, keys: Mapping[str, Any], seed: int) -> Dataset:
    options = {"severities": keys["severities"]} if "severities" in keys else {}
    files = bool(keys.get("corruption_files", False))
    return with_corruptions(data, keys["corruptions"], files=files, seed=seed, **options)

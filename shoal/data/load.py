"""A data set from its name or from a table of settings, which it then remembers."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.values import check_spec, check_value
from shoal.data.dataset import Dataset
from shoal.data.outsiders import outsiders
from shoal.data.registry import registry

__all__ = ["load"]


def load(spec: str | Mapping[str, Any]) -> Dataset:
    """The data set that a name or a table describes; its `spec` is the complete table.

    Every data set takes `ood`, the foreign data to judge by instead of its own: names of its own
    foreign sets, of other data sets, or files and folders; see `outsiders`.

    >>> load({"name": "toy-regression", "points": 10}).spec["noise_std"]
    0.25

    Args:
        spec: a name from `shoal list datasets`, or {"name": ..., settings}.
    """
    check_spec("data", spec, registry)
    table: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    settings = inspect.signature(registry[table["name"]]).parameters
    ood = table.get("ood") if "ood" not in settings else None
    check_value("data.ood", ood, str | tuple[str, ...] | None)
    data = registry.make({k: v for k, v in table.items() if k != "ood" or k in settings})
    if ood is not None:
        chosen = outsiders(ood, data.input_shape, data.pixel_range, data.ood)
        data = replace(data, ood=chosen)
    defaults = {name: setting.default for name, setting in settings.items()}
    return replace(data, spec={"name": table["name"], **defaults, **table})

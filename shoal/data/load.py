"""A data set from its name or from a table of settings, which it then remembers."""

import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from shoal.core.values import check_spec
from shoal.data.dataset import Dataset
from shoal.data.registry import registry

__all__ = ["load"]


def load(spec: str | Mapping[str, Any]) -> Dataset:
    """The data set that a name or a table describes; its `spec` is the complete table.

    >>> load({"name": "toy-regression", "points": 10}).spec["noise_std"]
    0.25

    Args:
        spec: a name from `shoal list datasets`, or {"name": ..., settings}.
    """
    check_spec("data", spec, registry)
    table: dict[str, Any] = {"name": spec} if isinstance(spec, str) else dict(spec)
    data = registry.make(table)
    settings = inspect.signature(registry[table["name"]]).parameters
    defaults = {name: setting.default for name, setting in settings.items()}
    return replace(data, spec={"name": table["name"], **defaults, **table})

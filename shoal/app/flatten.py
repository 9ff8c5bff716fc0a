"""Nested settings as a flat table of words."""

from collections.abc import Mapping
from typing import Any

__all__ = ["flat", "plain"]


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings that are set; a single architecture without its place in the list.

    >>> plain({"clip": None, "model": [{"name": "mlp", "members": 5}]})
    {'model': {'name': 'mlp'}}
    >>> plain({"model": [{"custom": "net", "members": 5}], "data": {"custom": "own data"}})
    {'model': 'own net', 'data': 'own data'}
    """
    kept = {key: value for key, value in config.items() if value is not None}
    models = kept.get("model")
    if isinstance(models, list) and len(models) == 1 and isinstance(models[0], Mapping):
        kept["model"] = {key: value for key, value in models[0].items() if key != "members"}
    return {key: _own(value) for key, value in kept.items()}


def _own(value: Any) -> Any:
    """What was the user's own, as one word: its name is all that a config holds of it."""
    own = isinstance(value, Mapping) and "custom" in value
    name = str(value["custom"]) if own else ""
    return (name if name.startswith("own ") else f"own {name}") if own else value


def flat(table: Any, prefix: str = "") -> dict[str, str]:
    """A nested table as one of dotted keys and words.

    >>> flat({"prior": {"name": "gaussian", "std": 1.0}, "hidden": [32, 32], "on": True})
    {'prior.name': 'gaussian', 'prior.std': '1', 'hidden': '32, 32', 'on': 'yes'}
    """
    if isinstance(table, Mapping):
        found: dict[str, str] = {}
        for key, value in table.items():
            found |= flat(value, f"{prefix}{key}.")
        return found
    name = prefix.removesuffix(".")
    if isinstance(table, list | tuple):
        if any(isinstance(value, Mapping | list | tuple) for value in table):
            return flat({str(index): value for index, value in enumerate(table)}, prefix)
        return {name: ", ".join(map(_word, table))}
    return {name: _word(table)}


def _word(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return repr(value).removesuffix(".0")
    return "none" if value is None else str(value)

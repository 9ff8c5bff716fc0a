"""Changes to a config that are typed as key=value."""

import tomllib
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.toml import MAX_DEPTH, parse_toml
from shoal.training.options import EXCLUDES

__all__ = ["apply_override", "parse_value"]

_OPENING = ("[", "{", '"', "'")


def apply_override(
    table: Mapping[str, Any], override: str, defaults: Mapping[str, Any]
) -> dict[str, Any]:
    """The table with one key changed.

    A dotted key reaches into a table, and makes one of a bare name on the way: `prior.std=2` turns
    "gaussian" into {"name": "gaussian", "std": 2}. The value `none` takes the key out.

    >>> apply_override({"prior": "gaussian"}, "prior.std=2", {})
    {'prior': {'name': 'gaussian', 'std': 2}}

    Args:
        table: what is changed; it stays as it is.
        override: "key=value".
        defaults: the names that hold where the table has none; also the keys there are.
    """
    key, equals, text = override.partition("=")
    path = [part.strip() for part in key.split(".")]
    if not equals or not all(path) or len(path) > MAX_DEPTH:
        raise ConfigError(f"a change is typed as key=value, as in lr=0.01, not as {override!r}")
    if defaults and path[0] not in defaults:
        raise ConfigError(f"there is no key {path[0]!r} in a config; {nearest(path[0], defaults)}")
    changed = dict(table)
    if len(path) == 1:
        changed.pop(EXCLUDES.get(key, key), None)
    elif path[0] not in changed and isinstance(defaults.get(path[0]), str):
        changed[path[0]] = defaults[path[0]]
    return _changed(changed, path, parse_value(text.strip(), key), key)


def parse_value(text: str, key: str) -> Any:
    """A TOML value; a bare word is text, and `none` is None.

    >>> parse_value("[50, 50]", "hidden"), parse_value("f-kde", "method"), parse_value(".5", "lr")
    ([50, 50], 'f-kde', 0.5)
    """
    if text == "none":
        return None
    if text.startswith(_OPENING):
        found = parse_toml(f"value = {text}", f"the value of {key}")
        if found.keys() != {"value"}:
            raise ConfigError(f"the value of {key} is not one TOML value")
        return found["value"]
    try:
        found = tomllib.loads(f"value = {text}")
    except ValueError:
        found = {}
    return found["value"] if found.keys() == {"value"} else _number_or_word(text)


def _number_or_word(text: str) -> float | str:
    """TOML wants digits on both sides of the point; people do not."""
    if text[:1] in set("0123456789+-."):
        try:
            return float(text)
        except ValueError:
            pass
    return text


def _changed(table: dict[str, Any], path: list[str], value: Any, key: str) -> dict[str, Any]:
    first, *rest = path
    if not rest:
        new = {name: entry for name, entry in table.items() if name != first}
        return new if value is None else new | {first: value}
    inner = table.get(first, {})
    if isinstance(inner, list):
        if len(inner) != 1 or not isinstance(inner[0], dict):
            raise ConfigError(f"{key} cannot be changed in a list of {len(inner)}; edit the file")
        return table | {first: [_changed(inner[0], rest, value, key)]}
    if isinstance(inner, str):
        inner = {"name": inner}
    elif first == "adversarial" and isinstance(inner, int | float):
        inner = {"epsilon": inner}
    if not isinstance(inner, dict):
        raise ConfigError(f"{key} cannot be set, since {first} is {inner!r} and not a table")
    return table | {first: _changed(inner, rest, value, key)}

"""Writing TOML; the standard library only reads it."""

import json
from collections.abc import Mapping
from typing import Any

__all__ = ["to_toml"]


def to_toml(table: Mapping[str, Any]) -> str:
    """The text of a table; None is left out, and tables within it are written in line.

    >>> print(to_toml({"lr": 0.001, "prior": {"name": "gaussian", "std": 1.0}}), end="")
    lr = 0.001
    prior = {name = "gaussian", std = 1.0}
    """
    lines = [f"{_key(key)} = {_value(v)}\n" for key, v in table.items() if v is not None]
    return "".join(lines)


def _key(key: str) -> str:
    plain = key and all(c.isascii() and (c.isalnum() or c in "-_") for c in key)
    return key if plain else json.dumps(key)


def _value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(float(value))
    if isinstance(value, Mapping):
        inner = [f"{_key(key)} = {_value(v)}" for key, v in value.items() if v is not None]
        return "{" + ", ".join(inner) + "}"
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(_value(v) for v in value) + "]"
    return _string(str(value))


def _string(text: str) -> str:
    # JSON's escapes are TOML's, except that TOML also wants the delete character escaped.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")

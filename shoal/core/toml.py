"""TOML: written, which the standard library does not do, and read when it may be anything."""

import json
import tomllib
from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.strict_json import deeper_than

__all__ = ["MAX_BYTES", "MAX_DEPTH", "parse_toml", "to_toml"]

MAX_BYTES = 1 << 16
"""No config is larger."""

MAX_DEPTH = 12
"""Levels of lists and tables in a config."""

_MAX_DOTS = 500


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


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table of a text; `where` it came from is named when it is not sound.

    >>> parse_toml("lr = ", "mine.toml")
    Traceback (most recent call last):
    shoal.core.errors.ConfigError: mine.toml is not sound TOML: Invalid value (at end of document)
    """
    # The parser takes quadratic time for a key of many parts, and recurses into lists and tables.
    if len(text) > MAX_BYTES or any(line.count(".") > _MAX_DOTS for line in text.splitlines()):
        raise ConfigError(f"{where} is too large or too deeply nested for a config")
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ConfigError(f"{where} is too deeply nested for a config") from None
    except ValueError as error:
        raise ConfigError(f"{where} is not sound TOML: {_one_line(error)}") from None
    if deeper_than(table, MAX_DEPTH):
        raise ConfigError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    return table


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).partition(";")[0]

"""Strict reading and writing of JSON and TOML: every value is restored exactly."""

import json
import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError

__all__ = [
    "MAX_BYTES",
    "MAX_DEPTH",
    "deeper_than",
    "parse_json",
    "parse_toml",
    "to_json",
    "to_toml",
]

_MAX_JSON_DEPTH = 64  # deeper values would exhaust the recursion limit


def to_json(value: object, indent: int | None = None) -> str:
    """The text of a value; order is kept, arrays become lists, non-finite numbers become null.

    >>> to_json({"loss": float("nan"), "shape": (2, 3)})
    '{"loss": null, "shape": [2, 3]}'
    """
    text = json.dumps(_plain(value), indent=indent, allow_nan=False)
    return text.replace("\x7f", "\\u007f")  # the only control character that JSON does not escape


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_text(key): _plain(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(inner) for inner in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    raise ConfigError(
        f"JSON has no {type(value).__name__}; give text, numbers, lists and tables of these"
    )


def _text(key: object) -> str:
    if not isinstance(key, str):
        raise ConfigError(f"JSON wants text as keys, not {key!r}; write str({key!r})")
    return key


def parse_json(text: str) -> Any:
    """The value of a JSON text; invalid or too deeply nested text is refused.

    Raises:
        ValueError: With a short description of the error.

    >>> parse_json('{"a": 1, "a": 2}')
    Traceback (most recent call last):
    ValueError: the key 'a' comes twice
    """
    try:
        value = json.loads(
            text, object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if deeper_than(value, _MAX_JSON_DEPTH):
        raise ValueError(f"it is nested more than {_MAX_JSON_DEPTH} levels deep")
    return value


def deeper_than(value: Any, limit: int) -> bool:
    """Whether lists and tables are nested more than `limit` levels deep.

    >>> deeper_than([[1]], 2), deeper_than([[1]], 1)
    (False, True)
    """
    level = [value] if isinstance(value, dict | list) else []
    for _ in range(limit):
        inner = (each.values() if isinstance(each, dict) else each for each in level)
        level = [each for values in inner for each in values if isinstance(each, dict | list)]
        if not level:
            return False
    return bool(level)


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    table: dict[str, Any] = {}
    for key, value in pairs:
        if key in table:
            raise ValueError(f"the key {key!r} comes twice")
        table[key] = value
    return table


def _refuse(literal: str) -> float:
    raise ValueError(f"{literal} is not a JSON number")


def _finite(literal: str) -> float:
    number = float(literal)
    return number if math.isfinite(number) else _refuse(literal)


MAX_BYTES = 1 << 16
"""Largest size of a config in bytes."""

MAX_DEPTH = 12
"""Largest depth of lists and tables in a config."""

_MAX_DOTS = 500


def to_toml(table: Mapping[str, Any]) -> str:
    """The text of a table; None is left out, and inner tables are inline tables.

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
    # JSON and TOML share their escapes, but TOML also escapes the delete character.
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")


def parse_toml(text: str, where: str) -> dict[str, Any]:
    """The table of a TOML text; `where` names its source in an error.

    >>> parse_toml("lr = ", "mine.toml")
    Traceback (most recent call last):
    shoal.core.errors.ConfigError: mine.toml is not sound TOML: Invalid value (at end of document)
    """
    # The parser takes quadratic time for keys with many dots, and recurses into lists and tables.
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

"""Reading TOML that may be anything: what cannot be a config is refused in one sentence."""

import tomllib
from typing import Any

from shoal.core.errors import ConfigError

__all__ = ["MAX_BYTES", "parse_toml"]

MAX_BYTES = 1 << 16
"""No config is larger."""

MAX_DEPTH = 12
_MAX_DOTS = 500


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
    if _deeper_than(table, MAX_DEPTH):
        raise ConfigError(f"{where} is nested more than {MAX_DEPTH} levels deep")
    return table


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).partition(";")[0]


def _deeper_than(table: dict[str, Any], limit: int) -> bool:
    level: list[Any] = [table]
    for _ in range(limit):
        inner = [v.values() if isinstance(v, dict) else v for v in level]
        level = [v for values in inner for v in values if isinstance(v, dict | list)]
    return bool(level)

"""JSON as the standard has it: no NaN, no key twice, nothing that comes back as something else."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shoal.core.errors import ConfigError

__all__ = ["deeper_than", "parse_json", "to_json"]

_MAX_JSON_DEPTH = 64  # deeper ones would exhaust whoever walks through them


def to_json(value: object, indent: int | None = None) -> str:
    """The text of a value; order is kept, arrays become lists, non-finite numbers become null.

    >>> to_json({"loss": float("nan"), "shape": (2, 3)})
    '{"loss": null, "shape": [2, 3]}'
    """
    text = json.dumps(_plain(value), indent=indent, allow_nan=False)
    return text.replace("\x7f", "\\u007f")  # the one control character that JSON leaves as it is


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, str | int):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_text(key): _plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
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
    """The value of a text; what the standard does not allow, or is nested too deeply, is refused.

    Raises:
        ValueError: With half a sentence that says what is wrong.

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

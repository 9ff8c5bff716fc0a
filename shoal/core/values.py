"""Checks of values from files and command lines against type annotations."""

import dataclasses
import math
import numbers
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry, nearest

__all__ = [
    "LARGEST",
    "check_settings",
    "check_spec",
    "check_value",
    "describe_value",
    "fits",
    "wanted",
]

LARGEST = 1e15
"""Size of real numbers whose squares and their inverses are single precision numbers too."""

_WHOLE = 2**63
_WORDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "text",
    dict: "a table",
}


def fits(value: object, annotation: Any) -> bool:
    """Whether a plain value fits `annotation`.

    Whole numbers pass for real numbers, lists for tuples. Real numbers must be zero or between
    1e-15 and 1e15 in size. An object fits a protocol if it has the protocol's own attributes.

    >>> fits(1, float), fits(True, int), fits([1, 2], tuple[int, ...]), fits(None, int | None)
    (True, False, True, True)
    """
    origin = typing.get_origin(annotation)
    if origin in (typing.Union, types.UnionType):
        return any(fits(value, option) for option in typing.get_args(annotation))
    if origin is typing.Literal:
        return isinstance(value, str | int) and value in typing.get_args(annotation)
    if origin in (list, tuple):
        return isinstance(value, list | tuple) and _elements_fit(value, annotation)
    if origin is not None:
        annotation = origin
    if annotation in (None, type(None)):
        return value is None
    if annotation in (dict, Mapping):
        return isinstance(value, Mapping)
    if annotation in (int, float):
        return _is_number(value, annotation)
    if not isinstance(annotation, type) or annotation is Any:
        return True
    if not getattr(annotation, "_is_protocol", False):
        return isinstance(value, annotation)
    own = [name for name in vars(annotation) if name == "__call__" or not name.startswith("_")]
    return isinstance(value, str | Mapping) or all(hasattr(value, name) for name in own)


def _elements_fit(values: list | tuple, annotation: Any) -> bool:
    inner = typing.get_args(annotation)
    if len(inner) == 2 and inner[1] is Ellipsis or typing.get_origin(annotation) is list:
        return all(fits(value, inner[0]) for value in values)
    return len(inner) == len(values) and all(map(fits, values, inner))


def _is_number(value: Any, kind: type) -> bool:
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        return False
    if kind is int:
        return isinstance(value, numbers.Integral) and abs(int(value)) < _WHOLE
    size: Any = abs(value)
    return size == 0 or 1 / LARGEST <= size <= LARGEST


def wanted(annotation: Any) -> str:
    """The annotation in words.

    >>> wanted(tuple[int, ...] | None), wanted(str | dict)
    ('a list of whole numbers', 'a name or a table')
    """
    phrases = " or ".join(dict.fromkeys(_phrases(annotation)))
    return phrases.replace("text or a table", "a name or a table")


def _phrases(annotation: Any) -> Iterator[str]:
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin in (typing.Union, types.UnionType):
        for option in inner:
            if option is not type(None):
                yield from _phrases(option)
    elif origin is typing.Literal:
        yield from map(repr, inner)
    elif origin in (list, tuple):
        word = _WORDS.get(typing.get_origin(inner[0]) or inner[0], "values")
        count = "" if origin is list or Ellipsis in inner else f"{len(inner)} "
        yield f"a list of {count}{word.removeprefix('a ')}{'s' if word.startswith('a ') else ''}"
    else:
        plain = dict if origin is not None and issubclass(origin, Mapping) else annotation
        yield _WORDS.get(plain) or f"a {getattr(plain, '__name__', 'value')}"


def describe_value(value: Any) -> str:
    """A value as words for a sentence.

    >>> describe_value("1e-3"), describe_value(True), describe_value({"a": 1}), describe_value(2.5)
    ("the text '1e-3'", 'true', 'a table', '2.5')
    """
    if isinstance(value, str):
        return f"the text {_short(repr(value))}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Mapping):
        return "a table"
    if isinstance(value, int) and abs(value) >= _WHOLE:
        return "one of more than 18 digits"
    if isinstance(value, list | tuple):
        return _short(f"the list {list(value)}")
    if shape := getattr(value, "shape", None):
        return f"an array of shape {tuple(shape)}"
    text = str(value)
    return _short(f"the object {type(value).__name__}" if text.startswith("<") else text)


def _short(text: str) -> str:
    text = " ".join(text.split())
    return text if len(text) <= 60 else f"{text[:57]}..."


def check_value(key: str, value: object, annotation: Any) -> None:
    """Refuse a value that does not fit the annotation."""
    if not fits(value, annotation):
        words = f"{key} must be {wanted(annotation)}, not {describe_value(value)}"
        raise ConfigError(words + _advice(value))


def _advice(value: object) -> str:
    if _is_quoted_number(value):
        return f"; write {value} without quotes"
    beyond = isinstance(value, float) and math.isfinite(value) and not fits(value, float)
    return "; its size must lie between 1e-15 and 1e15" if beyond else ""


def _is_quoted_number(value: object) -> bool:
    try:
        return isinstance(value, str) and math.isfinite(float(value))
    except ValueError:
        return False


def check_spec(key: str, spec: object, registry: Registry) -> None:
    """Refuse a value that `registry.make` cannot use: neither a name nor a table."""
    if isinstance(spec, str):
        registry[spec]
        return
    if not isinstance(spec, Mapping):
        raise ConfigError(
            f"{key} must be a name or a table with a name, not {describe_value(spec)}"
        )
    name = spec.get("name")
    if name is None:
        raise ConfigError(f"{key} needs a name; {nearest('', registry)}")
    check_value(f"{key}.name", name, str)
    check_settings(key, registry[name], spec)


def check_settings(key: str, target: Any, settings: Mapping[str, Any]) -> None:
    """Refuse settings of a class or function that do not fit its annotations."""
    registries = {}
    if dataclasses.is_dataclass(target):
        registries = {f.name: f.metadata.get("registry") for f in dataclasses.fields(target)}
    hints = typing.get_type_hints(target)
    for setting, value in settings.items():
        inner = registries.get(setting)
        if inner is not None:
            check_spec(f"{key}.{setting}", value, inner)
        elif setting in hints and setting != "name":
            check_value(f"{key}.{setting}", value, hints[setting])

"""Checks of arguments: each returns the valid value, or raises one sentence that refuses it.

A check takes the name of an argument and its value. Options of `fit` have theirs in their table,
public functions have theirs in `@checked`, and classes have theirs in `check_fields`:

    @checked(level=share, score=one_of("cqr", "scaled", "absolute"))
    def conformal_intervals(pred, y, level=0.9, *, score="cqr"): ...

An argument annotated as bool, int, float or str has a check without further words. This file does
not load torch, so help and error messages appear at once.
"""

import functools
import inspect
import math
import operator
import types
import typing
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

from shoal.core.errors import ConfigError, named_line
from shoal.core.storage.disk import checked_path
from shoal.core.values import LARGEST, describe_value

__all__ = [
    "Check",
    "anything",
    "check_fields",
    "checked",
    "device",
    "factor_or_none",
    "flag",
    "from_user",
    "instance_of",
    "is_truth",
    "items",
    "list_of",
    "not_negative",
    "number",
    "one_of",
    "one_or_more",
    "path",
    "positive",
    "seconds",
    "share",
    "text",
    "whole",
    "whole_64_bits",
    "whole_from",
    "whole_or_zero",
]

Check = Callable[[str, Any], Any]
"""Takes an argument's name and a value, returns the valid value or raises `ConfigError`."""

P = ParamSpec("P")
R = TypeVar("R")


def checked(**checks: Check) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorator that checks arguments by name before a function runs.

    A value that is the default is not checked. Plain types of the signature have usual checks.

    >>> @checked(level=share)
    ... def interval(level: float = 0.9, progress: bool = False) -> float:
    ...     return level
    >>> interval(0.5)
    0.5
    >>> interval(2)
    Traceback (most recent call last):
    shoal.core.errors.ConfigError: level must be between 0 and 1, such as 0.9, not 2
    """

    def decorate(called: Callable[P, R]) -> Callable[P, R]:
        parameters = inspect.signature(called).parameters
        if unknown := checks.keys() - parameters.keys():
            raise TypeError(f"{called.__name__} has no argument {', '.join(unknown)}")
        usual = {name: _usual(each.annotation) for name, each in parameters.items()}
        known = {name: check for name, check in {**usual, **checks}.items() if check is not None}
        defaults = {name: each.default for name, each in parameters.items()}

        def valid(name: str, value: Any) -> Any:
            check = known.get(name)
            return value if check is None or value is defaults[name] else check(name, value)

        @functools.wraps(called)
        def call(*positional: P.args, **named: P.kwargs) -> R:
            beyond = positional[len(defaults) :]
            ordered = [valid(name, v) for name, v in zip(defaults, positional, strict=False)]
            return called(*ordered, *beyond, **{n: valid(n, v) for n, v in named.items()})  # type: ignore[misc]

        return call

    return decorate


def check_fields(instance: Any, **checks: Check) -> None:
    """Check the fields of a dataclass in its `__post_init__`; defaults are not checked."""
    for name, check in checks.items():
        value = getattr(instance, name)
        if value is not getattr(type(instance), name, check_fields):
            object.__setattr__(instance, name, check(name, value))


def _usual(annotation: Any) -> Check | None:
    """The check of a plain type, or of a plain type that may be None."""
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(annotation) if option is not type(None)]
        annotation = options[0] if len(options) == 1 else None
    plain: dict[Any, Check] = {bool: flag, int: whole_64_bits, float: number, str: text}
    return plain.get(annotation)


# Numbers.


def flag(name: str, value: Any) -> bool:
    """True or false, of whatever library it came from."""
    if is_truth(value):
        return bool(value)
    raise ConfigError(f"{name} must be True or False, not {describe_value(value)}")


def number(name: str, value: Any) -> float:
    """A finite float, from a number of any library."""
    amount = _as_float(value)
    if not math.isfinite(amount):
        raise ConfigError(f"{name} must be a finite number, not {describe_value(value)}")
    if abs(amount) > LARGEST:
        raise ConfigError(f"{name} must be a number up to {LARGEST:g} in size, not {amount:g}")
    return amount


def positive(name: str, value: Any) -> float:
    """A number above zero, and not so small that its inverse overflows."""
    if (amount := number(name, value)) >= 1 / LARGEST:
        return amount
    least = "positive" if amount <= 0 else f"{1 / LARGEST:g} or more"
    raise ConfigError(f"{name} must be {least}, not {describe_value(value)}")


def not_negative(name: str, value: Any) -> float:
    """A number from zero on."""
    if (amount := number(name, value)) >= 0:
        return amount
    raise ConfigError(f"{name} must be zero or positive, not {describe_value(value)}")


def share(name: str, value: Any) -> float:
    """A number between 0 and 1, without the ends."""
    if 0 < (amount := _as_float(value)) < 1:
        return amount
    raise ConfigError(f"{name} must be between 0 and 1, such as 0.9, not {describe_value(value)}")


def factor_or_none(name: str, value: Any) -> float | None:
    """A number above zero; zero means None."""
    return not_negative(name, value) or None


def seconds(name: str, value: Any) -> float:
    """A time from zero on, which may be infinite."""
    if (amount := _as_float(value)) >= 0:
        return amount
    raise ConfigError(f"{name} must be a number of seconds from 0 on, not {describe_value(value)}")


def whole(name: str, value: Any) -> int:
    """A plain positive whole number."""
    return _index(name, value, 1, "from 1 on")


def whole_or_zero(name: str, value: Any) -> int:
    """A plain whole number from zero on."""
    return _index(name, value, 0, "from 0 on")


def whole_64_bits(name: str, value: Any) -> int:
    """A whole number that a generator can start from."""
    return _index(name, value, -(2**63), "that fits in 64 bits")


def whole_from(least: int, most: int | None = None) -> Check:
    """The check of a whole number from `least` on, or up to `most`."""
    words = f"from {least} on" if most is None else f"from {least} to {most}"

    def check(name: str, value: Any) -> int:
        """The value as a whole number of the range."""
        return _index(name, value, least, words, most)

    return check


def is_truth(value: Any) -> bool:
    """Whether a value is true or false, of Python or of numpy."""
    return type(value).__name__ in ("bool", "bool_")


def _as_float(value: Any) -> float:
    """The number, from any library; NaN for everything else."""
    if is_truth(value) or isinstance(value, str | bytes) or getattr(value, "ndim", 0):
        return math.nan
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        return float(value)
    return math.nan


def _index(name: str, value: Any, least: int, words: str, most: int | None = None) -> int:
    with suppress(TypeError):
        single = not getattr(value, "ndim", 0) and not is_truth(value)
        if single and least <= (count := operator.index(value)) <= (most or 2**63 - 1):
            return count
    raise ConfigError(f"{name} must be a whole number {words}, not {describe_value(value)}")


# Words, lists and files.


def text(name: str, value: Any) -> str:
    """Text."""
    if isinstance(value, str):
        return value
    raise ConfigError(f"{name} must be text, not {describe_value(value)}")


def one_of(*choices: str) -> Check:
    """The check of an argument that is one of a few words."""

    def check(name: str, value: Any) -> str:
        if isinstance(value, str) and value in choices:
            return value
        words = " or ".join(map(repr, choices))
        raise ConfigError(f"{name} must be {words}, not {describe_value(value)}")

    return check


def items(name: str, value: Any) -> list[Any]:
    """The entries of a list or another iterable, but not the letters of a text."""
    if not isinstance(value, str | bytes | Mapping):
        with suppress(TypeError):
            return list(value)
    raise ConfigError(f"{name} must be a list, not {describe_value(value)}; type {name}=[...]")


def list_of(check: Check) -> Check:
    """The check of a list, each entry with a check of its own."""
    return lambda name, value: [check(f"an entry of {name}", each) for each in items(name, value)]


def one_or_more(check: Check) -> Check:
    """The check of one value, or of a list of at least one."""

    def each(name: str, value: Any) -> Any:
        several = hasattr(value, "__iter__") and not isinstance(value, str | bytes)
        if not several or getattr(value, "ndim", 1) == 0:
            return check(name, value)
        if values := list_of(check)(name, value):
            return values
        raise ConfigError(f"{name} must be one value or several, not an empty list")

    return each


def path(name: str, value: Any) -> Path:
    """A path that a file or folder can have."""
    return checked_path(value, name)


# Objects.


def anything(name: str, value: Any) -> Any:
    """No check, in place of the usual one."""
    return value


def device(name: str, value: Any) -> Any:
    """A device that this machine has."""
    from shoal.core.devices import usable_device

    return usable_device(value)


def instance_of(kind: Any, words: str) -> Check:
    """The check of an object of a class, of one of several, or of anything that can be called.

    Args:
        kind: a class, a tuple of classes, or `Callable`.
        words: what is wanted and what to type.
    """

    def check(name: str, value: Any) -> Any:
        """The value, if it is of the class."""
        if isinstance(value, kind):
            return value
        raise ConfigError(f"{name} must be {words}, not {describe_value(value)}")

    return check


def from_user(name: str, words: str, called: Callable[..., R], *arguments: Any) -> R:
    """The result of a user's function; a sentence if it does not take these arguments."""
    try:
        return called(*arguments)
    except (TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ConfigError(f"{name} must be {words}; it raised {named_line(error)}") from error

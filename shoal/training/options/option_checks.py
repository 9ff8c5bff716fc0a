"""Checks of the values that an option takes: the valid value, or one sentence that refuses it."""

import math
import operator
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.values import LARGEST, describe_value

AUTO = "auto"
"""The value of an option that a search chooses."""

__all__ = [
    "AUTO",
    "factor_or_none",
    "flag",
    "memory_size",
    "not_negative",
    "number",
    "number_or_auto",
    "output_name",
    "place",
    "placing",
    "positive",
    "process_grid",
    "seconds",
    "share_or_data",
    "text",
    "which_kept",
    "whole",
    "whole_64_bits",
    "whole_or_zero",
]


def flag(name: str, value: Any) -> bool:
    """True or false, of whatever library it came from."""
    if _is_truth(value):
        return bool(value)
    raise ConfigError(f"{name} must be True or False, not {describe_value(value)}")


def number(name: str, value: Any) -> float:
    """A finite float, from a number of any library."""
    found = math.nan
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        found = math.nan if _is_truth(value) or isinstance(value, str | bytes) else float(value)
    if not math.isfinite(found):
        raise ConfigError(f"{name} must be a finite number, not {describe_value(value)}")
    if abs(found) > LARGEST:
        raise ConfigError(f"{name} must be a number up to {LARGEST:g} in size, not {found:g}")
    return found


def number_or_auto(name: str, value: Any) -> float | str:
    """A finite float, or "auto"."""
    if isinstance(value, str):
        if value == AUTO:
            return value
        raise ConfigError(f"{name} must be a finite number or 'auto', not {describe_value(value)}")
    return number(name, value)


def positive(name: str, value: Any) -> float:
    """A number above zero."""
    if (found := number(name, value)) > 0:
        return found
    raise ConfigError(f"{name} must be positive, not {describe_value(value)}")


def not_negative(name: str, value: Any) -> float:
    """A number from zero on."""
    if (found := number(name, value)) >= 0:
        return found
    raise ConfigError(f"{name} must be zero or positive, not {describe_value(value)}")


def factor_or_none(name: str, value: Any) -> float | None:
    """A number above zero; zero means None."""
    return not_negative(name, value) or None


def seconds(name: str, value: Any) -> float:
    """A time from zero on, which may be infinite."""
    with suppress(TypeError, ValueError, RuntimeError, OverflowError):
        if not (_is_truth(value) or isinstance(value, str | bytes)) and float(value) >= 0:
            return float(value)
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


def text(name: str, value: Any) -> str:
    """The value as text."""
    return str(value)


def process_grid(name: str, value: Any) -> str:
    """Processes along members x along data, such as "2x2"."""
    if isinstance(value, str) and re.fullmatch(r"[1-9]\d{0,6}x[1-9]\d{0,6}", value):
        return value
    raise ConfigError(f'{name} must be members x data, such as "2x2", not {describe_value(value)}')


_UNITS = {
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", 1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", 1)},
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*([kmgt]i?b)", re.IGNORECASE)


def memory_size(name: str, value: Any) -> int | float:
    """Bytes, from a size such as "8GiB" or a whole number; or a share of the device up to 1.0.

    >>> memory_size("memory", "8GiB"), memory_size("memory", "800 MB"), memory_size("memory", 0.5)
    (8589934592, 800000000, 0.5)
    """
    typed = _SIZE.fullmatch(value.strip()) if isinstance(value, str) else None
    if typed is not None:
        amount = float(typed[1]) * _UNITS[typed[2].lower()]
        if 1 <= amount < 2**63:
            return int(amount)
    elif not isinstance(value, str):
        with suppress(ConfigError):
            return _index(name, value, 1, "")
        with suppress(ConfigError):
            if 0 < (amount := number(name, value)) <= 1:
                return amount
            if amount > 1 and amount.is_integer():
                return int(amount)
    raise ConfigError(
        f'{name} must be a size such as "8GiB" or "800MB", a number of bytes or a share of the '
        f"device such as 0.5, not {describe_value(value)}"
    )


def output_name(name: str, value: Any) -> str | int:
    """The name or the position of an output."""
    return value if isinstance(value, str) else whole_or_zero(name, value)


def place(name: str, value: Any) -> str:
    """Where members stay."""
    if value in ("host", "disk"):
        return value
    raise ConfigError(f"{name} must be 'host' or 'disk', not {describe_value(value)}")


def share_or_data(name: str, value: Any) -> Any:
    """A share of the training data between 0 and 1, or data."""
    if _is_data(value):
        return value
    with suppress(ConfigError):
        if 0 < (found := number(name, value)) < 1:
            return found
    raise ConfigError(
        f"{name} must be a share of the data such as 0.1, a pair (x, y), a Dataset or a loader, "
        f"not {describe_value(value)}"
    )


def _is_data(value: Any) -> bool:
    """Whether a value may be data; `fit` finds out whether it is."""
    if isinstance(value, Mapping):
        return bool(value) and "custom" not in value
    if isinstance(value, str | bytes) or getattr(value, "ndim", 1) == 0:
        return False
    if isinstance(value, list | tuple):
        return not all(isinstance(each, int | float) for each in value)
    return any(hasattr(value, sign) for sign in ("__iter__", "__getitem__", "__len__", "train"))


def which_kept(name: str, value: Any) -> str:
    """Which members a run ends with."""
    if isinstance(value, str) and value in ("best", "last"):
        return value
    raise ConfigError(f"{name} must be 'best' or 'last', not {describe_value(value)}")


def placing(name: str, value: Any) -> str:
    """How processes hold what members share."""
    if value in ("replicated", "sharded"):
        return value
    raise ConfigError(f"{name} must be 'replicated' or 'sharded', not {describe_value(value)}")


def _is_truth(value: Any) -> bool:
    return type(value).__name__ in ("bool", "bool_")  # Python's, or that of numpy


def _index(name: str, value: Any, least: int, words: str) -> int:
    with suppress(TypeError):
        if not _is_truth(value) and least <= (found := operator.index(value)) < 2**63:
            return found
    raise ConfigError(f"{name} must be a whole number {words}, not {describe_value(value)}")

"""Symbols, errors, registries, files, and arithmetic on trees stacked over members."""

from collections.abc import Callable
from typing import Any

__all__ = ["factories"]

factories: dict[str, Callable[..., Any]] = {}
"""Functions that a lower room calls and may not import, by what they make. `shoal` adds them."""

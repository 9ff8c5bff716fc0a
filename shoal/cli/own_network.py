"""The user's own networks: functions named on the command line as MODULE:FUNCTION.

Only what was typed is imported, never a name from a file.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from shoal.core.errors import ConfigError, named_line
from shoal.core.registry import nearest
from shoal.inference.members import Build

__all__ = ["network_functions"]


def network_functions(typed: Sequence[str]) -> list[Build]:
    """The functions that make the networks, one per architecture."""
    return [_function(text) for text in typed]


def _function(typed: str) -> Build:
    module, colon, name = typed.partition(":")
    module = module.removesuffix(".py").replace("/", ".")
    words = [*module.split("."), *name.split(".")]
    if not colon or not all(word.isidentifier() for word in words):
        raise ConfigError(
            f"--model must be MODULE:FUNCTION, such as mynet:build for the function build in "
            f"mynet.py, not {typed!r}"
        )
    target: Any = _imported(module)
    for word in name.split("."):
        if not hasattr(target, word):
            made = [known for known, value in vars(target).items() if callable(value)]
            raise ConfigError(f"{module} has no function {word!r}; {_near(word, made)}")
        target = getattr(target, word)
    if isinstance(target, nn.Module) or not callable(target):
        raise ConfigError(
            f"{typed} is a {type(target).__name__}; --model names a function or class that makes a "
            f"new network when it is called without arguments"
        )
    return _Called(target, typed)


class _Called:
    """A user's function, whose errors become one sentence."""

    def __init__(self, make: Any, typed: str) -> None:
        self._make, self._typed = make, typed
        self.__qualname__ = getattr(make, "__qualname__", typed)

    def __call__(self) -> nn.Module:
        try:
            return self._make()
        except (Exception, SystemExit) as error:
            raise ConfigError(f"{self._typed} failed: {named_line(error)}") from error


def _imported(name: str) -> ModuleType:
    file = Path.cwd().joinpath(*name.split("."))
    known = sys.modules.get(name)
    if known is not None and (own := _source(file)) is not None and own != _file_of(known):
        raise ConfigError(f"a module called '{name}' is already loaded; rename {own.name}")
    try:
        with _this_folder_first():
            return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise ConfigError(f"{name} cannot be imported: {named_line(error)}") from error
        here = [path.stem for path in Path.cwd().glob("*.py")]
        raise ConfigError(
            f"there is no module '{name}' in this folder; {_near(name, here)}"
        ) from None
    except (Exception, SystemExit) as error:
        raise ConfigError(f"{name} cannot be imported: {named_line(error)}") from error


def _source(path: Path) -> Path | None:
    files = path.with_name(f"{path.name}.py"), path / "__init__.py"
    return next((file.resolve() for file in files if file.is_file()), None)


def _file_of(module: ModuleType) -> Path | None:
    file = getattr(module, "__file__", None)
    return None if file is None else Path(file).resolve()


@contextmanager
def _this_folder_first() -> Iterator[None]:
    """The installed command does not search the current folder, as `python` does."""
    here = str(Path.cwd())
    sys.path.insert(0, here)
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(here)


def _near(word: str, names: list[str]) -> str:
    return nearest(word, names) if names else "it has none"

"""The scripts beside the package (docs, benchmarks) use names that the package has."""

import ast
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path

HOME = Path(__file__).parents[1]


def scripts():
    return [*HOME.glob("benchmarks/*.py"), *HOME.glob("docs/**/*.py")]


def imported(tree: ast.Module) -> Iterator[str]:
    """Every `from shoal.a import b`, as `shoal.a.b`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shoal":
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def called(tree: ast.Module) -> Iterator[str]:
    """Every call that is spelled out from the package, as `shoal.plots.png`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and re.fullmatch(r"shoal(\.\w+)+", ast.unparse(node.func)):
            yield ast.unparse(node.func)


def found(name: str) -> object | None:
    """What a dotted name stands for."""
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(importlib.import_module(module), attribute)
    except ImportError:
        return getattr(found(module), attribute, None)
    except AttributeError:
        return importlib.util.find_spec(name)  # modules of kernels need Triton to be imported


def test_every_import_and_call_of_a_script_is_there():
    assert scripts()
    for script in scripts():
        tree = ast.parse(script.read_text())
        missing = [name for name in imported(tree) if found(name) is None]
        missing += [name for name in called(tree) if not callable(found(name))]
        assert not missing, f"{script.relative_to(HOME)} uses {missing}"

"""The modules of a study in docs/results, for its tests."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

RESULTS = Path(__file__).parents[1] / "docs/results"


@contextmanager
def study_modules(study: str, *names: str) -> Iterator[dict[str, ModuleType]]:
    """The modules of a study by name; other studies may have files of the same names."""
    folder = str(RESULTS / study)
    sys.path.insert(0, folder)
    before = {name: sys.modules.pop(name, None) for name in names}
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(folder)
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module

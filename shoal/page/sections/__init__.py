"""The sections of the page, one question a file.

A new module in this folder that decorates a function with `@section(name, order)` is on the page:
`builders` finds it.
"""

import importlib
import pkgutil

from shoal.page.blocks import Builder, registry

__all__ = ["builders"]


def builders() -> dict[str, Builder]:
    """Every section by name, in the order of the story."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    found = {name: registry[name] for name in registry}
    return dict(sorted(found.items(), key=lambda pair: pair[1].order))

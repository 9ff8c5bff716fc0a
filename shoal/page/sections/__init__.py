"""The sections of the page, one or two questions per file.

`builders` finds every module in this folder. A function decorated with `@section(name, order)` is
on the page.
"""

import importlib
import pkgutil

from shoal.page.blocks import Builder, registry

__all__ = ["builders"]


def builders() -> dict[str, Builder]:
    """Every section by name, in the order of the page."""
    for module in pkgutil.iter_modules(__path__):
        importlib.import_module(f"{__name__}.{module.name}")
    sections = {name: registry[name] for name in registry}
    return dict(sorted(sections.items(), key=lambda pair: pair[1].order))

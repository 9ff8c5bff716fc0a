"""Optional libraries, imported where they are used."""

import importlib
from types import ModuleType

from shoal.core.errors import ConfigError

__all__ = ["require"]


def require(module: str, extra: str) -> ModuleType:
    """Import an optional library or say in one sentence how to get it.

    Any exception counts as absence: a half-installed library can raise RuntimeError on import.

    >>> require("math", extra="report").sqrt(4)
    2.0
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        raise ConfigError(
            f"this needs {module}, which does not import here ({error}); "
            f"type: pip install 'shoal[{extra}]'"
        ) from error

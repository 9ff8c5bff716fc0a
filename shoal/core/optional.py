"""Optional libraries, imported on use."""

import importlib
from types import ModuleType

from shoal.core.errors import ConfigError

__all__ = ["require"]


def require(module: str, extra: str | None = None) -> ModuleType:
    """Import an optional library, or raise an error with the command to install it.

    Any exception counts as absence: a half-installed library can raise RuntimeError on import.

    Args:
        module: name of the module.
        extra: which optional dependencies of Shoal have it; None for the library itself.

    >>> require("math", extra="report").sqrt(4)
    2.0
    """
    try:
        return importlib.import_module(module)
    except Exception as error:
        wanted = module if extra is None else f"'shoal[{extra}]'"
        raise ConfigError(
            f"this needs {module}, which cannot be imported ({error}); type: pip install {wanted}"
        ) from error

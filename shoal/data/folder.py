"""Where data files belong."""

import os
from pathlib import Path

__all__ = ["folder"]


def folder() -> Path:
    """$SHOAL_DATA, or a folder in the user's cache."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("SHOAL_DATA") or Path(cache) / "shoal" / "data")

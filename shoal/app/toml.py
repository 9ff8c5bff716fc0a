"""Reading TOML that may be anything; it is done in `shoal.core.toml`."""

from shoal.core.toml import MAX_BYTES, MAX_DEPTH, parse_toml

__all__ = ["MAX_BYTES", "MAX_DEPTH", "parse_toml"]

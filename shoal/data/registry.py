"""The names of the data sets."""

from shoal.core.registry import Registry

__all__ = ["registry"]

registry = Registry("dataset")

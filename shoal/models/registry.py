"""The names of the architectures."""

from shoal.core.registry import Registry

__all__ = ["registry"]

registry = Registry("model")

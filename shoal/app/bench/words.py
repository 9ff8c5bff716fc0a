"""Methods as they are typed: by name, with settings inside their spaces added to it."""

from shoal.core.errors import ConfigError
from shoal.interaction import methods
from shoal.interaction.methods import Method

__all__ = ["parse_method"]


def parse_method(word: str, legacy: bool = False) -> Method:
    """The method that a word stands for.

    >>> parse_method("forde+fraction=0.25").settings
    (('fraction', 0.25),)

    Args:
        word: a name, then `+setting=number` for each setting to change.
        legacy: as published.
    """
    name, *changes = word.split("+")
    return methods.changed(methods.get(name, legacy), dict(map(_change, changes)))


def _change(text: str) -> tuple[str, float]:
    setting, _, value = text.partition("=")
    try:
        return setting, float(value)
    except ValueError:
        raise ConfigError(
            f"a setting of a method is a name and a number, as in forde+fraction=0.25, not {text!r}"
        ) from None

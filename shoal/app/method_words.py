"""Methods as they are typed: by name, with settings inside their spaces added to it."""

from shoal.core.errors import ConfigError
from shoal.interaction import methods
from shoal.interaction.methods import Method

__all__ = ["parse_method", "parse_word"]


def parse_method(word: str, legacy: bool = False) -> Method:
    """The method that a word stands for.

    >>> parse_method("forde+fraction=0.25").settings
    (('fraction', 0.25),)

    Args:
        word: a name, then `+setting=number` for each setting to change.
        legacy: as published.
    """
    name, settings = parse_word(word)
    return methods.changed(methods.get(name, legacy), settings)


def parse_word(word: str) -> tuple[str, dict[str, float]]:
    """A name, and the settings that are added to it.

    >>> parse_word("forde-tuned+alpha=0.4")
    ('forde-tuned', {'alpha': 0.4})
    """
    name, *changes = word.split("+")
    return name, dict(map(_change, changes))


def _change(text: str) -> tuple[str, float]:
    setting, _, value = text.partition("=")
    try:
        return setting, float(value)
    except ValueError:
        raise ConfigError(
            f"a setting of a method is a name and a number, as in forde+fraction=0.25, not {text!r}"
        ) from None

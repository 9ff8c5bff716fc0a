"""Methods as they are typed: by name, with settings inside their spaces added to it."""

from collections.abc import Mapping
from typing import Any

from shoal.core.errors import ConfigError
from shoal.interaction import methods
from shoal.interaction.methods import Method

__all__ = ["Setting", "parse_method", "parse_word", "word_of"]

Setting = float | bool
_TRUTHS = {"true": True, "false": False}


def parse_method(word: str, legacy: bool = False) -> Method:
    """The method that a word stands for.

    >>> parse_method("forde+fraction=0.25").settings
    (('fraction', 0.25),)

    Args:
        word: a name, then `+setting=value` for each setting to change.
        legacy: as published.
    """
    name, settings = parse_word(word)
    return methods.changed(methods.get(name, legacy), settings)


def parse_word(word: str) -> tuple[str, dict[str, Setting]]:
    """A name, and the settings that are added to it.

    >>> parse_word("f-kde+probabilities=true")
    ('f-kde', {'probabilities': True})
    """
    name, *changes = word.split("+")
    return name, dict(map(_change, changes))


def word_of(name: str, settings: Mapping[str, Any]) -> str:
    """The word for a method with these settings.

    >>> word_of("forde", {"target": "logit", "fraction": 0.25})
    'forde+fraction=0.25+target=logit'
    """
    return "+".join([name, *(f"{key}={_typed(settings[key])}" for key in sorted(settings))])


def _typed(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f"{value:g}" if isinstance(value, float) else str(value)


def _change(text: str) -> tuple[str, Setting]:
    setting, _, value = text.partition("=")
    if value in _TRUTHS:
        return setting, _TRUTHS[value]
    try:
        return setting, float(value)
    except ValueError:
        raise ConfigError(
            f"a setting of a method is a name and a number, or true or false, as in "
            f"forde+fraction=0.25, not {text!r}"
        ) from None

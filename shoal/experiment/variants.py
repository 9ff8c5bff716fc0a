"""The methods of a grid, with optional strength, settings, and options of their runs."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.core.values import describe_value
from shoal.experiment.config import KEYS
from shoal.interaction import methods, points
from shoal.interaction.methods import METHODS, Method, changed, known
from shoal.interaction.spaces import InputGradients
from shoal.training.options.options import AUTO, DEFAULT_METHOD

__all__ = [
    "PUBLISHED",
    "Setting",
    "Variant",
    "options_of",
    "parse_method",
    "parse_strengths",
    "parse_variants",
    "parse_word",
    "swept",
    "usual_methods",
    "variant_of",
    "word_of",
]

Setting = float | bool | str

_TRUTHS = {"true": True, "false": False}

_FREE = {*KEYS} - {"data", "method", "strength", "legacy", "calibrated", "seed", "init_seed", "out"}
"""Keys of a config that a variant may change; all runs share the others, or a word says them."""


def parse_method(word: str, legacy: bool = False) -> Method:
    """The method of a word.

    >>> parse_method("forde+fraction=0.25").settings
    (('fraction', 0.25),)

    Args:
        word: a name, then `+setting=value` for each setting to change.
        legacy: the method as published.
    """
    name, settings = parse_word(word)
    return methods.changed(methods.get(name, legacy), settings)


def parse_word(word: str) -> tuple[str, dict[str, Setting]]:
    """The name and the settings of a word.

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
    if setting == "points":
        points.registry[value]
        return setting, value
    if value in _TRUTHS:
        return setting, _TRUTHS[value]
    try:
        return setting, float(value)
    except ValueError:
        raise ConfigError(
            f"a setting of a method is a name and a number, true or false, such as "
            f"forde+fraction=0.25, or points and their name, such as f-kde+points=mixup, "
            f"not {text!r}"
        ) from None


PUBLISHED = ("ensemble", "kde", "sge", "ssge", "svgd", "f-kde", "f-sge", "f-ssge", "f-svgd")
"""The methods of `all`: those that D'Angelo & Fortuin (2021) compare."""


@dataclass(frozen=True)
class Variant:
    """A method with optional strength and settings, and options of its runs.

    Attributes:
        method: name; "custom" for the repulsion that the config defines, "auto" for a search.
        strength: repulsion factor, or "auto"; None takes that of the config.
        settings: changed settings of its space, by name.
        options: keys of the config that its runs change, with their values as typed.
    """

    method: str
    strength: float | str | None = None
    settings: tuple[tuple[str, Setting], ...] = ()
    options: tuple[tuple[str, str], ...] = ()

    @property
    def label(self) -> str:
        """The word to type for the variant."""
        word = word_of(self.method, dict(self.settings) | dict(self.options))
        if self.strength is None or self.method == AUTO:
            return word
        return f"{word}:{_typed(self.strength)}"

    @property
    def spec(self) -> str | dict[str, Any]:
        """The value of `method` in a config."""
        return {"name": self.method, **dict(self.settings)} if self.settings else self.method

    @property
    def members(self) -> int | None:
        """The ensemble size, if the variant names one."""
        words = dict(self.options)
        return int(words["members"]) if "members" in words else None

    @property
    def repels(self) -> bool:
        """Whether the method has a repulsion."""
        known = METHODS.get(self.method)
        return known is None or known.repulsion is not None

    @property
    def swept(self) -> bool:
        """Whether `--strengths` apply: the method repels, and its strength is open."""
        return self.repels and self.strength is None and self.method != AUTO


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Methods separated by commas, each with optional settings and strength; or `all`.

    >>> [(v.method, v.strength, v.settings) for v in parse_variants("kde:300,forde+fraction=0.5")]
    [('kde', 300.0, ()), ('forde', None, (('fraction', 0.5),))]
    >>> [(v.method, v.strength) for v in parse_variants("auto,kde:auto")]
    [('auto', None), ('kde', 'auto')]
    >>> parse_variants("ensemble+batches=own+members=11")[0].options
    (('batches', 'own'), ('members', '11'))
    """
    if text == "all":
        return tuple(map(Variant, PUBLISHED))
    variants = [_variant(word.strip()) for word in text.split(",") if word.strip()]
    if not variants:
        raise ConfigError("name the methods to compare, such as --methods ensemble,kde, or 'all'")
    return tuple(dict.fromkeys(variants))


def usual_methods(method: Any) -> str:
    """What a config is compared with if no methods are named.

    The plain ensemble stands beside the config's method, or beside "auto" if that is plain too.

    >>> usual_methods("kde"), usual_methods("ensemble")
    ('ensemble,kde', 'ensemble,auto')
    """
    label = variant_of(method).label
    return f"{DEFAULT_METHOD},{AUTO if label == DEFAULT_METHOD else label}"


def variant_of(method: Any, strength: float | str | None = None) -> Variant:
    """The variant of a config's method; "custom" if no word describes it.

    >>> variant_of({"name": "forde", "fraction": 0.25}).label
    'forde+fraction=0.25'
    >>> variant_of({"name": "f-kde", "points": {"name": "mixup", "alpha": 1.0}}).label
    'f-kde+points=mixup'
    """
    if isinstance(method, str):
        return Variant(method, strength)
    settings = {key: value for key, value in dict(method or {}).items() if key != "name"}
    if "points" in settings:
        settings["points"] = _usual(settings["points"])
    if settings.get("coupled") is InputGradients.coupled:  # a run stores it, nobody types it
        del settings["coupled"]
    words = all(
        isinstance(value, str if key == "points" else float | bool)
        for key, value in settings.items()
    )
    if not words or not known(method.get("name")):
        return Variant("custom", strength)
    try:
        changed(METHODS[method["name"]], settings)
    except ConfigError:  # a field of the repulsion, not a setting of its space
        return Variant("custom", strength)
    return Variant(method["name"], strength, tuple(sorted(settings.items())))


def _usual(spec: Any) -> Any:
    """The name of points whose other settings are the usual ones; any other value unchanged."""
    if not isinstance(spec, Mapping) or spec.get("name") not in points.registry:
        return spec
    made = points.registry.make(dict(spec))
    return spec["name"] if made == points.registry.make(spec["name"]) else spec


def _variant(word: str) -> Variant:
    method, colon, strength = word.partition(":")
    of_method = [word for word in method.split("+") if not _is_option(word)]
    name, settings = parse_word("+".join(of_method))
    options = tuple(sorted(_option(word) for word in method.split("+") if _is_option(word)))
    if name == AUTO:
        if settings or colon:
            raise ConfigError(f"'auto' takes no settings and no strength, and {word!r} came")
        return Variant(AUTO, options=options)
    if name not in METHODS and name != "custom":
        raise ConfigError(f"there is no method called {name!r}; {nearest(name, METHODS)}")
    if settings and name == "custom":
        raise ConfigError("'custom' takes no settings here; change them in the config")
    if settings:
        changed(METHODS[name], settings)
    variant = Variant(name, settings=tuple(sorted(settings.items())), options=options)
    if not colon:
        return variant
    if strength == AUTO:
        return replace(variant, strength=AUTO)
    try:
        return replace(variant, strength=float(strength))
    except ValueError:
        raise ConfigError(
            f"a strength is a number, such as {name}:300, or 'auto', not {strength!r}"
        ) from None


def options_of(folder: str) -> tuple[tuple[str, str], ...]:
    """The options in the name of a run's folder, see `GridPoint.name`.

    >>> options_of("kde+batches=own+lr=0.1-x1e+05-m5-s0")
    (('batches', 'own'), ('lr', '0.1'))
    """
    word = re.sub(r"(-x[\d.e+-]+|-xauto)?-m\d+-s\d+$", "", folder)
    return tuple(_option(change) for change in word.split("+") if _is_option(change))


def _is_option(change: str) -> bool:
    """Whether it changes the config of a run, and not the method."""
    key, equals, _ = change.partition("=")
    return bool(equals) and key.partition(".")[0] in _FREE


def _option(text: str) -> tuple[str, str]:
    """A key of a config and its value, as typed."""
    key, _, value = text.partition("=")
    if not re.fullmatch(r"[\w.-]+", value):  # it becomes a part of a folder's name
        raise ConfigError(
            f"an option of a run is a key and a word or number, such as ensemble+epochs=20, "
            f"not {text!r}"
        )
    if key == "members" and not (value.isdecimal() and int(value) > 0):
        raise ConfigError(f"members is a whole number above 0, such as members=11, not {value!r}")
    return key, value


def parse_strengths(text: str) -> tuple[float, ...]:
    """Positive numbers separated by commas.

    >>> parse_strengths("1,10,1e2")
    (1.0, 10.0, 100.0)
    """
    try:
        strengths = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        strengths = ()
    if not strengths or not all(0 < strength < float("inf") for strength in strengths):
        raise ConfigError(
            f"strengths are positive numbers, such as --strengths 1,10,100, not "
            f"{describe_value(text)}"
        )
    return strengths


def swept(variants: tuple[Variant, ...], strengths: tuple[float, ...]) -> tuple[Variant, ...]:
    """Every method at every strength; plain methods and variants with a strength stay unchanged.

    >>> [variant.label for variant in swept(parse_variants("ensemble,kde"), (1.0, 10.0))]
    ['ensemble', 'kde:1', 'kde:10']
    """
    expanded: list[Variant] = []
    for variant in variants:
        each = [replace(variant, strength=strength) for strength in strengths]
        expanded += each if variant.swept else [variant]
    return tuple(dict.fromkeys(expanded))

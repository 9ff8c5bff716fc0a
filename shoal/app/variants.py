"""The methods of a grid, each at its own strength or at others."""

from dataclasses import dataclass

from shoal.core.errors import ConfigError
from shoal.core.registry import nearest
from shoal.interaction.methods import METHODS

__all__ = ["PUBLISHED", "Variant", "parse_strengths", "parse_variants", "swept"]

PUBLISHED = ("ensemble", "kde", "sge", "ssge", "svgd", "f-kde", "f-sge", "f-ssge", "f-svgd")
"""What `all` stands for: the methods that D'Angelo & Fortuin (2021) compare."""


@dataclass(frozen=True)
class Variant:
    """A method, at its own strength or at another.

    Attributes:
        method: its name; "custom" for the repulsion that the config composes.
        strength: factor of the repulsion; None leaves what the config says.
    """

    method: str
    strength: float | None = None

    @property
    def label(self) -> str:
        """What to type for it."""
        return self.method if self.strength is None else f"{self.method}:{self.strength:g}"

    @property
    def repels(self) -> bool:
        """It has a repulsion whose strength could be changed."""
        return self.method == "custom" or METHODS[self.method].repulsion is not None


def parse_variants(text: str) -> tuple[Variant, ...]:
    """Methods separated by commas, each with a strength after a colon if wanted; or `all`.

    >>> parse_variants("ensemble,kde:300")
    (Variant(method='ensemble', strength=None), Variant(method='kde', strength=300.0))
    """
    if text == "all":
        return tuple(map(Variant, PUBLISHED))
    found = [_variant(word.strip()) for word in text.split(",") if word.strip()]
    if not found:
        raise ConfigError("name the methods to compare, as in --methods ensemble,kde, or 'all'")
    return tuple(dict.fromkeys(found))


def _variant(word: str) -> Variant:
    name, colon, strength = word.partition(":")
    if name not in METHODS and name != "custom":
        raise ConfigError(f"there is no method called {name!r}; {nearest(name, METHODS)}")
    if not colon:
        return Variant(name)
    try:
        return Variant(name, float(strength))
    except ValueError:
        raise ConfigError(f"a strength is a number, as in {name}:300, not {strength!r}") from None


def parse_strengths(text: str) -> tuple[float, ...]:
    """Positive numbers separated by commas.

    >>> parse_strengths("1,10,1e2")
    (1.0, 10.0, 100.0)
    """
    try:
        found = tuple(dict.fromkeys(float(word) for word in text.split(",")))
    except ValueError:
        found = ()
    if not found or not all(0 < strength < float("inf") for strength in found):
        raise ConfigError(
            f"strengths are positive numbers, as in --strengths 1,10,100, not {text!r}"
        )
    return found


def swept(variants: tuple[Variant, ...], strengths: tuple[float, ...]) -> tuple[Variant, ...]:
    """Every method at every strength; what does not repel, or has a strength, stays as it is.

    >>> [variant.label for variant in swept(parse_variants("ensemble,kde"), (1.0, 10.0))]
    ['ensemble', 'kde:1', 'kde:10']
    """
    found: list[Variant] = []
    for variant in variants:
        fixed = variant.strength is not None or not variant.repels
        found += [variant] if fixed else [Variant(variant.method, each) for each in strengths]
    return tuple(dict.fromkeys(found))

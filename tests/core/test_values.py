"""Plain values against annotations: what fits, and what is said when it does not."""

from dataclasses import dataclass
from typing import Literal

import pytest

from shoal.core.errors import ConfigError
from shoal.core.registry import Registry, nested_field
from shoal.core.values import check_spec, check_value, fits, wanted


@pytest.mark.parametrize(
    "value, annotation",
    [
        (1, float),
        (0, float),
        (-1e-15, float),
        (1.5, float),
        (3, int),
        ("a", str),
        (True, bool),
        ([1, 2], tuple[int, ...]),
        ([1.0, 2], tuple[float, float]),
        ([], list[int]),
        ([{"a": 1}], list[dict[str, int]]),
        (None, int | None),
        ("a", str | tuple[str, ...]),
        (["a", "b"], str | tuple[str, ...]),
        ({"a": 1}, dict[str, int]),
        ("b", Literal["a", "b"]),
    ],
)
def test_values_that_fit(value, annotation):
    assert fits(value, annotation)


@pytest.mark.parametrize(
    "value, annotation",
    [
        ("1e-3", float),
        (True, int),
        (True, float),
        (1, bool),
        (1.0, int),
        (float("nan"), float),
        (float("inf"), float),
        (2**63, int),
        (2**63, float),
        (1e300, float),
        (-1e-300, float),
        (1, complex),
        ("x", float | complex),
        ([1, "2"], tuple[int, ...]),
        ([1.0], tuple[float, float]),
        (None, int),
        (1, str),
        ([1], dict),
        ("abc", tuple[str, ...]),
        ("c", Literal["a", "b"]),
        ([], Literal["a", "b"]),
    ],
)
def test_values_that_do_not(value, annotation):
    assert not fits(value, annotation)
    with pytest.raises(ConfigError, match="^key must be "):
        check_value("key", value, annotation)


@pytest.mark.parametrize(
    "annotation, words",
    [
        (float | None, "a number"),
        (tuple[int, ...], "a list of whole numbers"),
        (list[dict[str, int]], "a list of tables"),
        (str | dict[str, int] | None, "a name or a table"),
        (float | dict[str, int] | None, "a number or a table"),
        (Literal["a", "b"] | None, "'a' or 'b'"),
    ],
)
def test_annotations_in_words(annotation, words):
    assert wanted(annotation) == words


inner, outer = Registry("inner"), Registry("outer")


@inner.register("point")
@dataclass(frozen=True)
class Point:
    """A point."""

    at: float = 0.0


@outer.register("pair")
@dataclass(frozen=True)
class Pair:
    """A pair."""

    first: Point = nested_field(inner, Point)
    sides: tuple[int, ...] = ()


@pytest.mark.parametrize(
    "spec, sentence",
    [
        (3, "thing must be a name or a table with a name, not 3"),
        ({"sides": [1]}, "thing needs a name; choose from: pair"),
        ({"name": [1]}, "thing.name must be text, not the list [1]"),
        ("pare", "there is no outer called 'pare'; did you mean 'pair'?"),
        ({"name": "pair", "sides": [1, "a"]}, "thing.sides must be a list of whole numbers"),
        ({"name": "pair", "first": 3}, "thing.first must be a name or a table with a name"),
        (
            {"name": "pair", "first": {"name": "point", "at": "x"}},
            "thing.first.at must be a number",
        ),
    ],
)
def test_a_table_is_held_against_what_it_describes(spec, sentence):
    with pytest.raises(ConfigError) as caught:
        check_spec("thing", spec, outer)
    assert sentence in str(caught.value)


def test_a_right_table_passes():
    check_spec("thing", {"name": "pair", "first": {"name": "point", "at": 1}, "sides": [2]}, outer)


def test_a_number_in_quotes_is_told_how_to_be_one():
    with pytest.raises(ConfigError, match="write 1e-3 without quotes"):
        check_value("lr", "1e-3", float)


def test_a_number_out_of_range_is_told_the_range():
    with pytest.raises(ConfigError, match="between 1e-15 and 1e15"):
        check_value("lr", 1e300, float)


def test_long_values_are_cut():
    with pytest.raises(ConfigError) as caught:
        check_value("lr", "x" * 10_000, float)
    assert len(str(caught.value)) < 200

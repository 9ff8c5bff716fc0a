"""The small figures of notebooks: places of marks, sizes, and words that are escaped."""

import math
import xml.etree.ElementTree as xml

import pytest

from shoal.core.display.notebook import (
    BOTTOM,
    LEFT,
    MOST,
    RIGHT,
    TOP,
    Curve,
    bars_svg,
    curves_svg,
)

SPACE = "{http://www.w3.org/2000/svg}"


def drawn(text, kind):
    return xml.fromstring(text).findall(f"{SPACE}{kind}")


def places(mark):
    return [tuple(map(float, place.split(","))) for place in mark.get("points").split()]


def words(text):
    return {each.text for each in drawn(text, "text")}


def test_a_line_fills_the_axes():
    text = curves_svg({"loss": Curve([3.0, 2.0, 1.0])}, "epoch", (1, 3), "nats")
    (line,) = drawn(text, "polyline")
    assert places(line) == [(LEFT, TOP), ((LEFT + RIGHT) / 2, (TOP + BOTTOM) / 2), (RIGHT, BOTTOM)]
    assert {"epoch", "nats", "loss", "1", "3"} <= words(text)


def test_a_wide_range_of_positive_values_has_a_logarithmic_axis():
    text = curves_svg({"loss": Curve([100.0, 1.0, 0.01])}, "epoch", (1, 3), "nats")
    (line,) = drawn(text, "polyline")
    assert places(line)[1][1] == pytest.approx((TOP + BOTTOM) / 2)
    assert "nats, log scale" in words(text)
    negative = curves_svg({"": Curve([100.0, 1.0, -0.01])}, "epoch", (1, 3), "nats")
    assert "nats" in words(negative)


def test_an_area_holds_its_line():
    curve = Curve([2.0, 2.0], low=[1.0, 1.5], high=[3.0, 2.5])
    (area,) = drawn(curves_svg({"": curve}, "epoch", (1, 2), "nats"), "polygon")
    assert [y for _, y in places(area)] == pytest.approx(
        [BOTTOM, BOTTOM - 0.25 * (BOTTOM - TOP), TOP + 0.25 * (BOTTOM - TOP), TOP]
    )


def test_values_that_are_not_finite_are_left_out():
    values = [1.0, None, math.nan, math.inf, 2.0]
    (line,) = drawn(curves_svg({"": Curve(values)}, "epoch", (1, 5), "nats"), "polyline")
    assert places(line) == [(LEFT, BOTTOM), (RIGHT, TOP)]


def test_one_value_is_a_dot_and_none_is_an_empty_figure():
    text = curves_svg({"": Curve([0.5])}, "epoch", (1, 1), "nats")
    assert len(drawn(text, "circle")) == 1
    empty = curves_svg({"": Curve([None, None])}, "epoch", (1, 2), "nats")
    assert places(drawn(empty, "polyline")[0]) == []


def test_a_long_run_is_thinned_and_keeps_both_ends():
    values = [float(index) for index in range(10_000)]
    text = curves_svg({"": Curve(values, low=values, high=values)}, "epoch", (1, 10_000), "nats")
    found = places(drawn(text, "polyline")[0])
    assert len(found) == MOST and found[0][0] == LEFT and found[-1][0] == RIGHT
    assert len(text) < 6000


def test_bars_have_heights_in_proportion():
    bars = drawn(bars_svg([0.1, 0.0, 0.4], "confidence", (0, 1), "share"), "rect")
    heights = [float(bar.get("height")) for bar in bars]
    assert heights == [(BOTTOM - TOP) / 4, 0, BOTTOM - TOP]
    assert float(bars[-1].get("x")) + float(bars[-1].get("width")) < RIGHT


def test_words_are_escaped():
    evil = '<script>"&'
    for text in (
        curves_svg({evil: Curve([1.0, 2.0])}, evil, (0, 1), evil),
        bars_svg([1.0], evil, (0, 1), evil),
    ):
        assert "<script" not in text and evil in words(text)

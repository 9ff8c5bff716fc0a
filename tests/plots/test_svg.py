"""One SVG for light and dark pages, many of them on one page."""

import re
import xml.etree.ElementTree as ElementTree

import pytest

from shoal.plots.figure import INK, blank, svg, tip
from shoal.plots.history import loss

ROWS = [{"epoch": i + 1, "loss": 1.0 / (i + 1), "member_loss": [1.0, 2.0]} for i in range(5)]


def ids(text):
    return set(re.findall(r'\bid="([^"]*)"', text))


@pytest.fixture(scope="module")
def drawn():
    return svg(loss(ROWS, "kde"), "figure1", "Loss")


def test_is_well_formed_and_begins_with_svg(drawn):
    root = ElementTree.fromstring(drawn)
    assert root.tag.endswith("svg")
    assert root.get("role") == "img"
    assert root.get("aria-label") == "Loss"
    assert root.get("viewBox")


def test_ink_follows_the_page(drawn):
    assert INK not in drawn
    assert drawn.count("currentColor") > 5
    assert "fill: #ffffff" not in drawn


def test_text_stays_text_in_the_readers_font(drawn):
    words = {"".join(e.itertext()) for e in ElementTree.fromstring(drawn).iter() if "text" in e.tag}
    assert {"epoch", "mean", "each member"} <= words
    assert "DejaVu" not in drawn
    assert "system-ui" in drawn


def test_ids_are_the_figures_own_and_all_references_have_one(drawn):
    other = svg(loss(ROWS, "kde"), "figure2")
    assert ids(drawn)
    assert not ids(drawn) & ids(other)
    for text in (drawn, other):
        used = set(re.findall(r'(?:url\(#|href="#)([^")]*)', text))
        assert used
        assert used <= ids(text)


def test_same_figure_same_text(drawn):
    assert svg(loss(ROWS, "kde"), "figure1", "Loss") == drawn


def test_loads_nothing(drawn):
    assert not re.findall(r'(?:href|src)="(?!#|data:)', drawn)
    assert "url(http" not in drawn
    assert "<metadata" not in drawn


def test_tips_become_titles_and_are_escaped():
    figure, axes = blank()
    (line,) = axes.plot([0, 1], [0, 1])
    tip(line, 'half < one & "so on"')
    image = axes.imshow([[0.0, 1.0]])
    tip(image, "an image </image>")
    root = ElementTree.fromstring(svg(figure, "f"))
    titles = [e.text for e in root.iter() if e.tag.endswith("title")]
    assert set(titles) == {'half < one & "so on"', "an image </image>"}


def test_words_of_the_user_stay_words():
    text = svg(loss(ROWS, title='<script>alert(1)</script> $x$ & "y"'), "f", '"><script>')
    assert "<script>" not in text
    root = ElementTree.fromstring(text)
    assert any('<script>alert(1)</script> $x$ & "y"' in "".join(e.itertext()) for e in root.iter())

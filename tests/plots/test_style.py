"""Colours that everybody can tell apart, on light and on dark pages."""

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

from shoal.interaction.methods import METHODS
from shoal.plots.figure import COLOURS, INK, look, method_styles, rc

# Machado et al. (2009), full severity, on linear RGB
BLINDNESS = {
    "none": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216],
               [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413],
               [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602],
               [0.004733, 0.691367, 0.303900]],
}  # fmt: skip


def linear(colour):
    rgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)


def contrast(one, other):
    light, dark = sorted(
        (linear(c) @ [0.2126, 0.7152, 0.0722] + 0.05 for c in (one, other)), reverse=True
    )
    return light / dark


def oklab(rgb):
    lms = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566],
           [0.0883024619, 0.2817188376, 0.6299787005]]  # fmt: skip
    lab = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099],
           [0.0259040371, 0.7827717662, -0.8086757660]]  # fmt: skip
    return np.array(lab) @ np.cbrt(np.array(lms) @ rgb)


def pages():
    css = (files("shoal.page") / "template" / "page.css").read_text()
    return re.findall(r"--page: (#[0-9a-f]{6});", css)


def test_page_is_light_and_dark():
    light, dark = pages()[:2]
    assert contrast(light, "#ffffff") < 1.1
    assert contrast(dark, "#000000") < 1.3


@pytest.mark.parametrize("method", COLOURS)
@pytest.mark.parametrize("page", pages()[:2])
def test_colours_stand_out_on_both_pages(method, page):
    assert contrast(COLOURS[method], page) >= 3


@pytest.mark.parametrize("kind", BLINDNESS)
def test_colours_can_be_told_apart(kind):
    matrix = np.array(BLINDNESS[kind])
    seen = [oklab(np.clip(matrix @ linear(colour), 0, 1)) for colour in COLOURS.values()]
    nearest = min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2))
    assert nearest > 0.05  # 0.02 is a just noticeable difference


def test_every_method_has_a_colour_and_a_marker_of_its_own():
    forms = {name for name in METHODS if name.startswith("forde-")}
    assert set(METHODS) - forms <= set(COLOURS)
    assert {look(name) for name in forms} == {look("forde")}
    looks = [look(name) for name in COLOURS]
    assert len({style.colour for style in looks}) == len({style.marker for style in looks}) == 10


def test_variants_keep_the_colour_and_differ_otherwise():
    labels = ["f-kde", "kde", "f-kde (strength = 100.0)", "f-kde:10"]
    styles = method_styles(labels)
    variants = [styles[label] for label in labels if label != "kde"]
    assert {style.colour for style in variants} == {COLOURS["f-kde"]}
    assert len({(style.fillstyle, style.linestyle) for style in variants}) == 3
    assert styles["kde"] == look("kde")


@pytest.mark.parametrize("label", ["", "my own", "<script>"])
def test_an_unknown_method_has_a_look(label):
    assert look(label) == look(label)
    assert look(label).colour in COLOURS.values()
    assert look(label).colour != COLOURS["ensemble"]


def test_ink_is_no_colour_of_a_method():
    assert INK not in COLOURS.values()
    assert rc()["text.color"] == INK

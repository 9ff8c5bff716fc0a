"""The page in a real browser: it draws, sorts, fits a phone, prints, and complains of nothing."""

import re

import numpy as np
import pytest
from browser import View

import shoal
from shoal.cli.main import main
from shoal.page.report import report
from shoal.sklearn import EnsembleClassifier

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def studied_run(tmp_path_factory):
    """Convolutional members with repelled input gradients, a landscape and evidence."""
    folder = str(tmp_path_factory.mktemp("studied") / "run")
    small = ["members=3", "epochs=1", "keep_every=1", "data.test_size=100"]
    assert main(["fit", "digits-forde", *small, "-o", folder, "-q"]) == 0
    parts = "trajectories,functions,line,origin-plane"
    assert main(["landscape", folder, "--quick", "--points", "5", "--parts", parts, "-q"]) == 0
    assert main(["evidence", folder, "--no-priors", "-q"]) == 0
    return folder


@pytest.fixture(scope="module")
def estimator_run():
    """A classifier with text labels and many parameters of its own."""
    x, names = np.random.default_rng(0).normal(size=(90, 3)), np.array(["ant", "bee", "cat"])
    labels = names[np.arange(90) % 3]
    settings = {"members": 2, "epochs": 2, "early_stopping": False, "n_iter_no_change": 3}
    model = EnsembleClassifier(**settings, random_state=0).fit(x, labels)
    shoal.evaluate(model.run_, model.dataset(x, labels))
    return model.run_


LATER = [pytest.param(name, marks=pytest.mark.nightly) for name in ("line", "not-evaluated")]


@pytest.fixture(scope="module", params=["readme", "pictures", "studied", "estimator", *LATER])
def address(request, tmp_path_factory):
    if request.param == "readme":  # an own network and arrays, by the five lines of README.md
        return (request.getfixturevalue("readme")[0] / "report.html").as_uri()
    runs = {
        "pictures": lambda: request.getfixturevalue("picture_runs"),
        "line": lambda: request.getfixturevalue("line_runs"),
        "not-evaluated": lambda: [request.getfixturevalue("picture_runs")[0][0]],
        "estimator": lambda: [request.getfixturevalue("estimator_run")],
        "studied": lambda: [request.getfixturevalue("studied_run")],
    }[request.param]()
    return report(runs, tmp_path_factory.mktemp("page") / f"{request.param}.html").as_uri()


@pytest.fixture(scope="module")
def view(browser, address):
    """The page, opened once for all tests of it."""
    opened = View(browser, address)
    yield opened
    opened.context.close()


@pytest.fixture
def seen(view):
    """Shows the page; afterwards nothing may have been complained about."""
    yield view.seen
    view.assert_quiet()


def test_every_section_is_shown_and_linked(seen):
    page = seen()
    shown = page.evaluate(
        "[...document.querySelectorAll('section')]"
        ".filter(s => s.getBoundingClientRect().height > 40).map(s => s.id)"
    )
    linked = page.evaluate("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert shown == linked
    if "newcomer" in page.url:
        allowed = [
            "trust",
            "errors",
            "methods",
            "uncertainty",
            "calibration",
            "diversity",
            "worth",
            "training",
            "making",
        ]
        assert shown == allowed


def test_every_figure_has_a_size(seen):
    page = seen(unfolded=True)
    boxes = page.evaluate(
        "[...document.querySelectorAll('figure svg')].map(s => {"
        " const box = s.getBoundingClientRect(); return [box.width, box.height] })"
    )
    assert boxes
    assert all(width > 200 and height > 40 for width, height in boxes)


def test_figures_fill_their_rows(seen):
    gaps = seen(unfolded=True).evaluate(
        "[...document.querySelectorAll('.figures')].map(grid => "
        " grid.getBoundingClientRect().right"
        " - grid.lastElementChild.getBoundingClientRect().right)"
    )
    assert gaps and max(map(abs, gaps)) < 1


def test_every_figure_has_words_and_every_table_headings(seen):
    page = seen(unfolded=True)
    labels = page.evaluate(
        "[...document.querySelectorAll('figure svg')].map(s => s.getAttribute('aria-label'))"
    )
    assert labels and all(label.strip() for label in labels)
    bare = page.evaluate(
        "[...document.querySelectorAll('table')].filter("
        "t => !t.querySelector('thead th[scope=col]')"
        " || [...t.tBodies[0].rows].some(r => !r.querySelector('th[scope=row]'))).length"
    )
    assert bare == 0


def test_attention_and_information_differ_in_colour(seen):
    for scheme in ("light", "dark"):
        edges = seen(scheme=scheme).evaluate(
            "['mind', 'info'].map(tone => { const box = document.createElement('div');"
            " box.className = `remark ${tone}`; document.querySelector('main').append(box);"
            " const colour = getComputedStyle(box).borderLeftColor; box.remove(); return colour })"
        )
        assert len(set(edges)) == 2


def test_text_in_figures_stays_within_them(seen):
    page = seen()
    outside = page.evaluate(
        "[...document.querySelectorAll('figure svg')].flatMap(svg => {"
        " const frame = svg.getBoundingClientRect();"
        " return [...svg.querySelectorAll('text')].filter(t => {"
        "  const box = t.getBoundingClientRect();"
        "  return box.width && (box.left < frame.left - 8 || box.right > frame.right + 8"
        "   || box.top < frame.top - 8 || box.bottom > frame.bottom + 8) })"
        " .map(t => t.textContent) })"
    )
    assert outside == []


@pytest.mark.parametrize("width", [360, 390, 768, 1200])
def test_page_never_scrolls_sideways(seen, width):
    page = seen(width, unfolded=True)
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_the_first_number_of_every_table_is_seen_on_a_phone(seen):
    hidden = seen(390, unfolded=True).evaluate(
        "[...document.querySelectorAll('table')].filter(table => {"
        " table.closest('.scroll').scrollLeft = 0;"
        " const frame = table.closest('.scroll').getBoundingClientRect();"
        " return [...table.tBodies[0].rows].some("
        "  row => row.cells[1].getBoundingClientRect().right > frame.right + 1) })"
        ".map(table => table.textContent.replace(/\\s+/g, ' ').slice(0, 200))"
    )
    assert hidden == []


def test_text_is_large_enough_on_a_phone(seen):
    page = seen(390)
    heights = page.evaluate(
        "[...document.querySelectorAll('figure svg text')].map(t => {"
        " const m = t.getScreenCTM();"
        " return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b) })"
    )
    assert heights
    assert min(heights) >= 9


def _luminance(colour):
    channels = [float(v) / 255 for v in re.findall(r"[\d.]+", colour)[:3]]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_stands_out_in_both_schemes(seen, scheme):
    page = seen(scheme=scheme)
    ground = _luminance(page.evaluate("getComputedStyle(document.body).backgroundColor"))
    assert ground > 0.9 if scheme == "light" else ground < 0.02
    inks = page.evaluate(
        "[...document.querySelectorAll('h1, h2, h3, p, figcaption, td, th, summary')]"
        ".map(e => getComputedStyle(e).color)"
    )
    labels = page.evaluate(
        "[...document.querySelectorAll('figure svg [id*=axis] text')]"
        ".map(e => getComputedStyle(e).fill)"
    )
    assert labels
    for ink in {*inks, *labels}:
        light, dark = sorted((ground, _luminance(ink)), reverse=True)
        assert (light + 0.05) / (dark + 0.05) >= 4.5


# Clicks on the last heading of a table twice, and tells the column after each click.
SORTED = """table => {
  const headings = [...table.tHead.rows[0].cells], column = headings.length - 1;
  return ['ascending', 'descending'].map(() => {
    headings[column].querySelector('button').click();
    const values = [...table.tBodies[0].rows].map(row => row.cells[column].dataset.value);
    return [headings[column].getAttribute('aria-sort'), values];
  });
}"""


def test_tables_sort_by_a_click(seen):
    # a slider changes the numbers of its table, which keeps its order
    tables = seen(unfolded=True).locator("figure:not(.slider) table")
    for found in tables.evaluate_all(f"tables => tables.map({SORTED})"):
        for (order, values), wanted in zip(found, ("ascending", "descending"), strict=True):
            numbers = [float(value) for value in values if _is_number(value)]
            assert order == wanted
            assert numbers == sorted(numbers, reverse=order == "descending")
    # the mouse reaches the button too
    first = tables.first.locator("thead th").first
    first.locator("button").click()
    assert first.get_attribute("aria-sort") == "ascending"


def _is_number(text):
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def test_page_prints_with_its_folds_open(seen):
    page = seen()
    printed = page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000


def test_tooltips_are_there(seen):
    page = seen()
    tips = page.evaluate(
        "[...document.querySelectorAll('figure svg title')].map(t => t.textContent)"
    )
    assert all(tip.strip() for tip in tips)

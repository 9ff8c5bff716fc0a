"""The page in a real browser: it draws, sorts, fits a phone, prints, and complains of nothing."""

import re
import shutil

import pytest

from shoal.cli.main import main
from shoal.page.report import report

pytestmark = pytest.mark.browser

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)} is on the path")
    flags = [
        "--no-sandbox",
        "--disable-gpu",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
    ]
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=flags)
        yield opened
        opened.close()


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


@pytest.fixture(scope="module", params=["readme", "pictures", "line", "not-evaluated", "studied"])
def address(request, tmp_path_factory):
    if request.param == "readme":  # an own network and arrays, by the five lines of README.md
        return (request.getfixturevalue("readme")[0] / "report.html").as_uri()
    runs = {
        "pictures": lambda: request.getfixturevalue("picture_runs"),
        "line": lambda: request.getfixturevalue("line_runs"),
        "not-evaluated": lambda: [request.getfixturevalue("picture_runs")[0][0]],
        "studied": lambda: [request.getfixturevalue("studied_run")],
    }[request.param]()
    return report(runs, tmp_path_factory.mktemp("page") / f"{request.param}.html").as_uri()


@pytest.fixture
def open_page(browser, address):
    """Opens the page with given settings; afterwards nothing may have been complained about."""
    contexts, complaints = [], []

    def opener(**options):
        context = browser.new_context(**options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        return page

    requests: list[str] = []
    yield opener
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} == {address}


def test_every_section_is_shown_and_linked(open_page):
    page = open_page(viewport={"width": 1200, "height": 900})
    shown = page.evaluate(
        "[...document.querySelectorAll('section')]"
        ".filter(s => s.getBoundingClientRect().height > 40).map(s => s.id)"
    )
    linked = page.evaluate("[...document.querySelectorAll('nav a')].map(a => a.hash.slice(1))")
    assert shown == linked
    if "newcomer" in page.url:
        allowed = [
            "trust",
            "methods",
            "uncertainty",
            "calibration",
            "diversity",
            "training",
            "making",
        ]
        assert shown == allowed


def test_every_figure_has_a_size(open_page):
    page = open_page(viewport={"width": 1200, "height": 900})
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    boxes = page.evaluate(
        "[...document.querySelectorAll('figure svg')].map(s => {"
        " const box = s.getBoundingClientRect(); return [box.width, box.height] })"
    )
    assert boxes
    assert all(width > 200 and height > 40 for width, height in boxes)


def test_text_in_figures_stays_within_them(open_page):
    page = open_page(viewport={"width": 1200, "height": 900})
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
def test_page_never_scrolls_sideways(open_page, width):
    page = open_page(viewport={"width": width, "height": 800})
    page.evaluate("for (const fold of document.querySelectorAll('details')) fold.open = true")
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_text_is_large_enough_on_a_phone(open_page):
    page = open_page(viewport={"width": 390, "height": 800})
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
def test_text_stands_out_in_both_schemes(open_page, scheme):
    page = open_page(color_scheme=scheme)
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


def test_tables_sort_by_a_click(open_page):
    page = open_page()
    page.evaluate("document.querySelectorAll('details').forEach(f => (f.open = true))")
    tables = page.locator("table")
    assert tables.count() > 0
    for index in range(tables.count()):
        table = tables.nth(index)
        headings = table.locator("thead th")
        column = headings.count() - 1
        for direction in ("ascending", "descending"):
            headings.nth(column).locator("button").click()
            assert headings.nth(column).get_attribute("aria-sort") == direction
            values = table.evaluate(
                "(t, c) => [...t.tBodies[0].rows].map(r => r.cells[c].dataset.value)", column
            )
            numbers = [float(value) for value in values if _is_number(value)]
            assert numbers == sorted(numbers, reverse=direction == "descending")


def _is_number(text):
    try:
        return float(text) == float(text)
    except ValueError:
        return False


def test_page_prints_with_its_folds_open(open_page):
    page = open_page()
    printed = page.pdf(format="A4")
    assert printed.startswith(b"%PDF")
    assert len(printed) > 20_000


def test_tooltips_are_there(open_page):
    page = open_page()
    tips = page.evaluate(
        "[...document.querySelectorAll('figure svg title')].map(t => t.textContent)"
    )
    assert all(tip.strip() for tip in tips)

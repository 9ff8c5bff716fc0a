"""The documentation site: it builds without warnings, its links lead somewhere, search works."""

import os
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

HOME = Path(__file__).parents[1]
pytest.importorskip("material", reason="mkdocs-material is not installed")
pytest.importorskip("mkdocstrings", reason="mkdocstrings is not installed")
pytest.importorskip("latex2mathml", reason="latex2mathml is not installed")
pytestmark = pytest.mark.nightly


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The folder of the built site; tutorials that did not change are not run again."""
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=HOME,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder


class Page(HTMLParser):
    """Links, anchors and loaded files of an HTML page."""

    def __init__(self, path):
        super().__init__()
        self.links, self.loads, self.anchors = [], [], set()
        self.feed(path.read_text(encoding="utf-8"))

    def handle_starttag(self, tag, attrs):
        found = dict(attrs)
        self.anchors |= {found[key] for key in ("id", "name") if found.get(key)}
        if tag == "a" and found.get("href"):
            self.links.append(found["href"])
        if tag in ("script", "img") and found.get("src"):
            self.loads.append(found["src"])
        if tag == "link" and found.get("rel") in ("stylesheet", "icon"):
            self.loads.append(found["href"])


def test_every_link_leads_to_a_page_and_an_anchor_of_the_site(site):
    pages = {path: Page(path) for path in site.rglob("*.html") if path.name != "404.html"}
    assert len(pages) > 60
    missing, checked = [], 0
    for path, page in pages.items():
        for link in {*page.links, *page.loads}:
            place = urlsplit(link)
            if place.scheme or place.netloc:
                continue
            checked += 1
            target = (path.parent / unquote(place.path)).resolve() if place.path else path
            known = target.is_file() and (
                not place.fragment
                or target not in pages
                or unquote(place.fragment) in pages[target].anchors
            )
            if not known:
                missing.append(f"{path.relative_to(site)}: {link}")
    assert not missing
    assert checked > 5000


def test_nothing_is_loaded_from_the_network(site):
    for path in site.rglob("*.html"):
        outside = [src for src in Page(path).loads if urlsplit(src).scheme not in ("", "data")]
        assert not outside, path


def test_tutorials_show_results_and_reports(site):
    text = (site / "tutorials/first-ensemble.html").read_text(encoding="utf-8")
    assert text.count('<figure class="result"><svg') >= 2 and "accuracy" in text
    assert "<section" in (site / "tutorials/first-ensemble/report.html").read_text(encoding="utf-8")


def test_formulas_are_drawn_by_the_browser(site):
    text = (site / "equation.html").read_text(encoding="utf-8")
    assert text.count("<math") > 5 and "arithmatex" not in text


def test_groups_of_arguments_are_lists_with_types(site):
    text = (site / "reference/train.html").read_text(encoding="utf-8")
    assert "Main arguments" in text and "Other arguments" in text
    assert 'class="language-pycon' in text or "&gt;&gt;&gt;" in text


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 400])
def test_pages_fit_the_window_and_have_the_colours_of_the_scheme(site, browser, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    page, problems = context.new_page(), []
    page.on("pageerror", lambda error: problems.append(str(error)))
    page.on(
        "request",
        lambda request: (
            problems.append(request.url)
            if "://" in request.url and not request.url.startswith("file://")
            else None
        ),
    )
    for name in ("index", "guide", "tutorials/own-parts", "reference/train", "gallery/README"):
        found = site / f"{name}.html"
        page.goto((found if found.is_file() else found.with_name("index.html")).as_uri())
        assert page.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
    shade = page.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, shade.strip("rgb()").split(",")[:3])) / 3
    assert brightness > 200 if scheme == "light" else brightness < 60
    assert problems == []
    context.close()


@pytest.mark.browser
def test_search_finds_pages_without_a_server(site, browser):
    page = browser.new_page()
    page.goto((site / "index.html").as_uri())
    page.click("input.md-search__input")
    page.keyboard.type("ood_alarm")
    page.wait_for_selector(".md-search-result__item")
    links = page.eval_on_selector_all(".md-search-result__link", "all => all.map(a => a.href)")
    assert any("decisions" in link for link in links)
    page.close()

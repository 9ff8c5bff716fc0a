"""One real browser for all tests of a process."""

import shutil

import pytest

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome")
FLAGS = (
    "--no-sandbox",
    "--disable-gpu",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser():
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f"there is no browser here: none of {', '.join(BROWSERS)} is on the path")
    with playwright.sync_playwright() as driver:
        opened = driver.chromium.launch(executable_path=program, args=[*FLAGS])
        yield opened
        opened.close()


class View:
    """A page that is opened once, then seen at any width and in any scheme."""

    def __init__(self, browser, address):
        self.address, self.complaints, self.requests = address, [], []
        self.context = browser.new_context()
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.complaints.append(message.text))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.requests.append(request.url))
        self.page.goto(address)

    def seen(self, width=1200, scheme="light", *, unfolded=False):
        self.page.set_viewport_size({"width": width, "height": 900})
        self.page.emulate_media(color_scheme=scheme)
        self.page.evaluate(
            "open => { for (const fold of document.querySelectorAll('details')) fold.open = open }",
            unfolded,
        )
        return self.page

    def assert_quiet(self):
        """Nothing was complained about, and nothing but the page was loaded."""
        assert self.complaints == []
        assert {url for url in self.requests if not url.startswith("data:")} == {self.address}

"""The pages of docs/: their links, the guide, the menu, the reference and code that runs."""

import importlib.util
import random
import re
import statistics
import sys
from pathlib import Path

import pytest

import shoal
from studies import gallery
from studies.guide import claims, evidence, findings, make

HOME = Path(__file__).parents[1]
DOCS = HOME / "docs"
PAGES = [*DOCS.rglob("*.md"), *(HOME / name for name in ("README.md", "CONTRIBUTING.md"))]
LINK = re.compile(r"\]\(([^)\s]+)\)")
FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


def script(path):
    """A script of docs/ as a module; it finds the files beside it."""
    spec = importlib.util.spec_from_file_location(f"docs_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(path.parent))
    return module


@pytest.fixture(scope="module")
def tutorials():
    return script(DOCS / "site" / "tutorials.py")


def anchors(path):
    """The anchors of a page, as mkdocs and GitHub make them of its headings."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", title.lower()).strip() for title in titles]
    return {re.sub(r"\s+", "-", title) for title in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda path: path.relative_to(HOME).as_posix())
def test_every_link_of_a_page_leads_to_a_file_and_a_heading(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))
    made = ("reference/", "first-ensemble/", "tables/", "from-data-to-answer/")  # with the site
    missing = []
    for link in LINK.findall(text):
        if re.match(r"[a-z]+:", link) or link.startswith(made):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if target in (DOCS / "contributing.md", DOCS / "changelog.md"):
            continue
        if not target.exists() or (anchor and anchor not in anchors(target)):
            missing.append(link)
    assert not missing


@pytest.fixture(scope="module")
def pages():
    return make.pages()


def test_the_guide_the_table_of_results_and_the_claims_are_what_the_raw_files_give(pages):
    assert {"guide.md", "README.md", "claims.md", "trinh.md"} <= {path.name for path in pages}
    for path, text in pages.items():
        assert path.read_text(encoding="utf-8") == text, "run python -m studies.guide.make"


def test_every_row_of_the_guide_has_a_sentence_a_figure_and_hidden_intervals(pages):
    guide = pages[DOCS / "guide.md"]
    rows = guide.partition("## What to do")[2].partition("\n## ")[0].split("\n### ")[1:]
    assert len(rows) >= 12
    for row in rows:
        seen, _, hidden = row.partition("<details")
        assert " to +" not in seen and " to -" not in seen, row
        assert "what it brings" in hidden and "](results/" in hidden
        assert pages[DOCS / re.search(r"!\[.*\]\((guide/.*\.svg)\)", seen)[1]].startswith("<svg")
    assert {path.name for path in (DOCS / "guide").iterdir()} == {
        path.name for path in pages if path.suffix == ".svg"
    }


def test_the_figure_of_the_readme_tells_its_training_and_its_price():
    text = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    caption = " ".join(text.partition("*CIFAR-10 under")[2].partition(".*\n")[0].split())
    path, arms = findings.CIFAR, ("ensemble", "forde:16")

    def means(metric, scale=1):
        values = [evidence.by_seed(path, metric, method=arm).values() for arm in arms]
        return [scale * statistics.mean(each) for each in values]

    plain, repelled = means(findings.CORRUPTED, 100)
    assert f"from {plain:.2f} to {repelled:.2f} %" in caption
    assert "from {:.3f} to {:.3f}".format(*means("corrupted.all.ece")) in caption
    share = evidence.noise_share(path, arms[1])[0]
    assert f"bring {share:.0%}".replace("%", " %") in caption
    nll = evidence.compared(path, "test.nll", arms[1]).difference
    assert f"NLL rises by {nll:.3f}" in caption
    for shift in ("fog", "contrast"):
        names = [f"shifts.{shift}-{level}.accuracy" for level in range(1, 6)]
        loss = [evidence.compared(path, name, arms[1]).difference for name in names]
        assert -2.5 < 100 * statistics.mean(loss) < -1.5, "fog and contrast lose two points"
    assert all(
        word in caption for word in ("25,000 images", "36 epochs", "four seeds", "equal cost")
    )
    step = evidence.times_plain("h200-forde.json", "forde", "resnet18")
    assert f"{step:.2f} times" in caption


def test_the_list_of_pages_is_the_menu_of_the_site():
    contents = script(DOCS / "site" / "contents.py")
    text = (DOCS / "README.md").read_text(encoding="utf-8")
    assert text == contents.page(), "run python docs/site/contents.py"


def test_an_interval_of_the_guide_says_when_it_may_be_nothing():
    apart = evidence.difference({0: 2.0, 1: 2.1, 2: 9.9}, {0: 1.0, 1: 1.1, 3: 7.0})
    assert apart.difference == pytest.approx(1.0)  # seed 2 and 3 have no partner
    near = evidence.difference({0: 1.0, 1: -1.0}, {0: 0.0, 1: 0.0})
    told = evidence.corrected([evidence.interval(each, digits=1) for each in (apart, near)])
    assert told[0] == "+1.0 (+1.0 to +1.0)"
    assert "not significant" in told[1]
    with pytest.raises(KeyError, match="forde"):
        evidence.by_seed("mnist/results.csv", "test.nll", method="forde")


def test_many_intervals_are_corrected_for_their_number():
    clear = evidence.difference({0: 1.0, 1: 1.2, 2: 1.1}, {0: 0.0, 1: 0.0, 2: 0.2})  # p = 0.011
    noise = evidence.difference({0: 1.0, 1: -1.0, 2: 0.3}, dict.fromkeys(range(3), 0.0))
    assert "significant" not in evidence.corrected([evidence.interval(clear)])[0]
    many = [evidence.interval(each) for each in (clear, *[noise] * 9)]
    assert "not significant after correction" in evidence.corrected(many)[0]


def test_a_claim_is_confirmed_refuted_or_open():
    zero, one = dict.fromkeys(range(4), 0.0), {0: 1.0, 1: 1.1, 2: 0.9, 3: 1.05}
    noise = {0: 1.0, 1: -1.0, 2: 0.5, 3: -0.6}

    def decided(*measures, one=False):
        return claims.verdict(measures, claims.adjusted(measures), one)

    assert decided(claims.higher("", one, zero)) == "confirmed"
    assert decided(claims.lower("", one, zero)) == "refuted"
    assert decided(claims.higher("", noise, zero)) == "cannot be told"
    assert decided(claims.higher("", one, zero), claims.higher("", noise, zero)) != "confirmed"
    sized = claims.higher("", noise, zero, published=9.0)  # of a longer training
    assert decided(sized) == "cannot be told" and sized.words.endswith("published +9")
    assert decided(claims.same("", one, zero, claims.Margin(2.0, ""))) == "confirmed"
    assert decided(claims.same("", one, zero, claims.Margin(0.1, ""))) == "refuted"
    assert decided(claims.higher("", one, zero), claims.lower("", one, zero)) == "mixed"
    assert decided(claims.higher("", one, zero), claims.lower("", one, zero), one=True) != "mixed"


def test_an_undecided_claim_says_what_is_equal_or_how_many_seeds_would_decide():
    zero = dict.fromkeys(range(5), 0.0)
    near = {0: 0.001, 1: -0.001, 2: 0.0005, 3: -0.0004, 4: 0.0001}
    wide = {0: 0.05, 1: -0.02, 2: 0.03, 3: -0.01, 4: 0.02}

    def shown(*measures):
        claim = claims.Claim("", "", "", lambda: measures)
        return claims.lines({"topic": [claim]})[0]["topic"][0][5]

    assert shown(claims.lower("NLL", near, zero)) == "cannot be told; equal within 0.01"
    assert shown(claims.higher("", near, zero, **evidence.PERCENT)).endswith("within 0.5 points")
    assert re.fullmatch(
        r"cannot be told; \d+ seeds would decide", shown(claims.lower("NLL", wide, zero))
    )
    told = shown(claims.lower("NLL", near, zero), claims.lower("NLL", wide, zero))
    assert "equal" not in told and "seeds would decide" in told
    assert shown(claims.lower("NLL", {0: 1.0, 1: 1.1}, zero)) == "cannot be told"  # two seeds
    assert shown(claims.fact("", holds=True)) == "cannot be told, one run for it"


def _breaks_the_rule(measures, decided, one):
    """A verdict needs three seeds in every number that decides it, and numbers of its kind."""
    spoken = list(zip(measures, claims.votes(measures, decided), strict=True))
    votes = {vote for measure, vote in spoken if measure.seeds >= 3}
    ways = {
        "confirmed": 1 in votes and (one or votes == {1}),
        "mixed": {1, -1} <= votes and not one,
        "refuted": -1 in votes and 1 not in votes,
        "cannot be told": True,
    }
    decides = [measure for measure, vote in spoken if vote]
    found = claims.verdict(measures, decided, one)
    whole = found != "confirmed" or one or len(decides) == len(measures)
    return not (ways[found] and whole and all(measure.seeds >= 3 for measure in decides))


def test_no_verdict_breaks_the_rule_of_three_seeds():
    draw = random.Random(0)
    seen = set()
    for _ in range(300):
        measures = []
        for _ in range(draw.randint(1, 3)):
            seeds = draw.randint(1, 5)
            centre = draw.choice((-3, 0, 3))
            first = {seed: draw.gauss(centre, 0.3) for seed in range(seeds)}
            kind = draw.choice((claims.higher, claims.lower, claims.same, claims.fact))
            if kind is claims.fact:
                measures.append(claims.fact("one run", draw.choice((True, False))))
            else:
                margin = (claims.Margin(1.0, ""),) if kind is claims.same else ()
                measures.append(kind("", first, dict.fromkeys(first, 0.0), *margin))
        one, decided = draw.random() < 0.2, claims.adjusted(measures)
        assert not _breaks_the_rule(measures, decided, one), measures
        seen.add(claims.verdict(measures, decided, one))
    assert seen == set(claims.VERDICTS)  # the draws reach every verdict
    for few in ({0: 1.0, 1: 1.0}, {0: 1.0}):
        for kind in (
            claims.higher,
            claims.lower,
            lambda *pair: claims.same(*pair, claims.Margin(2.0, "")),
        ):
            measures = [kind("", few, dict.fromkeys(few, 0.0))]
            assert claims.verdict(measures, claims.adjusted(measures)) == "cannot be told"


def test_no_claim_of_the_page_breaks_the_rule_of_three_seeds():
    evaluated = [pair for group in make.GROUPS.values() for pair in claims.evaluated(group)]
    assert sum(bool(measures) for _, measures in evaluated) > 180
    for claim, measures in evaluated:
        assert not _breaks_the_rule(measures, claims.adjusted(measures), claim.one), claim.words


def test_a_claim_without_data_is_listed_as_not_measured():

    def nothing():
        raise KeyError("no such file")

    rows, missing, counts = claims.lines({"A": [claims.Claim("x", "y", "z", nothing)]})
    assert rows == {"A": []} and counts == {} and missing[0][:2] == ["x", "y"]


def test_the_gallery_shows_the_figures_that_its_command_draws():
    assert (DOCS / "gallery" / "README.md").read_text(encoding="utf-8") == gallery.page()
    drawn = {path.stem for path in (DOCS / "gallery").glob("*.svg")}
    assert drawn == set(gallery.FIGURES)


@pytest.mark.slow
def test_the_reference_has_every_public_name():
    reference = script(DOCS / "site" / "reference.py")
    pages = reference.pages()
    grouped = [name for names in reference.groups().values() for name in names]
    assert sorted(grouped) == sorted(shoal.__all__)
    text = "\n".join(text for _, _, text in pages)
    for name in grouped:
        value = getattr(shoal, name)
        path = reference.home_of(value, f"shoal.{name}")
        assert f"::: {path}\n" in text or f"({name}.md)" in text, name
    entries = re.findall(r"^::: (\S+)$", text, re.MULTILINE)
    assert len(entries) == len(set(entries)) > 100
    assert "usage: shoal fit" in text


@pytest.mark.slow
def test_blocks_of_a_page_run_and_show_what_they_print_and_draw(tutorials, tmp_path, monkeypatch):
    page = tmp_path / "page.md"
    page.write_text(
        "# A page\n\n```python\na = 2\nprint('<a> is', a)\na + 1\n```\n\nNext.\n\n"
        "```py\nraise RuntimeError('not run')\n```\n\n"
        "```python\nimport torch\nfrom shoal import plots\n"
        "x = torch.arange(3.0)\nplots.band(x, a * x, x)\n```\n",
        encoding="utf-8",
    )
    monkeypatch.chdir(tmp_path)  # run() changes the folder
    tutorials.run(page, tmp_path)
    shown = tutorials.with_results(page.read_text(encoding="utf-8"), tmp_path)
    assert "&lt;a&gt; is 2\n3</pre>" in shown
    assert shown.index("is 2") < shown.index("Next.") < shown.index("<svg")
    assert "\n\n" not in shown[shown.index("<svg") : shown.index("</svg>")]


def test_a_block_that_fails_stops_the_build(tutorials, tmp_path, monkeypatch):
    page = tmp_path / "broken.md"
    page.write_text("```python\n1 / 0\n```\n", encoding="utf-8")
    monkeypatch.setattr(tutorials, "KEPT", tmp_path / "kept")
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        tutorials.executed(page)
    assert not list((tmp_path / "kept").rglob("results.json"))


def test_results_are_kept_until_the_page_changes(tutorials, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("one", encoding="utf-8")
    first = tutorials.digest(page)
    assert tutorials.digest(page) == first
    page.write_text("two", encoding="utf-8")
    assert tutorials.digest(page) != first

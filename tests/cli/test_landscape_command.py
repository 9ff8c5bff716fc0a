"""`shoal landscape`, and its section of the page in a real browser."""

import json

import pytest
from browser import View

from shoal.analysis.landscape.scene import registry
from shoal.cli.main import main
from shoal.page.report import report


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run of few steps, looked at once."""
    out = tmp_path_factory.mktemp("landscape") / "run"
    settings = ["members=3", "epochs=3", "keep_every=1", "model.hidden=[12]", "method=ensemble"]
    assert main(["fit", "digits", *settings, "-o", str(out), "-q"]) == 0
    return out


def test_every_analysis_is_described_in_a_sentence_then_kept(folder, capsys):
    command = ["landscape", str(folder), "--quick", "--points", "4", "--inputs", "60"]
    assert main([*command, "--json", "-q"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert list(value) == registry.names()
    assert all(result["sentence"].endswith(".") for result in value.values())
    assert main(command) == 0
    shown = capsys.readouterr()
    assert shown.err.count("kept from before") == len(value)
    assert "shoal report" in shown.out
    assert value["line"]["sentence"] in shown.out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--analyses", "lime"], "did you mean 'line'"),
        (["--parts", ","], "choose from"),
        (["--points", "1"], "points must be a whole number from 2"),
        (["--inputs", "0"], "inputs must be a whole number from 2"),
    ],
)
def test_mistakes_are_answered_in_a_line(folder, capsys, options, words):
    assert main(["landscape", str(folder), *options]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_a_folder_without_a_run(tmp_path, capsys):
    assert main(["landscape", str(tmp_path)]) == 74
    assert "is not a run" in capsys.readouterr().err


@pytest.fixture(scope="module")
def page(folder, tmp_path_factory):
    command = ["landscape", str(folder), "--quick", "--points", "4", "--inputs", "60", "-q"]
    assert main(command) == 0
    return report([folder], tmp_path_factory.mktemp("page") / "page.html")


def test_the_page_has_the_section_after_the_question_of_difference(page):
    text = page.read_text()
    question = "What lies between the members?"
    assert text.index("Do the members differ?") < text.index(question)
    for title in (
        "Low-loss tunnel between two members",
        "Diverse and accurate?",
        "Training trajectories in function space",
        "Averaging within and between modes: test",
        "Effective number of members",
    ):
        assert title in text


def test_a_run_without_landscape_has_no_section(undrawn, picture_runs, tmp_path):
    text = report(picture_runs[:1], tmp_path / "page.html").read_text()
    assert "What lies between the members?" not in text


@pytest.fixture(scope="module")
def view(browser, page):
    opened = View(browser, page.as_uri())
    yield opened
    opened.context.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [390, 1200])
def test_the_section_in_a_browser(view, scheme, width):
    shown = view.seen(width, scheme)
    assert shown.evaluate("document.documentElement.scrollWidth") <= width
    found = shown.evaluate(FIGURES)
    view.assert_quiet()
    assert len(found) >= 10
    for figure in found:
        assert figure["caption"], figure
        assert figure["width"] > 200 and figure["outside"] == [], figure
        assert figure["smallest"] >= 9, figure


FIGURES = """
[...document.querySelectorAll('#landscape figure, section[id*=landscape] figure')].map(f => {
  const svg = f.querySelector('svg'), frame = svg.getBoundingClientRect();
  const words = [...svg.querySelectorAll('text')];
  return {
    width: frame.width,
    caption: f.querySelector('figcaption')?.textContent.trim(),
    outside: words.filter(t => {
      const box = t.getBoundingClientRect();
      return box.width && (box.left < frame.left - 8 || box.right > frame.right + 8
        || box.top < frame.top - 8 || box.bottom > frame.bottom + 8);
    }).map(t => t.textContent),
    smallest: Math.min(...words.map(t => {
      const m = t.getScreenCTM();
      return parseFloat(getComputedStyle(t).fontSize) * Math.hypot(m.a, m.b);
    })),
  };
})
"""


def test_captions_say_what_was_measured_and_how_to_read_it(page):
    text = page.read_text()
    assert "stays as low as" not in text and "as good, but another" not in text
    assert "have nothing in common at any time" not in text


@pytest.fixture(scope="module")
def curve(tmp_path_factory):
    out = tmp_path_factory.mktemp("regression") / "run"
    settings = ["members=3", "epochs=3", "keep_every=1", "model.hidden=[12]", "method=ensemble"]
    assert main(["fit", "toy-regression", *settings, "steps=none", "-o", str(out), "-q"]) == 0
    command = ["landscape", str(out), "--quick", "--points", "4", "--inputs", "60", "-q"]
    assert main(command) == 0
    return out


def test_functions_that_give_numbers_have_no_labels(curve, tmp_path, capsys):
    command = ["landscape", str(curve), "--quick", "--points", "4", "--inputs", "60", "--json"]
    assert main([*command, "-q"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert "label" not in told["trajectories"]["sentence"]
    assert "%" not in told["tunnel"]["sentence"].split("Predictions")[-1]
    text = report([curve], tmp_path / "page.html").read_text()
    section = text[text.index('id="landscape"') : text.index('id="training"')]
    assert "other labels" not in section and "another label" not in section
    assert "root mean square difference of the predictions" in section

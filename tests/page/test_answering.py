"""The slider of the page: accuracy and share of answers above each confidence."""

import pytest
from browser import View

from shoal.page.blocks import Slider
from shoal.page.report import report
from shoal.page.report_data import load_report_data
from shoal.page.sections.predictive_uncertainty import THRESHOLDS, answering_slider
from shoal.prediction.decisions import clopper_pearson


def test_the_numbers_are_those_of_the_test_set(picture_runs):
    (slider,) = answering_slider(load_report_data(picture_runs, None))
    assert isinstance(slider, Slider)
    assert len(slider.rows) == 3 and slider.rows[0].name == "kde"
    samples = picture_runs[0][1].split_samples("test")
    for place in (0, 40, 55, 90):
        kept = samples["confidence"].double() >= THRESHOLDS[place]
        right = (samples["prediction"] == samples["label"])[kept]
        answered, accuracy, interval, wrong = slider.rows[0].cells[place]
        assert _number(answered) == pytest.approx(100 * float(kept.double().mean()), abs=0.06)
        assert int(wrong) == int((~right).sum())
        if len(right):
            assert _number(accuracy) == pytest.approx(100 * float(right.double().mean()), abs=0.06)
            ends = [100 * end for end in clopper_pearson(int(right.sum()), len(right))]
            assert [_number(end) for end in interval.split(" to ")] == pytest.approx(ends, abs=0.06)
        else:
            assert accuracy == "–"


def _number(text):
    return float(text.removesuffix("%").strip())


def test_numbers_have_no_slider(line_runs):
    assert not list(answering_slider(load_report_data(line_runs, None)))


@pytest.fixture(scope="module")
def address(picture_runs, tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:  # figures are not drawn, which takes long
        patch.setattr("shoal.page.report.svg", lambda *_: "<svg></svg>")
        return report(picture_runs, tmp_path_factory.mktemp("slider") / "page.html").as_uri()


@pytest.fixture(scope="module")
def view(browser, address):
    opened = View(browser, address)
    yield opened
    opened.context.close()


@pytest.mark.browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 1200])
def test_moving_the_slider_changes_the_table(view, picture_runs, scheme, width):
    (slider,) = answering_slider(load_report_data(picture_runs, None))
    page = view.seen(width, scheme)
    control = page.locator(".slider input")
    row = page.locator(".slider tbody tr").first.locator("td")

    def shown():
        return [text.replace("\u00a0", " ") for text in row.all_text_contents()]

    for place in (0, 40, 103):
        control.fill(str(place))
        assert shown() == slider.rows[0].cells[place]
        told = page.locator(".slider output").text_content().replace("\u00a0", " ")
        assert told == slider.places[place] == control.get_attribute("aria-valuetext")
    control.fill("40")
    control.press("ArrowRight")
    assert shown() == slider.rows[0].cells[41]
    box = control.bounding_box()
    assert box["width"] > 200 and box["x"] >= 0 and box["x"] + box["width"] <= width
    view.assert_quiet()


@pytest.mark.browser
def test_the_table_is_there_without_scripts(browser, address, picture_runs):
    (slider,) = answering_slider(load_report_data(picture_runs, None))
    context = browser.new_context(java_script_enabled=False)
    page = context.new_page()
    page.goto(address)
    cells = page.locator(".slider tbody tr").first.locator("td").all_text_contents()
    assert [text.replace("\u00a0", " ") for text in cells] == slider.rows[0].cells[slider.start]
    context.close()

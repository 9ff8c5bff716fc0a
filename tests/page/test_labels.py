"""A run is called by its whole name on every part of a page: method, strength and form."""

import re
from dataclasses import replace

import pytest

from shoal.evaluation.evaluate import Evaluation
from shoal.experiment.variants import variant_of
from shoal.page.blocks import Figure, Fold, Remark, Table
from shoal.page.measures import Measure, against_baseline
from shoal.page.report import _built_sections, render
from shoal.page.report_data import ReportData, RunRecord, SeedGroup, load_report_data
from shoal.plots.figure import svg


def renamed(run, **config):
    return replace(run, config=run.config | config)


@pytest.fixture
def strong(picture_runs):
    """All runs of kde at strength 100."""
    return [
        (renamed(run, strength=100.0) if run.config["method"] == "kde" else run, found)
        for run, found in picture_runs
    ]


def test_a_strength_is_told_even_where_all_runs_of_the_method_share_it(strong):
    assert {group.label for group in load_report_data(strong).groups} == {
        "kde:100",
        "ensemble",
        "f-svgd",
    }


def test_a_page_calls_a_method_as_it_is_typed():
    told = {"name": "forde-tuned", "fraction": 0.25, "alpha": 0.4}
    record = RunRecord("run", {"method": told, "strength": 16.0}, [], [], {}, None)
    assert record.method == variant_of(told, 16.0).label == "forde-tuned+alpha=0.4+fraction=0.25:16"
    assert record.family == "forde-tuned+alpha=0.4+fraction=0.25"


def test_no_part_of_the_page_calls_it_by_less(strong):
    one_seed = [pair for pair in strong if pair[0].config["seed"] == 0]
    for section in _built_sections(load_report_data(one_seed)).values():
        for block in every(section.blocks):
            for text in words_of(block):
                assert not re.search(r"(?<![\w-])kde(?![\w:-])", text), text


def every(blocks):
    for block in blocks:
        yield from every(block.blocks) if isinstance(block, Fold) else [block]


def words_of(block):
    """Titles and texts, and what is written in figures; settings stand in cells of their own."""
    if isinstance(block, Table):
        named = "setting" not in block.title.lower()
        cells = [cell.text for row in block.rows for cell in row] if named else []
        return [block.title, block.reading, *cells]
    if isinstance(block, Figure):
        return [block.title, block.reading, *re.findall(r">([^<]+)<", svg(block.figure, "f"))]
    if isinstance(block, Remark):
        return [block.text]
    return []


def test_a_form_that_all_runs_share_is_told_once_in_the_title(picture_runs):
    runs = [(renamed(run, legacy=True), found) for run, found in picture_runs]
    report_data = load_report_data(runs)
    assert {group.label for group in report_data.groups} == {"kde", "ensemble", "f-svgd"}
    assert "3 methods (legacy), 2 to 4 members" in render(report_data, sections={})


def test_a_form_that_some_runs_have_is_in_their_label(picture_runs):
    (run, found), *rest = picture_runs
    labels = {g.label for g in load_report_data([(renamed(run, legacy=True), found), *rest]).groups}
    assert "kde (legacy)" in labels and "kde" in labels


def test_published_methods_are_compared_with_the_plain_ensemble_of_their_form(picture_runs):
    runs = [(renamed(run, legacy=True), found) for run, found in picture_runs]
    report_data = load_report_data(runs)
    assert against_baseline(Measure("nll"), report_data.lead, report_data.groups) is not None


def test_the_lead_is_called_plain_whatever_its_form():
    scores = {
        "data": {"task": "classification", "counts": {"test": 10}},
        "test": {"accuracy": 0.9, "confidence": 0.9, "nll": 0.3, "effective_functions": 1.2},
        "shifts": {},
        "ood": {},
    }
    config = {"method": "ensemble", "legacy": True, "members": 3, "data": "d"}
    record = RunRecord("e", config, [], [], {}, Evaluation(scores))
    text = render(ReportData([record], [SeedGroup(record.method, [record])]))
    assert "About the plain ensemble (legacy) with 3 members" in text
    assert "only the scores of all runs" in text

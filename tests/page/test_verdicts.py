"""What a comparison decides, its family and margins, its power before the runs, and the words."""

import math

import pytest

from shoal.core.errors import ConfigError
from shoal.evaluation.evaluate import Evaluation
from shoal.page.blocks import Remark, Table
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, RunRecord, SeedGroup
from shoal.page.sections.methods import methods_section
from shoal.page.verdicts import (
    comparison_sentence,
    decide_groups,
    family_sentences,
    method_sentence,
    parse_margins,
    planned_power,
)
from shoal.prediction.statistics import Pairs, Verdict, decide, detectable

NLL, ACCURACY = Measure("nll"), Measure("accuracy")
NOISE = (-0.3, 0.4, 0.1, -0.4, 0.2)
"""Sum to zero; standard deviation 0.339."""


def group(method, seeds=5, members=5, task="classification", **shifts):
    """Runs whose test scores are those of the plain ensemble, plus (shift, noise)."""
    entries = []
    plain = {"classification": {"nll": 0.5, "accuracy": 0.9, "brier": 0.2}}.get(task, {"rmse": 2.0})
    for seed in range(seeds):
        test = dict(plain)
        for key, (shift, noise) in shifts.items():
            test[key] += shift + noise * NOISE[seed]
        scores = {"data": {"task": task}, "test": test, "shifts": {}, "ood": {}}
        config = {"method": method, "members": members, "seed": seed}
        entries.append(RunRecord(f"{method}-{seed}", config, [], [], {}, Evaluation(scores)))
    return SeedGroup(method, entries)


def test_margins_are_half_a_point_a_hundredth_of_a_nat_and_two_percent_of_other_measures():
    family = decide_groups([group("ensemble"), mine := group("kde")])
    assert family(mine, NLL).margin == 0.01
    assert family(mine, ACCURACY).margin == 0.005
    assert family(mine, Measure("brier")).margin == pytest.approx(0.02 * 0.2)
    real = [group("ensemble", task="regression"), group("kde", task="regression")]
    assert decide_groups(real)(real[1], Measure("rmse")).margin == pytest.approx(0.04)
    assert decide_groups(real, {"rmse": 0.5})(real[1], Measure("rmse")).margin == 0.5


@pytest.mark.parametrize("given", ["nll=0.02,accuracy=0.01", {"nll": 0.02, "accuracy": 0.01}])
def test_margins_are_given_as_text_or_table(given):
    assert parse_margins(given) == {"nll": 0.02, "accuracy": 0.01}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("nll", "a metric and a number"),
        ("nll=small", "a metric and a number"),
        ("", "a metric and a number"),
        ("nul=0.1", "not to 'nul'"),
        ("nll=0", "margin of nll"),
        ("nll=-1", "margin of nll"),
        ("nll=nan", "margin of nll"),
        ({"nll": "wide"}, "margin of nll"),
        (0.01, "a table of metrics"),
    ],
)
def test_a_margin_that_is_none_is_refused_in_one_sentence(given, words):
    with pytest.raises(ConfigError, match=words):
        parse_margins(given)


def test_the_family_has_every_method_and_headline_measure_and_is_named():
    groups = [group("ensemble"), group("kde"), group("f-kde", nll=(-0.1, 0.01))]
    family = decide_groups(groups)
    assert {measure.key for _, measure in family.decisions} == {"nll", "accuracy"}  # no Brier
    assert {decision.comparisons for decision in family.decisions.values()} == {4}
    text = family_sentences(family)
    assert "2 methods × 2 measures, 4 comparisons" in text and "Holm" in text
    assert "NLL 0.01 nats" in text and "accuracy 0.5 points" in text
    assert family(groups[1], Measure("brier")).comparisons == 1


def test_two_sizes_of_a_method_are_two_comparisons():
    groups = [group(method, members=m) for method in ("ensemble", "kde") for m in (2, 5)]
    assert "2 methods and sizes × 2 measures" in family_sentences(decide_groups(groups))


def test_more_methods_make_the_same_difference_harder_to_show():
    plain, mine = group("ensemble"), group("kde", nll=(-0.1, 0.15))
    assert decide_groups([plain, mine])(mine, NLL).verdict is Verdict.BETTER
    others = [group(f"kde:{k}", nll=(0.0, 0.2)) for k in range(2, 40)]
    assert decide_groups([plain, mine, *others])(mine, NLL).verdict is Verdict.UNDECIDED


def sentence(seeds=5, **shifts):
    family = decide_groups([group("ensemble", seeds), mine := group("kde", seeds, **shifts)])
    return method_sentence("kde", family.of_group(mine))


def test_a_method_gets_one_sentence_with_every_verdict():
    assert sentence() == "kde is equal within the margin in accuracy and NLL."
    text = sentence(nll=(-0.1, 0.02), accuracy=(-0.1, 0.02))
    assert text == "kde is better in NLL (by 0.100 nats); worse in accuracy (by 10.0 points)."
    text = sentence(nll=(0.001, 0.5))
    assert text.startswith("kde is equal within the margin in accuracy; not decided in NLL (")
    assert text.endswith("seeds would decide).") and text.count(".") == 1


def test_a_significant_difference_within_the_margin_is_said_to_be_both():
    text = sentence(nll=(-0.002, 0.002))
    assert "better in NLL (by 0.0020 nats, which is within the margin)" in text


def test_what_is_not_worse_by_the_margin_is_said_where_nothing_is_decided():
    assert "not decided in NLL (not worse by the margin, " in sentence(nll=(-0.025, 0.08))


@pytest.mark.parametrize("seeds", [1, 2])
def test_fewer_than_three_seeds_decide_nothing_whatever_they_show(seeds):
    text = sentence(seeds, nll=(-10.0, 0.0))
    assert "kde is not decided" in text and "better" not in text
    pair = {"kde": Pairs([0.1] * seeds, [0.5] * seeds, "lower", 0.01)}
    text = comparison_sentence(NLL, decide("one", pair), "the plain ensemble")
    assert "cannot show whether methods differ" in text


def test_the_answer_names_changes_first_then_equality_then_what_is_open():
    pairs = {
        "sge": Pairs([0.0, 0.1, -0.1, 0.05], [0.0] * 4, "lower", 0.01),
        "kde": Pairs([0.0, 0.001, -0.001, 0.0], [0.0] * 4, "lower", 0.01),
        "svgd": Pairs([0.20, 0.21, 0.19, 0.2], [0.0] * 4, "lower", 0.01),
        "f-kde": Pairs([-0.2, -0.21, -0.19, -0.2], [0.0] * 4, "lower", 0.01),
    }
    text = comparison_sentence(NLL, decide("four", pairs), "the plain ensemble")
    parts = ("f-kde lowers NLL by 0.200", "svgd raises NLL", "kde is equal within the margin")
    places = [text.find(part) for part in (*parts, "sge is not decided", "(4 seeds)")]
    assert -1 not in places and places == sorted(places)


def test_power_is_said_in_standard_deviations_before_any_run():
    power = planned_power(5, 2, None)
    assert "5 seeds find differences of 1.7 standard deviations" in str(power)
    assert power.value["standard_deviations"] == pytest.approx(detectable(1.0, 5))
    assert planned_power(5, 0, None) is None


def test_power_is_said_in_the_units_of_finished_runs():
    """The standard deviation of NOISE is 0.339; two methods and two measures are a family."""
    groups = [group("ensemble"), group("kde", nll=(0.3, 1.0)), group("f-kde", nll=(0.0, 1.0))]
    power = planned_power(10, 2, decide_groups(groups))
    stddev = math.sqrt(sum(x**2 for x in NOISE) / 4)
    alone, together = power.found[NLL]
    assert alone == pytest.approx(detectable(stddev, 10))
    assert together == pytest.approx(detectable(stddev, 10, alpha=0.05 / 4))
    assert str(power).startswith(f"10 seeds find a difference in NLL of {alone:.3g} nats")
    assert power.value["differences"]["test/nll"] == {"one_test": alone, "family": together}


def test_power_of_too_few_seeds():
    assert "2 seeds cannot decide" in str(planned_power(2, 1, None))
    assert planned_power(1, 1, None).value["standard_deviations"] is None


def test_the_page_marks_equality_and_what_is_open_and_colours_the_rest(monkeypatch):
    monkeypatch.setattr("shoal.page.sections.methods._figures", lambda *_: [])
    found = {"kde": (-0.1, 0.02), "f-kde": (0.0, 0.005), "svgd": (0.0, 0.5), "sge": (0.1, 0.02)}
    groups = [group("ensemble"), *(group(name, nll=nll) for name, nll in found.items())]
    entries = [entry for of in groups for entry in of.entries]
    section = methods_section(ReportData(entries, groups, margins={"nll": 0.02}))
    table = [block for block in section.blocks if isinstance(block, Table)][1]
    column = next(i for i, name in enumerate(table.columns) if name.startswith("NLL"))
    cells = {row[0].text: row[column] for row in table.rows}
    assert [cells[name].tone for name in found] == ["good", "", "", "mind"]
    assert [cells[name].text[0] for name in found] == ["−", "=", "?", "0"]
    remarks = [block.text for block in section.blocks if isinstance(block, Remark)]
    assert [text.split(" is ")[0] for text in remarks[:4]] == list(found)
    assert "NLL 0.02 nats" in remarks[4] and "kde lowers NLL by 0.1" in section.answer
    assert "f-kde is equal within the margin; svgd is not decided" in section.answer

"""Sweeps over strengths: groups, sentences, and the strength where accuracy falls."""

import pytest

from shoal.evaluation.evaluate import Evaluation
from shoal.page.blocks import Figure, Heading, Remark
from shoal.page.measures import Measure
from shoal.page.report_data import ReportData, RunRecord, SeedGroup
from shoal.page.sections.methods import strength_blocks
from shoal.page.sweep import growth_sentence, negligible, strength_sentence, sweeps
from shoal.page.verdicts import decide_groups

NLL, NOISE = Measure("nll"), (-0.001, 0.0, 0.002)
STRONG, WEAK = 0.1, 1e-5


def group(method, strength=None, nll=0.3, accuracy=0.9, ratio=STRONG, members=5, seeds=3, **more):
    entries = []
    for seed, noise in zip(range(seeds), NOISE, strict=False):
        config = {"method": method, "members": members, "seed": seed, "strength": strength, **more}
        test = {"nll": nll + noise, "accuracy": accuracy + noise}
        scores = {"data": {"task": "classification"}, "test": test, "shifts": {}, "ood": {}}
        history = [{"ratio": ratio, "epoch": 1}]
        assessment = Evaluation(scores)
        entries.append(RunRecord(f"{method}-{seed}", config, history, [], {}, assessment))
    return SeedGroup(method if strength is None else f"{method}:{strength:g}", entries)


@pytest.fixture
def groups():
    """kde gains at 10 and loses accuracy at 100; f-kde gains only where accuracy has fallen."""
    return [
        group("ensemble"),
        group("kde", 1.0, ratio=WEAK),
        group("kde", 100.0, nll=0.1, accuracy=0.8),
        group("kde", 10.0, nll=0.25),
        group("f-kde", 1.0),
        group("f-kde", 10.0, nll=0.2, accuracy=0.7),
        group("sge", 1.0, ratio=WEAK),
        group("sge", 10.0, ratio=WEAK),
        group("svgd", 1.0),
    ]


def test_a_sweep_is_one_method_at_several_strengths(groups):
    found = sweeps(groups)
    assert [sweep.method for sweep in found] == ["kde", "f-kde", "sge"]
    assert list(found[0].groups) == [1.0, 10.0, 100.0]
    assert found[0].groups[10.0] is groups[3]


def test_sizes_and_other_settings_are_never_mixed(groups):
    others = [group("kde", 1000.0, members=9), group("kde", 5.0, lr=0.5)]
    assert [list(sweep.groups) for sweep in sweeps([*groups, *others])][0] == [1.0, 10.0, 100.0]
    assert len(sweeps([*groups, *others])) == 3


def test_accuracy_falls_where_the_interval_leaves_zero_out(groups):
    assert [sweep.falls(decide_groups(groups)) for sweep in sweeps(groups)] == [100.0, 10.0, None]
    assert sweeps(groups[1:])[0].falls(decide_groups(groups[1:])) is None


def test_negligible_is_said_of_the_typical_run():
    assert negligible(group("kde", 1.0, ratio=WEAK))
    assert not negligible(group("kde", 1.0))
    assert negligible(group("ensemble", ratio=0.0))


def test_the_sentence_names_gains_before_the_fall_alone(groups):
    better, equal, weak, falls = strength_sentence(
        sweeps(groups), decide_groups(groups), NLL
    ).split(". ")
    assert better.startswith("kde at strength 10 lowers NLL by 0.05 nats")
    assert "no strength of f-kde improves NLL" in equal
    assert "sge is negligible" in weak
    assert falls.endswith("for kde from strength 100 on and f-kde from strength 10 on.")


def test_the_sentence_says_that_accuracy_does_not_fall():
    groups = [group("ensemble"), group("kde", 1.0), group("kde", 2.0)]
    assert strength_sentence(sweeps(groups), decide_groups(groups), NLL).endswith(
        "No strength lowers accuracy significantly."
    )


def test_one_seed_gives_no_interval():
    groups = [group("ensemble", seeds=1), group("kde", 1.0, seeds=1), group("kde", 2.0, seeds=1)]
    assert strength_sentence(sweeps(groups), decide_groups(groups), NLL).startswith(
        "One seed per strength"
    )


def test_growth_needs_active_repulsion_and_more_than_one_member():
    groups = [
        group("kde", 10.0, members=1, nll=0.9),
        group("kde", 10.0, members=5, nll=0.30),
        group("kde", 10.0, members=17, nll=0.20),
        group("sge", 10.0, members=5, nll=0.20, ratio=WEAK),
        group("sge", 10.0, members=17, nll=0.10, ratio=WEAK),
        group("f-kde", 10.0, members=5, nll=0.20),
        group("f-kde", 10.0, members=17, nll=0.25),
        group("ensemble", members=5, ratio=0.0),
        group("ensemble", members=17, ratio=0.0),
    ]
    found = growth_sentence(decide_groups(groups), NLL)
    assert found.startswith("From 5 to 17 members")
    assert found.endswith("NLL improves for kde:10 and worsens for f-kde:10.")
    assert growth_sentence(decide_groups(groups[3:5]), NLL) == ""


def test_growth_is_equal_only_within_the_margin():
    same = [group("kde", 10.0, members=5), group("kde", 10.0, members=17)]
    assert growth_sentence(decide_groups(same), NLL).endswith(
        "stays equal within the margin for kde:10."
    )
    same[1].entries[0].assessment.scores["test"]["nll"] += 0.1
    assert growth_sentence(decide_groups(same), NLL).endswith("NLL is not decided for kde:10.")


def test_the_page_has_a_figure_for_each_measure(groups):
    report_data = ReportData([entry for g in groups for entry in g.entries], groups)
    blocks = strength_blocks(report_data, [NLL, Measure("accuracy")])
    kinds = [type(block) for block in blocks]
    assert kinds == [Heading, Remark, Figure, Figure]
    assert all(block.reading.endswith(".") for block in blocks[2:])
    assert strength_blocks(ReportData(report_data.entries, groups[:2]), [NLL]) == []


def diverged(found, strength):
    """The same group, whose loss went up."""
    for entry in found.entries:
        entry.history[:] = [{"ratio": WEAK, "loss": 0.5}, {"ratio": WEAK, "loss": 200.0}]
    return found


def test_runs_that_diverged_are_not_called_negligible():
    weak = group("f-svgd", 1.0, ratio=WEAK)
    divergent = diverged(group("f-svgd", 100.0, ratio=WEAK), 100.0)
    groups = [group("ensemble"), weak, divergent]
    found = strength_sentence(sweeps(groups), decide_groups(groups), NLL)
    assert "f-svgd is negligible at every strength that did not diverge" in found
    assert "Training diverged in 3 of 3 runs of f-svgd at strength 100:" in found


def test_where_every_strength_diverged_nothing_is_said_about_repulsion():
    divergent = [diverged(group("f-svgd", s, ratio=WEAK), s) for s in (1.0, 10.0)]
    found = strength_sentence(sweeps(divergent), decide_groups(divergent), NLL)
    assert "negligible" not in found
    assert "Training of f-svgd diverged at every strength" in found
    assert "6 of 6 runs of f-svgd at strengths 1 and 10" in found

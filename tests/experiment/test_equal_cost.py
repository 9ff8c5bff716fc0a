"""Comparisons at equal cost: the plan, its arms, what they decide, and what is refused."""

import json
from dataclasses import replace

import pytest
from small_runs import assert_one_sentence, plain, points

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError, ShoalWarning
from shoal.experiment import equal_cost
from shoal.experiment.build import make_data
from shoal.experiment.config import load_config
from shoal.experiment.equal_cost import (
    ARMS,
    Arm,
    CostPlan,
    check_arms,
    load_plan,
    parse_arms,
    planned,
)
from shoal.experiment.grid import Grid
from shoal.experiment.variants import parse_variants
from shoal.page.compare import compare_grid
from shoal.page.equal_cost import EqualCost, name_of
from shoal.page.report_data import RunRecord

STEPS = {"ensemble": 2.0, "ensemble+batches=own": 2.5, "kde:300": 3.0, "f-kde:100": 4.0}


@pytest.fixture
def exact(monkeypatch):
    """A machine whose steps take exactly what the table says, per two members."""

    def timing(self, variants):
        for variant in variants:
            key, words = equal_cost._key(variant), dict(variant.options)
            base = replace(variant, options=tuple(p for p in variant.options if p[0] == "batches"))
            step = STEPS.get(equal_cost._key(base), 6.0) * int(words.get("members", 2)) / 2
            self.timings[key], self.epochs[key] = (0.0, step), 10.0

    monkeypatch.setattr(equal_cost._Planner, "measure", timing)
    trials = {}

    def tried(self, variant, data):
        trials[variant.label] = len(data.train), len(data.test)
        self.trials.append({"label": variant.label, "nll": 0.0, "seconds": 1.0})
        words = dict(variant.options)
        return float(words.get("lr", 1)) + ("members" in words) + (words.get("batches") == "own")

    monkeypatch.setattr(equal_cost._Planner, "tried", tried)
    return trials


def grid_of(folder, methods="kde:300,f-kde:100", *changes):
    config = load_config("digits", ["epochs=20", "members=2", "lr=0.9", *changes])
    return Grid(config, folder, parse_variants(methods), (2,), 3)


@pytest.fixture(scope="module")
def digits():
    return make_data(load_config("digits", []))


def test_every_arm_gets_the_seconds_of_the_dearest(exact, digits, tmp_path):
    plan = planned(grid_of(tmp_path), digits, ARMS)
    assert (plan.dearest, plan.seconds) == ("f-kde:100", 800.0)
    assert {arm.label: (arm.kind, arm.members, arm.epochs) for arm in plan.arms} == {
        "ensemble": ("reference", 2, 20.0),
        "kde+epochs=27:300": ("method", 2, 27.0),
        "f-kde:100": ("method", 2, 20.0),
        "ensemble+members=4": ("members", 4, 20.0),
        "ensemble+batches=own+epochs=16+members=4": ("members", 4, 16.0),
        "ensemble+epochs=40": ("longer", 2, 40.0),
        "ensemble+batches=own+epochs=32": ("longer", 2, 32.0),
        "ensemble+epochs=40+lr=0.3": ("tuned", 2, 40.0),
        "kde+epochs=27+placebo=true:300": ("placebo", 2, 27.0),
        "f-kde+placebo=true:100": ("placebo", 2, 20.0),
    }
    equal = [arm.seconds for arm in plan.arms if arm.kind not in ("reference", "placebo")]
    assert equal == pytest.approx([800.0] * 7, rel=0.02)
    assert "total" not in plan.announcement(3) and "f-kde:100" in plan.announcement(3)
    assert load_plan(tmp_path) == plan


def test_a_machine_that_slows_down_slows_all_arms_of_a_round(monkeypatch, digits, tmp_path):
    calls = []

    class Slower:
        """Steps of 1 s of the plain ensemble and 3 s of others, on a machine ever slower."""

        total = 200

        def __init__(self, device):
            pass

        @property
        def timing(self):
            slower = 1 + (len(calls) - 1) // 2
            return 0.5, slower * (1.0 if calls[-1].label == "ensemble" else 3.0)

    monkeypatch.setattr(equal_cost, "_Clock", Slower)
    monkeypatch.setattr(equal_cost._Planner, "train", lambda self, each, *_: calls.append(each))
    plan = planned(grid_of(tmp_path, "kde:300"), digits, ("longer",))
    first = plan.timings["ensemble"]["step_ms"]
    assert plan.timings["kde:300"]["step_ms"] == pytest.approx(3 * first)
    assert plan.arms[-1].kind == "longer"
    assert [each.label for each in calls[:2]] == ["ensemble", "kde:300"]
    assert len(calls) == 2 * equal_cost.ROUNDS


def test_tuning_sees_training_data_alone(exact, digits, tmp_path):
    planned(grid_of(tmp_path), digits, ("tuned",))
    held = round(0.2 * len(digits.train))
    assert set(exact.values()) == {(len(digits.train) - held, held)}
    assert "ensemble+lr=0.3+prior.std=3+steps=100" in exact  # half of the length, one after another
    assert "ensemble+epochs=40+lr=0.3" in exact and "ensemble+lr=0.3+members=4" in exact


def test_a_subset_of_arms_and_the_stored_plan(exact, digits, tmp_path):
    plan = planned(grid_of(tmp_path, "kde:300"), digits, parse_arms("longer"))
    assert [arm.label for arm in plan.arms] == ["ensemble", "kde:300", "ensemble+epochs=30"]
    STEPS_then = dict(STEPS)
    try:
        STEPS["kde:300"] = 9.0  # another day
        assert planned(grid_of(tmp_path, "kde:300"), digits, ("longer",)) == plan
    finally:
        STEPS.update(STEPS_then)
    with pytest.raises(ConfigError) as error:
        check_arms(grid_of(tmp_path, "kde:200"), ("longer",))
    assert_one_sentence(error.value, "kde:300", "-o")


@pytest.mark.parametrize(
    ("methods", "changes", "words"),
    [
        ("ensemble", [], ["--methods"]),
        ("auto", [], ["auto"]),
        ("kde:auto", [], ["kde:auto"]),
        ("kde+members=3:300", [], ["members"]),
        ("kde:300", ["patience=3", "validation=0.2"], ["patience"]),
    ],
)
def test_what_cannot_be_planned_is_said_before_any_work(methods, changes, words, tmp_path):
    with pytest.raises(ConfigError) as error:
        compare_grid(grid_of(tmp_path / "new", methods, *changes), equal_cost=ARMS)
    assert_one_sentence(error.value, *words)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("text", ["tuning", "", "epochs=3"])
def test_unknown_arms_are_one_sentence(text):
    with pytest.raises(ConfigError) as error:
        parse_arms(text)
    assert_one_sentence(error.value, "members")


def test_data_without_length_are_refused():
    x, y = points()
    with pytest.raises(DataError) as error:
        shoal.compare(plain, iter([(x, y)]), test=(x, y), methods="kde:300", equal_cost=True)
    assert_one_sentence(error.value, "length")


# What the arms decide


def judged(**nll):
    """Arms with these NLL over seeds: `kde` against `longer` and `members`, and its placebo."""
    arms = [
        Arm("kde:300", "method", 2, 10, 1.0, 2.0),
        Arm("ensemble+epochs=9", "longer", 2, 10, 1.0, 2.0),
        Arm("ensemble+members=4", "members", 4, 10, 1.0, 2.0),
        Arm("kde+placebo=true:300", "placebo", 2, 10, 1.0, 2.0, of="kde:300"),
    ]
    names = dict(zip(("kde", "longer", "members", "placebo"), arms, strict=True))
    plan = CostPlan({}, "kde:300", 2.0, tuple(arms), {}, [], 1.0, {})
    records = []
    for name, values in nll.items():
        arm = names[name]
        for seed, value in enumerate(values):
            folder = f"{arm.label.replace(':', '-x')}-m{arm.members}-s{seed}"
            record = RunRecord(folder, {"seed": seed}, [], [], {"seconds": 2.1}, None)
            records.append(replace(record, provenance={"seconds": 2.1, "nll": value}))
    found = EqualCost.of(plan, records)
    return replace(found, measure=Stored())


class Stored:
    """NLL of a record that has no evaluation."""

    title, unit, better, scale = "NLL", "nats", "lower", 1.0

    def __call__(self, record):
        return record.provenance["nll"]

    def summary(self, group):
        values = list(group.values(self).values())
        return sum(values) / len(values), 0.01


LOW = [0.10, 0.11, 0.12, 0.10]


def above(values, by):
    return [value + by + 1e-4 * place for place, value in enumerate(values)]


@pytest.mark.parametrize(
    ("longer", "members", "words"),
    [
        (above(LOW, 0.1), above(LOW, 0.2), ["better in NLL than every plain arm of equal cost"]),
        (
            [0.1, 0.111, 0.119, 0.1],
            above(LOW, 0.2),
            ["equal in NLL to 'longer training'", "margin"],
        ),
        (
            above(LOW, 1e-3),
            above(LOW, 0.2),
            ["better in NLL than every", "within the margin", "longer"],
        ),
        (above(LOW, -0.1), above(LOW, 0.2), ["worse in NLL than 'longer training'", "by 0.0998"]),
        (
            above(LOW, -0.1),
            above(LOW, -0.2),
            ["worse in NLL than every plain arm", "for 'more members'"],
        ),
        (
            [0.1, 0.2, 0.0, 0.1],
            above(LOW, 0.2),
            ["not decided in NLL against 'longer", "would decide"],
        ),
        (LOW[:2], LOW[:2], ["not decided", "2 seeds"]),
    ],
)
def test_one_sentence_answers(longer, members, words):
    found = judged(kde=LOW, longer=longer, members=members)
    (sentence,) = found.sentences
    assert all(word in sentence for word in words), sentence
    assert sentence.count(".") - sentence.count("0.") <= 1


def test_a_placebo_is_told_apart_from_plain_arms():
    found = judged(kde=LOW, longer=above(LOW, 0.1), placebo=above(LOW, 0.1))
    answer, placebo = found.sentences
    assert "better in NLL than every plain arm" in answer and "better than its placebo" in placebo
    assert len(found.decisions) == 1 and len(found.placebos) == 1
    assert "placebo of kde:300" in str(found)


def test_seconds_that_differ_are_said():
    found = judged(kde=LOW, longer=above(LOW, 0.1))
    assert not found.far
    late = [replace(arm, seconds=1.0) if arm.kind == "longer" else arm for arm in found.runs]
    runs = dict(zip(late, found.runs.values(), strict=True))
    (sentence,) = replace(found, runs=runs).far
    assert "'longer training' (2.1 s instead of 1.0 s)" in sentence and "1 arm " in sentence


@pytest.mark.parametrize(
    ("label", "kind", "name"),
    [
        ("kde+epochs=9:300", "method", "kde:300"),
        ("ensemble+batches=own+epochs=9", "longer", "longer training, own batches"),
        ("ensemble+lr=0.1+members=9", "tuned", "tuned"),
    ],
)
def test_arms_have_names(label, kind, name):
    assert name_of(Arm(label, kind, 2, 1, 1.0, 1.0)) == name


# Whole runs


@pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")
def test_equal_cost_on_digits(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(equal_cost, "SECONDS", 0.01)
    monkeypatch.setattr(equal_cost, "ROUNDS", 1)
    monkeypatch.setattr(equal_cost, "GUESSES", 1)
    out = str(tmp_path / "runs")
    words = ["compare", "digits", "--methods", "kde:300,f-kde:100", "epochs=2", "members=2"]
    words += ["model.hidden=[8]", "--seeds", "2", "-o", out, "--equal-cost", "--json"]
    assert main(words) == 0
    value = json.loads(capsys.readouterr().out)
    arms = {arm["kind"] for arm in value["equal_cost"]["arms"]}
    assert arms == {"reference", "method", "members", "longer", "tuned", "placebo"}
    plan = (tmp_path / "runs" / "plan.json").read_text()
    assert main(words) == 0  # nothing is measured or trained again
    assert (tmp_path / "runs" / "plan.json").read_text() == plan
    again = json.loads(capsys.readouterr().out)
    assert again["equal_cost"] == value["equal_cost"]


@pytest.mark.filterwarnings("ignore::shoal.core.errors.ShoalWarning")
def test_equal_cost_of_your_own_network(monkeypatch, tmp_path):
    monkeypatch.setattr(equal_cost, "SECONDS", 0.01)
    monkeypatch.setattr(equal_cost, "ROUNDS", 1)
    with pytest.warns(ShoalWarning):
        found = shoal.compare(
            plain, points(), test=points(seed=1), methods="f-kde:50", seeds=1, sizes=2, epochs=2,
            equal_cost="longer,placebo", out=tmp_path / "own", report=tmp_path / "page.html",
            progress=False,
        )  # fmt: skip
    assert {arm.kind for arm in found.equal_cost.runs} == {
        "reference", "method", "longer", "placebo"
    }  # fmt: skip
    assert "cannot decide" in str(found)
    page = (tmp_path / "page.html").read_text()
    assert "worth its price" in page
    assert "equal_cost=&#39;longer,placebo&#39;" in page and "methods=[&#39;f-kde:50&#39;]" in page

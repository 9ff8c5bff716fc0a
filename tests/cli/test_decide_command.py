"""`shoal decide`: rules of a run, fitted on one half of its test set and checked on the other."""

import json

import pytest

from shoal import decisions
from shoal.cli.main import main


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("decide")
    for name, typed in {
        "digits": ["digits", "members=3", "epochs=10"],
        "line": ["toy-regression", "members=3", "epochs=5"],
    }.items():
        if main(["fit", *typed, "--quiet", "-o", str(folder / name)]) != 0:
            pytest.fail(f"{name} was not trained")
    return folder


def test_classes_get_rules_that_hold_on_the_other_half(runs, capsys):
    file = runs / "rules.json"
    command = ["decide", str(runs / "digits"), "--error", "0.1", "--json", "-o", str(file)]
    assert main(command) == 0
    told = json.loads(capsys.readouterr().out)
    assert told == json.loads(file.read_text())
    rules = told["rules"]
    assert rules.keys() == {"temperature", "selective", "sets", "alarm"}
    assert abs(told["fitted_points"] - told["checked_points"]) <= 1
    assert rules["selective"]["checked"]["answered"] > 0.5
    low, _ = decisions.clopper_pearson(
        round(rules["sets"]["checked"]["coverage"] * told["checked_points"]),
        told["checked_points"],
        0.999,
    )
    assert rules["sets"]["checked"]["coverage"] > 0.85 and low < 1
    assert 0 < rules["alarm"]["checked"]["false alarms"] < 0.15
    assert any(name.endswith("detected") for name in rules["alarm"]["checked"])


def test_the_text_names_thresholds_and_conditions(runs, capsys):
    assert main(["decide", str(runs / "digits"), "--error", "0.1"]) == 0
    text = capsys.readouterr().out
    assert "answer if confidence ≥" in text and "exchangeable" in text


def test_an_error_rate_that_cannot_be_guaranteed_answers_nothing(runs, capsys):
    assert main(["decide", str(runs / "digits"), "--error", "0.0001"]) == 0
    assert "answer nothing" in capsys.readouterr().out


def test_numbers_get_intervals(runs, capsys):
    assert main(["decide", str(runs / "line"), "--level", "0.8", "--json"]) == 0
    rules = json.loads(capsys.readouterr().out)["rules"]
    assert rules.keys() == {"intervals", "alarm"}
    assert rules["intervals"]["level"] == 0.8 and rules["intervals"]["checked"]["width"] > 0


@pytest.mark.parametrize("option", [["--error", "2"], ["--level", "0"], ["--alarms", "1"]])
def test_a_share_outside_0_and_1_is_refused(runs, option, capsys):
    assert main(["decide", str(runs / "digits"), *option]) == 2
    assert "between 0 and 1" in capsys.readouterr().err

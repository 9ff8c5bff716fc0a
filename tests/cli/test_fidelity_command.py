"""`shoal fidelity` and its section of the page."""

import json

import pytest

from shoal.analysis.fidelity.study import Budget, Row
from shoal.cli.main import main
from shoal.core.errors import ConfigError
from shoal.page.fidelity import closest, read_rows, results_text, write_rows
from shoal.page.report_data import ReportData, RunRecord
from shoal.page.sections.bayesian import fidelity_section

NAMES = (
    "frechet/on",
    "frechet/off",
    "frechet",
    "tv/on",
    "tv/off",
    "mean/on",
    "std/on",
    "mean/off",
    "std/off",
    "stein",
    "tv",
)


def test_a_posterior_in_closed_form_needs_no_chains(tmp_path, capsys):
    command = ["fidelity", "--reference", "--problems", "linear", "-o", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found) == ["linear"] and "closed form" in found["linear"]["method"]
    assert main(command) == 0
    assert "–" in capsys.readouterr().out  # no chains, no draws


def row(problem, method, seed, value):
    return Row(problem, method, seed, dict.fromkeys(NAMES, value))


ROWS = [
    row(problem, method, seed, value + 0.01 * seed)
    for problem in ("linear", "digits")
    for method, value in (("ensemble", 0.4), ("kde:legacy", 0.35), ("kde:calibrated", 0.1))
    for seed in range(2)
]


def test_the_table_has_the_closest_method_first():
    lines = results_text(ROWS).splitlines()
    assert [line.split()[0] for line in lines] == ["method", "kde:calibrated", "kde:legacy",
                                                   "ensemble"]  # fmt: skip
    assert "0.105 ± 0.005" in lines[1]


def test_the_closest_of_each_kind():
    found = closest(ROWS)["digits"]
    assert (found["calibrated"], found["other"]) == ("kde:calibrated", "kde:legacy")
    assert found["distance"] == pytest.approx(0.105)


def test_rows_of_another_budget_are_not_mixed(tmp_path):
    write_rows(tmp_path, Budget(), ROWS)
    assert read_rows(tmp_path, Budget()) == ROWS
    with pytest.raises(ConfigError, match="give another folder"):
        read_rows(tmp_path, Budget(members=3))


def test_a_page_about_runs_beside_a_study_has_the_section(tmp_path):
    pytest.importorskip("matplotlib")
    write_rows(tmp_path, Budget(), ROWS)
    entry = RunRecord("run", {}, [], [], {}, None, tmp_path / "run")
    section = fidelity_section(ReportData([entry]))
    assert section.answer.startswith("On 2 of 2 problems")
    assert len(section.blocks) == 3
    alone = RunRecord("run", {}, [], [], {}, None, None)
    assert fidelity_section(ReportData([alone])) is None


def test_the_command_from_end_to_end(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    quick = Budget(4, 3, 0.1)
    monkeypatch.setattr("shoal.cli.commands.fidelity.Budget", lambda *_: quick)
    arguments = ["fidelity", "--quick", "--problems", "linear", "-o", str(tmp_path), "--json", "-q"]
    arguments += ["--methods", "ensemble,kde:calibrated", "--seeds", "2"]
    assert main(arguments) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["closest"]["linear"]["calibrated"] == "kde:calibrated"
    assert (tmp_path / "results.csv").read_text().startswith("problem,method,seed,distance,value\n")
    assert {"law.png", "frechet.png", "tv.png", "growth.png"} <= {
        p.name for p in tmp_path.iterdir()
    }


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--problems", "linea"], "did you mean 'linear'"),
        (["--seeds", "0"], "--seeds must be 1 or more"),
        (["--methods", "kde:best"], "NAME:legacy or NAME:calibrated"),
    ],
)
def test_mistakes_are_answered_in_one_line(arguments, sentence, capsys):
    assert main(["fidelity", *arguments]) == 2
    assert sentence in capsys.readouterr().err

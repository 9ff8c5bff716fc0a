"""`run.worth`: more members of a run, what they cost, on the page and on the command line."""

import json
import math
import re

import pytest
import torch
from small_runs import assert_one_sentence, plain, points, quick, shoal_of

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError
from shoal.evaluation.evaluate import stored_curves
from shoal.evaluation.worth import cost, last_epochs
from shoal.page.blocks import Figure, Remark, Statement
from shoal.page.report_data import load_report_data
from shoal.page.sections.worth import worth_section

TEST = points(50, seed=1)


@pytest.fixture(scope="module")
def run():
    return quick(shoal_of(members=4), epochs=8, validation=0.25, method="ensemble", lr=0.05)


def test_a_run_tells_gains_and_their_price(run):
    found = run.worth(TEST, ood={"far": 5 + points(30, seed=2)[0]})
    assert [*found.curves] == ["nll", "accuracy", "brier", "auroc far"]
    scores = shoal.evaluate(shoal.predict(run, TEST[0]), TEST[1])
    for name in ("nll", "accuracy", "brier"):
        assert found.curves[name].at(4) == pytest.approx(scores[name], rel=1e-6)
    assert found.seconds == pytest.approx(run.provenance["seconds"] / 4)
    gain = found.gain(2)
    assert gain.low < gain.value < gain.high and gain.value > 0
    assert re.match(
        r"2 more members: NLL lower by [\d.e−]+ ± [\d.e−]+ nats, for ", found.sentence(2)
    )
    assert "+1" in repr(found) and "all 15 subsets" in repr(found)
    page = found._repr_html_()
    assert "<svg" in page and "1 more member: NLL" in page
    table = found.to_pandas()
    assert {*table["score"]} == {*found.curves} and table["members"].max() == 9


def test_longer_training_and_other_runs_stand_beside(run):
    other = quick(shoal_of(members=4), epochs=1, method="ensemble", lr=0.05)
    found = run.worth(TEST, beside={"short": other})
    last, short = found.beside
    rows = [row["validation"]["nll"] for row in run.history]
    assert last.gain == pytest.approx(rows[5] - rows[7]) and "2 epochs" in last.name
    nll = [shoal.evaluate(shoal.predict(r, TEST[0]), TEST[1])["nll"] for r in (run, other)]
    assert short.gain == pytest.approx(nll[0] - nll[1], rel=1e-5) and short.error > 0
    spent = [each.provenance["seconds"] for each in (run, other)]
    assert short.seconds == pytest.approx(spent[1] - spent[0]) and short.seconds < 0
    assert "short" in repr(found) and cost(short.seconds).startswith("−")
    assert last_epochs(other.history) is None


def test_a_run_of_draws_counts_its_chains(run):
    drawn = shoal.draw(run, points(), draws=3, warmup=20, thin=1, progress=False)
    found = run.worth(TEST, beside={"draws": drawn})
    assert found.beside[-1].name == "draws" and found.beside[-1].seconds == pytest.approx(
        drawn.provenance["seconds"] - run.provenance["seconds"]
    )
    of_chains = drawn.worth(TEST)
    scores = shoal.evaluate(shoal.predict(drawn, TEST[0]), TEST[1])
    assert of_chains.members == 4 and of_chains.curves["nll"].at(4) == pytest.approx(scores["nll"])
    assert "2 more chains" in of_chains.sentence(2)
    assert of_chains.seconds == pytest.approx(drawn.provenance["seconds"] / 4)


def test_weights_of_points_count(run):
    weight = torch.arange(50.0)
    weighted = run.worth((*TEST, weight)).curves["nll"].at(4)
    scores = shoal.evaluate(shoal.predict(run, TEST[0]), TEST[1], sample_weight=weight)
    assert weighted == pytest.approx(scores["nll"], rel=1e-6)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda run: quick(shoal_of(members=2)).worth(TEST), ["from 3 finite members on"]),
        (lambda run: run.worth(TEST).gain(0), ["more must be a whole number from 1 on"]),
        (lambda run: run.worth(TEST).gain(1, "rmse"), ["score must be one of nll"]),
        (lambda run: run.worth(TEST, beside=run), ["beside is a dict"]),
        (lambda run: run.worth(TEST[0]), ["targets"]),
    ],
)
def test_mistakes_are_one_sentence(run, call, words):
    with pytest.raises((ConfigError, DataError)) as error:
        call(run)
    assert_one_sentence(error.value, *words)


def test_missing_data_say_what_to_type(tmp_path):
    quick(out=tmp_path / "run")
    with pytest.raises(ConfigError) as error:
        shoal.load(tmp_path / "run", plain).worth()
    assert_one_sentence(error.value, "run.worth((x_test, y_test))")


@pytest.mark.usefixtures("undrawn")
def test_the_page_asks_what_one_more_member_is_worth(run, tmp_path):
    path = shoal.report(run, tmp_path / "page.html", data=TEST)
    text = path.read_text(encoding="utf-8")
    assert "What is one more member worth?" in text
    section = worth_section(load_report_data([run]))
    found = run.worth(TEST)
    kept = stored_curves(run.results["evaluation"])
    assert kept.keys() == found.curves.keys()
    assert kept["nll"].gain(2) == found.gain(2)
    names = [block.name for block in section.blocks if isinstance(block, Statement)]
    assert names == [
        "1 more member",
        "2 more members",
        "4 more members",
        "last 2 epochs (validation)",
    ]
    assert section.answer.startswith("One more member changes the NLL by −")
    titles = [block.title for block in section.blocks if isinstance(block, Figure)]
    assert titles == ["NLL by number of members", "Accuracy by number of members"]
    assert any(
        isinstance(block, Remark) and "all 15 subsets" in block.text for block in section.blocks
    )


def test_two_members_have_no_such_section():
    run = quick(shoal_of(members=2))
    shoal.evaluate(run, TEST)
    assert worth_section(load_report_data([run])) is None


def test_the_commands_tell_and_grow(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny = ["model.hidden=[8]", "members=3", "epochs=2", "validation=0.3", "method=ensemble"]
    assert main(["fit", "toy-classification", *tiny, "-o", "run", "-q"]) == 0
    capsys.readouterr()
    assert main(["worth", "run", "--beside", "run", "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["sizes"][0]["members"] == 1 and value["beside"][-1]["gain"] == 0
    assert main(["worth", "run"]) == 0
    assert "NLL lower by" in capsys.readouterr().out
    by_steps = ["grow", "run", "--until", "worth it", "-q"]
    assert main([*by_steps, "--price", "100"]) == 0
    assert "stopped at 3 members" in capsys.readouterr().out
    assert main([*by_steps, "--price", "1e-9", "--most", "4"]) == 0
    told = capsys.readouterr().out
    assert "1 new member added" in told and "stopped at 4 members" in told
    assert shoal.load("run-grown/members-4").ensemble.members == 4
    assert main(by_steps) == 2
    assert math.isfinite(value["seconds_per_member"])

"""Evidence and growing from the command line, and their section of the page."""

import json
import re
from dataclasses import replace

import pytest
import torch

import shoal
from shoal.analysis.evidence import Evidence, PriorResult, Weighting, load_evidence
from shoal.cli.main import main
from shoal.page.findings import answers, degenerate, exact, tied, widths
from shoal.page.report import render
from shoal.page.report_data import load_report_data

TOLD = Evidence(
    members=3,
    finite_members=[0, 1, 2],
    points=100,
    step=20,
    log_likelihoods=[-10.0, -12.0, -13.0],
    log_priors=[],
    log_evidence=-10.93,
    lower=-11.1,
    upper=-10.0,
    spread=3.0,
    ties=1,
    half_temperature=1.5,
    gradient_norms=[0.1, 0.2, 0.3],
    in_weights=[[0], [1], [2]],
    in_function=[[0], [1], [2]],
    distinct=3.0,
    weightings={
        "uniform": Weighting([1 / 3] * 3, 3.0, 0.5, 0.0),
        "posterior": Weighting([0.84, 0.11, 0.05], 1.38, 0.6, 0.04),
        "stacking": Weighting([0.0, 0.5, 0.5], 2.0, 0.4, 0.1),
    },
    learned_priors=[
        PriorResult(
            "Gaussians at the members, last layer", -10.9, 0.5, 0.6, {"2": 0.02}, "members"
        ),
        PriorResult("point masses", -10.93, 0.5, 0.6),
        PriorResult("Gaussians at zero, last layer", -50.0, 0.55, 0.65, {"2": 0.7}, "zero"),
    ],
    held_out="every second test point",
    evaluated_on="the other half of the test data",
)


def test_sentences_say_what_the_numbers_say():
    text = " ".join(answers(TOLD))
    numbers = re.findall(r"[−\d.]*\d(?: %)?", text)
    bounds = ["−10.93", "−11.10", "−10.00"]
    ties = ["1.38", "3", "3", "0.03", "0.01", "1.5"]
    weights = ["0.5000", "0.6000", "0.4000", "4 %"]
    rest = ["3", "0.1", "0.3", "0", "39.1", "0.02"]
    assert numbers == [*bounds, *ties, *weights, *rest]


def test_duplicates_are_named():
    told = replace(TOLD, in_weights=[[0, 2], [1]], in_function=[[0, 2], [1]])
    assert re.findall(r"\d", degenerate(told)) == ["1", "3", "1", "2", "3"]
    assert re.findall(r"\d", degenerate(TOLD)) == ["3"]


def test_ties_collapse_and_missing_data_have_words_of_their_own():
    equal = {"posterior": Weighting([1 / 3] * 3, 3.0)}
    assert "every temperature" in tied(replace(TOLD, half_temperature=0.0, weightings=equal))
    assert "only member" in tied(replace(TOLD, finite_members=[0]))
    unjudged = {name: replace(w, nll=float("nan")) for name, w in TOLD.weightings.items()}
    assert "no test data" in exact(replace(TOLD, weightings=unjudged))
    collapsed = [replace(TOLD.learned_priors[0], scales={"2": 1e-7}), *TOLD.learned_priors[1:]]
    assert "point masses are the best prior" in widths(replace(TOLD, learned_priors=collapsed))
    left = replace(TOLD, missing={"a flow": "no zuko"})
    assert answers(left)[-1] == "Not computed: a flow (no zuko)."


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """One tiny ensemble, its evidence, and what the command line said of it."""
    folder = tmp_path_factory.mktemp("evidence") / "run"
    fit = ["fit", "toy-classification", "model.hidden=[6]", "members=2", "steps=20", "-q"]
    assert main([*fit, "-o", str(folder)]) == 0
    assert main(["evidence", str(folder), "-q", "--flow-steps", "2"]) == 0
    return folder


def test_evidence_is_kept_in_the_folder(work, capsys):
    assert main(["evidence", str(work), "--json", "--no-priors"]) == 0
    out, err = capsys.readouterr()
    value = json.loads(out)
    assert err.splitlines()[-1].startswith("3/3") and value["learned_priors"] == []
    assert main(["evidence", str(work), "--flow-steps", "2"]) == 0
    out, err = capsys.readouterr()
    assert "8/8" in err and "point masses" in out and "log evidence" in out
    kept = load_evidence(work)
    assert kept is not None and len(kept.learned_priors) >= 5
    assert kept.log_likelihoods == value["log_likelihoods"]


def test_predictions_take_their_weights_from_the_folder(work):
    kept = load_evidence(work)
    assert kept is not None
    pred = shoal.predict(work, torch.zeros(3, 2), weights="stacking")
    weights = torch.tensor(kept.weightings["stacking"].weights)
    each = shoal.predict(work, torch.zeros(3, 2)).member_probs()
    torch.testing.assert_close(pred.probs, torch.einsum("m,mbc->bc", weights, each))


def test_the_page_has_the_section_before_the_training(work):
    page = render(load_report_data([work]))
    headings = re.findall(r"<h2>(.*?)</h2>", page)
    assert headings.index("In what sense is it Bayesian?") + 1 == headings.index(
        "Did training go well?"
    )
    for title in ("Weights of the members", "Log-likelihood of each member", "Learned priors"):
        assert title in page
    assert "From point masses to a Bayesian network" in page


def test_a_page_without_evidence_has_no_such_section(work, picture_runs):
    assert "In what sense" not in render(load_report_data(picture_runs[:1]))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--points", "0"], "--points must be 1 or more"),
        (["--data", "digit"], "did you mean 'digits'?"),
    ],
)
def test_mistakes_are_answered_in_a_line(work, arguments, words, capsys):
    assert main(["evidence", str(work), *arguments]) == 2
    assert words in capsys.readouterr().err


def test_growing_makes_a_run_of_all_members(work, capsys):
    assert main(["grow", str(work), "--more", "1", "-q", "steps=10"]) == 0
    grown = work.with_name("run-grown-3")
    assert "1 new member added to 2 trained members" in capsys.readouterr().out
    run = shoal.load(grown)
    assert run.ensemble.members == 3 and run.config["frozen"] == 2 and run.config["steps"] == 10
    assert (grown / "scores.json").exists()
    assert main(["grow", str(work), "--more", "1", "-q"]) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert main(["evaluate", str(grown), "-q"]) == 0
    assert "accuracy" in render(load_report_data([grown]))


def test_a_grown_config_says_what_to_type_and_resumes(work, capsys, tmp_path):
    main(["grow", str(work), "--more", "1", "-q", "steps=10", "-o", str(tmp_path / "g")])
    capsys.readouterr()
    config = str(tmp_path / "g" / "config.toml")
    assert main(["fit", config, "-q", "-o", str(tmp_path / "again")]) == 2
    assert "type: shoal grow RUN" in capsys.readouterr().err
    before = shoal.load(tmp_path / "g").ensemble.state
    assert main(["fit", config, "-q", "-o", str(tmp_path / "g"), "--resume"]) == 0
    after = shoal.load(tmp_path / "g").ensemble.state
    assert all(torch.equal(tensor, after[name]) for name, tensor in before.items())


@pytest.mark.parametrize("change", ["members=7", "data=digits", "frozen=1"])
def test_what_growing_keeps_cannot_be_changed(work, change, capsys):
    assert main(["grow", str(work), change]) == 2
    assert "there is no key" in capsys.readouterr().err

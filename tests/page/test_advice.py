"""Under every number that needs attention stands a line, and the line runs for its run."""

import copy
import shlex

import numpy as np
import pytest
import torch
from torch import nn

import shoal
from shoal.cli.main import main
from shoal.core.display.text import percent
from shoal.data.dataset import Dataset, Split
from shoal.evaluation.evaluate import Evaluation, evaluate_run, kept_evaluation
from shoal.page import advice
from shoal.page.measures import Measure
from shoal.page.report import render
from shoal.page.report_data import load_report_data
from shoal.page.sections.calibration import calibration_section
from shoal.page.sections.errors import errors_section
from shoal.page.sections.making import making_section
from shoal.page.sections.predictive_uncertainty import uncertainty_section
from shoal.page.sections.training import training_section
from shoal.page.sections.trust import trust_section
from shoal.page.sentences import Calibration, Coverage
from shoal.page.trend import still_falling
from shoal.sklearn import EnsembleClassifier, EnsembleRegressor

X = torch.randn(80, 2, generator=torch.Generator().manual_seed(0))
LABELS, NUMBERS = (X[:, 0] > 0).long(), X.sum(1)
NAMES = np.array(["ant", "bee"])[LABELS]


def build():
    return nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2))


def build_one():
    return nn.Linear(2, 1)


def python_run(kind, folder=None, **options):
    y, make = (LABELS, build) if kind == "classes" else (NUMBERS, build_one)
    ensemble = shoal.Ensemble.init(make, 2)
    settings = {"epochs": 2, "method": "kde", "progress": False, "out": folder} | options
    run = shoal.fit(ensemble, (X, y), **settings)
    shoal.evaluate(run, (X, y), ood={"far": X + 9})
    return run


def names(kind):
    """What only the user has."""
    y, make = (LABELS, build) if kind == "classes" else (NUMBERS, build_one)
    parts = {"x": X, "y": y, "x_val": X, "y_val": y, "x_test": X, "y_test": y, "x_noisy": X + 0.1}
    return parts | {"build": make, "shoal": shoal, "x_other": X + 9}


def estimator(kind, **options):
    settings = {"members": 2, "epochs": 2, "method": "kde", "random_state": 0} | options
    make, y = (
        (EnsembleClassifier, NAMES) if kind == "classes" else (EnsembleRegressor, NUMBERS.numpy())
    )
    model = make(**settings).fit(X.numpy(), y)
    shoal.evaluate(model.run_, model.dataset(X.numpy(), y))
    return model


def estimator_names(model, kind):
    y = NAMES if kind == "classes" else NUMBERS.numpy()
    x = {name: X.numpy() for name in ("X_train", "X_val", "X_test", "X_noisy", "X_other")}
    return x | {"y_train": y, "y_val": y, "y_test": y, "model": model, "shoal": shoal}


def record_of(run):
    (record,) = load_report_data([run]).entries
    return record


def executed(code, known):
    exec(code, known)
    return known


CALLS = {
    "calibrated": (lambda run: advice.for_confidence(run, Calibration.OVERCONFIDENT), "classes"),
    "longer": (lambda run: advice.for_confidence(run, Calibration.UNDERCONFIDENT), "classes"),
    "conformal": (lambda run: advice.for_intervals(run, Coverage.TOO_NARROW), "numbers"),
    "crossed": (lambda run: advice.for_intervals(run, Coverage.TOO_NARROW), "numbers"),
    "search": (advice.for_ood, "classes"),
    "strength": (advice.for_repulsion, "classes"),
    "slower": (advice.for_divergence, "numbers"),
}
OPTIONS = {"search": {"method": "ensemble"}, "crossed": {"folds": 2}}


def did(case, known, before):
    """Whether the line had its effect."""
    run = known["model"].run_ if "model" in known else known.get("run")
    return {
        "calibrated": lambda: known["calibrated"].probs.shape == (80, 2),
        "longer": lambda: run.config["epochs"] == 2 * before.config["epochs"],
        "conformal": lambda: len(known["low"]) == len(known["high"]) == 80,
        "crossed": lambda: len(known["low"]) == len(known["high"]) == 80,
        "search": lambda: run.config["asked"] == {"method": "kde", "strength": "auto"},
        "strength": lambda: run.choice is not None,
        "slower": lambda: run.config["lr"] == pytest.approx(before.config["lr"] / 10),
    }[case]()


@pytest.fixture
def falling(monkeypatch):
    """Losses that still fall, and noise of one size."""
    monkeypatch.setattr(advice, "still_falling", lambda history: True)
    monkeypatch.setattr(advice, "noise_varies", lambda record: False)


@pytest.mark.parametrize("kept", [False, True], ids=["in memory", "in a folder"])
@pytest.mark.parametrize("case", CALLS)
def test_python_users_get_python_that_runs(case, kept, tmp_path, monkeypatch, falling):
    monkeypatch.chdir(tmp_path)
    make, kind = CALLS[case]
    run = python_run(kind, "kept" if kept else None, **OPTIONS.get(case, {}))
    step = make(record_of(run))
    known = executed(step.code, names(kind) | ({} if kept else {"run": run}))
    assert step.sentence.endswith(".")
    assert did(case, known, run)


@pytest.mark.parametrize("case", CALLS)
def test_users_of_estimators_get_estimator_lines_that_run(case, falling):
    make, kind = CALLS[case]
    model = estimator(kind, early_stopping=False, **OPTIONS.get(case, {}))
    step = make(record_of(model.run_))
    assert "shoal.fit(" not in step.code and "Ensemble.init" not in step.code
    known = executed(step.code, estimator_names(model, kind))
    assert did(case, known, model.run_)


@pytest.fixture(scope="module")
def typed_run(tmp_path_factory):
    """A run that a command made."""
    folder = tmp_path_factory.mktemp("typed") / "digits"
    small = ["members=2", "epochs=1", "method=kde", "data.test_size=60", "model.hidden=[4]"]
    assert main(["fit", "digits", *small, "-o", str(folder), "-q"]) == 0
    return folder


@pytest.mark.parametrize("case", ["calibrated", "longer", "search", "strength", "slower"])
def test_users_of_commands_get_commands_that_run(case, typed_run, monkeypatch, falling):
    monkeypatch.chdir(typed_run.parent)
    (record,) = load_report_data([typed_run]).entries
    if case == "search":
        record.config["method"] = "ensemble"
    assert advice.interface(record) == "command line"
    words, again = shlex.split(CALLS[case][0](record).code), str(typed_run.parent / case)
    words = [again if word.startswith("digits-") else word for word in words]
    assert words[0] == "shoal" and main([*words[1:], "-q"]) == 0
    if case != "calibrated":
        assert did(case, {"run": shoal.load(again)}, shoal.load(typed_run))


def test_a_script_gets_python_even_for_named_data(typed_run):
    (record,) = load_report_data([typed_run]).entries
    record.provenance.pop("made_by")
    record.provenance["command"] = "train.py --fast"
    assert advice.interface(record) == "python"
    line = advice.refit(record, epochs=3)
    assert "shoal.data.load({" in line and "epochs=3" in line


def test_a_warning_without_a_line_is_repeated():
    run = warned(python_run("classes"), "Outputs are probabilities; leave out its last softmax.")
    step = advice.for_confidence(record_of(run), Calibration.UNDERCONFIDENT)
    assert step == ("First: leave out its last softmax.", "")


def test_the_command_takes_names_of_classes(typed_run, undrawn, monkeypatch, tmp_path):
    def only(page):
        return {"errors": errors_section(page)}

    monkeypatch.setattr("shoal.page.report._built_sections", only)
    page, names = tmp_path / "page.html", ",".join(f"digit-{k}" for k in range(10))
    assert main(["report", str(typed_run), "--classes", names, "-o", str(page), "-q"]) == 0
    assert ">digit-7<" in page.read_text(encoding="utf-8")


def test_decide_asks_for_the_function_of_an_own_network(tmp_path, capsys):
    run = python_run("classes", tmp_path / "kept")
    assert main(["decide", str(run.folder)]) == 2
    told = capsys.readouterr().err
    assert "add --model MODULE:FUNCTION" in told and "shoal.decisions" in told


def test_noise_that_varies_is_learned_from_the_input():
    random = np.random.default_rng(0)
    x = random.uniform(-2, 2, (400, 1))
    y = x[:, 0] + np.where(np.abs(x[:, 0]) < 1.4, 0.02, 1.5) * random.normal(size=400)
    few = {"members": 2, "epochs": 10, "hidden": (8,), "random_state": 0}
    model = EnsembleRegressor(**few, likelihood="homoscedastic").fit(x, y)
    shoal.evaluate(model.run_, model.dataset(x, y))
    step = advice.for_intervals(record_of(model.run_), Coverage.TOO_NARROW)
    known = executed(step.code, {"shoal": shoal, "X_train": x, "y_train": y})
    assert type(known["model"].run_.likelihood).__name__ == "HeteroscedasticGaussian"


def test_the_lines_for_missing_data_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("shoal.page.report._built_sections", lambda report_data: {})
    run, model = python_run("classes"), estimator("numbers")
    for kind in ("ood", "shifts"):
        executed(advice.report_again(record_of(run), kind), names("classes") | {"run": run})
        known = estimator_names(model, "numbers")
        executed(advice.report_again(record_of(model.run_), kind), known)
    assert (tmp_path / "report.html").exists()
    scores = kept_evaluation(model.run_).scores
    assert "noisy" in scores["shifts"]


def test_every_card_that_needs_attention_has_its_line(picture_runs, line_runs, typed_run):
    pages = [load_report_data(runs) for runs in (picture_runs, line_runs, [typed_run])]
    cards = [card for page in pages for card in trust_section(page).blocks]
    amber = [card for card in cards if card.tone == "mind"]
    assert len(amber) >= 4
    for card in cards:
        assert bool(card.code and card.advice) == (card.tone == "mind"), card


def test_the_headline_takes_the_number_of_the_test_set(picture_runs):
    run, found = picture_runs[0]
    scores = copy.deepcopy(found.scores)
    scores["ood"]["noise"]["effective_functions"] = 3.9
    page = load_report_data([(run, Evaluation(scores, found.samples))])
    (card,) = [card for card in trust_section(page).blocks if card.name == "functions"]
    assert card.number == f"{scores['test']['effective_functions']:.2g} of 4"
    assert "3.9 on noise" in card.sentence


def test_calibration_is_told_of_the_test_set_before_any_shift(picture_runs, line_runs):
    for runs, words in ((picture_runs, "accuracy {}"), (line_runs, "contain {} of the targets")):
        page = load_report_data(runs)
        key = "accuracy" if runs is picture_runs else "coverage_90"
        first, *rest = calibration_section(page).answer.split(" Under ")
        assert words.format(percent(Measure(key).summary(page.lead)[0])) in first
        assert rest


def bare(kind):
    run = python_run(kind)
    y = LABELS if kind == "classes" else NUMBERS
    data = Dataset("own", Split(X, y), Split(X, y))
    return load_report_data([(run, evaluate_run(run, data, keep=False))])


@pytest.mark.parametrize("kind", ["classes", "numbers"])
def test_missing_data_are_named_where_their_section_would_be(kind):
    page = bare(kind)
    for build_section, words in (
        (uncertainty_section, "No OOD data were given"),
        (calibration_section, "No shifted data were given"),
    ):
        remarks = [b for b in build_section(page).blocks if type(b).__name__ == "Remark"]
        (found,) = [remark for remark in remarks if remark.text.startswith(words)]
        assert found.tone == "info" and found.code.startswith("shoal.report(")


def warned(run, sentence):
    run.provenance["warnings"] = [sentence]
    run.notes.append(sentence)
    return run


def test_the_line_of_a_warning_ends_where_its_words_go_on():
    sentence = "Too bright; type x = x / 255, or pass x as bytes, and change later inputs too."
    run = warned(python_run("classes"), sentence)
    assert advice.for_ood(load_report_data([run]).entries[0]).code == "x = x / 255"


def test_a_warning_comes_first_and_misleading_advice_is_left_out(undrawn):
    sentence = (
        "The inputs are far from unit scale; column 3 has mean 7; "
        "type x = (x - x.mean(0)) / x.std(0), and change later inputs by the same numbers."
    )
    page = load_report_data([warned(python_run("classes"), sentence)])
    builds = (trust_section, training_section, making_section)
    text = render(page, {build.__name__: build(page) for build in builds})
    top = text[text.index("<main>") : text.index("Can I trust it?", text.index("<main>"))]
    assert 'class="remark mind"' in top and "unit scale" in top
    assert text.count("The inputs are far from unit scale") == 1
    amber = [card for card in trust_section(page).blocks if card.tone == "mind"]
    assert amber
    for card in amber:
        known = executed(card.code, {"x": 9 + 5 * X})
        assert known["x"].std(0).allclose(torch.ones(2)) and card.advice.startswith("First")
    assert "train longer" not in training_section(page).answer


def test_information_does_not_look_like_a_warning(undrawn, picture_runs):
    run, found = picture_runs[0]
    run = type(run)(**vars(run) | {"notes": ["The members are those of epoch 3.", "It diverged."]})
    page = load_report_data([(run, found)])
    text = render(page, {"training": training_section(page)})
    assert '<div class="remark info"><p><b class="mark-of" role="img" aria-label="note">' in text
    (tone,) = {text[: text.index("It diverged.")].rpartition('class="remark ')[2].split('"')[0]}
    assert tone == "mind"


@pytest.mark.parametrize(
    ("losses", "falls"),
    [([2.0, 1.5], True), ([2.0, 1.99], False), ([2.0], False), ([1.0, None], False)],
)
def test_a_short_history_falls_by_its_last_epoch(losses, falls):
    assert still_falling([{"loss": loss} for loss in losses]) is falls

"""What a newcomer does: a network from a lambda and arrays, as README.md says, to a whole page."""

import inspect
import re
from dataclasses import replace
from typing import Unpack

import numpy as np
import pytest
import torch
from small_runs import assert_one_sentence
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.cli.main import main
from shoal.core.errors import ConfigError, DataError
from shoal.evaluation.evaluate import kept_evaluation, load_evaluation
from shoal.page.report import render
from shoal.page.report_data import load_report_data
from shoal.training.options.options import RunOptions


@pytest.fixture
def here(readme, monkeypatch):
    monkeypatch.chdir(readme[0])
    return readme[0]


def test_the_readme_leads_to_every_section_that_data_allow(readme, here):
    folder, names = readme
    page = (folder / "report.html").read_text(encoding="utf-8")
    found = re.findall(r'<section id="([^"]+)"', page)
    assert found == [
        "trust",
        "errors",
        "methods",
        "uncertainty",
        "calibration",
        "diversity",
        "worth",
        "training",
        "making",
    ]
    assert names["scores"]["accuracy"] == kept_evaluation(names["run"]).test["accuracy"]
    assert "Not evaluated yet" not in page


def test_no_command_is_printed_that_cannot_work(readme):
    """Every `shoal verb` on the page of an own network would fail, so there is none."""
    folder, names = readme
    bare = render(load_report_data([replace(names["run"], folder=None, results={})]))
    for page in ((folder / "report.html").read_text(encoding="utf-8"), bare):
        typed = re.findall(r"<code>(.*?)</code>|<pre[^>]*>(.*?)</pre>", page, re.DOTALL)
        assert not re.findall(r"shoal (?:fit|evaluate|compare|landscape|evidence|grow)", str(typed))
    assert "shoal.evaluate(run, (x_test, y_test))" in bare


@pytest.mark.parametrize("verb", ["evaluate", "landscape", "evidence", "grow", "draw"])
def test_the_command_line_says_the_python_call_which_then_works(verb, readme, here, arrays, capsys):
    assert main([verb, "runs/first"]) == 2
    call = capsys.readouterr().err.partition("type: ")[2].strip()
    assert call.startswith(f"shoal.{verb}(shoal.load('runs/first', build)")
    quick = {"landscape": ", parts=['line'], quick=True", "evidence": ", priors=False"}
    more = {"grow": ", more=1, epochs=1, progress=False", "draw": ", draws=2, warmup=2, thin=1"}
    call = call.removesuffix(")") + (quick | more).get(verb, "") + ")"
    result = eval(call, {"shoal": shoal, **arrays})
    assert result is not None


def test_config_of_an_own_network_is_no_config_to_fit(readme, here, capsys):
    assert main(["fit", "runs/first/config.toml", "-o", "again"]) == 2
    assert "your own" in capsys.readouterr().err


def test_a_run_of_an_older_version_says_the_call_too(here, capsys):
    old = (here / "runs/first/config.toml").read_text().replace('{custom = "own data"}', '"tuple"')
    (here / "old.toml").write_text(old.replace('custom = "<lambda>"', 'name = "mlp"'))
    assert main(["fit", "old.toml", "-o", "again"]) == 2
    assert "shoal.fit(" in capsys.readouterr().err


@pytest.fixture(scope="module")
def run(arrays):
    ensemble = shoal.Ensemble.init(arrays["build"], members=3)
    return shoal.fit(ensemble, (arrays["x"], arrays["y"]), epochs=2, progress=False)


def test_data_may_be_a_pair_a_data_set_or_a_loader(run, arrays):
    x, y = torch.from_numpy(arrays["x_test"]), torch.from_numpy(arrays["y_test"])
    split = shoal.Split(x, y)
    pairs = TensorDataset(x, y)
    given = {
        "arrays": (arrays["x_test"], arrays["y_test"]),
        "tensors": (x, y),
        "split": split,
        "dataset": shoal.Dataset("points", split, test=split),
        "torch dataset": pairs,
        "loader": DataLoader(pairs, 32),
    }
    found = {name: shoal.evaluate(run, data, keep=False) for name, data in given.items()}
    direct = shoal.evaluate(shoal.predict(run, x), y)
    for name, evaluation in found.items():
        assert evaluation.test == direct, name
        assert evaluation.scores["data"]["counts"] == {"test": len(x)}
    assert found["dataset"].scores["data"]["name"] == "points"


def test_ood_and_shifts_by_name_with_their_own_targets_or_those_of_the_test(run, arrays):
    x, y = arrays["x_test"], arrays["y_test"]
    found = shoal.evaluate(
        run,
        (x, y),
        ood={"far": arrays["x_ood"], "loaded": DataLoader(torch.from_numpy(arrays["x_ood"]), 16)},
        shifts={"moved-1": x + 1, "moved-2": (x[:50] + 2, y[:50])},
        keep=False,
    )
    assert found.ood["far"] == found.ood["loaded"]
    test, far = shoal.predict(run, x), shoal.predict(run, arrays["x_ood"])
    assert found.ood["far"]["auroc_entropy"] == shoal.evaluate(test, y, far)["auroc_entropy"]
    assert found.shifts["moved-1"] == shoal.evaluate(shoal.predict(run, x + 1), y)
    assert found.shifts["moved-2"] == shoal.evaluate(shoal.predict(run, x[:50] + 2), y[:50])


def test_corruptions_of_images_by_name():
    x, y = torch.rand(40, 1, 8, 8), torch.arange(40) % 2
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(64, 2))  # noqa: E731
    run = shoal.fit(shoal.Ensemble.init(build, 2), (x, y), epochs=1, progress=False)
    found = shoal.evaluate(run, (x, y), shifts=["fog", "brightness"], severities=[1, 3])
    assert set(found.shifts) == {"fog-1", "fog-3", "brightness-1", "brightness-3"}
    assert set(found.corrupted) == {"all", "standard", "severity-1", "severity-3"} - {"standard"}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ood": [1.0]}, "dict of names"),
        ({"ood": {"far": np.zeros((5, 3))}}, "shape"),
        ({"shifts": {"moved": np.zeros((5, 4))}}, "without targets"),
        ({"data": np.zeros((5, 4))}, "x_test, y_test"),
        ({"shifts": "fog"}, "images"),
    ],
)
def test_what_cannot_be_evaluated_is_one_sentence(run, arrays, options, words):
    given = {"data": (arrays["x_test"], arrays["y_test"]), **options}
    with pytest.raises((DataError, ConfigError), match=words):
        shoal.evaluate(run, **given)


def test_own_data_are_asked_for_by_the_call_that_gives_them(run):
    with pytest.raises(ConfigError, match=r"shoal\.evaluate\(run, \(x_test, y_test\)\)"):
        shoal.evaluate(run)


def test_named_data_are_loaded_again(tmp_path):
    data = shoal.data.load({"name": "toy-classification"})
    build = lambda: nn.Linear(2, data.outputs)  # noqa: E731
    run = shoal.fit(shoal.Ensemble.init(build, 2), data, epochs=1, progress=False)
    assert shoal.evaluate(run).test == shoal.evaluate(run, data).test


def test_a_run_in_memory_has_a_whole_page(run, arrays, tmp_path):
    alone = replace(run, results={})
    test = (arrays["x_test"], arrays["y_test"])
    train = (arrays["x"], arrays["y"])
    shoal.landscape(alone, train, test=test, parts=["line"], quick=True)
    shoal.evidence(alone, train, test=test, priors=False)
    page = shoal.report(alone, tmp_path / "page.html", data=test).read_text(encoding="utf-8")
    found = re.findall(r'<section id="([^"]+)"', page)
    assert {"trust", "landscape", "evidence", "training", "making"} <= set(found)
    assert alone.results.keys() == {"landscape", "evidence", "evaluation"}


def test_report_evaluates_what_was_not_evaluated_on_these_data(
    readme, tmp_path, monkeypatch, arrays
):
    from shoal.page import report as page

    calls = []
    evaluate = page.evaluate_run
    monkeypatch.setattr(
        page, "_built_sections", lambda data: {}
    )  # what is drawn is not the question
    monkeypatch.setattr(page, "evaluate_run", lambda *a, **k: calls.append(1) or evaluate(*a, **k))
    run = replace(readme[1]["run"], folder=None, results={})
    test = (arrays["x_test"], arrays["y_test"])
    for options, wanted in (
        ({}, 0),
        ({"data": test}, 1),
        ({"data": test}, 1),
        ({"data": test, "ood": {"far": arrays["x_ood"]}}, 2),
        ({"data": test, "ood": {"far": arrays["x_ood"] + 1}}, 3),
        ({}, 3),
    ):
        shoal.report([run], tmp_path / "page.html", **options)
        assert len(calls) == wanted
    trained_on = replace(run, history=[*run.history, run.history[-1]])
    shoal.report(trained_on, tmp_path / "page.html", data=test, ood={"far": arrays["x_ood"] + 1})
    assert len(calls) == 4


def test_what_is_found_is_kept_in_the_folder(readme, here, arrays):
    run = readme[1]["run"]
    found = shoal.evaluate(run, (arrays["x_test"], arrays["y_test"]), ood={"a": arrays["x_ood"]})
    kept = load_evaluation("runs/first")
    assert kept.scores == found.scores and kept.samples.keys() == found.samples.keys()
    other = shoal.evaluate(run, (arrays["x_test"] + 1, arrays["y_test"]), keep=False)
    assert other.scores != kept.scores
    assert kept_evaluation(run).scores == kept.scores


def test_methods_are_compared_over_an_own_network_and_resumed(arrays, tmp_path):
    options = {
        "test": (arrays["x_test"], arrays["y_test"]),
        "ood": {"far": arrays["x_ood"]},
        "methods": ["ensemble", "custom"],
        "method": shoal.Repulsion(strength=3.0),
        "prior": shoal.priors.Gaussian(2.0),
        "optimizer": torch.optim.SGD,
        "sizes": [2, 3],
        "seeds": 2,
        "epochs": 1,
        "out": tmp_path / "grid",
        "progress": False,
    }
    data = (arrays["x"], arrays["y"])
    found = shoal.compare(arrays["build"], data, **options, report=tmp_path / "page.html")
    assert [(g.label, g.members, len(g.entries)) for g in found.groups] == [
        (label, size, 2) for size in (2, 3) for label in ("ensemble", "custom")
    ]
    assert "members" in str(found) and found.failed == {}
    direct = shoal.fit(
        shoal.Ensemble.init(arrays["build"], 2, seed=1),
        data,
        method="ensemble",
        prior=shoal.priors.Gaussian(2.0),
        optimizer="sgd",
        epochs=1,
        seed=1,
        progress=False,
    )
    kept = shoal.load(tmp_path / "grid/ensemble-m2-s1", arrays["build"])
    x = torch.from_numpy(arrays["x_test"])
    assert torch.equal(kept.ensemble(x), direct.ensemble(x))
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("grid/*/scores.json")}
    shoal.compare(arrays["build"], data, **options)
    assert len(before) == 8
    assert before == {path: path.stat().st_mtime_ns for path in before}
    with pytest.raises(ConfigError, match="data"):
        shoal.compare(arrays["build"], (data[0] + 1, data[1]), **options)


def test_methods_are_compared_over_a_config(tmp_path):
    table = {"data": {"name": "toy-classification"}, "epochs": 1, "members": 2}
    found = shoal.compare(
        table, methods="ensemble,kde", seeds=1, lr=0.02, out=tmp_path, progress=False
    )
    assert {group.label for group in found.groups} == {"ensemble", "kde"}
    assert shoal.load(tmp_path / "kde-m2-s0").config["lr"] == 0.02
    assert "2 groups, 2 runs" in repr(found) and str(tmp_path) in repr(found)
    shown = found._repr_html_()
    assert "kde" in shown and "summary.csv" in shown and str(tmp_path) in shown


@pytest.mark.parametrize(
    ("own", "options", "words"),
    [
        (True, {}, "shoal.compare(build, (x, y)"),
        (True, {"data": True, "jobs": 2}, "jobs=1"),
        (False, {"data": True}, "a config names its data"),
        (False, {"seeds": 0}, "seeds must be a whole number"),
        (False, {"steps": 2, "epochs": 2}, "steps"),
    ],
)
def test_a_comparison_that_cannot_begin_is_refused_before_anything_is_written(
    own, options, words, arrays, tmp_path
):
    source = arrays["build"] if own else {"data": {"name": "toy-classification"}, "members": 2}
    pair = {"data": (arrays["x"], arrays["y"])} if options.get("data") else {}
    with pytest.raises(ConfigError) as error:
        shoal.compare(source, **(options | pair), out=tmp_path / "grid", progress=False)
    assert_one_sentence(error.value, words)
    assert not (tmp_path / "grid").exists()


def test_what_the_command_line_does_is_a_function_without_catch_alls():
    for name in (
        "evaluate", "report", "landscape", "evidence", "grow", "draw", "compare", "predict"
    ):  # fmt: skip
        signature = inspect.signature(getattr(shoal, name))
        rest = [p for p in signature.parameters.values() if p.kind is p.VAR_KEYWORD]
        typed = [] if name not in ("grow", "compare") else [Unpack[RunOptions]]
        assert [p.annotation for p in rest] == typed, name
        assert (
            "Args:" in shoal.__dict__[name].__doc__ or "arguments:" in getattr(shoal, name).__doc__
        )

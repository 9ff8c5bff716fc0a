"""`shoal draw`: the command does what `shoal.draw` does, and says what it did."""

import json

import pytest
import torch

import shoal
from shoal.cli.commands.list import entries
from shoal.cli.main import main
from shoal.core.bibliography import BIBLIOGRAPHY
from shoal.inference import samplers

SHORT = ["--draws", "4", "--warmup", "6", "--thin", "2", "-q"]


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """The folder of two small trained networks."""
    folder = tmp_path_factory.mktemp("work") / "run"
    small = [
        "data.points=60",
        "data.test_points=30",
        "data.ood_points=10",
        "model.hidden=[3]",
        "members=2",
        "steps=5",
    ]
    assert main(["fit", "toy-classification", *small, "-q", "-o", str(folder)]) == 0
    return folder


def test_draws_are_kept_scored_and_told(work, capsys):
    assert main(["draw", str(work), *SHORT]) == 0
    told, folder = capsys.readouterr().out, work.with_name("run-drawn")
    assert "2 chains of 4 draws: 14 steps" in told and f"Kept in {folder}" in told
    assert "energy error" in told and "accuracy" in told
    kept, expected = shoal.load(folder), shoal.draw(work, draws=4, warmup=6, thin=2, progress=False)
    for name, tensor in expected.ensemble.state.items():
        assert torch.equal(kept.ensemble.state[name], tensor), name
    assert (folder / "scores.json").exists()
    assert main(["draw", str(work), *SHORT]) == 2
    assert "already holds a run; add --resume" in capsys.readouterr().err
    assert main(["draw", str(work), *SHORT, "--resume"]) == 0
    assert main(["report", str(folder), "-q", "-o", str(work / "page.html")]) == 0
    assert "shoal draw RUN --sampler mclmc --draws 4" in (work / "page.html").read_text()


def test_settings_are_typed_and_the_result_is_json(work, capsys, tmp_path):
    typed = ["--sampler", "sghmc", "sampler.lr=0.02", "prior.std=2", "batch_size=16", "seed=3"]
    typed.append("of=3.*")
    where = str(tmp_path / "drawn")
    assert main(["draw", str(work), *SHORT, *typed, "-o", where, "--json"]) == 0
    value = json.loads(capsys.readouterr().out)
    assert value["folder"] == where and value["steps"] == 14
    table = value["config"]["draws"]
    assert table["sampler"]["name"] == "sghmc" and table["sampler"]["lr"] == 0.02
    assert table["seed"] == 3 and table["batch_size"] == 16
    assert table["of"] == ["3.*"]
    assert value["config"]["prior"]["std"] == 2
    assert len(value["diagnostics"]["refused"]) == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--sampler", "mclmd"], "did you mean 'mclmc'"),
        (["sampler.lr=1"], "lr"),
        (["lr=0.1"], "there is no key 'lr'"),
        (["--draws", "0"], "the number of draws is 1 or more"),
        (["batch_size=8"], "sees all data"),
    ],
)
def test_mistakes_are_answered_in_a_line(work, arguments, words, capsys, tmp_path):
    try:
        status = main(["draw", str(work), *arguments, "-q", "-o", str(tmp_path / "d")])
    except SystemExit as stop:
        status = stop.code
    said = capsys.readouterr().err
    assert status in (2, 65) and words in said and len(said.splitlines()) == 1
    assert not (tmp_path / "d").exists()


def test_the_config_of_draws_is_no_config_to_fit(work, capsys, tmp_path):
    main(["draw", str(work), *SHORT, "-o", str(tmp_path / "d")])
    capsys.readouterr()
    assert main(["fit", str(tmp_path / "d" / "config.toml"), "-o", str(tmp_path / "e")]) == 2
    assert "type: shoal draw RUN" in capsys.readouterr().err


def test_the_list_has_every_sampler_with_its_papers():
    listed = {entry.name: entry.cite for entry in entries("samplers")}
    assert listed.keys() == set(samplers.registry)
    assert all(keys and set(keys) <= BIBLIOGRAPHY.keys() for keys in listed.values())
    assert "swag" in {entry.name for entry in entries("subspace-samplers")}

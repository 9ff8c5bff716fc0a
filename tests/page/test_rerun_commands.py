"""What a page says to type for making its runs again."""

import ast
import inspect
import shlex
from pathlib import Path

import pytest
import torch

import shoal
from shoal.cli.parser import parse
from shoal.core.storage.formats import to_toml
from shoal.page.report_data import RunRecord
from shoal.page.rerun_commands import commands, fit_call
from shoal.training.folder.own_data import what_to_type


def entry(folder, method="kde", members=5, seed=0, **more):
    config = {"data": "digits", "method": method, "members": members, "seed": seed, **more}
    return RunRecord(Path(folder).name, config, [], [], {}, None, Path(folder))


@pytest.fixture(autouse=True)
def beside_the_runs(tmp_path, monkeypatch):
    """A page is made where its commands are to be typed."""
    monkeypatch.chdir(tmp_path.parent)


def test_runs_of_a_grid_are_one_compare(tmp_path):
    (tmp_path / "grid.toml").write_text('data = "digits"\n')
    runs = [
        entry(tmp_path / f"{m}-{size}-{seed}", m, size, seed, strength=strength)
        for seed in (3, 4)
        for size in (5, 10)
        for m, strength in (("ensemble", None), ("kde", 1.0), ("f-kde", 100.0))
    ]
    (told,) = commands(runs)
    assert told.replace(" \\\n ", "") == (
        f"shoal compare {tmp_path.name}/grid.toml seed=3 --methods ensemble,kde,f-kde:100 "
        f"--sizes 5,10 --seeds 2 -o {tmp_path.name}-again"
    )


def test_a_strength_that_the_file_holds_is_not_typed(tmp_path):
    (tmp_path / "grid.toml").write_text('data = "digits"\nstrength = 30.0\n')
    (told,) = commands([entry(tmp_path / "one", strength=30.0)])
    assert "--methods kde " in told


def test_settings_are_typed_and_what_no_word_tells_is_in_the_file(tmp_path):
    part, half = {"name": "forde", "fraction": 0.25}, {"name": "forde", "fraction": 0.5}
    composed = {"space": {"name": "outputs"}, "kernel": "rbf"}
    (tmp_path / "grid.toml").write_text('data = "digits"\n')
    runs = [entry(tmp_path / "one", part), entry(tmp_path / "two", half, strength=2.0)]
    (told,) = commands([*runs, entry(tmp_path / "three", composed)])
    assert "--methods forde+fraction=0.25,forde+fraction=0.5:2,custom " in told


def test_other_runs_are_a_fit_each_and_none_is_dropped_silently(tmp_path):
    told = list(commands([entry(tmp_path / f"run{i}") for i in range(23)]))
    assert told[0] == f"shoal fit {tmp_path.name}/run0/config.toml"
    assert told[-1] == "# and 3 more runs"


def test_a_folder_elsewhere_or_with_spaces_is_typed_so_that_it_works(tmp_path, monkeypatch):
    (tmp_path / "else where").mkdir()
    monkeypatch.chdir(tmp_path / "else where")
    (told,) = commands([entry(tmp_path / "one run")])
    assert told == f"shoal fit '{tmp_path}/one run/config.toml'"


def test_a_grown_run_is_not_a_fit(tmp_path):
    (told,) = commands([entry(tmp_path / "one", members=7, frozen=5)])
    assert "shoal grow RUN --more 2" in told


DRAWN = {"chains": 5, "draws": 20, "warmup": 40, "thin": 2, "seed": 1, "precision": "float32"}


@pytest.mark.parametrize("own", [False, True])
def test_a_run_of_draws_is_drawn_again_and_not_fitted(own, tmp_path):
    table = {**DRAWN, "sampler": {"name": "sghmc", "lr": 0.02}, "of": ["head.*"]}
    table["temperature"] = 0.3
    (told,) = commands([entry(tmp_path / "one", members=100, draws=table, **(OWN if own else {}))])
    if own:
        keywords = ast.parse(told).body[0].value.keywords
        assert {k.arg for k in keywords} <= inspect.signature(shoal.draw).parameters.keys()
        assert ast.literal_eval(keywords[0].value) == table["sampler"]
    else:
        options = parse(shlex.split(told.splitlines()[1])[1:])
        assert (options.sampler, options.draws, options.warmup, options.thin) == (
            "sghmc",
            20,
            40,
            2,
        )
        settings = ["sampler.lr=0.02", "seed=1", "precision=float32", "temperature=0.3"]
        settings.append('of=["head.*"]')
        assert options.changes == settings


OWN = {
    "data": {"custom": "own data"},
    "model": [{"custom": "<lambda>", "members": 5}],
    "init_seed": 3,
    "prior": {"name": "gaussian", "std": 1.0},
    "optimizer": {"name": "sgd", "momentum": 0.9},
    "schedule": {"name": "cosine"},
    "strength": 1.0,
    "epochs": 7,
}


def test_python_makes_a_run_again_that_a_folder_cannot(tmp_path):
    """The code is run with the names that its comments ask for, and settings are compared."""
    x, y = torch.randn(20, 3), torch.arange(20) % 2

    def build():
        return torch.nn.Linear(3, 2)

    first = shoal.Ensemble.init(build, 3, seed=4)
    settings = {"method": "kde", "strength": 5.0, "epochs": 2, "lr": 0.1, "optimizer": "sgd"}
    run = shoal.fit(
        first, (x, y), **settings, prior={"name": "gaussian", "std": 2.0}, progress=False
    )
    names = {"shoal": shoal, "build": build, "x": x, "y": y}
    exec(fit_call(run.config), names)
    assert names["run"].config == run.config
    assert torch.equal(names["ensemble"](x), run.ensemble(x))


def test_mixed_networks_of_ones_own_are_named_one_by_one():
    models = [{"custom": "small", "members": 2}, {"custom": "large", "members": 3}]
    told = fit_call(OWN | {"model": models, "members": 5})
    assert "# build_0: your own small" in told
    assert "init([(build_0, 2), (build_1, 3)], seed=3)" in told


def test_a_grid_of_ones_own_is_one_compare_in_python(tmp_path):
    shared = {"data": {"custom": "own data"}, "model": {"custom": "net"}, "epochs": 7}
    (tmp_path / "grid.toml").write_text(to_toml(shared))
    runs = [
        entry(tmp_path / f"{m}-{s}", m, 5, s, **OWN) for m in ("ensemble", "kde") for s in (0, 1)
    ]
    (told,) = commands(runs)
    assert "shoal.compare(" in told and "shoal compare" not in told
    for part in ("methods=['ensemble', 'kde']", "sizes=[5]", "seeds=2", "epochs=7"):
        assert part in told


@pytest.mark.parametrize("own", [{"data": {"custom": "x"}}, {"model": [{"custom": "net"}]}])
@pytest.mark.parametrize("verb", ["evaluate", "landscape", "evidence", "grow", "draw", "predict"])
@pytest.mark.parametrize("folder", [None, "runs/a b"])
def test_what_is_typed_for_ones_own_parses_as_python(own, verb, folder):
    told = what_to_type(verb, {"data": "digits", **own}, folder)
    call = ast.parse(told).body[0].value
    assert ast.unparse(call.func) == f"shoal.{verb}" and hasattr(shoal, verb)
    known = inspect.signature(getattr(shoal, verb)).parameters
    assert {keyword.arg for keyword in call.keywords} <= known.keys()

"""Networks trained by a plain loop, adopted and used from the command line."""

import contextlib
import csv
import io
import json
import os
import re
import shutil
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

import shoal
from shoal.cli.main import main
from shoal.page.measures import Measure, against_baseline
from shoal.page.report_data import load_report_data

pytestmark = pytest.mark.usefixtures("warm")

NETWORK = """
from torch import nn

def build():
    return nn.Sequential(nn.Linear(2, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 5))

def wide():
    return nn.Sequential(nn.Linear(2, 16), nn.Tanh(), nn.Linear(16, 5))

def needs(width):
    return nn.Linear(2, width)

def fails():
    raise KeyError("no such thing")

def quits():
    raise SystemExit(3)

network = build()
number = 3
"""
NAME = "adopted_networks_of_a_test"
MODEL = f"{NAME}:build"
DATA = "toy-classification"
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def shell(*arguments, folder):
    """The command in a process of its own."""
    command = [sys.executable, "-m", "shoal.cli.start", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=ENVIRONMENT)
    return SimpleNamespace(status=done.returncode, out=done.stdout, err=done.stderr)


def typed(*arguments, folder):
    """The command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(out), redirect_stderr(err):
        status = main([*map(str, arguments)])
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue())


def trained(build, seed):
    torch.manual_seed(seed)
    network, data = build(), shoal.data.load(DATA)
    optimizer = torch.optim.Adam(network.parameters(), 0.02)
    for _ in range(30):
        loss = F.cross_entropy(network(data.train.x), data.train.y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return network.eval()


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder with three networks, adopted and evaluated."""
    folder = tmp_path_factory.mktemp("work")
    (folder / f"{NAME}.py").write_text(NETWORK)
    made = {}
    exec(NETWORK, made)
    (folder / "nets").mkdir()
    networks = [trained(made["build"], seed) for seed in range(3)]
    for index, network in enumerate(networks):
        torch.save(network.state_dict(), folder / "nets" / f"net{index}.pt")
    done = shell("adopt", "nets/", "--model", MODEL, "-o", "runs/mine", folder=folder)
    assert done.status == 0, done.err
    assert "net2.pt" in done.out and "shoal evaluate runs/mine" in done.out
    return SimpleNamespace(folder=folder, networks=networks, wide=made["wide"])


def about(command, *more, work, run="runs/mine", model=MODEL):
    return typed(command, run, *more, "--model", model, "-q", folder=work.folder)


def outputs(work, x):
    with torch.no_grad():
        return torch.stack([network(x) for network in work.networks])


def test_evaluate_gives_the_numbers_computed_by_hand(work):
    done = about("evaluate", "--data", DATA, "--json", work=work)
    assert done.status == 0, done.err
    test = shoal.data.load(DATA).test
    probs = outputs(work, test.x).double().softmax(-1).mean(0)
    scores = json.loads(done.out)["test"]
    assert scores["accuracy"] == pytest.approx(float((probs.argmax(-1) == test.y).double().mean()))
    nll = -probs[torch.arange(len(test.y)), test.y].log().mean()
    assert scores["nll"] == pytest.approx(float(nll), rel=1e-5)


def test_predict_writes_the_mean_of_the_networks(work):
    x = np.random.default_rng(0).normal(size=(5, 2)).astype("float32")
    np.save(work.folder / "new.npy", x)
    done = about("predict", "new.npy", work=work)
    assert done.status == 0, done.err
    rows = list(csv.DictReader(io.StringIO(done.out)))
    probs = outputs(work, torch.from_numpy(x)).softmax(-1).mean(0)
    assert [int(row["class"]) for row in rows] == probs.argmax(-1).tolist()
    found = [float(row["probability"]) for row in rows]
    np.testing.assert_allclose(found, probs.amax(-1).numpy(), rtol=1e-4)


def test_the_page_says_that_the_training_is_not_known(work):
    analyses = ("--data", DATA, "--quick", "--analyses", "trajectories,line")
    assert about("landscape", *analyses, work=work).status == 0
    assert about("evidence", "--data", DATA, "--no-priors", work=work).status == 0
    done = about("report", "--data", DATA, "-o", "page.html", work=work)
    assert done.status == 0, done.err
    page = (work.folder / "page.html").read_text()
    text = re.sub(r"<(script|style|svg).*?</\1>|<[^>]+>", " ", page, flags=re.DOTALL)
    assert "training are not known" in text and "3 adopted networks" in text
    for word in ("Training loss", "seed", "Repulsion", "wall time", "learning rate", "keep_every"):
        assert word not in text, word
    assert "In what sense is it Bayesian?" in text and "What lies between the members?" in text
    assert "nets/net1.pt" in text and "shoal adopt" in text


def test_grow_needs_method_and_data_and_keeps_the_networks(work):
    done = about("grow", "--data", DATA, "--more", "1", work=work)
    assert done.status == 2 and "method" in done.err
    done = about("grow", "method=kde", "--more", "1", work=work)
    assert done.status == 2 and "--data" in done.err
    done = about("grow", "--data", DATA, "--more", "2", "method=kde", "steps=4", work=work)
    assert done.status == 0, done.err
    x = shoal.data.load(DATA).test.x[:6]
    np.save(work.folder / "few.npy", x.numpy())
    done = about("predict", "few.npy", work=work, run="runs/mine-grown-5")
    assert done.status == 0, done.err
    from_files = shoal.load(work.folder / "runs/mine-grown-5", lambda: _build(work))
    found = shoal.predict(from_files, x).members
    torch.testing.assert_close(found[:3], outputs(work, x))


def _build(work):
    made = {}
    exec(NETWORK, made)
    return made["build"]()


@pytest.fixture
def pages(monkeypatch):
    """What pages are asked for; drawing them takes seconds."""
    asked = []

    def report(runs, path, **options):
        asked.append((runs, options))
        return path

    monkeypatch.setattr("shoal.cli.commands.report.report", report)
    return asked


def test_named_data_are_kept_with_the_run(work, pages):
    done = typed(
        "adopt", "nets", "--model", MODEL, "--data", DATA, "-o", "runs/known", folder=work.folder
    )
    assert done.status == 0, done.err
    assert about("report", work=work, run="runs/known").status == 0
    assert pages[-1][1]["data"].name == DATA, "a run that is not evaluated is evaluated first"
    assert about("evaluate", work=work, run="runs/known").status == 0
    assert about("report", work=work, run="runs/known").status == 0
    assert pages[-1][1]["data"] is None


def test_several_architectures_take_several_functions(work):
    torch.save(work.wide().state_dict(), work.folder / "wide.pt")
    model = ["--model", MODEL, "--model", f"{NAME}:wide"]
    done = typed("adopt", "nets", "wide.pt", *model, "-o", "runs/mixed", folder=work.folder)
    assert done.status == 0, done.err
    command = ["evaluate", "runs/mixed", "--data", DATA, "-q"]
    assert typed(*command, *model, folder=work.folder).status == 0
    done = typed(*command, *model[:2], folder=work.folder)
    assert done.status == 2 and "2 architectures" in done.err


def test_an_ordinary_run_of_ones_own_network_takes_its_function(work, pages):
    ensemble = shoal.Ensemble.init(lambda: _build(work), members=2)
    data = shoal.data.load(DATA)
    shoal.fit(ensemble, data, steps=3, progress=False, out=work.folder / "runs/own")
    done = typed("evaluate", "runs/own", "-q", folder=work.folder)
    assert done.status == 2 and "--model MODULE:FUNCTION" in done.err
    for command, more in [
        ("evaluate", []),
        ("predict", ["own.npy"]),
        ("landscape", ["--quick", "--analyses", "line"]),
        ("evidence", ["--no-priors"]),
        ("grow", ["--more", "1"]),
        ("report", ["-o", "own.html"]),
    ]:
        np.save(work.folder / "own.npy", data.test.x[:3].numpy())
        done = about(command, *more, work=work, run="runs/own")
        assert done.status == 0, done.err


def test_a_registered_network_needs_no_function(work):
    fit = ["fit", DATA, "model.hidden=[4]", "members=2", "steps=2", "-o", "runs/named", "-q"]
    assert typed(*fit, folder=work.folder).status == 0
    done = about("evaluate", work=work, run="runs/named")
    assert done.status == 2 and "leave --model out" in done.err


@pytest.mark.parametrize(
    ("model", "word"),
    [
        ("mynet", "MODULE:FUNCTION"),
        (f"{NAME}:", "MODULE:FUNCTION"),
        (f"{NAME}:build()", "MODULE:FUNCTION"),
        (f"{NAME}s:build", f"did you mean '{NAME}'?"),
        (f"{NAME}:biuld", "did you mean 'build'?"),
        (f"{NAME}:number", "int"),
        (f"{NAME}:network", "makes a new network"),
        (f"{NAME}:needs", "width"),
        (f"{NAME}:fails", "no such thing"),
        (f"{NAME}:quits", "SystemExit"),
        ("broken_network:build", "ZeroDivisionError"),
    ],
)
def test_a_wrong_function_gets_one_sentence(model, word, work):
    (work.folder / "broken_network.py").write_text("1 / 0")
    done = typed("adopt", "nets", "--model", model, "-o", "runs/wrong", folder=work.folder)
    assert done.status == 2 and done.err.count("\n") == 1, done.err
    assert word in done.err
    assert not (work.folder / "runs/wrong").exists()


def test_a_name_in_the_files_of_a_run_is_never_imported(work):
    shutil.copytree(work.folder / "runs/mine", work.folder / "runs/crafted")
    config = work.folder / "runs/crafted/config.toml"
    config.write_text(config.read_text().replace('"build"', '"crafted_network:build"'))
    (work.folder / "crafted_network.py").write_text("open('imported', 'w')\n" + NETWORK)
    done = typed("evaluate", "runs/crafted", "--data", DATA, folder=work.folder)
    assert done.status == 2 and "--model" in done.err
    assert about("evaluate", "--data", DATA, work=work, run="runs/crafted").status == 74
    assert not (work.folder / "imported").exists()


class Attack:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


def test_files_that_are_refused_have_status_65(work, tmp_path):
    marker = tmp_path / "ran"
    torch.save(Attack(marker), tmp_path / "evil.pt")
    whole = (work.folder / "nets/net0.pt").read_bytes()
    (tmp_path / "short.pt").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "short.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{}")
    torch.save(work.wide().state_dict(), tmp_path / "other.pt")
    for name in ("evil.pt", "short.pt", "short.safetensors", "other.pt"):
        path = tmp_path / name
        done = typed("adopt", path, "--model", MODEL, "-o", "runs/bad", folder=work.folder)
        assert done.status == 65, (name, done.err)
        assert name in done.err and done.err.count("\n") == 1, done.err
        assert not (work.folder / "runs/bad").exists()
    assert not marker.exists()
    done = typed("adopt", tmp_path / "none.pt", "--model", MODEL, folder=work.folder)
    assert done.status == 74


def test_a_second_adoption_does_not_overwrite_the_first(work):
    done = typed("adopt", "nets", "--model", MODEL, "-o", "runs/mine", folder=work.folder)
    assert done.status == 2 and "already holds a run" in done.err


def test_adopted_and_trained_runs_share_a_page(work):
    """An adopted ensemble is no seed of another run, and pairs with none."""
    for name in ("one", "two"):
        place = work.folder / f"runs/{name}"
        shoal.adopt(work.networks, data=DATA, out=place)
        shoal.evaluate(shoal.load(place, lambda: _build(work)))
    fit = ["fit", DATA, "method=ensemble", "members=3", "steps=2", "-o", "runs/plain", "-q"]
    assert typed(*fit, folder=work.folder).status == 0
    runs = [work.folder / f"runs/{name}" for name in ("one", "two", "plain")]
    groups = load_report_data(runs).groups
    assert [group.label for group in groups] == ["adopted (one)", "adopted (two)", "ensemble"]
    assert all(against_baseline(Measure("nll"), group, groups) is None for group in groups[:2])

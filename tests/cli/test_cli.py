"""The command line as people use it: real processes, real files, real mistakes."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import warnings
from argparse import Namespace
from contextlib import redirect_stderr, redirect_stdout
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import shoal
from shoal.cli.commands.list import KINDS
from shoal.cli.main import main
from shoal.cli.outcome import Outcome
from shoal.core.display.progress import notice
from shoal.core.errors import ShoalWarning
from shoal.models import MLP, Blueprint
from shoal.training.folder.run import RunFolder

pytestmark = pytest.mark.usefixtures("warm")

TINY = ["toy-classification", "model.hidden=[8]", "members=2"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}


def start(*arguments, folder):
    return subprocess.Popen(
        [sys.executable, "-m", "shoal.cli.start", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder,
        env=ENVIRONMENT,
    )


def shell(*arguments, folder):
    process = start(*arguments, folder=folder)
    out, err = process.communicate()
    return SimpleNamespace(status=process.returncode, out=out, err=err)


def typed(*arguments, folder):
    """As `shell`, in this process: for all that a process of its own adds nothing to."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), redirect_stdout(out), redirect_stderr(err):
        status = main([*map(str, arguments)])
    return SimpleNamespace(status=status, out=out.getvalue(), err=err.getvalue())


@pytest.fixture(scope="module")
def work(tmp_path_factory):
    """A folder in which one tiny ensemble has been trained from the command line."""
    folder = tmp_path_factory.mktemp("work")
    done = typed("fit", *TINY, "steps=20", "--json", folder=folder)
    assert done.status == 0, done.err
    (folder / "fit.json").write_text(done.out)
    (folder / "fit.err").write_text(done.err)
    return folder


@pytest.fixture
def here(work, monkeypatch):
    monkeypatch.chdir(work)
    return work


RUN = "runs/toy-classification-f-kde-m2-s0"


# What each command does


def test_fit_with_json_prints_nothing_else(work):
    value = json.loads((work / "fit.json").read_text())
    assert value["folder"] == RUN
    assert value["config"]["members"] == 2
    stored = json.loads((work / RUN / "scores.json").read_text())
    assert stored.items() >= value["scores"].items()
    assert "epoch" in (work / "fit.err").read_text()


def test_fit_keeps_what_it_says(here):
    run = shoal.load(RUN)
    data = shoal.data.load(run.config["data"])
    assert data.test is not None and data.test.y is not None
    scores = shoal.evaluate(shoal.predict(run, data.test.x), data.test.y)
    assert json.loads((here / "fit.json").read_text())["scores"]["test"] == scores


def test_fit_calls_a_method_as_it_is_typed_elsewhere(here, capsys):
    told = ['method={name="forde", fraction=0.5}', "strength=4", "-o", "runs/part", "-q"]
    assert main(["fit", *TINY, "steps=3", *told]) == 0
    assert "toy-classification, forde+fraction=0.5:4, 2 members" in capsys.readouterr().out


def test_fit_holds_out_data_and_ends_early(here, capsys):
    told = ["--validation", "0.2", "--patience", "2", "--keep", "last", "-o", "runs/held", "-q"]
    assert main(["fit", *TINY, "steps=6", *told]) == 0
    config = RunFolder(here / "runs" / "held").config()
    assert (config["validation"], config["patience"], config["keep"]) == (0.2, 2, "last")
    assert main(["fit", *TINY, "steps=6", "--validation", "2", "-o", "runs/no", "-q"]) == 2
    assert "validation must be a share" in capsys.readouterr().err


def test_a_second_fit_does_not_overwrite_the_first(here, capsys):
    assert main(["fit", *TINY, "steps=20"]) == 2
    assert "add --resume to continue it" in capsys.readouterr().err


def test_evaluate_repeats_the_scores(here, capsys):
    before = (here / RUN / "scores.json").read_text()
    assert main(["evaluate", RUN, "--json"]) == 0
    assert json.loads(before).items() >= json.loads(capsys.readouterr().out).items()
    assert (here / RUN / "scores.json").read_text() == before


def test_evaluate_on_other_data_leaves_the_run_alone(here, capsys):
    before = (here / RUN / "scores.json").read_bytes()
    other = "{name = 'toy-classification', seed = 9}"
    assert main(["evaluate", RUN, "--data", other, "-o", "other.json"]) == 0
    assert "toy-classification" in capsys.readouterr().out
    assert (here / RUN / "scores.json").read_bytes() == before
    assert json.loads((here / "other.json").read_text())["test"] != json.loads(before)["test"]


def test_evaluate_takes_a_file_of_test_data(here, capsys):
    x = np.random.default_rng(0).normal(size=(20, 2)).astype(np.float32)
    y = shoal.predict(RUN, x).labels().numpy()
    np.savez("test.npz", x=x, y=y)
    np.savez("inputs.npz", x=x)
    before = (here / RUN / "scores.json").read_bytes()
    assert main(["evaluate", RUN, "--data", "test.npz", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["test"]["accuracy"] == 1
    assert (here / RUN / "scores.json").read_bytes() == before
    assert main(["evaluate", RUN, "--data", "inputs.npz"]) == 65
    assert "has no targets" in capsys.readouterr().err
    assert main(["evidence", RUN, "--data", "test.npz"]) == 2
    assert "evidence needs training data; type --data '{name" in capsys.readouterr().err


@pytest.mark.parametrize("ending", ["csv", "npy", "npz"])
def test_predict_writes_a_row_a_point(ending, here, capsys):
    x = np.random.default_rng(0).normal(size=(6, 2))
    if ending == "csv":
        np.savetxt("new.csv", x, delimiter=",")
    elif ending == "npy":
        np.save("new.npy", x)
    else:
        np.savez("new.npz", x=x)
    assert main(["predict", RUN, f"new.{ending}"]) == 0
    rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    pred = shoal.predict(RUN, x)
    assert [int(row["class"]) for row in rows] == pred.labels().tolist()
    for column, values in [
        ("probability", pred.confidence()),
        ("entropy", pred.entropy()),
        ("disagreement", pred.disagreement()),
    ]:
        assert [float(row[column]) for row in rows] == pytest.approx(values.tolist(), rel=1e-4)


def test_predict_into_files(here, capsys):
    np.save("many.npy", np.zeros((3, 2)))
    assert main(["predict", RUN, "many.npy", "-o", "out.csv"]) == 0
    assert main(["predict", RUN, "many.npy", "-o", "out.npz"]) == 0
    assert "3 predictions written to out.csv" in capsys.readouterr().out
    assert main(["predict", RUN, "many.npy"]) == 0
    assert capsys.readouterr().out == (here / "out.csv").read_text()
    with np.load("out.npz") as arrays:
        assert arrays["probs"].shape == (3, 5)
        np.testing.assert_allclose(arrays["probs"].max(1), arrays["probability"])


def test_predict_writes_the_outputs_of_every_member(here, capsys):
    x = np.random.default_rng(0).normal(size=(3, 2))
    np.save("many.npy", x)
    assert main(["predict", RUN, "many.npy", "-o", "members.safetensors"]) == 0
    found, wanted = shoal.Predictive.load("members.safetensors"), shoal.predict(RUN, x)
    assert torch.equal(found.members, wanted.members)
    assert f"predictions of {wanted.size} members for 3 inputs" in capsys.readouterr().out


def test_predict_brings_pixels_to_the_range_of_the_training(here, capsys):
    draw = torch.Generator().manual_seed(0)
    unit = torch.rand(20, 1, 4, 4, generator=draw)
    split = shoal.Split(3 * unit - 1, torch.arange(20) % 3)
    data = shoal.Dataset("stretched", split, split, pixel_range=(-1.0, 2.0))
    blueprint = Blueprint(MLP((8,)), (1, 4, 4), 3)
    ensemble = shoal.Ensemble.init(blueprint, 2, seed=0)
    run = shoal.fit(ensemble, data, steps=20, batch_size=10, out="runs/stretched", progress=False)
    wanted = shoal.predict(run, data.test.x).entropy().tolist()
    np.savez("unit.npz", x=unit.numpy())
    assert main(["predict", "runs/stretched", "unit.npz", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["entropy"] for row in rows] == pytest.approx(wanted, rel=1e-4)
    np.savez("wide.npz", x=data.test.x.numpy())
    assert main(["predict", "runs/stretched", "wide.npz"]) == 65
    assert "give them from 0 to 1 or as bytes" in capsys.readouterr().err


def test_predict_takes_colours_last_and_rows(here, capsys):
    x = torch.rand(12, 3, 4, 5, generator=torch.Generator().manual_seed(0))
    blueprint = Blueprint(MLP((8,)), (3, 4, 5), 3)
    ensemble = shoal.Ensemble.init(blueprint, 2, seed=0)
    options = {"steps": 20, "batch_size": 6, "out": "runs/colours", "progress": False}
    run = shoal.fit(ensemble, (x, torch.arange(12) % 3), **options)
    wanted = shoal.predict(run, x).entropy().tolist()
    for shown in (x, x.permute(0, 2, 3, 1), x.flatten(1)):
        np.save("shown.npy", shown.numpy())
        assert main(["predict", "runs/colours", "shown.npy", "--json"]) == 0
        rows = json.loads(capsys.readouterr().out)
        assert [row["entropy"] for row in rows] == pytest.approx(wanted, rel=1e-4)
    np.save("turned.npy", x.permute(0, 2, 1, 3).numpy())  # as many numbers, and no way to know
    assert main(["predict", "runs/colours", "turned.npy"]) == 65
    assert "turned.npy has inputs of shape (4, 3, 5)" in capsys.readouterr().err


def test_predict_for_regression(here, capsys):
    arguments = ["data=toy-regression", "likelihood=gaussian", "-o", "runs/curve", "-q"]
    assert main(["fit", *TINY, "steps=3", *arguments]) == 0
    np.save("line.npy", np.linspace(0, 7, 5)[:, None])
    capsys.readouterr()
    assert main(["predict", "runs/curve", "line.npy", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [set(row) for row in rows] == [{"mean", "stddev"}] * 5


def test_report_takes_a_folder_of_runs(here, capsys):
    assert main(["report", RUN, "-o", "page.html", "--title", "A title of one's own"]) == 0
    assert "A title of one" in (here / "page.html").read_text()
    assert "1 run: page.html" in capsys.readouterr().out


@pytest.mark.parametrize("kind", KINDS)
def test_list_names_and_explains(kind, capsys):
    assert main(["list", kind, "--json"]) == 0
    entries = json.loads(capsys.readouterr().out)
    assert entries and all(entry["name"] and entry["summary"] for entry in entries)
    assert main(["list", kind]) == 0
    lines = capsys.readouterr().out.splitlines()
    starts = [line.split()[0] for line in lines if not line.startswith(" ")]
    assert starts == [entry["name"] for entry in entries]


def test_list_methods_cites(capsys):
    assert main(["list", "methods"]) == 0
    assert "D'Angelo & Fortuin 2021" in capsys.readouterr().out


def test_list_without_a_kind_names_the_kinds(capsys):
    assert main(["list", "--json"]) == 0
    names = json.loads(capsys.readouterr().out)
    assert tuple(names) == KINDS and "f-kde" in names["methods"]


def test_data(capsys, monkeypatch):
    assert main(["data", "list"]) == 0
    assert "digits" in capsys.readouterr().out
    assert main(["data", "get", "toy-regression", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parts"] == {"train": 90, "test": 200}
    assert main(["data", "get", "toy-regression", "toy-classification"]) == 0
    shown = capsys.readouterr().out
    assert "toy-regression is ready" in shown and "toy-classification is ready" in shown
    monkeypatch.setenv("SHOAL_DATA", "/somewhere")
    assert main(["data", "path"]) == 0
    assert capsys.readouterr().out.strip() == "/somewhere"


def test_data_tells_what_is_here_and_where(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "shared"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    batch = tmp_path / "shared" / "cifar10" / "cifar-10-batches-bin" / "test_batch.bin"
    batch.parent.mkdir(parents=True)
    batch.touch()
    assert main(["data", "list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert rows["digits"]["state"] == "built in" and rows["digits"]["bytes"] == 0
    assert rows["mnist"]["state"] == "not here" and rows["mnist"]["bytes"] == 11_594_722
    assert rows["cifar10"]["state"] == "partly here"
    assert rows["svhn"]["licence"] == "non-commercial use only"
    assert main(["data", "path", "cifar10"]) == 0
    *trained, tested = capsys.readouterr().out.split()
    assert tested == str(batch)
    assert all(path.startswith(str(tmp_path / "home" / "shoal" / "data")) for path in trained)


def test_training_needs_nothing_but_torch_numpy_and_safetensors(tmp_path, bare):
    code = (
        "import sys\n"
        "for name in ('sklearn', 'matplotlib', 'jinja2', 'rich', 'scipy', 'PIL'):\n"
        "    sys.modules[name] = None\n"
        "from shoal.cli.main import main\n"
        f"sys.exit(main(['fit', *{TINY}, 'steps=2']) or main(['list']))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert done.returncode == 0, done.stderr


def test_quiet_is_for_one_command(capsys):
    assert main(["list", "kernels", "--quiet"]) == 0
    capsys.readouterr()
    notice("said")
    assert capsys.readouterr().err == "shoal: said\n"


# Mistakes


@pytest.mark.parametrize(
    "status, sentence, arguments",
    [
        (2, "there is no command 'fti'; did you mean 'fit'?", ["fti"]),
        (2, "options come after the command", ["--quiet", "fit"]),
        (2, "the following arguments are required: CONFIG; see shoal fit --help", ["fit"]),
        (2, "there is no option '--nope'; see shoal list --help", ["list", "--nope"]),
        (2, "no option '--otu'; did you mean '--out'?", ["fit", "digits", "--otu", "x"]),
        (2, "'--method'; write method=VALUE without", ["fit", "digits", "--method", "kde"]),
        (2, "'--batch-size=8'; write batch_size=VALUE", ["fit", "digits", "--batch-size=8"]),
        (2, "are required: list|get|path; see shoal data --help", ["data"]),
        (2, "1 or more, not '0'", ["fit", "digits", "--threads", "0"]),
        (2, "there is no experiment and no file called 'digit'", ["fit", "digit"]),
        (74, "there is no file called no.toml", ["fit", "no.toml"]),
        (2, "did you mean 'kde'?", ["fit", *TINY, "method=kdee", "-o", "x"]),
        (
            2,
            "the device 'moon' cannot be used",
            ["fit", *TINY, "device=moon", "-o", "x"],
        ),
        (2, "epochs must be a whole number", ["fit", *TINY, "epochs=0", "-o", "x"]),
        (2, "lr must be positive, not -1", ["fit", *TINY, "lr=-1", "-o", "x"]),
        (74, "there is no file", ["fit", *TINY, "data={name='file',train='no.npz'}", "-o", "x"]),
        (74, "cannot lock", ["fit", *TINY, "-o", "/proc/no/such"]),
        (74, "nowhere is not a run", ["evaluate", "nowhere"]),
        (2, "there is no dataset called 'imagenet'", ["evaluate", RUN, "--data", "imagenet"]),
        (74, "there is no file called no.csv", ["predict", RUN, "no.csv"]),
        (65, "3 numbers per row|inputs of shape", ["predict", RUN, "three.npy"]),
        (65, "Shoal reads", ["predict", RUN, "page.txt"]),
        (2, "written as .csv, .npz or .safetensors", ["predict", RUN, "three.npy", "-o", "a.txt"]),
        (2, "there is no method called 'kdee'", ["compare", *TINY, "--methods", "kdee"]),
        (2, "a strength is a number", ["compare", *TINY, "--methods", "kde:x"]),
        (2, "sizes are whole numbers", ["compare", *TINY, "--sizes", "a"]),
        (2, "members must be 1 or more", ["compare", *TINY, "--sizes", "0"]),
        (2, "at least one seed", ["compare", *TINY, "--seeds", "0"]),
        (74, "nowhere is not a run", ["report", "nowhere"]),
        (2, "there is no kind called 'kernel'", ["list", "kernel"]),
        (2, "name a data set to get", ["data", "get"]),
        (2, "'digits' has no files", ["data", "path", "digits"]),
        (2, "there is no dataset called 'minst'; did you mean 'mnist'", ["data", "path", "minst"]),
        (2, "there is no dataset called 'imagenet'", ["data", "get", "imagenet"]),
    ],
)
def test_a_mistake_is_answered_in_one_line(status, sentence, arguments, here, capsys):
    np.save("three.npy", np.zeros((2, 3)))
    assert main(arguments) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("shoal: ") and err.count("\n") == 1, err
    assert any(part in err for part in sentence.split("|")), err


def test_a_mistake_in_a_real_process(tmp_path):
    done = shell("fit", *TINY, "prior.std=-1", folder=tmp_path)
    assert done.status == 2
    assert done.err == "shoal: a prior's std must be positive, not -1\n"
    assert not list(tmp_path.iterdir())


def failing(error):
    def run(options: Namespace) -> Outcome:
        raise error

    return SimpleNamespace(run=run)


def command_that(monkeypatch, module):
    for name in ("list", "fit"):
        monkeypatch.setitem(sys.modules, f"shoal.cli.commands.{name}", module)


def test_a_fault_is_owned_up_to(monkeypatch, capsys):
    command_that(monkeypatch, failing(KeyError("x")))
    assert main(["list"]) == 70
    err = capsys.readouterr().err
    assert "KeyError: 'x'; this is a fault in Shoal; run again with --debug" in err
    assert err.count("\n") == 1
    assert main(["list", "--debug"]) == 70
    assert "Traceback" in capsys.readouterr().err


@pytest.mark.parametrize("error", [MemoryError(), RuntimeError("x: can't allocate memory: y")])
def test_memory_is_not_a_fault(error, monkeypatch, capsys):
    command_that(monkeypatch, failing(error))
    assert main(["list"]) == 2
    assert "not enough memory" in capsys.readouterr().err


@pytest.mark.parametrize(
    "error, status, words",
    [
        (KeyboardInterrupt(), 130, "shoal: stopped; add --resume to continue\n"),
        (SystemExit(143), 143, "shoal: stopped; add --resume to continue\n"),
        (SystemExit(0), 0, ""),
    ],
)
def test_what_stops_a_command(error, status, words, monkeypatch, capsys):
    command_that(monkeypatch, failing(error))
    assert main(["fit", "digits"]) == status
    assert capsys.readouterr().err == words


def test_warnings_are_one_line_without_a_place(monkeypatch, capsys):
    def run(options: Namespace) -> Outcome:
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.warn("members are few", ShoalWarning, stacklevel=1)
            warnings.warn("not ours", UserWarning, stacklevel=1)
        return Outcome("", {})

    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    command_that(monkeypatch, SimpleNamespace(run=run))
    assert main(["list"]) == 0
    assert capsys.readouterr().err == "shoal: note: members are few\n"


def test_a_closed_pipe_is_quiet(tmp_path):
    code = f"{sys.executable} -m shoal.cli.start list metrics | head -n 1"
    done = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {code}; exit ${{PIPESTATUS[0]}}"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=ENVIRONMENT,
    )
    assert done.stderr == ""
    assert done.returncode in (0, 141)
    assert done.stdout.startswith("accuracy")


# Signals

LONG = ["data.points=100", "batch_size=20", "epochs=40", "method=kde"]


def wait_for_epoch(process, epoch):
    for line in process.stderr:
        if f"epoch {epoch}:" in line:
            return
    raise AssertionError("the run ended before it could be stopped")


@pytest.mark.kill
def test_ctrl_c_saves_and_resume_finishes_the_same_run(tmp_path):
    whole = typed("fit", *TINY, *LONG, "-o", "whole", folder=tmp_path)
    assert whole.status == 0, whole.err
    process = start("fit", *TINY, *LONG, "-o", "cut", folder=tmp_path)
    wait_for_epoch(process, 2)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate()
    assert process.returncode == 130, err
    assert err.endswith("shoal: stopped; add --resume to continue\n") and "Traceback" not in err
    assert not (tmp_path / "cut" / "scores.json").exists()
    assert list((tmp_path / "cut" / "checkpoints").iterdir())
    resumed = typed("fit", *TINY, *LONG, "-o", "cut", "--resume", folder=tmp_path)
    assert resumed.status == 0, resumed.err
    scores = [(tmp_path / name / "scores.json").read_text() for name in ("whole", "cut")]
    assert scores[0] == scores[1]


@pytest.mark.kill
def test_a_terminated_run_saves_and_says_so(tmp_path):
    process = start("fit", *TINY, *LONG, "epochs=100000", "-o", "cut", folder=tmp_path)
    wait_for_epoch(process, 2)
    process.terminate()
    _, err = process.communicate()
    assert process.returncode == 143, err
    assert "Traceback" not in err
    assert shoal.load(tmp_path / "cut").history


LOSES_ITS_FOLDER = """
import shutil, sys
from shoal.cli.main import main
from shoal.training.loop.session import Session

def removed(self):
    shutil.rmtree(self.folder.path, ignore_errors=True)

Session._keep_snapshot = removed
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.parametrize("save_every", ["0", "600"])
def test_a_folder_that_is_removed_during_training_is_an_error(save_every, tmp_path):
    """At the next checkpoint, or after the last step; nothing claims that the run is kept."""
    typed = ["fit", *TINY, "epochs=3", f"save_every={save_every}", "-o", str(tmp_path / "run")]
    done = subprocess.run(
        [sys.executable, "-c", LOSES_ITS_FOLDER, *typed],
        capture_output=True,
        text=True,
        env=ENVIRONMENT,
    )
    assert done.returncode == 74 and "Kept in" not in done.stdout
    assert "removed or replaced during training" in done.stderr

"""Command lines that a new user types by mistake, each answered by one line."""

import importlib
import pwd

import numpy as np
import pytest

from shoal.cli.main import main
from shoal.data.files import store

TINY = ["toy-classification", "model.hidden=[8]", "members=2", "steps=3"]


def answer(capsys, *arguments):
    """Exit status, and the one line that was written."""
    status = main(list(map(str, arguments)))
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert "this is a fault in Shoal" not in lines[0]
    return status, lines[0]


@pytest.fixture
def empty(tmp_path, monkeypatch):
    """An empty working folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.mark.parametrize("count", ["99999999999", "9" * 5000])
@pytest.mark.parametrize("command", [["fit", *TINY], ["fidelity"], ["bench"]])
def test_more_threads_than_there_can_be(command, count, empty, capsys):
    status, line = answer(capsys, *command, "--threads", count)
    assert status == 2
    assert "threads" in line
    assert not list(empty.iterdir())


def test_a_few_threads_more_than_cores_are_fine(empty):
    assert main(["fit", *TINY, "-o", "run", "--threads", "2", "--quiet"]) == 0


@pytest.mark.parametrize("command", [["fit", *TINY], ["compare", *TINY], ["bench", "--quick"]])
def test_a_device_that_holds_no_numbers(command, empty, capsys):
    status, line = answer(capsys, *command, "--device", "meta", "--quiet")
    assert status == 2
    assert "'meta' cannot be used" in line and "cpu" in line
    assert not list(empty.rglob("config.toml"))


def test_a_run_cannot_predict_on_a_device_that_holds_no_numbers(empty, capsys):
    assert main(["fit", *TINY, "-o", "run", "--quiet"]) == 0
    capsys.readouterr()
    np.save("x.npy", np.zeros((2, 2), np.float32))
    for command in (["predict", "run", "x.npy"], ["evaluate", "run"]):
        status, line = answer(capsys, *command, "--device", "meta")
        assert status == 2
        assert "'meta' cannot be used" in line


@pytest.mark.parametrize("command", ["fit", "compare"])
def test_an_empty_folder_name(command, empty, capsys):
    status, line = answer(capsys, command, *TINY, "-o", "")
    assert status == 2
    assert "--out" in line and "empty" in line
    assert not list(empty.iterdir())


@pytest.fixture
def homeless(monkeypatch):
    """A user without a home, as in a container with an unknown user id."""

    def unknown(uid):
        raise KeyError(uid)

    monkeypatch.setattr(pwd, "getpwuid", unknown)
    for name in ("HOME", "XDG_CACHE_HOME", "SHOAL_DATA"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("homeless")
class TestWithoutAHome:
    def test_getting_data_says_what_to_set(self, capsys):
        status, line = answer(capsys, "data", "get", "mnist")
        assert status == 74
        assert "HOME" in line and "XDG_CACHE_HOME" in line

    def test_data_that_need_no_files_come_anyway(self, capsys):
        assert main(["data", "get", "toy-classification"]) == 0

    def test_files_in_a_folder_of_ones_own_are_found(self, tmp_path, monkeypatch):
        monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
        (tmp_path / "mine").write_text("data")
        assert store.path_of("mine") == tmp_path / "mine"
        assert store.path_of("nothing") is None
        assert not store.in_cache(tmp_path / "mine")


@pytest.fixture
def plotless(monkeypatch):
    """A machine without matplotlib."""
    real = importlib.import_module

    def imported(name, *rest):
        if name.partition(".")[0] == "matplotlib":
            raise ImportError(f"No module named '{name}'")
        return real(name, *rest)

    monkeypatch.setattr(importlib, "import_module", imported)


@pytest.mark.usefixtures("plotless")
class TestWithoutMatplotlib:
    def test_fidelity_says_so_before_it_trains(self, empty, capsys):
        status, line = answer(capsys, "fidelity", "--quick")
        assert status == 2
        assert "matplotlib" in line and "pip install" in line
        assert not list(empty.iterdir())

    def test_a_comparison_with_a_page_says_so_before_it_trains(self, empty, capsys):
        status, line = answer(capsys, "compare", *TINY, "--report", "page.html", "--quiet")
        assert status == 2
        assert "matplotlib" in line
        assert not list(empty.iterdir())

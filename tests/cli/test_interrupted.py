"""Ctrl-C at any moment: one sentence and 130, or the result that was there already."""

import os
import signal
import subprocess
import sys

import pytest

from shoal.cli import main as cli

pytestmark = pytest.mark.usefixtures("warm")

START = ["-m", "shoal.cli.start"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def begin(*arguments, folder):
    pipe = subprocess.PIPE
    command = [sys.executable, *arguments]
    return subprocess.Popen(
        command, cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.kill
@pytest.mark.parametrize(
    "imports", [1, 700, *(pytest.param(n, marks=pytest.mark.nightly) for n in (50, 300, 1100))]
)
def test_a_command_that_is_stopped_says_so_in_a_line(tmp_path, imports):
    """Most of its time goes into imports, which libraries do not survive in one piece."""
    with begin("-X", "importtime", *START, "fidelity", folder=tmp_path) as process:
        wait_for_imports(process, imports)
        process.send_signal(signal.SIGINT)
        err = process.stderr.read()
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "shoal: stopped" and "Traceback" not in err


@pytest.mark.kill
def test_after_the_result_there_is_nothing_to_stop(tmp_path):
    process = begin(*START, "list", "kernels", folder=tmp_path)
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate()
    assert process.returncode in (0, 130), err
    assert "Traceback" not in err and "ignored" not in err


def wait_for_imports(process, count):
    """Until so many modules were imported since the handler was set; Python tells of each."""
    for line in process.stderr:
        if line.split("|")[-1].strip() == "shoal.cli.ranks":
            break
    while count and "import time:" in process.stderr.readline():
        count -= 1


@pytest.mark.parametrize("wrapped", [RuntimeError("in pieces"), ImportError("half")])
def test_an_interruption_that_was_made_into_another_error_is_still_one(
    monkeypatch, capsys, wrapped
):
    def broken(_):
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt as error:
            raise wrapped from error

    monkeypatch.setattr(cli, "_command", broken)
    assert cli.main(["evidence", "run"]) == 130
    assert capsys.readouterr().err == "shoal: stopped\n"

"""Ctrl-C at any moment: one sentence and 130, or the result that was there already."""

import os
import signal
import subprocess
import sys
import time

import pytest

from shoal.app import cli

START = [sys.executable, "-m", "shoal.app.start"]
ENVIRONMENT = os.environ | {"OMP_NUM_THREADS": "1"}


def begin(*arguments, folder):
    pipe = subprocess.PIPE
    return subprocess.Popen(
        [*START, *arguments], cwd=folder, env=ENVIRONMENT, stdout=pipe, stderr=pipe, text=True
    )


@pytest.mark.kill
@pytest.mark.parametrize("delay", [0.0, 0.05, 0.15, 0.4, 0.8, 1.3, 2.0])
def test_a_command_that_is_stopped_says_so_in_a_line(tmp_path, delay):
    """Most of this time goes into imports, which libraries do not survive in one piece."""
    process = begin("fidelity", folder=tmp_path)
    wait_for_python(process)
    time.sleep(delay)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130, err
    assert err.splitlines()[-1] == "shoal: stopped" and "Traceback" not in err


@pytest.mark.kill
def test_after_the_result_there_is_nothing_to_stop(tmp_path):
    process = begin("list", "kernels", folder=tmp_path)
    assert process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode in (0, 130), err
    assert "Traceback" not in err and "ignored" not in err


def wait_for_python(process):
    """Until the handler is set: what is before belongs to Python itself."""
    caught = 1 << (signal.SIGINT - 1)
    while True:
        with (
            open(f"/proc/{process.pid}/status") as status,
            open(f"/proc/{process.pid}/cmdline") as command,
        ):
            line = next(text for text in status if text.startswith("SigCgt"))
            if "shoal" in command.read() and int(line.split()[1], 16) & caught:
                break
        time.sleep(0.005)
    time.sleep(0.2)


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

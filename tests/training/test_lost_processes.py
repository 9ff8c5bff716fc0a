"""What the other processes do when one is lost or hangs, at the command line and under torchrun."""

import signal
import subprocess

import pytest
from lost_processes import attempt, difference, expected, side_by_side, wait_for

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.kill, pytest.mark.slow]

PATIENCE = 90  # of this test, on a busy machine; torch's own is 1,800 s

COMMAND = """
import sys
from shoal.cli.main import main
from shoal.training import fit
fit.TIMEOUT = 5.0
sys.exit(main(sys.argv[1:]))
"""
"""`shoal` in a process that waits 5 seconds for the others, not 120."""


@pytest.mark.parametrize(
    "hung", [pytest.param(0, marks=pytest.mark.nightly), 1], ids=["first", "another"]
)
def test_the_others_end_when_a_process_hangs(hung, tmp_path):
    folder = tmp_path / "run"
    words = ["-c", COMMAND, *"fit digits members=3 epochs=100000 save_every=1 --quiet".split()]
    words += ["-o", str(folder)]
    pipes = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    processes = side_by_side(3, *words, **pipes)
    try:
        rows = folder / "history.jsonl"
        wait_for(lambda: rows.exists() and rows.stat().st_size > 0, processes)
        processes[hung].send_signal(signal.SIGSTOP)
        for rank, process in enumerate(processes):
            if rank == hung:
                continue
            _, said = process.communicate(timeout=PATIENCE)
            assert process.returncode == 75
            assert said.count("\n") == 1 and "resume" in said, said
    finally:
        for process in processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize("rank", [0, pytest.param(1, marks=pytest.mark.nightly)])
def test_torchrun_picks_a_run_up_whichever_process_is_killed(rank, tmp_path):
    restarted, _ = attempt(tmp_path / "run", rank, delay=0.3)
    assert restarted
    assert difference(tmp_path / "run", expected()) < 1e-10

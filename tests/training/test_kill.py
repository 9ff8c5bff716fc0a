"""Real processes, really killed: no moment is the wrong one.

A trainer is killed again and again, and taken up again until it is done. SHOAL_KILLS asks for more
kills of each method than the usual 15; `python tests/reliability.py kills` makes the long run.
"""

import os
import signal

import pytest
from killed_runs import check_finished, check_survivor, kill_often, serving, uninterrupted

from shoal.core.storage.checkpoints import steps

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.kill]

KILLS = int(os.environ.get("SHOAL_KILLS", "15"))


@pytest.fixture(scope="module")
def server():
    with serving() as server:
        yield server


@pytest.fixture(
    scope="module",
    params=[
        "f-kde",
        *(
            pytest.param(method, marks=pytest.mark.nightly)
            for method in ("kde", "svgd", "ensemble")
        ),
    ],
)
def reference(request, server, tmp_path_factory):
    """An uninterrupted run, and how long it takes."""
    folder = tmp_path_factory.mktemp(request.param) / "whole"
    return request.param, folder, uninterrupted(server, request.param, folder)


def test_killed_runs_end_as_if_nothing_had_happened(server, reference, tmp_path):
    found = kill_often(server, *reference, KILLS, tmp_path)
    assert found["runs"] > 1
    assert found["bit_exact"] == found["runs"]


@pytest.mark.parametrize("reference", ["f-kde"], indirect=True)
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
@pytest.mark.parametrize("step", [2, 3])
def test_a_polite_signal_saves_the_step_first(server, reference, number, status, step, tmp_path):
    method, whole, _ = reference
    folder = tmp_path / "run"
    assert server.interrupted(method, folder, step, number) == status
    assert steps(folder / "checkpoints")[-1] == step + 1
    check_survivor(folder)
    assert server.attempt(method, folder) == 0
    check_finished(folder, whole)


@pytest.mark.parametrize("reference", ["f-kde"], indirect=True)
def test_the_second_signal_does_not_wait(server, reference, tmp_path):
    method, whole, _ = reference
    folder = tmp_path / "run"
    status = server.interrupted(method, folder, 5, signal.SIGTERM, signal.SIGTERM)
    assert status == -signal.SIGTERM
    assert steps(folder / "checkpoints")[-1] in (4, 5)
    check_survivor(folder)
    assert server.attempt(method, folder) == 0
    check_finished(folder, whole)

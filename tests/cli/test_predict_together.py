"""`shoal predict` in several processes: the predictions of one process, written once."""

import subprocess

import numpy as np
import pytest
from lost_processes import SOON, torchrun

import shoal
from shoal.cli.main import main

pytestmark = [pytest.mark.usefixtures("warm"), pytest.mark.slow]
LIMIT = 1e-5


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """A run of three members, and a file with more than one batch."""
    folder = tmp_path_factory.mktemp("case")
    words = ["fit", "digits", "members=3", "epochs=1", "-o", str(folder / "run"), "--quiet"]
    assert main(words) == 0
    x = np.random.default_rng(0).random((1500, 1, 8, 8), dtype=np.float32)
    np.savez(folder / "x.npz", x=x)
    return folder


def predicted(case, processes, *words):
    """What `shoal predict` prints in so many processes."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    command = ("-m", "shoal", "predict", str(case / "run"), str(case / "x.npz"), *words)
    printed, said = (job := torchrun(processes, *command, **pipes)).communicate(timeout=SOON)
    assert job.returncode == 0, said
    return printed


def test_members_of_two_processes_predict_as_one(case):
    assert main(["predict", str(case / "run"), str(case / "x.npz"), "-o", str(case / "1.npz")]) == 0
    told = predicted(case, 2, "-o", str(case / "2.npz"))
    assert told.count("1500 predictions written") == 1
    one, two = np.load(case / "1.npz"), np.load(case / "2.npz")
    assert one.files == two.files
    for name in one.files:
        np.testing.assert_allclose(two[name], one[name], rtol=LIMIT, atol=LIMIT)


def test_the_first_process_prints_or_writes_the_outputs_of_all(case):
    # four processes and three members: two rows of two, of which the second has nothing to do
    out = case / "members.safetensors"
    assert "3 members for 1500 inputs" in predicted(case, 4, "-o", str(out))
    whole = shoal.predict(shoal.load(case / "run"), np.load(case / "x.npz")["x"])
    found = shoal.Predictive.load(out).members
    np.testing.assert_allclose(found.numpy(), whole.members.numpy(), rtol=LIMIT, atol=LIMIT)
    assert len(predicted(case, 2).splitlines()) == 1 + 1500

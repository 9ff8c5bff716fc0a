"""Work on side streams, and what it reads."""

import os
import subprocess
import sys

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.engine.member_runner import lanes, open_queues
from shoal.inference.ensemble import Ensemble
from shoal.training.fit import fit

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class TestOnACpu:
    def test_there_is_one_lane_and_it_is_the_ordinary_one(self):
        with lanes(4, torch.device("cpu"), []) as side:
            assert side == [None]


NAME = "CUDA_DEVICE_MAX_CONNECTIONS"


def test_importing_the_package_sets_no_environment_variable():
    ask = "import os; before = dict(os.environ); import shoal; shoal.fit, shoal.Ensemble; "
    command = [sys.executable, "-c", ask + "assert dict(os.environ) == before"]
    assert subprocess.run(command).returncode == 0


class TestQueues:
    @pytest.fixture(autouse=True)
    def untouched(self, monkeypatch):
        """A process that has not touched a GPU yet, and an environment that is put back."""
        monkeypatch.setenv(NAME, "")
        monkeypatch.delenv(NAME)
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)

    @pytest.mark.parametrize(("device", "found"), [("cuda:0", "32"), ("cpu", None), (None, None)])
    def test_the_driver_is_told_before_it_starts(self, device, found):
        open_queues(device)
        assert os.environ.get(NAME) == found

    def test_what_somebody_chose_stays(self, monkeypatch):
        monkeypatch.setenv(NAME, "1")
        open_queues("cuda")
        assert os.environ[NAME] == "1"

    def test_a_driver_that_runs_is_not_told_in_vain(self, monkeypatch):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
        open_queues("cuda")
        assert NAME not in os.environ

    @pytest.mark.skipif(torch.cuda.is_available(), reason="this is about a machine without a GPU")
    def test_training_on_a_gpu_tells_it_before_anything_is_moved(self):
        ensemble = Ensemble.init(lambda: torch.nn.Linear(2, 2), 2)
        with pytest.raises(ConfigError, match="cuda"):
            fit(ensemble, (torch.zeros(4, 2), torch.zeros(4).long()), device="cuda")
        assert os.environ[NAME] == "32"


@needs_gpu
class TestOnAGpu:
    def test_what_lanes_read_is_not_given_away_before_they_have_read_it(self):
        """The kernel that reads comes after slow ones on its lane; the host lets go at once."""
        device = torch.device("cuda")
        for _ in range(5):
            source = torch.ones(1 << 20, device=device)
            with lanes(2, device, [source]) as side:
                with torch.cuda.stream(side[1]):
                    torch.cuda._sleep(20_000_000)
                    found = source * 1
                place = source.data_ptr()
                del source
                other = torch.zeros(1 << 20, device=device)
                assert other.data_ptr() != place
            assert found.sum().item() == 1 << 20

    def test_two_streams_have_lanes_of_their_own(self):
        device = torch.device("cuda")
        with lanes(2, device, []) as first, torch.cuda.stream(torch.cuda.Stream()):
            with lanes(2, device, []) as second:
                assert not set(first) & set(second)

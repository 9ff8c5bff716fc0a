"""Work on side streams, and what it reads."""

import torch
from triton_ready import needs_gpu

from shoal.engine.members.member_runner import lanes


class TestOnACpu:
    def test_there_is_one_lane_and_it_is_the_ordinary_one(self):
        with lanes(4, torch.device("cpu"), []) as side:
            assert side == [None]


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

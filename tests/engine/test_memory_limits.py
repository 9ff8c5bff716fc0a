"""The limit of a GPU's memory, with an allocator that is only played."""

from types import SimpleNamespace

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.engine.resources.memory import MemoryLimit, lifted

GPU, TOTAL = torch.device("cuda:0"), 1000


@pytest.fixture
def allocator(monkeypatch):
    """Bytes that the process holds, and the share of the device that it may hold."""
    state = SimpleNamespace(reserved=300, share=0.8)
    properties = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: state.reserved)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.cuda, "get_per_process_memory_fraction", lambda device: state.share)
    monkeypatch.setattr(
        torch.cuda,
        "set_per_process_memory_fraction",
        lambda share, device: setattr(state, "share", share),
    )
    return state


def test_the_limit_does_not_count_what_others_hold(allocator):
    limit = MemoryLimit(400, GPU, own=100)  # 200 of the 300 bytes belong to others
    with limit.kept():
        assert allocator.share == pytest.approx(0.6)
        with lifted(limit):
            assert allocator.share == 1.0
        assert allocator.share == pytest.approx(0.6)
    assert allocator.share == 0.8
    allocator.reserved = 600
    assert not limit.exceeded
    allocator.reserved = 601
    assert limit.exceeded
    limit.include(50)  # data of the run
    allocator.reserved = 551
    assert limit.exceeded


def test_the_share_comes_back_after_an_error(allocator):
    with pytest.raises(KeyError), MemoryLimit(400, GPU, own=0).kept():
        raise KeyError
    assert allocator.share == 0.8


def test_a_share_of_the_device(allocator):
    assert MemoryLimit(0.25, GPU, own=0).bytes == TOTAL // 4
    with MemoryLimit(2 * TOTAL, GPU, own=0).kept():
        assert allocator.share == 1.0


def test_a_share_of_an_unknown_device_is_refused():
    with pytest.raises(ConfigError, match="unknown; give memory as a size"):
        MemoryLimit(0.5, torch.device("meta"), own=0)
    with lifted(None):
        assert MemoryLimit(5, torch.device("meta"), own=0).bytes == 5

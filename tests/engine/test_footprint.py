"""The footprint of a step: what autograd saves, against closed forms; peaks and chunks."""

import pytest
import torch
from torch import nn

from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.resources.footprint import Footprint, transient_bytes
from shoal.engine.saved_bytes import SavedBytes
from shoal.inference.ensemble import Ensemble

BATCH, INPUTS, HIDDEN, CLASSES = 12, 6, (32, 64), 4


def perceptron() -> nn.Module:
    first, second = HIDDEN
    return nn.Sequential(
        nn.Linear(INPUTS, first), nn.Tanh(), nn.Linear(first, second), nn.ReLU(),
        nn.Linear(second, CLASSES),
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("members", [1, 5])
@pytest.mark.parametrize("kind", ["vmap", "loop"])
def test_a_perceptron_keeps_the_outputs_of_its_hidden_layers(kind, members, dtype):
    ensemble = Ensemble.init(perceptron, members, seed=0).to("cpu", dtype)
    x = torch.randn(BATCH, INPUTS, dtype=dtype)
    with SavedBytes([x, *ensemble.state.values()]) as saved:
        outputs = ensemble(x, MemberRunner(kind))
    turned = BATCH * INPUTS if kind == "vmap" else 0  # all members share one transposed batch
    assert saved.peak == dtype.itemsize * (turned + members * BATCH * sum(HIDDEN))
    assert saved.largest == dtype.itemsize * BATCH * max(HIDDEN) * (members if turned else 1)
    outputs.sum().backward()
    assert saved.now == 0
    assert saved.peak > 0


def test_a_convolution_keeps_its_input_and_its_output():
    filters, width = 3, 5
    module = nn.Sequential(nn.Conv2d(2, filters, 3, padding=1), nn.Sigmoid(), nn.Flatten())
    x = torch.randn(4, 2, width, width)
    with SavedBytes([*module.parameters()]) as saved:
        module(x)
    assert saved.peak == 4 * (x.numel() + 4 * filters * width**2)


def test_second_derivatives_count_while_they_exist():
    w = torch.randn(50, requires_grad=True)
    x = torch.randn(50, requires_grad=True)
    with SavedBytes([w, x]) as saved:
        value = (w * x).exp().sum()
        once = saved.peak
        (slope,) = torch.autograd.grad(value, x, create_graph=True)
        assert saved.peak > once
        slope.square().sum().backward()
        del value, slope
    assert saved.now == 0


def test_a_step_counts_two_more_of_its_largest_activations():
    w = torch.randn(100, requires_grad=True)

    def step():
        w.exp().sum().backward()

    assert transient_bytes(step, torch.device("cpu"), [w]) == 4 * 100 * 3


class TestFootprint:
    known = Footprint(members=10, resident=100, gradients=20, update=15, common=5, member=10)

    def test_peak_of_every_chunk(self):
        assert self.known.peak(10) == 100 + 20 + 5 + 100
        assert self.known.peak(1) == 100 + 20 + 15
        assert Footprint(members=2, resident=1, gradients=1, update=50).peak(2) == 52

    @pytest.mark.parametrize(
        "limit, most, chunk",
        [(225, 10, 10), (224, 10, 9), (1000, 4, 4), (146, 10, 2), (135, 10, 1), (134, 10, None)],
    )
    def test_the_largest_chunk_that_fits(self, limit, most, chunk):
        assert self.known.largest_chunk(limit, most) == chunk

    def test_a_process_holds_freed_memory_up_to_a_bound(self):
        small = Footprint(members=4, resident=7, gradients=3, member=10, unused=15)
        assert small.peak(1) == 7 + 3 + 10 + 10
        assert small.peak(4) == 7 + 3 + 40 + 15

    def test_cast_copies_stay_to_the_end_of_a_captured_step(self):
        captured = Footprint(members=10, resident=0, gradients=0, member=10, delayed=3)
        assert captured.peak(10) == 100
        assert captured.peak(4) == 40 + 6 * 3

"""Forward passes that are replayed: when, and with which numbers."""

import gc
import sys
import warnings
import weakref
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.precision import calculating_in
from shoal.engine.resources import graph
from shoal.engine.resources.graph import CapturedForward
from shoal.engine.resources.plan import default_runner
from shoal.engine.resources.transfer import through_gpu
from shoal.inference.ensemble import Ensemble
from shoal.models.resnet import ResNet20
from shoal.prediction import predict

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")


class Clock:
    """Launching takes `launch` seconds, waiting for the device `wait` more."""

    def __init__(self, launch, wait):
        self.now, self.launch, self.wait = 0.0, launch, wait

    def perf_counter(self):
        return self.now

    def synchronize(self):
        self.now += self.wait

    def call(self, x):
        self.now += self.launch
        return x * 2


class TestWhen:
    """When a pass is captured, by a clock instead of a GPU."""

    @pytest.fixture
    def begun(self, monkeypatch):
        """A forward pass on a clock, and the sizes of the batches that were captured."""

        def begin(launch, wait, points):
            clock, asked = Clock(launch, wait), []
            monkeypatch.setattr(graph, "time", clock)
            monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)

            def capture(self, passes, x):
                passes.captures = False
                asked.append(len(x))

            monkeypatch.setattr(CapturedForward, "_capture", capture)
            return CapturedForward(clock.call, points), asked

        return begin

    @pytest.mark.parametrize(
        "launch, wait, points, captured",
        [
            (1e-2, 1e-3, 10_000, True),
            (1e-2, 1e-1, 10_000, False),  # the device is the slower one
            (1e-2, 1e-3, 100, False),  # too few batches are left
            (1e-2, 1e-3, None, False),
        ],
    )
    def test_launching_takes_longest_and_many_batches_are_left(
        self, begun, launch, wait, points, captured
    ):
        forward, asked = begun(launch, wait, points)
        for size in (10, 10, 7, 10, 10):
            assert torch.equal(forward(torch.ones(size, 2)), torch.full((size, 2), 2.0))
        assert asked == [10] * captured

    def test_launching_has_taken_as_long_as_a_capture(self, begun):
        forward, asked = begun(1e-2, 1e-3, None)
        price = CapturedForward.CAPTURE_SECONDS + CapturedForward.CAPTURE_LAUNCHES * 1e-2
        calls = 0
        while not asked:
            forward(torch.ones(1, 2))
            calls += 1
        timed = calls - CapturedForward.WARM + 1
        assert timed - 1 <= price / 1e-2 + 1e-6 < timed + 1

    def test_every_shape_pays_for_its_own_capture(self, begun):
        forward, asked = begun(1e-2, 1e-3, None)
        for _ in range(30):
            for size in (1, 16, 100):
                forward(torch.ones(size, 2))
        assert sorted(asked) == [1, 16, 100]
        for size in range(101, 900):  # shapes that come once are never captured, nor remembered
            forward(torch.ones(size, 2))
        assert len(asked) == 3 and len(forward.passes) == CapturedForward.MOST_KINDS

    def test_objects_are_never_captured(self):
        class Graphs(list):
            pass

        forward = CapturedForward(lambda x: torch.zeros(1), 1000)
        for _ in range(5):
            forward(Graphs([1]))
        assert not forward.passes


class TestKept:
    """Captured passes between calls: what they depend on, without a GPU."""

    @pytest.fixture
    def device(self, monkeypatch):
        stream = SimpleNamespace(cuda_stream=7)
        memory = SimpleNamespace(total_memory=3200)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: memory)

    def used(self, ensemble, taken=0):
        with graph.captured_forward(ensemble, 5) as forward:
            forward.taken = taken
        assert forward.call is None
        return forward

    def test_later_calls_find_them(self, device):
        ensemble = Ensemble.init(lambda: nn.Linear(3, 2), 2)
        first = self.used(ensemble)
        with torch.no_grad():
            ensemble.weights["weight"].add_(1.0)
        assert self.used(ensemble) is first

    def test_a_replaced_tensor_or_another_precision_begins_anew(self, device):
        ensemble = Ensemble.init(lambda: nn.Linear(3, 2), 2)
        first = self.used(ensemble)
        old = ensemble.groups[0].weights["weight"]
        ensemble.groups[0].weights["weight"] = old.detach().clone().requires_grad_()
        second = self.used(ensemble)
        assert second is not first
        with calculating_in("bfloat16", ensemble):
            assert self.used(ensemble) is not second

    def test_a_frozen_tensor_that_changes_begins_anew(self, device):
        def build():
            network = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
            nn.init.ones_(network[0].weight.requires_grad_(False))
            return network

        ensemble = Ensemble.init(build, 2)
        first = self.used(ensemble)
        ensemble.shared["0.weight"].mul_(2.0)
        assert self.used(ensemble) is not first

    def test_large_ones_are_given_up(self, device):
        ensemble = Ensemble.init(lambda: nn.Linear(3, 2), 2)
        first = self.used(ensemble, taken=101)
        second = self.used(ensemble, taken=100)
        assert second is not first and self.used(ensemble, taken=100) is second

    def test_blocks_at_the_same_time_do_not_share(self, device):
        ensemble = Ensemble.init(lambda: nn.Linear(3, 2), 2)
        with graph.captured_forward(ensemble, 5) as outer:
            assert self.used(ensemble) is not outer

    def test_the_networks_can_be_freed(self, device):
        ensemble = Ensemble.init(lambda: nn.Linear(3, 2), 2)
        self.used(ensemble)
        seen = weakref.ref(ensemble)
        del ensemble
        gc.collect()
        assert seen() is None


def test_fused_layers_serve_predictions():
    runner, gpu = MemberRunner("loop", streams=4), torch.device("cuda")
    with torch.no_grad():
        assert type(runner._layers(gpu)).__name__ == "fused_layers"
        assert type(runner._layers(torch.device("cpu"))).__name__ == "nullcontext"


def test_an_ensemble_runs_as_its_device_wants(monkeypatch):
    """Every caller that names no member runner: landscapes, snapshots, adopted networks."""
    ensemble = Ensemble.init(lambda: nn.Linear(3, 2), 2)
    module, asked = sys.modules["shoal.inference.ensemble"], []

    def noted(groups, device):
        asked.append(device)
        return default_runner(groups, device)

    monkeypatch.setattr(module, "default_runner", noted)
    ensemble(torch.ones(1, 3))
    ensemble(torch.ones(1, 3), MemberRunner("loop"))
    assert asked == [torch.device("cpu")]


@pytest.fixture
def at_once(monkeypatch):
    """Captures as soon as possible."""
    monkeypatch.setattr(CapturedForward, "CAPTURE_SECONDS", -1.0)
    monkeypatch.setattr(CapturedForward, "LAUNCH_SHARE", 0.0)


@needs_gpu
class TestOnAGpu:
    X = torch.randn(205, 3, 8, 8, generator=torch.Generator().manual_seed(0))

    def small(self, members=3):
        return Ensemble.init(lambda: ResNet20((4, 6)).build((3, 8, 8), 5), members).to("cuda")

    def test_a_replay_has_the_numbers_of_the_pass(self, at_once, monkeypatch):
        replays = []
        real = torch.cuda.CUDAGraph.replay
        monkeypatch.setattr(
            torch.cuda.CUDAGraph, "replay", lambda self: replays.append(1) or real(self)
        )
        ensemble = self.small()
        found = predict(ensemble, self.X, batch_size=10).members
        assert len(replays) == 20 - CapturedForward.WARM
        with monkeypatch.context() as never:
            never.setattr(CapturedForward, "CAPTURE_SECONDS", 1e9)
            wanted = predict(self.small(), self.X, batch_size=10).members
        assert len(replays) == 20 - CapturedForward.WARM
        assert torch.equal(found, wanted)
        kept = predict(ensemble, self.X, batch_size=10, keep=True).members
        assert kept.is_cuda and torch.equal(kept.cpu(), wanted)
        assert len(replays) == 40 - CapturedForward.WARM

    def test_replays_of_later_calls_see_weights_that_changed_in_place(self, at_once):
        ensemble, x = self.small(), self.X[:4]
        for _ in range(CapturedForward.WARM + 2):
            predict(ensemble, x)
        with torch.no_grad():
            for tensor in ensemble.weights.values():
                tensor.mul_(1.1)
        wanted = predict(ensemble.to("cpu"), x).members
        ensemble.to("cuda")
        torch.testing.assert_close(predict(ensemble, x).members, wanted, rtol=1e-4, atol=1e-4)

    def test_three_shapes_are_captured_side_by_side(self, at_once):
        ensemble = self.small()
        wanted = {size: predict(self.small(), self.X[:size]).members for size in (1, 16, 100)}
        for _ in range(CapturedForward.WARM + 2):
            for size, outputs in wanted.items():
                found = predict(ensemble, self.X[:size]).members
                torch.testing.assert_close(found, outputs, rtol=1e-4, atol=1e-4)
        _, forward, _ = graph._kept_forwards[ensemble]
        assert [each.graph is not None for each in forward.passes.values()] == [True] * 3

    def test_validation_of_every_epoch_is_replayed(self, at_once, monkeypatch):
        replays, real = [], CapturedForward.__call__
        monkeypatch.setattr(
            CapturedForward, "__call__", lambda self, x: replays.append(1) or real(self, x)
        )
        y = torch.arange(200) % 5

        def losses():
            data = self.X[:200].cuda(), y.cuda()
            run = shoal.fit(
                self.small(), data, validation=0.2, epochs=6, batch_size=40, progress=False, lr=1e-3
            )
            return [row["validation"]["nll"] for row in run.history]

        found = losses()
        assert len(replays) == 6
        monkeypatch.setattr(CapturedForward, "CAPTURE_SECONDS", 1e9)
        assert found == pytest.approx(losses(), rel=1e-3)

    def test_a_network_that_waits_for_the_host_is_not_captured(self, at_once, monkeypatch):
        def started(self, *_, **__):
            raise AssertionError("a capture was started")

        monkeypatch.setattr(torch.cuda.graph, "__init__", started)

        class Waits(nn.Module):
            def __init__(self):
                super().__init__()
                self.conv = nn.Conv2d(3, 2, 8)

            def forward(self, x):
                return self.conv(x).flatten(1) * float(x.shape[0] + 0 * x.sum().item())

        ensemble = Ensemble.init(Waits, 2).to("cuda")
        found = predict(ensemble, self.X[:100], batch_size=10).members
        wanted = torch.stack([ensemble.member(i).cuda()(self.X[:100].cuda()) for i in range(2)])
        torch.testing.assert_close(found, wanted.cpu().detach() / 10, rtol=1e-2, atol=2e-2)

    def test_transfers_keep_order_and_values(self):
        batches = [torch.full((size, 1000), float(i)) for i, size in enumerate((5, 9, 9, 2, 9))]
        device = torch.device("cuda")
        found = [out.clone() for out in through_gpu(batches, lambda x: x[None] + 1, device)]
        for batch, outputs in zip(batches, found, strict=True):
            assert torch.equal(outputs, batch[None] + 1)

    def test_predictions_are_those_of_the_members_without_warnings(self):
        ensemble = self.small()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = shoal.predict(ensemble, self.X, batch_size=64).members
            assert torch.equal(ensemble(self.X.cuda()).cpu()[:, :1].isfinite(), found[:, :1] < 1e9)
        ours = ensemble.to("cpu")
        wanted = torch.stack([ours.member(i)(self.X) for i in range(3)]).detach()
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)

    def test_fused_layers_in_bfloat16_are_as_near_to_the_exact_outputs_as_torch(self):
        ensemble = self.small()
        exact = Ensemble.init(lambda: ResNet20((4, 6)).build((3, 8, 8), 5), 3).to(
            dtype=torch.float64
        )
        wanted = predict(exact, self.X).members

        def deviation(mapping):
            with torch.no_grad(), calculating_in("bfloat16", ensemble):
                found = ensemble(self.X.cuda(), mapping).cpu().double()
            return float((found - wanted).square().mean().sqrt())

        fused, plain = deviation(MemberRunner("loop", streams=3)), deviation(MemberRunner("loop"))
        assert fused < 1.2 * plain

    def test_the_gpu_holds_a_few_batches(self):
        ensemble = Ensemble.init(lambda: nn.Linear(8, 1000), 10).to("cuda")
        x = torch.randn(20_000, 8)
        predict(ensemble, x[:2000], batch_size=500)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        predict(ensemble, x, batch_size=500)
        batch = 10 * 500 * 1000 * 4
        assert torch.cuda.max_memory_allocated() - before < 6 * batch

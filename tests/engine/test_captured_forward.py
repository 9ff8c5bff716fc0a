"""Forward passes that are replayed: when, and with which numbers."""

import sys
import warnings

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
        self, monkeypatch, launch, wait, points, captured
    ):
        clock, asked = Clock(launch, wait), []
        monkeypatch.setattr(graph, "time", clock)
        monkeypatch.setattr(torch.cuda, "synchronize", clock.synchronize)
        monkeypatch.setattr(CapturedForward, "_capture", lambda self, x: asked.append(len(x)))
        forward = CapturedForward(clock.call, points)
        for size in (10, 10, 7, 10, 10):
            assert torch.equal(forward(torch.ones(size, 2)), torch.full((size, 2), 2.0))
        assert asked == [10] * captured

    def test_objects_are_never_captured(self):
        class Graphs(list):
            pass

        forward = CapturedForward(lambda x: torch.zeros(1), 1000)
        for _ in range(5):
            forward(Graphs([1]))
        assert forward.seen == 0


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
        monkeypatch.setattr(CapturedForward, "CAPTURE_SECONDS", 1e9)
        wanted = predict(ensemble, self.X, batch_size=10).members
        assert len(replays) == 20 - CapturedForward.WARM
        assert torch.equal(found, wanted)
        kept = predict(ensemble, self.X, batch_size=10, keep=True).members
        assert kept.is_cuda and torch.equal(kept.cpu(), wanted)

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

"""Forward passes on a CPU without gradients: the outputs are those of the members."""

import copy

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.members import forward_pass
from shoal.engine.members.forward_pass import forward_outputs
from shoal.engine.members.member_runner import MemberRunner
from shoal.inference.ensemble import Ensemble


def perceptron():
    return nn.Sequential(nn.Flatten(), nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 3)).double()


class Normed(nn.Module):
    """Convolutions, running statistics, and one weight that is used twice."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)
        self.again = nn.Conv2d(4, 4, 1)
        self.last = nn.Conv2d(4, 4, 1)
        self.last.weight = self.again.weight
        self.dropout, self.head = nn.Dropout(0.5), nn.Linear(16, 3)

    def forward(self, x):
        hidden = self.last(self.again(self.norm(self.conv(x))))
        return self.head(self.dropout(hidden).flatten(1))


def normed():
    return Normed().double()


class Two(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3).double()

    def forward(self, a, b):
        return self.layer(a) + b


def literal(ensemble, x):
    """Outputs of copies of the members, one after another."""
    with torch.no_grad():
        return torch.stack([ensemble.member(i)(x) for i in range(ensemble.members)])


def outputs(ensemble, x):
    with torch.no_grad():
        return ensemble(x)


@pytest.mark.parametrize("build, shape", [(perceptron, (2, 2)), (normed, (1, 4, 4))])
@pytest.mark.parametrize("members", [2, forward_pass.FEW_MEMBERS + 1])
@pytest.mark.parametrize("points", [1, 5, forward_pass.FEW_POINTS + 1])
def test_outputs_are_those_of_the_members(build, shape, members, points):
    ensemble = Ensemble.init(build, members)
    x = torch.randn(points, *shape, dtype=torch.float64)
    torch.testing.assert_close(outputs(ensemble, x), literal(ensemble, x), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("build, shape", [(perceptron, (4,)), (normed, (1, 4, 4))])
def test_changed_and_replaced_tensors_are_seen(build, shape):
    ensemble, x = Ensemble.init(build, 2), torch.randn(3, *shape, dtype=torch.float64)
    outputs(ensemble, x)
    name = next(iter(ensemble.groups[0].weights))
    with torch.no_grad():
        ensemble.groups[0].weights[name].mul_(2.0)
    torch.testing.assert_close(outputs(ensemble, x), literal(ensemble, x))
    weights = ensemble.groups[0].weights
    weights[name] = (weights[name].detach() + 1.0).requires_grad_()
    torch.testing.assert_close(outputs(ensemble, x), literal(ensemble, x))
    weights[name].data = weights[name].data * 3.0
    torch.testing.assert_close(outputs(ensemble, x), literal(ensemble, x))
    twin = copy.deepcopy(ensemble)
    with torch.no_grad():
        twin.groups[0].weights[name].zero_()
    torch.testing.assert_close(outputs(twin, x), literal(twin, x))
    torch.testing.assert_close(outputs(ensemble, x), literal(ensemble, x))
    single = ensemble.to(dtype=torch.float32)
    torch.testing.assert_close(outputs(single, x.float()), literal(single, x.float()))


def test_modules_serve_few_members_or_many_numbers(monkeypatch):
    ensemble = Ensemble.init(normed, forward_pass.FEW_MEMBERS + 1)
    few = torch.randn(2, 1, 4, 4, dtype=torch.float64)
    assert forward_outputs(ensemble.groups[0], few) is None
    monkeypatch.setattr(forward_pass, "MANY_NUMBERS", few.numel())
    with torch.no_grad():
        assert forward_outputs(ensemble.groups[0], few) is not None


def test_structures_are_taken_and_gradients_keep_the_usual_pass():
    ensemble = Ensemble.init(Two, 2)
    a, b = torch.randn(5, 4, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    wanted = torch.stack([ensemble.member(i)(a, b) for i in range(2)]).detach()
    torch.testing.assert_close(shoal.predict(ensemble, {"a": a, "b": b}).members, wanted)
    x = torch.randn(2, 4, dtype=torch.float64)
    assert Ensemble.init(perceptron, 2)(x).requires_grad


def test_a_network_that_replaces_its_buffers_keeps_the_usual_pass():
    class Counts(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(2, 1)
            self.register_buffer("calls", torch.rand(1))

        def forward(self, x):
            self.calls = self.calls + 1
            return self.layer(x) * self.calls

    ensemble, x = Ensemble.init(Counts, 2), torch.randn(3, 2)
    first = outputs(ensemble, x)
    assert torch.equal(outputs(ensemble, x), first)
    torch.testing.assert_close(first, literal(ensemble, x))


def test_members_of_several_architectures_are_joined():
    small = lambda: nn.Linear(4, 3).double()  # noqa: E731
    ensemble = Ensemble.init([(perceptron, 2), (small, 2)])
    x = torch.randn(3, 4, dtype=torch.float64)
    torch.testing.assert_close(outputs(ensemble, x), literal(ensemble, x))


def test_dropout_in_training_keeps_the_usual_pass():
    ensemble = Ensemble.init(normed, 2).train()
    x = torch.randn(3, 1, 4, 4, dtype=torch.float64)
    with torch.no_grad():
        wanted = ensemble(x, MemberRunner(), step=3)
        before = {n: t.clone() for n, t in ensemble.buffers.items()}
        assert not torch.equal(ensemble(x, step=4), wanted)
    assert any(not torch.equal(t, ensemble.buffers[n]) for n, t in before.items())
    assert not ensemble.rests

"""A part of a batch, normalised as the whole of it: values, both derivatives, and what stays."""

import sys
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from derivatives_reference import run_kernels
from reference import normalised_as
from torch import nn
from torch.func import vmap
from torch.nn import functional as F
from triton_ready import needs_triton

from shoal.core.errors import ConfigError
from shoal.engine.derivatives import fast_second_order, forward_with_rows
from shoal.engine.derivatives.shared_statistics import RowRule, row_rule


class Network(nn.Module):
    """Normalised layers with and without a shortcut and a rectifier, and one that is fixed."""

    def __init__(self, smooth=False):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, bias=False)
        self.short, self.last = nn.Conv2d(4, 4, 3, bias=False), nn.Linear(4, 3)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(3))
        self.act = F.softplus if smooth else F.relu

    def forward(self, x):
        x = self.act(self.norms[0](self.first(x)))
        x = self.act(self.norms[1](self.second(x)) + self.norms[2](self.short(x)))
        return self.last(x.mean((2, 3)))


def drawn(smooth=False, dtype=torch.float64):
    torch.manual_seed(0)
    module = Network(smooth).to(dtype)
    for norm in module.norms:
        nn.init.uniform_(norm.weight, 0.5, 2.0)
        nn.init.normal_(norm.bias)
    return module, 1 + 2 * torch.randn(6, 2, 5, 5, dtype=dtype)


class Bare(nn.Module):
    """Convolutions with a bias, a shortcut, a rectifier, and a result that is used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.short, self.third = nn.Conv2d(4, 4, 1, bias=False), nn.Conv2d(4, 4, 3, stride=2)
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        x = F.relu(self.first(x))
        x = self.third(F.relu(self.second(x) + self.short(x)))
        return self.last((x + F.relu(x)).mean((2, 3)))


def derivatives(module, x, shown, first=False):
    """Of drive and push together, for a part that is the last rows or the first."""
    part = (x[:2] if first else x[4:]).clone().requires_grad_()
    outputs, more = shown(part)
    (slope,) = torch.autograd.grad(more[:, 0].sum(), part, create_graph=True)
    loss = outputs.sin().sum() + slope.pow(3).sum() + more.square().sum()
    parameters = list(module.parameters())
    return outputs, more, slope, *torch.autograd.grad(loss, parameters, materialize_grads=True)


@pytest.mark.parametrize("coupled", [True, False], ids=["coupled", "separate"])
@pytest.mark.parametrize("smooth", [True, False])
@pytest.mark.parametrize("block", [nullcontext, fast_second_order], ids=["plain", "fast"])
def test_both_derivatives_are_those_of_the_definition(block, smooth, coupled):
    module, x = drawn(smooth)

    def ours(part):
        with block(), row_rule(RowRule(coupled)):
            return forward_with_rows(module, {}, x, part)

    def literal(part):
        outputs = module(x)
        with normalised_as(module, x, coupled):
            return outputs, module(part)

    pairs = zip(derivatives(module, x, ours), derivatives(module, x, literal), strict=True)
    for mine, theirs in pairs:
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-11)


def test_a_part_is_seen_as_in_its_batch_and_depends_on_no_neighbour():
    module, x = drawn()
    outputs, more = forward_with_rows(module, {}, x, x[4:])
    torch.testing.assert_close(more, outputs[4:])
    other = torch.cat([x[4:5], 7 * x[5:]])
    torch.testing.assert_close(forward_with_rows(module, {}, x, other)[1][0], outputs[4])


def test_a_filter_can_be_scaled_and_the_push_knows():
    """What does not change a normalised network does not change its gradients at a part."""
    module, x = drawn()
    part = x[4:].clone().requires_grad_()
    _, more = forward_with_rows(module, {}, x, part)
    (slope,) = torch.autograd.grad(more[:, 0].sum(), part, create_graph=True)
    weight = module.second.weight
    (push,) = torch.autograd.grad(slope.pow(3).sum(), weight)
    along = (push * weight).sum((1, 2, 3)) / weight.flatten(1).norm(dim=1)
    assert 0 < along.norm() < 1e-3 * push.norm()  # but for eps, nothing


def test_statistics_follow_the_batch_once():
    kept = []
    for both in (True, False):
        module, x = drawn()
        module.norms[1].eval()
        forward_with_rows(module, {}, x, x[4:]) if both else module(x)
        kept.append({name: tensor.clone() for name, tensor in module.named_buffers()})
        assert [norm.training for norm in module.norms] == [True, False, True]
    assert kept[0]["norms.0.num_batches_tracked"] == 1
    for name, tensor in kept[0].items():
        torch.testing.assert_close(tensor, kept[1][name])


def test_layers_that_keep_no_statistics_take_those_of_the_batch():
    layer, x = nn.BatchNorm1d(3, track_running_stats=False), torch.randn(5, 3)
    outputs, more = forward_with_rows(layer, {}, x, x[3:])
    torch.testing.assert_close(more, outputs[3:])


def test_the_mode_comes_back_after_an_error():
    module, x = drawn()
    with pytest.raises(RuntimeError):
        forward_with_rows(module, {}, x, x[:, :1])
    assert all(norm.training for norm in module.norms)


class Uneven(nn.Module):
    """Normalises batches of some sizes once more."""

    def __init__(self, sizes):
        super().__init__()
        self.first, self.second, self.sizes = nn.BatchNorm1d(3), nn.BatchNorm1d(3), sizes

    def forward(self, x):
        return self.first(self.second(x) if len(x) in self.sizes else x)


@pytest.mark.parametrize("size", [5, 2], ids=["less often", "more often"])
def test_a_network_that_normalises_its_part_otherwise_is_refused(size):
    with pytest.raises(ConfigError, match="other normalisation layers"):
        forward_with_rows(Uneven([size]), {}, torch.randn(5, 3), torch.randn(2, 3))


def test_whatever_else_a_network_remembers_follows_the_batch():
    kept = []
    for both in (True, False):
        torch.manual_seed(0)
        norm = nn.InstanceNorm2d(2, track_running_stats=True)
        module = nn.Sequential(norm, nn.utils.spectral_norm(nn.Conv2d(2, 3, 3)))
        x = torch.randn(6, 2, 5, 5)
        forward_with_rows(module, {}, x, x[4:]) if both else module(x)
        kept.append({name: tensor.clone() for name, tensor in module.named_buffers()})
    assert len(kept[0]) > 3
    for name, tensor in kept[0].items():
        torch.testing.assert_close(tensor, kept[1][name])


def test_members_together_by_vmap():
    module, x = drawn()
    weights = {name: torch.stack([p, 2 * p]) for name, p in module.named_parameters()}
    still = {name: b.expand(2, *b.shape).clone() for name, b in module.named_buffers()}

    def one(tensors, part):
        return forward_with_rows(module, tensors, x, part)

    part = torch.stack([x[4:], x[:2]])
    together = vmap(one)(weights | still, part)
    for i in range(2):
        alone = one({name: t[i].clone() for name, t in (weights | still).items()}, part[i])
        for mine, theirs in zip(together, alone, strict=True):
            torch.testing.assert_close(mine[i], theirs)


class Twice(nn.Module):
    """A layer that is used with its rectifier and without, and one that is the output."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv2d(2, 4, 3), nn.BatchNorm2d(4), nn.BatchNorm1d(4)

    def forward(self, x):
        x = self.norm(self.conv(x))
        return self.last((F.relu(x) + x).mean((2, 3)))


KERNELS = """
import torch
from test_shared_statistics import Bare, Twice, derivatives, drawn
from shoal.engine.derivatives import convolution, fast_second_order, forward_with_rows
from shoal.engine.derivatives.shared_statistics import RowRule, row_rule
device = "cuda" if torch.cuda.is_available() else "cpu"
found = []
for last in (True, False):
    module, x = drawn(dtype=torch.float32)
    module, x = module.to(device), x.to(device)
    if last:
        module, x = module.to(memory_format=torch.channels_last), x.to(
            memory_format=torch.channels_last)
    def shown(part):
        with fast_second_order():
            return forward_with_rows(module, {}, x, part)
    found.append([*derivatives(module, x, shown), *module.buffers()])
for ours, theirs in zip(*found, strict=True):
    torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)
module, x = Twice().to(device), torch.randn(6, 2, 5, 5, device=device)
x = x.to(memory_format=torch.channels_last)
outputs, more = forward_with_rows(module, {}, x, x[4:])
torch.testing.assert_close(more, outputs[4:], rtol=1e-5, atol=1e-5)

calls, native = [], torch.convolution
def counted(*given):
    calls.append(given[0].shape[0])
    return native(*given)
torch.convolution = counted
for bare in (True, False):
    for coupled in (True, False):
        found, counts = [], []
        for leading in (True, False):
            module, x = drawn(dtype=torch.float32)
            module = (Bare() if bare else module).to(device).to(memory_format=torch.channels_last)
            x = x.to(device).to(memory_format=torch.channels_last)
            if bare:
                with torch.no_grad():
                    for i, p in enumerate(module.parameters()):
                        p.copy_(torch.linspace(-0.5, 0.7, p.numel()).view(p.shape) + 0.1 * i)
            def shown(part):
                calls.clear()
                with fast_second_order(), row_rule(RowRule(coupled, leading)):
                    result = forward_with_rows(module, {}, x, part)
                counts.append(list(calls))
                return result
            found.append([*derivatives(module, x, shown, first=True), *module.buffers()])
        layers = len(counts[0])
        assert counts == [[6] * layers, [6] * layers + [2] * layers], counts
        for ours, theirs in zip(*found, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-4)

class Random(Bare):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, 0.5))
calls.clear()
with row_rule(RowRule(leading=True)):
    forward_with_rows(Random().to(device).to(memory_format=torch.channels_last), {}, x, x[:2])
assert calls == [6, 6, 6, 6, 2, 2, 2, 2], calls
"""


@needs_triton
def test_by_kernels():
    places = [*sys.path, str(Path(__file__).parent)]
    run_kernels(f"import sys; sys.path[:] = {places!r}" + KERNELS)

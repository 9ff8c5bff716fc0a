"""Layers with fixed numbers: derivatives against autograd, where they end, and Triton's kernels."""

from contextlib import nullcontext
from itertools import product

import pytest
import torch
from derivatives_reference import run_kernels
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional as F
from triton_ready import needs_triton

from shoal.core.errors import ConfigError
from shoal.engine.derivatives import fast_second_order
from shoal.engine.derivatives.affine import Channels, affine


def numbers(scaled, affine_too, residual):
    random = torch.Generator().manual_seed(1)

    def draw(*size):
        return torch.randn(*size, generator=random, dtype=torch.float64).requires_grad_()

    x, weight, bias, beside = draw(3, 2, 2, 3), draw(2), draw(2), draw(3, 2, 2, 3)
    mean, rstd = draw(2), (draw(2).detach().square() + 0.1).requires_grad_()
    channels = Channels(weight if scaled and affine_too else None, bias if affine_too else None)
    if scaled:
        channels = channels._replace(mean=mean, rstd=rstd)
    return x, channels, beside if residual else None


def plain(x, channels, residual, rectified):
    shape = (1, -1, 1, 1)
    y = x
    if channels.mean is not None:
        y = (y - channels.mean.view(shape)) * channels.rstd.view(shape)
    y = y if channels.weight is None else y * channels.weight.view(shape)
    y = y if channels.bias is None else y + channels.bias.view(shape)
    y = y if residual is None else y + residual
    return y.relu() if rectified else y


VARIANTS = [some for some in product([True, False], repeat=4) if any(some)]


@pytest.mark.parametrize(("scaled", "learned", "residual", "rectified"), VARIANTS)
def test_both_derivatives_against_finite_differences(scaled, learned, residual, rectified):
    x, channels, beside = numbers(scaled, learned, residual)
    live = [t for t in (x, *channels, beside) if t is not None]

    def function(x, *rest):
        rest = iter(rest)
        *taken, residual = (None if t is None else next(rest) for t in (*channels, beside))
        return affine(x, Channels._make(taken), residual, rectified)

    assert gradcheck(function, live)
    assert gradgradcheck(function, live)


@pytest.mark.parametrize(("scaled", "learned", "residual", "rectified"), VARIANTS)
def test_as_plain_double_backward(scaled, learned, residual, rectified):
    found = []
    for function in (affine, plain):
        x, channels, beside = numbers(scaled, learned, residual)
        live = [t for t in (x, *channels, beside) if t is not None]
        outputs = function(x, channels, beside, rectified)
        (slope,) = torch.autograd.grad(outputs.sin().sum(), x, create_graph=True)
        loss = slope.pow(3).sum() + outputs.square().sum()
        found.append([outputs, slope, *torch.autograd.grad(loss, live)])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class Plain(nn.Module):
    """Convolutions with biases, a shortcut and rectifiers, as networks without normalisation."""

    def __init__(self, norm):
        super().__init__()
        self.convolutions = nn.ModuleList(nn.Conv2d(3, 3, 3, padding=1) for _ in range(3))
        self.norms = nn.ModuleList(nn.BatchNorm2d(3) if norm else nn.Identity() for _ in range(3))
        self.last = nn.Linear(3, 4)

    def forward(self, x):
        one, two, three = (
            nn.Sequential(*pair) for pair in zip(self.convolutions, self.norms, strict=True)
        )
        x = F.relu(one(x))
        x = F.relu(two(x) + x)
        return self.last(F.relu(three(x)).mean((2, 3)))


@pytest.mark.parametrize("norm", [True, False], ids=["evaluation mode", "biases"])
def test_a_push_alone_does_not_go_back_through_the_forward_pass(norm):
    """Autograd visits no layer of the first pass, and finds what plain double backward finds."""
    torch.manual_seed(0)
    module = Plain(norm).double()
    if norm:
        module(torch.randn(16, 3, 5, 5).double())
    module.eval()
    found = []
    for block in (fast_second_order(fuse=True), nullcontext()):
        x = torch.randn(4, 3, 5, 5, generator=torch.Generator().manual_seed(2)).double()
        x.requires_grad_()
        with block:
            outputs = module(x)
        (slope,) = torch.autograd.grad(outputs[:, 0].sum(), x, create_graph=True)
        parameters = list(module.parameters())
        second = torch.autograd.grad(slope.pow(3).sum(), parameters, allow_unused=True)
        second = [torch.zeros_like(p) if s is None else s
                  for p, s in zip(parameters, second, strict=True)]  # fmt: skip
        found.append((slope, *second))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-12)
    with fast_second_order(fuse=True):
        outputs = module(x)
    first = [node for node in nodes_of(outputs) if node.name() == "_AffineBackward"]
    assert len(first) >= 3
    (slope,) = torch.autograd.grad(outputs[:, 0].sum(), x, create_graph=True)
    seen = []
    for node in first:
        node.register_prehook(lambda gradients: seen.extend(gradients))
    torch.autograd.grad(slope.pow(3).sum(), module.convolutions[0].weight)
    assert all(gradient is None for gradient in seen)


def nodes_of(outputs):
    seen, left = set(), [outputs.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in seen:
            seen.add(node)
            left += [after for after, _ in node.next_functions]
    return seen


def test_a_third_derivative_is_refused():
    x, channels, _ = numbers(True, True, False)
    outputs = affine(x, channels, None, True)
    (slope,) = torch.autograd.grad(outputs.pow(3).sum(), x, create_graph=True)
    with pytest.raises(ConfigError, match="has two derivatives, and a third was asked for"):
        torch.autograd.grad(slope.pow(3).sum(), channels.weight, create_graph=True)


KERNELS = """
import torch
from itertools import product
from shoal.engine.derivatives import affine_formulas as formulas
from shoal.engine.derivatives import backend, launch_affine_kernels as launch
from shoal.engine.derivatives.affine_formulas import Channels
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
sizes = [(5, 3), (70, 5)]
for (channels, side), scaled, learned, rectified in product(sizes, *[(True, False)] * 3):
    def draw():
        drawn = torch.randn(7, channels, side, side, device=device)
        return drawn.to(memory_format=torch.channels_last)
    x, g, u, beside = draw(), draw(), draw().contiguous(), draw().contiguous()
    assert backend.by_kernels(x) and backend.arithmetic(x, "affine") is launch
    gamma, beta, mean, rstd = torch.randn(4, channels, device=device)
    layer = Channels(gamma if scaled and learned else None, beta if learned else None)
    if scaled:
        layer = layer._replace(mean=mean, rstd=rstd.square() + 0.1)
    close = lambda ours, theirs: torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    close(launch.sums(g), formulas.sums(g))
    close(launch.sums(beside), formulas.sums(beside))
    for residual in (None, beside):
        out = formulas.shift(x, layer, residual, rectified)
        close(launch.shift(x, layer, residual, rectified), out)
        signs = out if rectified else None
        for both in (True, False):
            for ours, theirs in zip(launch.pass_back(g, residual, signs, layer, both),
                                    formulas.pass_back(g, residual, signs, layer, both)):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    close(ours, theirs)
        for summed in (False, layer.scaled):
            twice = u, residual, g, signs, layer, summed
            for ours, theirs in zip(launch.pass_twice(*twice), formulas.pass_twice(*twice)):
                assert (ours is None) == (theirs is None)
                if ours is not None:
                    close(ours, theirs)
"""


@pytest.mark.parametrize("learned", [True, False])
def test_a_bias_keeps_no_input_for_the_backward_pass(learned):
    x, channels, _ = numbers(learned, True, False)
    kept = []

    def keep(tensor):
        kept.append(tensor.data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        affine(x, channels, None, True)
    assert kept and (x.data_ptr() in kept) == learned


@needs_triton
def test_kernels_compute_the_formulas():
    run_kernels(KERNELS)

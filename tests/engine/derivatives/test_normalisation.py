"""Batch normalisation: closed forms against autograd, finite differences and Triton's kernels."""

from itertools import product

import pytest
import torch
from derivatives_reference import distance, run_kernels
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.nn import functional as F
from triton_ready import needs_triton

from shoal.core.errors import ConfigError
from shoal.engine.derivatives import fast_second_order, formulas
from shoal.engine.derivatives.normalisation import normalise

EPS = 1e-5


def mine(x, weight=None, bias=None, residual=None, rectified=False):
    mean, rstd = formulas.moments(x.detach(), EPS, (None, None), 0.1)
    return normalise(x, weight, bias, (mean, rstd), residual, rectified)


def plain(x, weight=None, bias=None, residual=None, rectified=False):
    y = F.batch_norm(x, None, None, weight, bias, training=True, eps=EPS)
    y = y if residual is None else y + residual
    return y.relu() if rectified else y


def tensors(affine, residual, dtype=torch.float64, shape=(3, 2, 2, 3)):
    random = torch.Generator().manual_seed(1)

    def draw(*size):
        return torch.randn(*size, generator=random, dtype=dtype).requires_grad_()

    x, weight, bias = draw(*shape), draw(2), draw(2)
    beside = draw(*shape) if residual else None
    return (x, weight, bias, beside) if affine else (x, None, None, beside)


VARIANTS = list(product([True, False], repeat=3))


@pytest.mark.parametrize(("affine", "residual", "rectified"), VARIANTS)
def test_both_derivatives_against_finite_differences(affine, residual, rectified):
    given = [t for t in tensors(affine, residual) if t is not None]

    def function(*live):
        live = iter(live)
        taken = [next(live) for _ in range(3 if affine else 1)]
        taken = taken if affine else [*taken, None, None]
        return mine(*taken, next(live, None), rectified)

    assert gradcheck(function, given)
    assert gradgradcheck(function, given)


@pytest.mark.parametrize(("affine", "residual", "rectified"), VARIANTS)
def test_as_plain_double_backward_in_single_precision(affine, residual, rectified):
    found = []
    for function in (mine, plain):
        given = tensors(affine, residual, torch.float32, (16, 2, 6, 6))
        live = [t for t in given if t is not None]
        outputs = function(*given, rectified)
        (slope,) = torch.autograd.grad(outputs.sin().sum(), live[0], create_graph=True)
        loss = slope.pow(3).sum() + outputs.square().sum()
        second = torch.autograd.grad(loss, live, allow_unused=True)
        found.append([outputs, slope, *[t for t in second if t is not None]])
    for ours, theirs in zip(*found, strict=True):
        assert distance(ours, theirs) < 1e-6


def test_the_port_adds_nothing_where_there_is_no_second_derivative():
    x, weight, bias, _ = tensors(True, False)
    slopes = [torch.autograd.grad(f(x, weight, bias).pow(3).sum(), (x, weight, bias))
              for f in (mine, plain)]  # fmt: skip
    for ours, theirs in zip(*slopes, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_push_without_a_drive_reaches_the_input():
    """Nothing comes back to the outputs, and the port alone carries what the input receives."""
    found = []
    for function in (mine, plain):
        x, weight, bias, _ = tensors(True, False)
        (slope,) = torch.autograd.grad(
            (function(x, weight, bias) * torch.arange(36.0).view(3, 2, 2, 3)).sum(),
            x,
            create_graph=True,
        )
        found.append(torch.autograd.grad(slope.pow(3).sum(), (x, weight)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("driven", [True, False])
@pytest.mark.parametrize(("affine", "residual", "rectified"), VARIANTS)
def test_what_comes_back_to_the_moments_reaches_the_input(affine, residual, rectified, driven):
    """They are functions of the input, whether or not anything comes back to the outputs."""
    found = []
    for own in (True, False):
        given = tensors(affine, residual)
        live = [t for t in given if t is not None]
        if own:
            noted = []
            moments = formulas.moments(given[0].detach(), EPS, (None, None), 0.1)
            outputs = normalise(*given[:3], moments, given[3], rectified, note=noted.extend)
            mean, rstd = noted
        else:
            outputs = plain(*given, rectified)
            variance, mean = torch.var_mean(given[0], (0, 2, 3), correction=0)
            rstd = (variance + EPS).rsqrt()
        loss = (mean.sin() * rstd.square()).sum() + (outputs.pow(3).sum() if driven else 0.0)
        found.append(torch.autograd.grad(loss, live, materialize_grads=True))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_moments_that_are_used_elsewhere_have_one_derivative():
    x, weight, bias, _ = tensors(True, False)
    noted = []
    moments = formulas.moments(x.detach(), EPS, (None, None), 0.1)
    normalise(x, weight, bias, moments, note=noted.extend)
    with pytest.raises(ConfigError, match="have one derivative, not two"):
        torch.autograd.grad(noted[1].sum(), x, create_graph=True)


def test_members_together_by_vmap():
    x = torch.randn(4, 3, 2, 2, dtype=torch.float64, requires_grad=True)
    weights = torch.rand(5, 3, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (mine, plain):
        outputs = vmap(lambda w, f=function: f(x * w.sum(), w, w))(weights)
        (slope,) = torch.autograd.grad(outputs.pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.pow(3).sum(), weights)[0])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("shape", [(6, 3), (6, 3, 5), (4, 3, 2, 2), (2, 3, 2, 2, 2)])
@pytest.mark.parametrize("momentum", [0.1, 0.7])
def test_running_statistics_move_as_always(shape, momentum):
    x = 3 * torch.randn(*shape, dtype=torch.float64) + 1
    kept = []
    for fast in (True, False):
        running = torch.zeros(3, dtype=torch.float64), torch.ones(3, dtype=torch.float64)
        for _ in range(3):
            if fast:
                with fast_second_order():
                    F.batch_norm(x, *running, training=True, momentum=momentum)
            else:
                F.batch_norm(x, *running, training=True, momentum=momentum)
        kept.append(running)
    for ours, theirs in zip(*kept, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-13, atol=0.0)


def test_half_precision_is_summed_in_single():
    x = (100 + torch.randn(64, 2, 8, 8)).bfloat16()
    mean, rstd = formulas.moments(x, EPS, (None, None), 0.1)
    assert mean.dtype == torch.float32
    torch.testing.assert_close(mean, x.float().mean((0, 2, 3)))
    out = normalise(x, torch.ones(2), torch.zeros(2), (mean, rstd))
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float().std((0, 2, 3)), torch.ones(2), rtol=0.01, atol=0.0)


def test_a_third_derivative_is_refused():
    x, weight, bias, _ = tensors(True, False)
    (slope,) = torch.autograd.grad(mine(x, weight, bias).pow(3).sum(), x, create_graph=True)
    with pytest.raises(ConfigError, match="has two derivatives, and a third was asked for"):
        torch.autograd.grad(slope.pow(3).sum(), weight, create_graph=True)


KERNELS = """
import torch
from itertools import product
from shoal.engine.derivatives import backend, formulas, layout
from shoal.engine.derivatives import launch_batchnorm_kernels as launch
torch.manual_seed(0)
device = "cuda" if torch.cuda.is_available() else "cpu"
for channels, sides, affine, residual, rectified in [
    (5, (3, 3), True, False, True), (70, (5, 5), True, True, True),
    (16, (9, 9), False, False, False), (64, (6, 6), True, True, False),
    (3, (1, 1), False, True, True), (5, (2, 3, 4), True, True, True),
]:
    def draw():
        drawn = torch.randn(7, channels, *sides, device=device)
        return drawn.to(memory_format=layout.CHANNELS_LAST[2 + len(sides)])
    x, g, u, beside, more = draw() + 50, draw(), draw(), draw(), draw()
    weight, bias = (torch.randn(2, channels, device=device) if affine else (None, None))
    assert backend.by_kernels(x) and backend.arithmetic(x, "batchnorm") is launch
    first = torch.randn(2, channels, device=device)
    running = [tuple(first.clone()) for _ in range(2)]
    mean, rstd = formulas.moments(x, 1e-5, running[0], 0.3)
    found = launch.moments(x, 1e-5, running[1], 0.3)
    for ours, theirs in zip((*found, *running[1]), (mean, rstd, *running[0])):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-5)
    assert launch.moments(x, 1e-5, (None, None), 0.3)[1].equal(found[1])
    layer = formulas.Layer(x, weight, bias, None, mean, rstd, rectified)
    beside = beside if residual else None
    out = formulas.normalise(layer, beside)
    torch.testing.assert_close(launch.normalise(layer, beside), out, rtol=2e-5, atol=2e-5)
    layer = layer._replace(out=out if residual and rectified else None)
    asked = 4 if layer.out is not None else 3
    at_mean, at_rstd = 100 * torch.randn(2, channels, device=device)
    moments = [(None, None), (at_mean, None), (None, at_rstd), (at_mean, at_rstd)]
    for extra, at in product((None, more), moments):
        expected = formulas.backward_pass(layer, g, extra, at)
        for ours, theirs in zip(launch.backward_pass(layer, g, extra, at)[:asked], expected):
            torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-4)
    twice = layer, g, (expected.gh, expected.g), u, beside
    for ours, theirs in zip(launch.differentiate(*twice), formulas.differentiate(*twice)):
        torch.testing.assert_close(ours, theirs, rtol=2e-5, atol=2e-4)
"""


@needs_triton
def test_kernels_compute_the_formulas():
    run_kernels(KERNELS)

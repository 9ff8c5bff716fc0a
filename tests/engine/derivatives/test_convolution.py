"""Convolution: derivatives of every order against autograd and finite differences."""

import pytest
import torch
from derivatives_reference import distance, run_kernels
from torch.autograd import gradcheck, gradgradcheck
from torch.func import vmap
from torch.nn import functional as F
from triton_ready import needs_triton

from shoal.engine.derivatives.convolution import Geometry, convolve

CASES = {
    "3x3": ((3, 2, 3, 3), {"padding": 1}),
    "1x1": ((3, 2, 1, 1), {}),
    "strided": ((2, 2, 3, 3), {"stride": 2, "padding": 1}),
    "strided 1x1": ((3, 2, 1, 1), {"stride": (2, 2)}),
    "uneven": ((2, 2, 2, 3), {"stride": (2, 1), "padding": (0, 1)}),
    "dilated": ((2, 2, 2, 2), {"dilation": 2, "padding": 1}),
    "grouped": ((4, 1, 3, 3), {"groups": 2, "padding": 1}),
}


def geometry(settings, axes=2):
    usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": 1}
    return Geometry.of(**{**usual, **settings}, axes=axes)


def tensors(shape, dtype=torch.float64, bias=True):
    random = torch.Generator().manual_seed(0)

    def draw(*size):
        return torch.randn(*size, generator=random, dtype=dtype).requires_grad_()

    return draw(2, 2, 4, 3), draw(*shape), draw(shape[0]) if bias else None


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("bias", [True, False])
def test_both_derivatives_against_finite_differences(name, bias):
    shape, settings = CASES[name]
    x, weight, b = tensors(shape, bias=bias)
    shifts = geometry(settings)
    inputs = (x, weight, b) if bias else (x, weight)

    def function(*given):
        return convolve(*given, *[None] * (3 - len(given)), shifts)

    # without a bias in random directions, which is quick; with one in every direction
    assert gradcheck(function, inputs)
    assert gradgradcheck(function, inputs, fast_mode=not bias)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("last", [True, False])
def test_as_plain_double_backward_in_single_precision(name, last):
    shape, settings = CASES[name]
    found = []
    for function in (
        lambda *t: convolve(*t, geometry(settings)),
        lambda *t: F.conv2d(*t, **settings),
    ):
        x, weight, bias = tensors(shape, torch.float32)
        image = x.to(memory_format=torch.channels_last) if last else x
        outputs = function(image, weight, bias)
        (slope,) = torch.autograd.grad(outputs.sin().sum(), x, create_graph=True)
        second = torch.autograd.grad(slope.pow(3).sum(), (x, weight, bias))
        found.append([outputs, slope, *second])
    for mine, plain in zip(*found, strict=True):
        assert distance(mine, plain) < 1e-6


def test_signals_and_volumes():
    for axes, plain in ((1, F.conv1d), (3, F.conv3d)):
        x = torch.randn(2, 3, *[4] * axes, dtype=torch.float64)
        weight = torch.randn(2, 3, *[2] * axes, dtype=torch.float64)
        shifts = geometry({"stride": 2}, axes)
        torch.testing.assert_close(convolve(x, weight, None, shifts), plain(x, weight, stride=2))


def test_members_together_by_vmap():
    shape, settings = CASES["strided"]
    x, _, _ = tensors(shape)
    weights = torch.randn(3, *shape, dtype=torch.float64, requires_grad=True)
    found = []
    for function in (lambda w: convolve(x, w, None, geometry(settings)),
                     lambda w: F.conv2d(x, w, **settings)):  # fmt: skip
        (slope,) = torch.autograd.grad(vmap(function)(weights).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(slope.square().sum(), weights)[0])
    torch.testing.assert_close(*found)


def test_nobody_computes_a_weight_gradient_that_nobody_wants(monkeypatch):
    """The gradient at the input takes one native kernel a layer; the weights' would be another."""
    asked = []
    native = torch.ops.aten.convolution_backward

    class Counting:
        def __call__(self, *args):
            asked.append(args[-1])
            return native(*args)

    x, weight, _ = tensors((3, 2, 3, 3))
    outputs = convolve(x, weight * 1.0, None, geometry({}))
    monkeypatch.setattr(torch.ops.aten, "convolution_backward", Counting())
    (slope,) = torch.autograd.grad(outputs.pow(2).sum(), x, create_graph=True)
    assert asked == [[True, False, False]]
    torch.autograd.grad(slope.sum(), weight)
    assert [mask[1] for mask in asked] == [False, True, True]


DEPTHWISE = """
import sys
import torch
from torch.nn import functional as F
from shoal.engine.derivatives import backend, convolution
from shoal.engine.derivatives.convolution import Geometry, convolve

device = "cuda" if torch.cuda.is_available() else "cpu"
cases = [
    (24, (3, 3), {"padding": 1}, torch.float32, 1e-5),
    (70, (3, 5), {"padding": (1, 2), "stride": (2, 1)}, torch.float32, 1e-5),
    (5, (5, 5), {"padding": 2, "stride": 2}, torch.float32, 1e-5),
    (3, (4, 1), {"padding": (2, 1)}, torch.float32, 1e-5),
    (8, (3, 2), {"padding": (2, 0), "dilation": (2, 1), "stride": (1, 2)}, torch.float32, 1e-5),
    (16, (3, 3), {"padding": 1, "stride": 2}, torch.bfloat16, 5e-3),
]
for channels, sides, settings, dtype, allowed in cases:
    random = torch.Generator().manual_seed(channels)
    x = torch.randn(3, channels, 9, 8, generator=random).to(device, dtype)
    weight = torch.randn(channels, 1, *sides, generator=random).to(device, dtype)
    biases = [None, torch.randn(channels, generator=random).to(device, dtype)]
    bias = biases[channels % 2]
    usual = {"stride": 1, "padding": 0, "dilation": 1, "groups": channels, **settings}
    found, wanted = [], []
    for out, kind in ((found, dtype), (wanted, torch.float64)):
        image = x.to(kind, memory_format=torch.channels_last, copy=True).requires_grad_()
        filters = weight.to(kind).requires_grad_()
        if kind == dtype:
            assert backend.by_kernels(image.detach())
            y = convolve(image, filters, bias, Geometry.of(**usual, axes=2))
            assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)
        else:
            y = F.conv2d(image, filters, bias if bias is None else bias.to(kind), **usual)
        out.append(y.detach())
        toward = torch.randn(y.shape, generator=random.manual_seed(1)).to(device, dtype).to(kind)
        out += torch.autograd.grad(y, (image, filters), toward)
        if kind == dtype:
            assert out[1].is_contiguous(memory_format=torch.channels_last)
            assert out[2].dtype == dtype and out[2].is_contiguous()
    for name, mine, plain in zip(("output", "input", "weight"), found, wanted):
        apart = ((mine.double() - plain).norm() / plain.norm()).item()
        assert apart < allowed, (channels, name, apart)
assert "shoal.engine.derivatives.launch_depthwise_kernels" in sys.modules
"""


@needs_triton
def test_kernels_of_a_filter_for_each_channel_and_their_gradients():
    run_kernels(DEPTHWISE)


def test_which_convolutions_have_a_filter_for_each_channel():
    def depthwise(shape, groups):
        return geometry({"groups": groups}).depthwise(torch.empty(shape))

    assert depthwise((4, 1, 3, 3), 4)
    assert not depthwise((4, 1, 3, 3), 2)
    assert not depthwise((8, 1, 3, 3), 4)
    assert not depthwise((1, 1, 3, 3), 1)
    assert not depthwise((4, 4, 3, 3), 1)

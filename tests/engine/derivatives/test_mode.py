"""The block `fast_second_order`: whole networks, unchanged modules, and nothing left behind."""

import copy

import pytest
import torch
from derivatives_reference import distance, run_kernels, second_order
from torch import nn
from torch.func import functional_call, stack_module_state, vmap
from torch.nn import functional as F
from torch.overrides import _get_current_function_mode_stack
from triton_ready import needs_triton

from shoal.core.errors import ConfigError
from shoal.engine.derivatives import fast_second_order, fused_layers
from shoal.engine.saved_bytes import SavedBytes
from shoal.models import PreActResNet18, ResNet18, ResNet20, ResNet32, SmallCNN


class Inplace(nn.Module):
    """As many write it: in-place sums and rectifiers."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(2))
        self.relu, self.last = nn.ReLU(inplace=True), nn.Linear(4, 3)

    def forward(self, x):
        x = self.relu(self.norms[0](self.first(x)))
        y = self.norms[1](self.second(x))
        y += x
        return self.last(self.relu(y).mean((2, 3)))


class Unusual(nn.Module):
    """A normalised layer that is looked at, used twice and sent through other functions."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, groups=1, padding="same", padding_mode="reflect")
        self.norm, self.other = nn.BatchNorm2d(4, affine=False), nn.BatchNorm2d(4)
        self.flat, self.last = nn.BatchNorm1d(8), nn.Linear(8, 3)

    def forward(self, x):
        h = self.norm(self.conv(x))
        assert h.shape == h.size() and h.dtype == x.dtype and h.ndim == 4
        h = F.relu(h) + 2 * h.tanh() + torch.add(self.other(h), h, alpha=2)
        h = self.flat(torch.cat([h.mean((2, 3)), self.other(h).amax((2, 3))], 1))
        return self.last(1 + h)


NETWORKS = {
    "resnet20": lambda: ResNet20((4, 6)).build((3, 8, 8), 5),
    "resnet18": lambda: ResNet18((4, 6)).build((3, 8, 8), 5),
    "resnet32 without norm": lambda: ResNet32((4, 6)).build((3, 8, 8), 5),
    "layer norm": lambda: ResNet18((4, 6), norm="layer").build((3, 8, 8), 5),
    "pre-activated": lambda: PreActResNet18((4, 6)).build((3, 8, 8), 5),
    "small": lambda: SmallCNN((4, 6), activation="tanh", norm="batch").build((3, 8, 8), 5),
    "in place": Inplace,
    "unusual": Unusual,
}
FUSE = [None, True, False]


def made(name, dtype):
    torch.manual_seed(0)
    return NETWORKS[name]().to(dtype).train(), torch.randn(12, 3, 8, 8, dtype=dtype)


@pytest.mark.parametrize("fuse", FUSE)
@pytest.mark.parametrize("name", NETWORKS)
def test_whole_networks_as_by_plain_double_backward(name, fuse):
    module, x = made(name, torch.float64)
    other = copy.deepcopy(module)
    outputs, slope, found = second_order(module, x, fast=True, fuse=fuse)
    wanted_outputs, wanted_slope, wanted = second_order(other, x, fast=False)
    torch.testing.assert_close(outputs, wanted_outputs)
    torch.testing.assert_close(slope, wanted_slope)
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-9, atol=1e-11)
    for ours, theirs in zip(module.buffers(), other.buffers(), strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("fuse", FUSE)
@pytest.mark.parametrize("name", ["resnet20", "resnet32 without norm", "pre-activated"])
def test_single_precision_loses_no_more_than_plain_double_backward(name, fuse):
    """Both round: each is compared with double precision, and they with each other to 1e-6."""
    module, x = made(name, torch.float32)
    exact = second_order(copy.deepcopy(module).double(), x.double(), fast=False)[2]
    theirs = second_order(copy.deepcopy(module), x, fast=False)[2]
    ours = second_order(copy.deepcopy(module), x, fast=True, fuse=fuse)[2]
    flat = {which: torch.cat([t.flatten().double() for t in tree.values()])
            for which, tree in (("exact", exact), ("theirs", theirs), ("ours", ours))}  # fmt: skip
    assert distance(flat["ours"], flat["theirs"]) < 1e-6
    assert distance(flat["ours"], flat["exact"]) < 2 * distance(flat["theirs"], flat["exact"])


@pytest.mark.parametrize("push", [0.0, 1.0])
@pytest.mark.parametrize("drive", [0.0, 1.0])
def test_drive_and_push_alone_and_together(drive, push):
    module, x = made("resnet20", torch.float64)
    found = second_order(copy.deepcopy(module), x, True, drive, push, fuse=True)[2]
    wanted = second_order(module, x, False, drive, push)[2]
    for key in wanted:
        torch.testing.assert_close(found[key], wanted[key], rtol=1e-9, atol=1e-11)


def test_evaluation_mode_is_left_to_torch():
    module, x = made("resnet20", torch.float64)
    module(x)
    module.eval()
    before = [buffer.clone() for buffer in module.buffers()]
    found = second_order(module, x, fast=True)
    wanted = second_order(module, x, fast=False)
    torch.testing.assert_close(found[2], wanted[2])
    assert all(torch.equal(a, b) for a, b in zip(before, module.buffers(), strict=True))


def test_members_together_by_vmap():
    modules = [made("resnet20", torch.float64)[0] for _ in range(3)]
    for index, module in enumerate(modules):
        for parameter in module.parameters():
            nn.init.normal_(parameter, std=0.2 * (index + 1))
    parameters, buffers = stack_module_state(modules)
    x = made("resnet20", torch.float64)[1]
    inputs = x.expand(3, *x.shape).clone().requires_grad_()
    with fast_second_order():
        outputs = vmap(lambda p, b, x: functional_call(modules[0], (p, b), (x,)))(
            parameters, buffers, inputs
        )
    (slope,) = torch.autograd.grad(outputs[..., 0].sum(), inputs, create_graph=True)
    found = torch.autograd.grad(slope.pow(3).sum(), list(parameters.values()), allow_unused=True)
    for index, module in enumerate(modules):
        alone = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(module(alone)[:, 0].sum(), alone, create_graph=True)
        wanted = torch.autograd.grad(
            slope.pow(3).sum(), list(module.parameters()), allow_unused=True
        )
        for ours, theirs in zip(found, wanted, strict=True):
            assert (ours is None) == (theirs is None)
            if theirs is not None:
                torch.testing.assert_close(ours[index], theirs, rtol=1e-8, atol=1e-11)
        for name, buffer in module.named_buffers():
            torch.testing.assert_close(buffers[name][index], buffer)


def names_of(outputs):
    """Every kind of node in a graph of autograd, with how often it occurs."""
    seen, left, counts = set(), [outputs.grad_fn], {}
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        counts[node.name()] = counts.get(node.name(), 0) + 1
        left += [after for after, _ in node.next_functions]
    return counts


def test_sums_and_rectifiers_join_the_layer_before_them():
    module, x = made("resnet20", torch.float64)
    norms = sum(isinstance(layer, nn.BatchNorm2d) for layer in module.modules())
    with fast_second_order(fuse=True):
        joined = names_of(module(x))
    assert joined["_NormaliseBackward"] == norms
    assert "ReluBackward0" not in joined and "AddBackward0" not in joined
    with fast_second_order(fuse=False):
        apart = names_of(module(x))
    assert apart["ReluBackward0"] == norms


def test_nothing_is_replaced_outside_of_the_block():
    module, x = made("resnet18", torch.float32)
    with pytest.raises(ZeroDivisionError), fast_second_order():
        module(x)
        raise ZeroDivisionError
    assert _get_current_function_mode_stack() == []
    names = names_of(module(x))
    assert "ConvolutionBackward0" in names and "NativeBatchNormBackward0" in names
    assert not any(name.startswith(("_Convolution", "_Normalise")) for name in names)


def test_a_layer_that_leaves_the_block_is_a_tensor():
    norm, x = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2)
    with fast_second_order(fuse=True):
        out = norm(x)
    torch.testing.assert_close(
        torch.stack([out, out])[0], F.batch_norm(x, None, None, training=True)
    )
    assert out.requires_grad


def test_a_change_in_place_is_noticed():
    norm, x, beside = nn.BatchNorm2d(3), torch.randn(4, 3, 2, 2), torch.randn(4, 3, 2, 2)
    with fast_second_order(fuse=True):
        waiting = norm(x) + beside
        beside.add_(1)
        with pytest.raises(ConfigError, match="was changed in place before the layer was used"):
            waiting.relu()


def test_one_value_a_channel_is_refused_as_always():
    with fast_second_order(), pytest.raises(ValueError, match="more than 1 value per channel"):
        nn.BatchNorm1d(3)(torch.randn(1, 3))


def test_mixed_precision_of_torch_is_left_alone():
    with torch.autocast("cpu", torch.bfloat16), fast_second_order():
        assert nn.Conv2d(1, 1, 1)(torch.randn(2, 1, 3, 3)).dtype == torch.bfloat16


@pytest.mark.parametrize("name", NETWORKS)
def test_without_kernels_fused_layers_are_those_of_torch(name):
    module, x = made(name, torch.float32)
    with fused_layers():
        ours = names_of(module(x))
    assert ours == names_of(module(x))


FUSED = """
import copy, torch
from shoal.engine.derivatives import fused_layers
from shoal.models import ResNet20, ResNet32
device = "cuda" if torch.cuda.is_available() else "cpu"
for network, layer in ((ResNet20, "_NormaliseBackward"), (ResNet32, "_AffineBackward")):
    torch.manual_seed(0)
    module = network((4, 6)).build((3, 8, 8), 5).to(device).to(memory_format=torch.channels_last)
    other = copy.deepcopy(module)
    x = torch.randn(6, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
    with fused_layers():
        outputs = module(x)
    nodes, left = [], [outputs.grad_fn]
    while left:
        node = left.pop()
        if node is not None and node not in nodes:
            nodes.append(node)
            left += [after for after, _ in node.next_functions]
    names = [node.name() for node in nodes]
    assert layer in names and "ReluBackward0" not in names, names
    wanted = other(x)
    torch.testing.assert_close(outputs, wanted, rtol=1e-4, atol=1e-5)
    outputs.log_softmax(1)[:, 0].sum().backward()
    wanted.log_softmax(1)[:, 0].sum().backward()
    for ours, theirs in zip(module.parameters(), other.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    for ours, theirs in zip(module.buffers(), other.buffers()):
        torch.testing.assert_close(ours, theirs)
"""


class Dense(nn.Module):
    """Every layer reads all earlier ones; the last join follows a change in place."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(2 + 3 * i, 3) for i in range(3))

    def forward(self, x, note=lambda joined: None):
        features = [x]
        for layer in self.layers:
            joined = torch.cat(features, 1)
            note(joined)
            features.append(2 * layer(joined))
        with torch.no_grad():
            features[1].mul_(1)
        return torch.cat(features, 1).square().sum()


def test_what_was_joined_before_is_joined_as_a_whole():
    torch.manual_seed(0)
    network, x, seen = Dense().double(), torch.randn(4, 2, dtype=torch.float64), []
    wanted = torch.autograd.grad(network(x), network.parameters())
    with fused_layers():
        outputs = network(x, seen.append)
    found = torch.autograd.grad(outputs, network.parameters())
    for mine, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine, other)
    first, second, third = seen
    assert third.grad_fn.next_functions[0][0] is second.grad_fn
    assert len(third.grad_fn.next_functions) == 2
    last = outputs.grad_fn.next_functions[0][0].next_functions[0][0]
    assert len(last.next_functions) == 4  # joined anew: somebody wrote to one of them


@needs_triton
def test_fused_layers_by_kernels_have_the_gradients_of_torch():
    run_kernels(FUSED)


@needs_triton
def test_light_layers_by_kernels_have_the_gradients_of_torch():
    run_kernels(FUSED.replace("fused_layers()", "fused_layers(light=True)"))


@pytest.mark.parametrize("name", NETWORKS)
def test_light_layers_keep_less_and_have_the_same_gradients(name):
    module, x = made(name, torch.float64)
    found, kept = [], []
    for light in (False, True):
        here, other = copy.deepcopy(module), x.clone().requires_grad_()
        with SavedBytes([x, other, *here.parameters()]) as saved:
            with fast_second_order(fuse=True, light=light):
                outputs = here(other)
            kept.append(saved.now)
        outputs.log_softmax(1)[:, 0].sum().backward()
        found.append([other.grad, *(p.grad for p in here.parameters()), *here.buffers()])
    for ours, theirs in zip(*found, strict=True):
        assert (ours is None and theirs is None) or torch.equal(ours, theirs)
    most = {"resnet20": 0.68, "resnet18": 0.69, "pre-activated": 0.76, "in place": 0.85}
    assert kept[1] <= most.get(name, 1.0) * kept[0]


def test_light_layers_have_no_second_derivative():
    module, x = made("resnet20", torch.float32)
    with fast_second_order(fuse=True, light=True):
        outputs = module(x.requires_grad_())
    with pytest.raises(ConfigError, match="one derivative"):
        torch.autograd.grad(outputs.sum(), x, create_graph=True)


PREDICTED = """
import torch
from unittest import mock
from shoal.engine.derivatives import affine, fused_layers
from shoal.models import ResNet20, ResNet32
device = "cuda" if torch.cuda.is_available() else "cpu"
real, joined = affine._Affine.forward, []
def noted(x, *rest):
    *_, residual, rectified, _ = rest
    joined.append((residual is not None, rectified))
    return real(x, *rest)
for network in (ResNet20, ResNet32):
    torch.manual_seed(0)
    module = network((4, 6)).build((3, 8, 8), 5).to(device).to(memory_format=torch.channels_last)
    for name, buffer in module.named_buffers():
        buffer.copy_(torch.rand_like(buffer.float()) + 0.5)
    x = torch.randn(6, 3, 8, 8, device=device).to(memory_format=torch.channels_last)
    with torch.no_grad():
        wanted = module.eval()(x)
        with mock.patch.object(affine._Affine, "forward", staticmethod(noted)), fused_layers():
            found = module(x)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
    assert (True, True) in joined and (False, True) in joined, joined
    joined.clear()
"""


@needs_triton
def test_predictions_by_kernels_join_normalisation_residual_and_rectifier():
    run_kernels(PREDICTED)

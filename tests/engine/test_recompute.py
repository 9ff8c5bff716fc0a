"""Recomputed blocks: the same outputs, gradients, statistics and random numbers, less memory."""

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.members.member_runner import MemberRunner
from shoal.engine.members.recompute import blocks_of, recomputed_blocks
from shoal.engine.saved_bytes import SavedBytes
from shoal.inference.ensemble import Ensemble

LIGHT = MemberRunner("loop", recompute=True)
BATCH, WIDTH, DEPTH = 10, 16, 5


class Residual(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x, scale=1.0):
        return x + scale * self.layers(x)


class Listed(nn.Module):
    """Blocks in a list, called with a keyword and with a second tensor."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, WIDTH)
        self.blocks = nn.ModuleList(Residual(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))
        self.last = nn.Linear(WIDTH, 2)

    def forward(self, x):
        h = self.first(x)
        for block in self.blocks:
            h = block(h, scale=h.mean())
        return self.last(h)


class Noise(nn.Module):
    def forward(self, x):
        return x + torch.randn_like(x) if self.training else x


def stack(*inner):
    def build():
        blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), *(f() for f in inner)) for _ in range(3)]
        return nn.Sequential(nn.Linear(3, WIDTH), nn.Sequential(*blocks), nn.Linear(WIDTH, 2))

    return build


NETWORKS = {
    "tanh": stack(nn.Tanh),
    "normalised": stack(lambda: nn.BatchNorm1d(WIDTH), nn.ReLU),
    "dropout": stack(nn.Tanh, lambda: nn.Dropout(0.4)),
    "noise": stack(Noise, nn.Tanh),
    "list": Listed,
}


def gradients(build, mapping):
    ensemble = Ensemble.init(build, 3, seed=1).to("cpu", torch.float64).train()
    torch.manual_seed(3)
    x = torch.randn(BATCH, 3, dtype=torch.float64)
    outputs = ensemble(x, mapping, False, 5, 7)
    drawn = torch.rand(3)  # later random numbers do not depend on the mapping
    found = torch.autograd.grad(outputs.square().sum(), list(ensemble.weights.values()))
    return [outputs.detach(), drawn, torch.rand(3), *found, *ensemble.buffers.values()]


@pytest.mark.parametrize("name", NETWORKS)
def test_nothing_but_memory_differs(name):
    for found, expected in zip(
        gradients(NETWORKS[name], LIGHT),
        gradients(NETWORKS[name], MemberRunner("loop")),
        strict=True,
    ):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def deep() -> nn.Module:
    def block():
        layers = [nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
        return nn.Sequential(*layers)

    return nn.Sequential(*(block() for _ in range(DEPTH)))


def test_inputs_of_all_blocks_and_activations_of_one_are_kept():
    ensemble, one = Ensemble.init(deep, 1, seed=0), 4 * BATCH * WIDTH
    x = torch.randn(BATCH, WIDTH)
    for mapping, kept in ((MemberRunner("loop"), 2 * DEPTH), (LIGHT, DEPTH - 1 + 2)):
        with SavedBytes([x, *ensemble.state.values()]) as saved:
            ensemble(x, mapping).sum().backward()
        assert saved.peak == kept * one, mapping
        assert saved.now == 0


def test_a_graph_can_be_used_twice():
    module, x = deep(), torch.randn(BATCH, WIDTH)
    weights = list(module.parameters())
    with recomputed_blocks(module):
        loss = module(x).square().sum()
    first = torch.autograd.grad(loss, weights, retain_graph=True)
    for one, two in zip(first, torch.autograd.grad(loss, weights), strict=True):
        assert torch.equal(one, two)


def test_a_module_is_left_as_it_was():
    module = deep()
    own = module[0].forward = module[0].forward
    with recomputed_blocks(module):
        assert module[0].forward is not own
    assert module[0].forward is own and "forward" not in vars(module[1])


@pytest.mark.parametrize(
    "module, count",
    [
        (shoal.models.ResNet18().build((3, 32, 32), 10), 8),
        (shoal.models.ViT(width=12, heads=3, depth=4).build((3, 8, 8), 10), 4),
        (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(4, 1, 8), 3, enable_nested_tensor=False
            ),
            3,
        ),
        (nn.Sequential(nn.Linear(2, 2), nn.ReLU()), 0),
        (nn.Linear(2, 2), 0),
    ],
    ids=["resnet", "vit", "encoder", "perceptron", "layer"],
)
def test_blocks(module, count):
    assert len(blocks_of(module)) == count

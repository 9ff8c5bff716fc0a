"""Dropout masks: right in number, and different wherever they should be."""

import math

import pytest
import torch
from torch import nn

import shoal
from shoal.engine.members.member_runner import MemberRunner

POINTS, WIDTH = 50, 40


class Masks(nn.Module):
    """Returns what its dropout layers make of ones: two layers, the second called twice."""

    def __init__(self, p=0.3, kind=nn.Dropout, shape=(POINTS, WIDTH)):
        super().__init__()
        self.one, self.two = kind(p), kind(p)
        self.scale = nn.Parameter(torch.ones(()))
        self.shape = shape

    def forward(self, x):
        ones = self.scale.detach() * torch.ones(self.shape)
        masks = [self.one(ones), self.two(ones), self.two(ones)]
        return torch.cat([mask.flatten(1) for mask in masks], 1) + 0 * x.sum()


def masks(members=3, mapping=MemberRunner(), mode=True, seed=0, step=0, **options):  # noqa: B008
    """Masks [M, 3, ...] of the two layers, the second twice."""
    with pytest.warns(UserWarning, match="equal members"):
        ensemble = shoal.Ensemble.init(lambda: Masks(**options), members)
    out = ensemble.train(mode)(torch.zeros(1), mapping, seed=seed, step=step)
    return torch.stack(out.chunk(3, -1), 1)


def init_of_ones(p, kind=nn.Dropout, shape=(POINTS, WIDTH)):
    return masks(p=p, kind=kind, shape=shape)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_kept_share_and_scale(p):
    mask = init_of_ones(p)
    kept = mask != 0
    scale = mask.amax(dim=(1, 2, 3), keepdim=True)
    error = 5 * math.sqrt(p * (1 - p) / kept[0, 0].numel())
    assert ((kept.double().mean((2, 3)) - (1 - p)).abs() < error).all()
    assert torch.equal(mask, kept * scale)
    torch.testing.assert_close(scale[0], torch.full((1, 1, 1), 1 / (1 - p)))


@pytest.mark.parametrize(("p", "value"), [(0.0, 1.0), (1.0, 0.0)])
def test_nothing_or_everything_dropped(p, value):
    assert (init_of_ones(p)[0] == value).all()


def correlated(a, b):
    """Correlation of two masks in units of its standard error."""
    pair = torch.stack([(a != 0).flatten().double(), (b != 0).flatten().double()])
    return abs(torch.corrcoef(pair)[0, 1].item()) * math.sqrt(a.numel())


def test_masks_are_independent():
    now, later, other = masks(), masks(step=1), masks(seed=1)
    pairs = {
        "members": (now[0, 0], now[1, 0]),
        "layers": (now[0, 0], now[0, 1]),
        "calls": (now[0, 1], now[0, 2]),
        "steps": (now[0, 0], later[0, 0]),
        "seeds": (now[0, 0], other[0, 0]),
        "step of one, member of the other": (now[1, 0], later[0, 0]),
        "seed of one, member of the other": (now[1, 0], other[0, 0]),
        "neighbouring points": (now[0, 0, 1:], now[0, 0, :-1]),
        "neighbouring units": (now[0, 0, :, 1:], now[0, 0, :, :-1]),
        "layer of one, call of the other": (now[0, 0], now[0, 2]),
    }
    for name, (a, b) in pairs.items():
        assert correlated(a, b) < 5, name


def test_masks_are_a_function_of_seed_and_step():
    before = torch.get_rng_state()
    assert torch.equal(masks(seed=3, step=8), masks(seed=3, step=8))
    assert torch.equal(before, torch.get_rng_state())


def test_the_masks_of_a_member_do_not_depend_on_the_number_of_members():
    assert torch.equal(masks(members=2), masks(members=4)[:2])


def test_evaluation_drops_nothing():
    assert (masks(mode=False)[0] == 1).all()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [
        (nn.Dropout1d, (20, 30, 4)),
        (nn.Dropout2d, (20, 30, 2, 2)),
        (nn.Dropout3d, (20, 30, 2, 1, 2)),
    ],
)
def test_whole_channels_are_dropped(kind, shape):
    mask = init_of_ones(0.4, kind, shape)[0, 0].reshape(20, 30, 4)
    assert torch.equal(mask, mask[..., :1].expand_as(mask))
    kept = (mask[..., 0] != 0).double()
    assert abs(kept.mean() - 0.6) < 5 * math.sqrt(0.24 / 600)
    assert correlated(kept[1:], kept[:-1]) < 5


@pytest.mark.parametrize(
    "mapping", [MemberRunner("loop"), MemberRunner(chunk=1), MemberRunner(chunk=2)], ids=repr
)
def test_masks_do_not_depend_on_how_members_run(mapping):
    assert torch.equal(masks(mapping=mapping), masks())


def test_one_layer_under_two_names():
    """The same dropout module in two places draws its masks from the step, in both places."""

    def build():
        drop = nn.Dropout(0.5)
        return nn.Sequential(nn.Linear(3, 30), drop, nn.Linear(30, 30), drop, nn.Linear(30, 2))

    ensemble = shoal.Ensemble.init(build, 2).train()
    x = torch.randn(5, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(ensemble(x, step=1), ensemble(x, step=1))
    torch.testing.assert_close(ensemble(x, MemberRunner("loop"), step=1), ensemble(x, step=1))


def test_a_member_has_the_dropout_of_torch():
    ensemble = shoal.Ensemble.init(lambda: nn.Sequential(nn.Linear(3, 4), nn.Dropout2d(0.2)), 2)
    layer = ensemble.member(0)[1]
    assert type(layer) is nn.Dropout2d and layer.p == 0.2

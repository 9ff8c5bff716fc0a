"""Curves between two members, and the order of hidden units."""

import pytest
import torch
from small_runs import assert_one_sentence, plain, points, quick, shoal_of
from torch import nn

from shoal.analysis.landscape import curves
from shoal.analysis.landscape.analyses import between
from shoal.analysis.landscape.curves import (
    Bezier,
    Polygon,
    Tunnel,
    align,
    connect,
    hidden_layers,
    permuted,
)
from shoal.analysis.landscape.planes import line
from shoal.analysis.landscape.points import chosen, combined, cosines, with_weights
from shoal.analysis.landscape.survey import Survey, outputs, survey
from shoal.core.errors import ConfigError, DataError
from shoal.data.dataset import Split
from shoal.inference.likelihoods import Categorical
from shoal.models import MLP, Blueprint, ResNet18, SmallCNN

T = torch.linspace(0, 1, 31, dtype=torch.float64)
DATA = Split(*points(120))


@pytest.mark.parametrize("name", curves.registry.names())
def test_coefficients_sum_to_one_and_begin_and_end_at_the_ends(name):
    curve = curves.registry.make(name)
    found = curve.coefficients(T)
    torch.testing.assert_close(found.sum(-1), torch.ones(31).double())
    assert bool((found >= 0).all())
    ends = torch.zeros(2, curve.pivots + 2).double()
    ends[0, 0] = ends[1, -1] = 1
    torch.testing.assert_close(found[[0, -1]], ends)


@pytest.mark.parametrize("curve", [Bezier(2), Polygon(3), Tunnel(4)])
def test_even_pivots_on_the_line_are_the_line(curve):
    even = torch.linspace(0, 1, curve.pivots + 2, dtype=torch.float64)
    torch.testing.assert_close(curve.coefficients(T) @ even, T)


@pytest.fixture(scope="module")
def pair():
    return chosen(quick(shoal_of(plain, members=2), DATA, epochs=30, lr=0.02).ensemble, [0, 1])


def test_ends_stay_and_a_tunnel_stays_in_its_hyperplanes(pair):
    pivots = connect(pair, Tunnel(3), DATA, steps=20, lr=0.05)
    assert pivots.members == 5
    for name, tensor in pair.weights.items():
        torch.testing.assert_close(pivots.weights[name][[0, -1]], tensor, rtol=0, atol=0)
    flat = torch.cat([t.flatten(1) for t in pivots.weights.values()], 1).double()
    along = flat[-1] - flat[0]
    share = (flat - flat[0]) @ along / along.square().sum()
    torch.testing.assert_close(share, torch.linspace(0, 1, 5).double(), rtol=0, atol=1e-6)
    straight = flat[0] + share[:, None] * along
    assert float((flat - straight)[1:-1].norm(dim=1).min()) > 0.05


def test_a_trained_curve_is_lower_than_the_line(pair):
    straight = survey(pair, line(31), DATA, Categorical()).loss
    curve = Bezier()
    pivots = connect(pair, curve, DATA, steps=150, lr=0.05)
    found = survey(pivots, curve.coefficients(T), DATA, Categorical()).loss
    assert float(straight.max()) > 1.5 * float(straight[[0, -1]].max())
    assert float(found.max()) < 1.02 * float(straight[[0, -1]].max())
    again = connect(pair, curve, DATA, steps=150, lr=0.05)
    for name, tensor in again.weights.items():
        assert torch.equal(tensor, pivots.weights[name])


def test_curves_want_two_members_and_labels(pair):
    with pytest.raises(ConfigError) as caught:
        connect(chosen(pair, [0]), Bezier(), DATA)
    assert_one_sentence(caught.value, "two members, not 1")
    with pytest.raises(DataError) as caught:
        connect(pair, Bezier(), Split(DATA.x))
    assert_one_sentence(caught.value, "targets")


NETWORKS = [
    (MLP((12, 9)), (5,)),
    (MLP((12, 9), norm="batch"), (5,)),
    (SmallCNN((4, 6, 5)), (1, 8, 8)),
    (SmallCNN((4, 6, 5), norm="batch"), (1, 8, 8)),
]


@pytest.mark.parametrize(("network", "shape"), NETWORKS, ids=str)
def test_permuted_units_are_the_same_function_far_away_and_alignment_brings_them_back(
    network, shape
):
    ensemble = shoal_of(Blueprint(network, shape, 4), members=1)
    group = ensemble.groups[0]
    state = {name: t.detach()[0] for name, t in (group.weights | group.buffers).items()}
    random = torch.Generator().manual_seed(1)
    # Fresh normalisations are all alike; trained ones are not.
    state |= {n: state[n] + torch.randn(state[n].shape, generator=random) for n in group.weights}
    moved = dict(state)
    for layer in hidden_layers(group.prototype):
        moved = permuted(moved, layer, torch.randperm(layer.units, generator=random))
    both = {name: torch.stack([state[name], moved[name]]) for name in state}
    pair = with_weights(
        ensemble, {n: both[n] for n in group.weights}, {n: both[n] for n in group.buffers}
    )
    x = torch.randn(50, *shape, generator=random)
    one, two = outputs(pair, x)
    torch.testing.assert_close(one, two, rtol=1e-4, atol=1e-5)
    assert bool((one.argmax(-1) == two.argmax(-1)).all())
    assert float(cosines(pair)[0, 1]) < 0.6
    split = Split(x, one.argmax(-1))
    statistics = x if network.norm else None
    before = survey(pair, line(5), split, Categorical(), train=statistics).loss
    after = survey(align(pair), line(5), split, Categorical(), train=statistics).loss
    assert float(cosines(align(pair))[0, 1]) == pytest.approx(1, abs=1e-6)
    assert float((before - before[0]).abs().max()) > 0.01
    torch.testing.assert_close(after, after[:1].expand(5), rtol=1e-4, atol=1e-6)


def test_alignment_never_changes_the_functions(pair):
    found = align(pair)
    torch.testing.assert_close(outputs(found, DATA.x), outputs(pair, DATA.x), rtol=1e-4, atol=1e-5)
    assert float(cosines(found)[0, 1]) >= float(cosines(pair)[0, 1])


def test_units_are_matched_in_chains_only():
    with pytest.raises(ConfigError) as caught:
        align(shoal_of(lambda: nn.Bilinear(3, 3, 4), members=2))
    assert_one_sentence(caught.value, "nn.Sequential", "Bilinear")
    with pytest.raises(ConfigError) as caught:
        hidden_layers(ResNet18((4, 4)).build((3, 8, 8), 10))
    assert_one_sentence(caught.value, "Block")


def test_a_combination_is_linear(pair):
    middle = combined(pair, torch.tensor([[0.5, 0.5]]))
    for name, tensor in pair.weights.items():
        torch.testing.assert_close(middle.weights[name][0], tensor.detach().mean(0))


def test_a_path_of_negative_loss_is_uneven_by_its_share_too():
    """The NLL of a density may lie below zero: -2 between ends of -1 is off by the whole level."""
    loss = torch.tensor([-1.0, -2.0, -1.0]).double()
    found = Survey(loss, torch.full_like(loss, torch.nan), torch.zeros(2, 3).double())
    path = between._profiles({"tunnel": (found, found)}, {}).scores["paths"]["tunnel"]
    assert path["uneven"] == 1.0
    assert path["barrier"] == 0.0

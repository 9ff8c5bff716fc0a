"""Laws of every registered bandwidth, and the median heuristic in numbers."""

import math
import statistics

import pytest
import torch

from shoal.core.errors import ConfigError
from shoal.interaction.bandwidths import Fixed, Median, MemberMedian, masked_median, registry
from shoal.interaction.methods import get
from shoal.interaction.repulsion import interact

pytestmark = pytest.mark.usefixtures("double")

MEDIANS = [Median(scale, legacy) for scale in ("log", "unit") for legacy in (False, True)]
EVERY = [registry[name]() for name in registry] + MEDIANS[1:]


def distances(z):
    """d2 [S, M, M] of coordinates [M, S, D]."""
    return (z[:, None] - z).square().sum(-1).permute(2, 0, 1)


def cloud(members, sites=1, dimensions=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(members, sites, dimensions, generator=generator)


def everyone(members):
    return torch.ones(members, dtype=torch.bool)


@pytest.mark.parametrize("bandwidth", EVERY, ids=repr)
@pytest.mark.parametrize("members", [1, 2, 3, 10])
def test_one_positive_number_a_site(bandwidth, members):
    h2 = bandwidth(distances(cloud(members, sites=4)), everyone(members))
    assert h2.shape == (4, 1, members if isinstance(bandwidth, MemberMedian) else 1)
    assert (h2 > 0).all() and h2.isfinite().all()


@pytest.mark.parametrize("bandwidth", EVERY, ids=repr)
def test_a_bandwidth_is_in_squared_units_or_given(bandwidth):
    d2 = distances(cloud(5))
    h2, scaled = bandwidth(d2, everyone(5)), bandwidth(9 * d2, everyone(5))
    torch.testing.assert_close(scaled, h2 if isinstance(bandwidth, Fixed) else 9 * h2)


@pytest.mark.parametrize("bandwidth", EVERY, ids=repr)
def test_sites_do_not_see_each_other(bandwidth):
    z = cloud(5, sites=3)
    together = bandwidth(distances(z), everyone(5))
    for s in range(3):
        alone = bandwidth(distances(z[:, s : s + 1]), everyone(5))
        torch.testing.assert_close(together[s : s + 1], alone)


@pytest.mark.parametrize("bandwidth", EVERY, ids=repr)
def test_degenerate_clouds_have_a_positive_bandwidth(bandwidth):
    same = cloud(1).expand(6, 1, 3)
    most = torch.cat([same, cloud(1, seed=1)])
    for z in (same, most):
        h2 = bandwidth(distances(z), everyone(len(z)))
        assert (h2 > 0).all() and h2.isfinite().all()
    if isinstance(bandwidth, MemberMedian):
        return  # as released: its constant 1e-12 has no units, see the test of its zero median
    scaled = bandwidth(25 * distances(most), everyone(7))
    factor = 1 if isinstance(bandwidth, Fixed) else 25
    torch.testing.assert_close(scaled, factor * bandwidth(distances(most), everyone(7)))


@pytest.mark.parametrize("bandwidth", EVERY, ids=repr)
def test_dead_members_are_not_counted(bandwidth):
    alive = torch.tensor([True, False, True, True, False, True])
    z = cloud(6, sites=2)
    h2 = bandwidth(distances(z), alive)
    h2 = h2[..., alive] if isinstance(bandwidth, MemberMedian) else h2
    torch.testing.assert_close(h2, bandwidth(distances(z[alive]), everyone(4)))


@pytest.mark.parametrize("bandwidth", EVERY, ids=repr)
def test_a_bandwidth_is_a_constant_for_differentiation(bandwidth):
    z = cloud(4).requires_grad_()
    assert not bandwidth(distances(z), everyone(4)).requires_grad


@pytest.mark.parametrize("members", [2, 3, 4, 7])
@pytest.mark.parametrize("bandwidth", MEDIANS, ids=repr)
def test_median_over_pairs(bandwidth, members):
    z = cloud(members)
    d2 = distances(z)
    pairs = [
        float(d2[0, i, j])
        for i in range(members)
        for j in range(members)
        if bandwidth.legacy or i != j
    ]
    scale = 2 * math.log(members + 1) if bandwidth.scale == "log" else 1.0
    target = statistics.median(pairs) / scale
    torch.testing.assert_close(
        bandwidth(d2, everyone(members)), torch.full((1, 1, 1), target), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("members", [2, 3, 8])
def test_kernel_between_equidistant_members(members, legacy):
    d2 = 3.7 * (1 - torch.eye(members))[None]
    h2 = Median(legacy=legacy)(d2, everyone(members))
    k = math.exp(-3.7 / (2 * h2.item()))
    halved = legacy and members == 2
    assert math.isclose(k, 1 / 9 if halved else 1 / (members + 1), rel_tol=1e-12)


@pytest.mark.parametrize("members, ratio", [(3, 0.951), (5, 0.998), (10, 1.011)])
def test_the_published_width_of_input_gradients_has_ln_m(members, ratio):
    z, pushes = torch.eye(members), []
    for legacy, typical in ((False, 1 / (members + 1)), (True, 1 / members)):
        repulsion = get("forde-identity", legacy=legacy).repulsion
        apart = interact(repulsion, [z[:, None]], everyone(members))
        off = apart.K[0, 1]
        torch.testing.assert_close(off, torch.tensor(typical), rtol=1e-9, atol=0)
        pushes.append((apart.B[0] @ z).norm())
    assert (pushes[1] / pushes[0]).item() == pytest.approx(ratio, abs=1e-3)


@pytest.mark.parametrize("count", range(1, 8))
def test_masked_median(count):
    values = torch.randn(3, 9, generator=torch.Generator().manual_seed(count))
    keep = torch.zeros(9, dtype=torch.bool)
    keep[torch.randperm(9, generator=torch.Generator().manual_seed(count))[:count]] = True
    target = [statistics.median(row[keep].tolist()) for row in values]
    torch.testing.assert_close(masked_median(values, keep), torch.tensor(target))


def test_median_of_nothing_is_zero():
    assert masked_median(torch.ones(2, 3), torch.zeros(3, dtype=torch.bool)).tolist() == [0, 0]


@pytest.mark.parametrize("h2", [0.0, -1.0, math.nan])
def test_fixed_bandwidth_must_be_positive(h2):
    with pytest.raises(ConfigError, match="h2 must be (positive|a number)"):
        Fixed(h2)


def test_scale_of_the_median_is_one_of_two():
    with pytest.raises(ConfigError, match="'log' or 'unit', not 'square'"):
        Median(scale="square")


def test_a_median_for_each_member():
    z = cloud(5, sites=2)
    d2 = distances(z)
    h2 = MemberMedian()(d2, everyone(5))
    for s in range(2):
        for j in range(5):
            middle = statistics.median(d2[s, :, j].tolist())  # its own zero is one of the five
            assert math.isclose(h2[s, 0, j], (middle / math.log(5) + 1e-12) / 2, rel_tol=1e-14)


def test_a_zero_median_of_a_member_leaves_the_released_constant():
    """Four of six members coincide: no mean replaces the median of these four."""
    z = torch.cat([cloud(1).expand(4, 1, 3), cloud(2, seed=1)])
    h2 = MemberMedian()(distances(z), everyone(6))[0, 0]
    torch.testing.assert_close(2 * h2[:4], torch.full((4,), 1e-12), rtol=1e-14, atol=0)
    assert (h2[4:] > 1e-3).all()

"""Symmetries of the push for every kernel and flow, dead and coincident members, precision."""

import itertools
import math

import pytest
import torch

import shoal
from shoal.interaction.bandwidths import Fixed, Median
from shoal.interaction.repulsion import interact, repel

pytestmark = pytest.mark.usefixtures("double")

kernels, estimators = shoal.kernels, shoal.estimators
RADIAL = [
    kernel
    for kernel in [*(kernels.registry[name]() for name in kernels.registry), kernels.Matern(2.5)]
    if isinstance(kernel, kernels.RadialKernel)
]
FLOWS = [shoal.flows.Stein()] + [
    shoal.flows.Wasserstein(estimator)
    for estimator in [
        *(estimators.registry[name]() for name in estimators.registry),
        estimators.SGE(0.01),
        estimators.SSGE(share=1.0, eta=0.01),
        estimators.SSGE(share=1.0, pairs=3),
    ]
]
EVERY = [
    pytest.param(
        shoal.Repulsion(shoal.spaces.Weights(), kernel, Median(), flow), id=f"{kernel} {flow}"
    )
    for kernel, flow in itertools.product(RADIAL, FLOWS)
]
LINEAR = shoal.Repulsion(
    shoal.spaces.Weights(), kernels.LinearKernel(), Median(), shoal.flows.Stein()
)


def cloud(members=6, dimensions=3, seed=0, **options):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(members, dimensions, generator=generator, **options)


def push(repulsion, z, alive=None):
    alive = torch.ones(len(z), dtype=torch.bool) if alive is None else alive
    return repel(repulsion, {"z": z}, alive).tree()["z"]


def mixing(repulsion, z, alive):
    return repel(repulsion, {"z": z}, alive).interaction.mix


def close(a, b, tolerance=1e-9):
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("repulsion", EVERY)
def test_translation(repulsion):
    z = cloud()
    close(push(repulsion, z + 3.0), push(repulsion, z))


@pytest.mark.parametrize("repulsion", EVERY)
def test_rotation(repulsion):
    z = cloud()
    Q = torch.linalg.qr(cloud(3, 3, seed=1)).Q
    close(push(repulsion, z @ Q), push(repulsion, z) @ Q)


@pytest.mark.parametrize("repulsion", EVERY)
def test_permutation(repulsion):
    z, order = cloud(), torch.tensor([4, 2, 0, 5, 1, 3])
    close(push(repulsion, z[order]), push(repulsion, z)[order])


@pytest.mark.parametrize("repulsion", EVERY)
@pytest.mark.parametrize("legacy", [False, True])
def test_with_the_median_bandwidth_the_push_of_a_cloud_scales_inversely(repulsion, legacy):
    scaled = shoal.Repulsion(
        repulsion.space, repulsion.kernel, Median(legacy=legacy), repulsion.flow
    )
    z = cloud()
    close(push(scaled, 4 * z), push(scaled, z) / 4)


@pytest.mark.parametrize("repulsion", EVERY)
def test_parts_of_a_space_are_one_space(repulsion):
    z = cloud(dimensions=7)
    whole = push(repulsion, z)
    alive = torch.ones(6, dtype=torch.bool)
    parts = {"a": z[:, :4].reshape(6, 2, 2), "b": z[:, 4:6], "c": z[:, 6]}
    pushed = repel(repulsion, parts, alive).tree()
    close(torch.cat([pushed["a"].flatten(1), pushed["b"], pushed["c"][:, None]], 1), whole)


@pytest.mark.parametrize("repulsion", EVERY)
def test_one_member_feels_nothing(repulsion):
    assert (push(repulsion, cloud(1)) == 0).all()


@pytest.mark.parametrize("legacy", [False, True])
@pytest.mark.parametrize("repulsion", EVERY)
def test_identical_members_feel_nothing(repulsion, legacy):
    bandwidth = Median(legacy=legacy)
    same = shoal.Repulsion(repulsion.space, repulsion.kernel, bandwidth, repulsion.flow)
    for members in (2, 5):
        z = cloud(1).expand(members, 3).contiguous()
        close(push(same, z), torch.zeros(members, 3))


@pytest.mark.parametrize("repulsion", EVERY)
def test_two_identical_members_among_others_feel_the_same(repulsion):
    z = cloud()
    z[3] = z[1]
    P = push(repulsion, z)
    assert P.isfinite().all()
    close(P[3], P[1], 1e-6)


@pytest.mark.parametrize("repulsion", [*EVERY, pytest.param(LINEAR, id="linear stein")])
def test_dead_members_are_as_if_absent(repulsion):
    z = cloud(8)
    alive = torch.tensor([True, True, False, True, True, True, False, True])
    close(push(repulsion, z, alive)[alive], push(repulsion, z[alive]))
    mixed, alone = mixing(repulsion, z, alive), mixing(repulsion, z[alive], alive[alive])
    if alone is not None:
        close(mixed[alive][:, alive], alone)
        assert (mixed[alive][:, ~alive] == 0).all()


def test_a_dead_member_does_not_move_the_spectral_cut_off():
    """Eigenvalues 1.945, 1, 1, 1 and 0.055: the last lies just within 99 % of the trace."""
    z = 100 * torch.arange(5.0)[:, None]
    z[1, 0] = z[0, 0] + math.sqrt(-2 * math.log(0.945))
    flow = shoal.flows.Wasserstein(estimators.SSGE(share=0.99))
    repulsion = shoal.Repulsion(shoal.spaces.Weights(), kernels.RBF(), Fixed(1.0), flow)
    alive = torch.tensor([True] * 5 + [False])
    close(push(repulsion, torch.cat([z, z[:1]]), alive)[:5], push(repulsion, z))


@pytest.mark.parametrize("repulsion", [*EVERY, pytest.param(LINEAR, id="linear stein")])
@pytest.mark.parametrize("poison", [math.nan, math.inf, -math.inf, 1e300])
def test_what_a_dead_member_holds_cannot_be_felt(repulsion, poison):
    z = cloud()
    alive = torch.tensor([True, True, False, True, True, True])
    clean = push(repulsion, z, alive)
    z[2, 1] = poison
    assert torch.equal(push(repulsion, z, alive)[alive], clean[alive])


@pytest.mark.parametrize("repulsion", EVERY)
def test_all_dead_is_finite(repulsion):
    z = cloud()
    assert push(repulsion, z, torch.zeros(6, dtype=torch.bool)).isfinite().all()


@pytest.mark.parametrize("repulsion", EVERY)
def test_close_members_far_from_the_origin_in_single_precision(repulsion):
    """Raw Gram matrices would have errors of 1e-7 * 300² = 1e-2 beside distances of 1e-4."""
    step = 2.0**-7  # sums with 300 are exact in float32
    z = (cloud(dtype=torch.float64) * 8).round() * step
    fixed = shoal.Repulsion(repulsion.space, repulsion.kernel, Fixed(200 * step**2), repulsion.flow)
    exact = push(fixed, z)
    single = push(fixed, (z + 300).float())
    error = (single.double() - exact).norm() / exact.norm()
    assert error < 2e-4


def test_half_precision_coordinates_are_compared_in_single():
    z = cloud(dtype=torch.float32)
    repulsion = shoal.Repulsion(shoal.spaces.Weights())
    half = z.bfloat16()
    P = push(repulsion, half)
    assert P.dtype == torch.bfloat16
    torch.testing.assert_close(P, push(repulsion, half.float()).bfloat16())


def test_sites_average_the_kernel_and_keep_their_bandwidth():
    """K = (1/S) sum_s phi(d2_s / h2_s) and the push is the gradient of sum_i log sum_j K_ij."""
    z = torch.randn(4, 3, 2, generator=torch.Generator().manual_seed(0))
    z = z * torch.tensor([1.0, 5.0, 0.2])[:, None]
    repulsion = shoal.Repulsion(shoal.spaces.Weights(), kernels.RBF(), Median())
    interaction = interact(repulsion, [z], torch.ones(4, dtype=torch.bool))
    live = z.clone().requires_grad_()
    d2 = (live[:, None] - z).square().sum(-1)
    off = ~torch.eye(4, dtype=torch.bool)
    ordered = d2.detach()[off].sort(0).values
    h2 = (ordered[5] + ordered[6]) / 2 / (2 * math.log(5))
    K = torch.exp(-d2 / (2 * h2)).mean(-1)
    close(interaction.K, K.detach())
    close(interaction.h2.flatten(), h2)
    (gradient,) = torch.autograd.grad(K.sum(1).log().sum(), live)
    pushed = torch.einsum("sij,jsd->isd", interaction.B, interaction.cloud.leaves[0])
    close(pushed, gradient)


@pytest.mark.parametrize("separation", [0.0, 1e-6, 1e3])
def test_effective_number_of_members(separation):
    z = separation * torch.arange(5.0)[:, None]
    repulsion = shoal.Repulsion(shoal.spaces.Weights(), kernels.RBF(), Fixed(1.0))
    interaction = interact(repulsion, [z.unsqueeze(1)], torch.ones(5, dtype=torch.bool))
    close(interaction.effective, torch.tensor(5.0 if separation > 1 else 1.0))


def test_part_of_the_members_lives_here():
    """With `gather`, the push on the own rows is that of the whole."""
    z = cloud()
    repulsion = shoal.Repulsion(shoal.spaces.Weights())
    alive = torch.ones(6, dtype=torch.bool)
    whole = push(repulsion, z)
    for rows in (slice(0, 2), slice(2, 6)):
        part = repel(repulsion, {"z": z[rows]}, alive, lambda _: z.unsqueeze(1), rows).tree()
        close(part["z"], whole[rows])

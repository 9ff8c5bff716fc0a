"""Laws of every registered kernel, and the gradient that the interaction makes of it."""

import pytest
import reference
import torch

import shoal
from shoal.core.errors import ConfigError
from shoal.interaction.bandwidths import Fixed
from shoal.interaction.repulsion import interact

pytestmark = pytest.mark.usefixtures("double")

registry = shoal.kernels.registry
EVERY = [registry[name]() for name in registry] + [shoal.kernels.Matern(2.5)]
RADIAL = [kernel for kernel in EVERY if isinstance(kernel, shoal.kernels.RadialKernel)]
LITERAL = {
    shoal.kernels.RBF(): reference.rbf,
    shoal.kernels.Laplace(): reference.laplace,
    shoal.kernels.IMQ(): reference.imq,
    shoal.kernels.Matern(1.5): reference.matern32,
    shoal.kernels.Matern(2.5): reference.matern52,
}
SHAPES = [(7, 1), (6, 3), (5, 20)]


def cloud(members, dimensions, seed=0):
    return torch.randn(members, dimensions, generator=torch.Generator().manual_seed(seed))


def acted(kernel, z, h2=0.7):
    """K, and L z: the Stein flow's push without its 1 / M."""
    repulsion = shoal.Repulsion(shoal.spaces.Weights(), kernel, Fixed(h2), shoal.flows.Stein())
    alive = torch.ones(len(z), dtype=torch.bool)
    interaction = interact(repulsion, [z.unsqueeze(1)], alive)
    return interaction.K, len(z) * interaction.B[0] @ interaction.cloud.leaves[0][:, 0]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", EVERY, ids=repr)
def test_symmetric_and_positive_semidefinite(kernel, shape):
    K, _ = acted(kernel, cloud(*shape))
    assert torch.equal(K, K.mT)
    assert torch.linalg.eigvalsh(K).min() > -1e-12 * K.diagonal().max()


@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_one_at_zero_then_falling(kernel):
    u = torch.cat([torch.zeros(1), torch.logspace(-8, 2, 200)])
    value = kernel.value(u)
    assert value[0] == 1
    assert (value.diff() <= 0).all()
    assert (value > 0).all()


@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_slope_is_the_finite_difference_of_the_value(kernel):
    u = torch.logspace(-3, 1.5, 50)
    step = 1e-5 * u
    difference = (kernel.value(u + step) - kernel.value(u - step)) / (2 * step)
    torch.testing.assert_close(kernel.slope(u), difference, rtol=1e-6, atol=1e-11)


@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_slope_at_zero_is_finite(kernel):
    assert kernel.slope(torch.zeros(1)).isfinite().all()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_translation_changes_nothing(kernel, shape):
    z = cloud(*shape)
    K, G = acted(kernel, z)
    moved_K, moved_G = acted(kernel, z + 5.0)
    torch.testing.assert_close(moved_K, K, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(moved_G, G, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kernel", LITERAL, ids=repr)
def test_kernel_and_summed_gradient_as_written_in_the_book(kernel, shape):
    z = cloud(*shape)
    K, G = acted(kernel, z, h2=0.7)
    literal = LITERAL[kernel]
    torch.testing.assert_close(K, reference.kernel_matrix(z, literal, 0.7), rtol=1e-12, atol=0)
    target = reference.summed_gradient(z, literal, 0.7)
    torch.testing.assert_close(G, target, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_summed_gradient_is_the_finite_difference_of_the_sum(kernel):
    z = cloud(4, 2)
    _, G = acted(kernel, z)
    for i in range(len(z)):
        for d in range(z.shape[1]):
            step = torch.zeros_like(z)
            step[i, d] = 1e-6
            # Row i of K holds k(z_i, z_j): only the first argument moves in it.
            up, down = acted(kernel, z + step)[0][i].sum(), acted(kernel, z - step)[0][i].sum()
            torch.testing.assert_close(G[i, d], (up - down) / 2e-6, rtol=1e-7, atol=1e-8)


@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_forces_between_members_cancel(kernel):
    _, G = acted(kernel, cloud(6, 3))
    torch.testing.assert_close(G.sum(0), torch.zeros(3), rtol=0, atol=1e-13)


@pytest.mark.parametrize("kernel", LITERAL, ids=repr)
def test_without_the_stop_gradient_the_force_is_twice_as_large(kernel):
    z = cloud(5, 3)
    live = z.clone().requires_grad_()
    total = reference.kernel_matrix(live, LITERAL[kernel], 0.7).sum()
    (both,) = torch.autograd.grad(total, live)
    torch.testing.assert_close(both, 2 * acted(kernel, z)[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_coincident_points_exert_no_force_on_each_other(kernel):
    z = torch.tensor([[0.3, -1.0], [0.3, -1.0], [2.0, 0.5]])
    _, G = acted(kernel, z)
    _, pair = acted(kernel, z[1:])
    torch.testing.assert_close(G[0], pair[0], rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(G[1], pair[0], rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("kernel", RADIAL, ids=repr)
def test_the_force_points_away_from_the_other(kernel):
    _, G = acted(kernel, torch.tensor([[-1.0], [2.0]]))
    assert G[0] > 0 > G[1]  # the push is subtracted, so that the left one moves left


def test_every_radial_kernel_has_a_literal_twin():
    assert set(RADIAL) == set(LITERAL)


def test_linear_kernel():
    z = cloud(4, 3)
    K, push = acted(shoal.kernels.LinearKernel(), z)
    torch.testing.assert_close(K, reference.kernel_matrix(z, reference.linear, None))
    # The Stein flow adds sum_j dk(z_j, z_i)/dz_j = M z_i; the push is what it subtracts.
    torch.testing.assert_close(push, -4 * z)


def test_linear_kernel_is_for_the_stein_flow_only():
    """Its L holds the gradient of the second argument, of which no score can be made."""
    with pytest.raises(ConfigError):
        flow = shoal.flows.Wasserstein()
        repulsion = shoal.Repulsion(shoal.spaces.Weights(), shoal.kernels.LinearKernel(), flow=flow)
        interact(repulsion, [cloud(4, 3).unsqueeze(1)], torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("nu", [0.5, 2.0, 3.5])
def test_matern_of_another_smoothness_is_refused(nu):
    with pytest.raises(ConfigError, match="nu = 1.5 or 2.5, not"):
        shoal.kernels.Matern(nu)

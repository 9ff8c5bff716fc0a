"""Particles on targets whose equilibria and scores are known in closed form."""

import itertools
import math

import pytest
import reference
import torch

import shoal
from shoal.core.errors import ConfigError, DataError
from shoal.data.targets import StandardGaussian
from shoal.interaction.bandwidths import Fixed, Median
from shoal.training.options.annealing import Constant

pytestmark = pytest.mark.usefixtures("double")

KDE, SGE, SSGE = shoal.estimators.KDE, shoal.estimators.SGE, shoal.estimators.SSGE
Stein, Wasserstein = shoal.flows.Stein, shoal.flows.Wasserstein
RBF = shoal.kernels.RBF


def spring(variance=1.0):
    """Log density of N(0, variance)."""
    return lambda x: -x.square().sum() / (2 * variance)


def nothing(x):
    """A density without a drive: one step of size one is minus the estimated score."""
    return 0.0 * x.sum()


def cloud(members, dimensions, seed=0):
    return torch.randn(members, dimensions, generator=torch.Generator().manual_seed(seed))


def repulsion(flow, bandwidth, kernel=RBF()):  # noqa: B008
    return shoal.Repulsion(shoal.spaces.Weights(), kernel, bandwidth, flow)


def quantiles(count):
    """Points that carry equal shares of N(0, 1)."""
    return torch.special.ndtri((torch.arange(count) + 0.5) / count)[:, None]


# Two like charges on a spring.

CHARGES = {
    "kde": (Wasserstein(KDE()), lambda h2: h2 / (2 - h2)),
    "sge": (Wasserstein(SGE(0.1)), lambda h2: 1.1 * h2 / (h2 + 2)),
    "ssge": (Wasserstein(SSGE(share=1.0)), lambda h2: h2 / (h2 + 2)),
    "svgd": (Stein(), lambda h2: h2 / (h2 + 2)),
}


@pytest.mark.parametrize(("h2", "dimensions"), [(0.25, 4), (0.8, 1)])
@pytest.mark.parametrize("name", CHARGES)
def test_two_like_charges_on_a_spring(name, h2, dimensions):
    """They settle at ±a with a² = -(h²/2) ln k*, where k* is the kernel between them."""
    flow, kernel = CHARGES[name]
    start = cloud(2, dimensions)
    x = shoal.sample(spring(), start, method=repulsion(flow, Fixed(h2)), lr=0.35, steps=120)
    a2 = -h2 / 2 * math.log(kernel(h2))
    torch.testing.assert_close(x[0], -x[1], rtol=0, atol=1e-6)
    torch.testing.assert_close(x.square().sum(1), torch.full((2,), a2), rtol=1e-6, atol=0)


def test_the_published_places_of_the_charges():
    places = {"kde": 0.524074, "sge": 0.615249, "ssge": 0.634318, "svgd": 0.634318}
    for name, place in places.items():
        method = repulsion(CHARGES[name][0], Fixed(0.5))
        x = shoal.sample(spring(), torch.tensor([[-0.3], [0.4]]), method=method, lr=0.4, steps=80)
        assert abs(x[1].item() - place) < 1e-6


@pytest.mark.parametrize(("variance", "h2", "lr"), [(1.0, 0.9, 0.9), (4.0, 1.0, 1.6)])
def test_charges_on_a_softer_spring(variance, h2, lr):
    """a² = (h²/2) ln(2s²/h² - 1) for a kernel density estimate."""
    method = repulsion(Wasserstein(KDE()), Fixed(h2))
    x = shoal.sample(spring(variance), cloud(2, 3), method=method, lr=lr, steps=120)
    a2 = h2 / 2 * math.log(2 * variance / h2 - 1)
    torch.testing.assert_close(x.square().sum(1), torch.full((2,), a2), rtol=1e-5, atol=0)


def test_a_kernel_wider_than_the_target_lets_the_charges_collapse():
    method = repulsion(Wasserstein(KDE()), Fixed(1.5))
    x = shoal.sample(spring(), cloud(2, 2), method=method, lr=0.9, steps=100)
    assert x.abs().max() < 1e-6


@pytest.mark.parametrize(
    ("flow", "square"),
    [
        (Wasserstein(KDE()), 0.8 * math.log(3)),
        (Wasserstein(SGE(0.0)), math.log(3)),
        (Stein(), math.log(3)),
    ],
    ids=["kde", "sge", "svgd"],
)
def test_two_members_with_the_published_median(flow, square):
    """The zeros of the diagonal halve the median of a pair."""
    method = repulsion(flow, Median(legacy=True))
    x = shoal.sample(spring(2.5), cloud(2, 3), method=method, lr=1.0, steps=120)
    assert math.isclose((x[0] - x[1]).square().sum(), 2.5 * square, rel_tol=1e-6)


# Regular simplices.


def shrink(members, eta):
    k = members / (members + 1)
    return k / (k + eta)


SIMPLEX = {
    "kde": (Wasserstein(KDE()), lambda M: math.log(M + 1)),
    "svgd": (Stein(), lambda M: 2 * math.log(M + 1)),
    "sge 0": (Wasserstein(SGE(0.0)), lambda M: 2 * math.log(M + 1)),
    "sge 0.2": (Wasserstein(SGE(0.2)), lambda M: 2 * math.log(M + 1) * shrink(M, 0.2)),
    "ssge 0": (Wasserstein(SSGE(share=1.0)), lambda M: 2 * math.log(M + 1)),
    "ssge 0.2": (
        Wasserstein(SSGE(share=1.0, eta=0.2)),
        lambda M: 2 * math.log(M + 1) * shrink(M, 0.2) ** 2,
    ),
}


def squared_distances(x):
    return torch.stack(
        [(x[i] - x[j]).square().sum() for i, j in itertools.combinations(range(len(x)), 2)]
    )


@pytest.mark.parametrize(
    ("members", "dimensions", "legacy"), [(3, 2, True), (4, 9, False)], ids=["3 in 2", "4 in 9"]
)
@pytest.mark.parametrize("name", SIMPLEX)
def test_few_members_form_a_regular_simplex(name, members, dimensions, legacy):
    """With the median bandwidth its edge does not depend on the dimension."""
    flow, square = SIMPLEX[name]
    method = repulsion(flow, Median(legacy=legacy))
    start = cloud(members, dimensions, seed=1)
    x = shoal.sample(spring(1.7), start, method=method, lr=1.0, steps=100)
    d2 = squared_distances(x)
    torch.testing.assert_close(d2, torch.full_like(d2, 1.7 * square(members)), rtol=1e-6, atol=0)


@pytest.mark.parametrize(("estimator", "eta"), [(SGE(1.0), 1.0), (SSGE(), 0.0)])
def test_simplices_of_stein_estimates_with_a_wide_kernel(estimator, eta):
    """With h² = D², k = e^(-1/2): D² = s² k M / (1 - k + eta)."""
    M, k = 4, math.exp(-0.5)
    method = repulsion(Wasserstein(estimator), Median(scale="unit"))
    x = shoal.sample(spring(1.7), cloud(M, 3, seed=1), method=method, lr=0.8, steps=150)
    d2 = squared_distances(x)
    target = 1.7 * k * M / (1 - k + eta)
    torch.testing.assert_close(d2, torch.full_like(d2, target), rtol=1e-6, atol=0)


def test_annealing_heats_the_posterior():
    """A factor gamma of the drive makes s² into s² / gamma."""
    method = repulsion(Wasserstein(KDE()), Median())
    x = shoal.sample(
        spring(1.7), cloud(4, 3, seed=1), method=method, lr=2.0, steps=100, annealing=Constant(0.4)
    )
    d2 = squared_distances(x)
    target = 1.7 / 0.4 * math.log(5)
    torch.testing.assert_close(d2, torch.full_like(d2, target), rtol=1e-6, atol=0)


class MedianDistance:
    """A bandwidth of one's own: h = median distance / ln(M + 1)."""

    def __call__(self, d2, alive):
        M = d2.shape[-1]
        distances = d2[0][~torch.eye(M, dtype=torch.bool)].sqrt()
        return (distances.median() / math.log(M + 1)).square().expand(1, 1, 1)


@pytest.mark.parametrize(("members", "dimensions"), [(3, 2), (4, 5)])
def test_simplex_of_the_laplace_kernel(members, dimensions):
    """D² = s² ln(M + 1) / 2."""
    method = repulsion(Wasserstein(KDE()), MedianDistance(), shoal.kernels.Laplace())
    start = cloud(members, dimensions, seed=1)
    x = shoal.sample(spring(1.7), start, method=method, lr=1.0, steps=100)
    d2 = squared_distances(x)
    target = 1.7 * math.log(members + 1) / 2
    torch.testing.assert_close(d2, torch.full_like(d2, target), rtol=1e-6, atol=0)


# Many members.


@pytest.mark.parametrize("h2", [0.25, 0.5])
def test_many_members_have_the_target_less_the_kernel(h2):
    """A kernel density estimate adds h² to the variance it sees, so s² - h² settles."""
    start = 0.6 * quantiles(200) + 0.3
    method = repulsion(Wasserstein(KDE()), Fixed(h2))
    x = shoal.sample(spring(), start, method=method, lr=0.3, steps=150)
    assert abs(x.mean()) < 1e-3
    assert abs(x.var(correction=0) / (1 - h2) - 1) < 0.02


@pytest.mark.parametrize(("members", "dimensions"), [(3, 2), (4, 3), (9, 2)])
def test_svgd_with_a_linear_kernel_has_the_moments_of_a_gaussian(members, dimensions):
    """Exactly, whatever the number of members: what assumes a radial kernel fails here."""
    root = cloud(dimensions, dimensions, seed=5) * 0.4 + torch.eye(dimensions)
    covariance, mean = root @ root.mT, torch.linspace(0.5, -0.5, dimensions)
    precision = torch.linalg.inv(covariance)
    method = repulsion(Stein(), Fixed(1.0), shoal.kernels.LinearKernel())
    x = shoal.sample(
        lambda x: -(x - mean) @ precision @ (x - mean) / 2,
        cloud(members, dimensions, seed=2),
        method=method,
        lr=0.2,
        steps=300,
    )
    torch.testing.assert_close(x.mean(0), mean, rtol=0, atol=1e-9)
    centred = x - x.mean(0)
    torch.testing.assert_close(centred.mT @ centred / members, covariance, rtol=0, atol=1e-9)


# Estimated scores: one step without a drive.


def estimated_score(x, method):
    return x - shoal.sample(nothing, x, method=method, steps=1, lr=1.0)


@pytest.mark.parametrize(("variance", "h2"), [(1.0, 0.25), (2.0, 0.5)])
def test_kernel_density_score_of_a_normal_law(variance, h2):
    """-x / (s² + h²), on points that carry equal shares of the law."""
    x = math.sqrt(variance) * quantiles(1500)
    score = estimated_score(x, repulsion(Wasserstein(KDE()), Fixed(h2)))
    middle = x.abs() < 1.5
    torch.testing.assert_close(score[middle], -x[middle] / (variance + h2), rtol=0, atol=0.01)


def test_kernel_density_score_of_a_skewed_law():
    """Against the score of the law convolved with the kernel, by quadrature."""
    h2, shape = 0.2, 2.0
    grid = torch.linspace(-14, 5, 8001)
    density = torch.exp(shape * grid - grid.exp() - math.lgamma(shape))
    share = torch.cumulative_trapezoid(density, grid)
    count = 600
    index = torch.searchsorted(share, (torch.arange(count) + 0.5) / count)
    x = grid[index + 1][:, None]
    score = estimated_score(x, repulsion(Wasserstein(KDE()), Fixed(h2)))
    kernel = torch.exp(-((x - grid) ** 2) / (2 * h2)) * density
    target = torch.trapezoid(kernel * (grid - x) / h2, grid) / torch.trapezoid(kernel, grid)
    inside = slice(count // 50, -count // 50)
    torch.testing.assert_close(score[inside, 0], target[inside], rtol=0, atol=0.02)
    assert (target + target.flip(0))[inside].abs().max() > 0.3  # skewed indeed


def relative_error(score, target):
    return ((score - target).square().mean() / target.square().mean()).sqrt().item()


def test_stein_estimates_by_their_own_papers_and_as_published():
    x = cloud(1000, 1)
    wide = Median(scale="unit")
    assert relative_error(estimated_score(x, repulsion(Wasserstein(SGE(1.0)), wide)), -x) < 0.25
    spectral = SSGE(share=1.0, pairs=6)
    assert relative_error(estimated_score(x, repulsion(Wasserstein(spectral), wide)), -x) < 0.25
    for name in ("sge", "ssge"):
        published = shoal.methods.get(name, legacy=True)
        assert relative_error(estimated_score(x, published), -x) > 1.4


def test_stein_identity_holds_in_the_limit():
    """(K s - G) / M with the true score vanishes as 1 / sqrt(M); about 0.5 / sqrt(M) for d = 2."""
    method = repulsion(Stein(), Fixed(1.0))
    found = {}
    for members in (100, 900):
        squares = []
        for seed in range(4):
            x = cloud(members, 2, seed)
            velocity = shoal.sample(spring(), x, method=method, steps=1, lr=1.0) - x
            squares.append(velocity.square().mean())
        found[members] = math.sqrt(sum(squares) / len(squares)) * math.sqrt(members)
    assert all(0.35 < value < 0.7 for value in found.values())
    assert 0.75 < found[900] / found[100] < 1.33


@pytest.mark.parametrize(("name", "factor"), [("kde", 0.5), ("sge", 1.0), ("ssge", 1.0)])
def test_in_high_dimension_the_published_push_is_a_weak_spring(name, factor):
    """ln(M + 1) / 2d of the true score for KDE, twice that for the Stein estimates."""
    members, dimensions = 20, 20_000
    x = cloud(members, dimensions)
    score = estimated_score(x, shoal.methods.get(name, legacy=True))
    centred = x - x.mean(0)
    ratio = -(score * centred).sum() / centred.square().sum()
    target = factor * math.log(members + 1) / dimensions
    if name != "kde":
        target *= shrink(members, 0.01) ** (2 if name == "ssge" else 1)
    assert abs(ratio / target - 1) < 0.02
    across = score + ratio * centred
    assert across.norm() < 0.04 * score.norm()


# An asymmetric target, step by step against the textbook.


def skewed(x):
    """Independent log-gamma coordinates: a steep right flank and a long left tail."""
    return (1.5 * x - x.exp()).sum()


@pytest.mark.parametrize("legacy", [False, True], ids=["corrected", "published"])
@pytest.mark.parametrize("name", ["ensemble", "kde", "sge", "ssge", "svgd"])
def test_every_step_is_the_textbook_step(name, legacy):
    start = cloud(5, 2)
    method = shoal.methods.get(name, legacy=legacy)
    x = shoal.sample(skewed, start, method=method, lr=0.1, steps=6)
    y = start.clone()
    for _ in range(6):
        score = 1.5 - y.exp()
        if name == "ensemble":
            y = y + 0.1 * score
            continue
        K, push = reference.interaction(name, legacy, y)
        y = y + 0.1 * ((K @ score / 5 if name == "svgd" else score) - push)
    torch.testing.assert_close(x, y, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("name", ["kde", "svgd"])
def test_members_lean_to_the_long_tail(name):
    """The mode is ln 1.5, the mean lies left of it, and the left gap is the wider one."""
    x = shoal.sample(skewed, 0.1 * cloud(3, 1), method=name, lr=0.2, steps=150).sort(0).values
    left, right = x[1] - x[0], x[2] - x[1]
    assert left > 1.05 * right
    assert x.mean() < math.log(1.5)


# Arguments.


def test_one_particle_climbs_to_the_mode():
    x = shoal.sample(skewed, torch.tensor([[0.0, 2.0]]), method="kde", lr=0.5, steps=80)
    torch.testing.assert_close(x, torch.full((1, 2), math.log(1.5)))


def test_without_steps_nothing_moves():
    start = cloud(3, 2)
    x = shoal.sample(spring(), start, steps=0)
    assert torch.equal(x, start) and x.data_ptr() != start.data_ptr()


def test_the_start_is_left_alone():
    start = cloud(3, 2)
    kept = start.clone()
    x = shoal.sample(spring(), start, steps=3)
    assert torch.equal(start, kept) and not x.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_particles_keep_their_type(dtype):
    assert shoal.sample(spring(), cloud(3, 2).to(dtype), steps=2).dtype == dtype


def test_the_order_of_particles_does_not_matter():
    start = cloud(6, 2)
    order = torch.tensor([5, 3, 0, 1, 4, 2])
    x = shoal.sample(skewed, start, steps=20)
    y = shoal.sample(skewed, start[order], steps=20)
    torch.testing.assert_close(y, x[order], rtol=1e-10, atol=1e-10)


def test_any_elementwise_optimiser():
    method = repulsion(Wasserstein(KDE()), Fixed(0.5))
    optimizer = {"name": "sgd", "momentum": 0.5}
    x = shoal.sample(spring(), cloud(2, 1), method=method, lr=0.3, steps=100, optimizer=optimizer)
    torch.testing.assert_close(x.abs(), torch.full((2, 1), 0.524074), rtol=0, atol=1e-6)


def test_a_density_with_choices_in_it():
    """Half a normal law on each side, with different widths: vmap cannot follow the branch."""

    def two_halves(x):
        return -x.square().sum() / 2 if x.sum() > 0 else -x.square().sum() / 8

    with pytest.warns(shoal.ShoalWarning, match="one after another"):
        start = torch.tensor([[-1.0], [1.0]])
        x = shoal.sample(two_halves, start, method="ensemble", lr=0.1, steps=1)
    torch.testing.assert_close(x, torch.tensor([[-0.975], [0.9]]))


@pytest.mark.parametrize("shape", [(3,), (2, 3, 1), (0, 2)])
def test_particles_are_a_matrix(shape):
    with pytest.raises(DataError, match=r"\[M, D\] with M and D of at least 1"):
        shoal.sample(spring(), torch.zeros(shape))


def test_particles_have_no_outputs():
    with pytest.raises(ConfigError, match="no outputs; use a weight-space method such as 'kde'"):
        shoal.sample(spring(), cloud(3, 2), method="f-kde")


@pytest.mark.parametrize("name", ["kde", "sge", "ssge", "svgd"])
def test_particles_spread_over_a_gaussian_without_clumps(name):
    """A score that is too smooth leaves particles on top of each other: it sees only their mean."""
    target = StandardGaussian(2)
    start = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    x = shoal.sample(target.log_density, start, method=name, steps=300, lr=0.1, optimizer="adam")
    apart = torch.cdist(x, x) + 9 * torch.eye(40, dtype=x.dtype)
    assert apart.min(1).values.median() > 0.15
    assert 0.5 < torch.cov(x.T).diagonal().mean() < 1.05
    assert x.mean(0).norm() < 0.05

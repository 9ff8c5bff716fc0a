"""Laws of every registered estimator, and the identities between them."""

import pytest
import reference
import torch

import shoal
from shoal.core.errors import ConfigError

pytestmark = pytest.mark.usefixtures("double")

KDE, SGE, SSGE = shoal.estimators.KDE, shoal.estimators.SGE, shoal.estimators.SSGE
registry = shoal.estimators.registry
EVERY = [registry[name]() for name in registry] + [
    SGE(0.0),
    SGE(0.01),
    SSGE(share=1.0),
    SSGE(share=1.0, eta=0.01),
    SSGE(share=1.0, pairs=2),
    SSGE(share=0.5),
]


def matrices(members=6, dimensions=3, h2=0.5, seed=0):
    """K and L of an RBF kernel between random points, and the points."""
    z = torch.randn(members, dimensions, generator=torch.Generator().manual_seed(seed))
    K = torch.exp(-(z[:, None] - z).square().sum(-1) / (2 * h2))
    W = -K / h2
    return K, (torch.diag(W.sum(1)) - W)[None], z


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_rows_of_B_sum_to_zero(estimator):
    K, L, _ = matrices()
    sums = estimator(K, L).sum(-1)
    torch.testing.assert_close(sums, torch.zeros(1, 6), rtol=0, atol=1e-11)


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_permuted_members_have_permuted_scores(estimator):
    K, L, _ = matrices()
    order = torch.tensor([3, 0, 5, 1, 4, 2])
    B = estimator(K, L)
    permuted = estimator(K[order][:, order], L[:, order][:, :, order])
    torch.testing.assert_close(permuted, B[:, order][:, :, order], rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_sites_share_one_inverse(estimator):
    K, L, _ = matrices()
    B = estimator(K, torch.cat([L, 2 * L, -L]))
    torch.testing.assert_close(B, torch.cat([B[:1], 2 * B[:1], -B[:1]]))


@pytest.mark.parametrize("estimator", EVERY, ids=repr)
def test_coincident_members_are_finite(estimator):
    z = torch.tensor([[0.0], [0.0], [1.0], [1.0], [1.0], [3.0]])
    K = torch.exp(-(z - z.mT).square() / 2)
    L = (torch.diag(-K.sum(1)) + K)[None]
    score = estimator(K, L)[0] @ z
    assert score.isfinite().all()
    torch.testing.assert_close(score[0], score[1], rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(score[2], score[4], rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("estimator", "literal"),
    [
        (KDE(), lambda K, G: reference.kde_score(K, G)),
        (SGE(0.3), lambda K, G: reference.sge_score(K, G, 0.3)),
        (SSGE(share=1.0, eta=0.3), lambda K, G: reference.ssge_score(K, G, 0.3)),
        (SSGE(share=0.8), lambda K, G: reference.ssge_score(K, G, 0.0, share=0.8)),
    ],
)
def test_scores_as_written_in_the_book(estimator, literal):
    K, L, z = matrices()
    G = reference.summed_gradient(z, reference.rbf, 0.5)
    torch.testing.assert_close(L[0] @ z, G, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(estimator(K, L)[0] @ z, literal(K, G), rtol=1e-9, atol=1e-10)


def test_ssge_with_a_ridge_is_a_filter_of_the_spectrum():
    K, L, z = matrices()
    R = K @ torch.linalg.matrix_power(torch.linalg.inv(K + 0.01 * torch.eye(6)), 2)
    B = SSGE(share=1.0, eta=0.01)(K, L)
    torch.testing.assert_close(B[0], R @ L[0], rtol=1e-9, atol=1e-10)


def test_all_eigenpairs_and_no_ridge_make_ssge_and_sge_one():
    K, L, _ = matrices()
    spectral, plain = SSGE(share=1.0, eta=0.0)(K, L), SGE(0.0)(K, L)
    torch.testing.assert_close(spectral, plain, rtol=1e-9, atol=1e-9)


def test_sge_is_svgd_preconditioned():
    """s - SGE(0) = M K^-1 phi_SVGD, with phi_SVGD = (K s - G) / M, for any drives s."""
    K, L, z = matrices()
    s = torch.randn(6, 3, generator=torch.Generator().manual_seed(9))
    mix, B = shoal.flows.Stein()(K, L, torch.tensor(6))
    phi = mix @ s - B[0] @ z
    left = s - SGE(0.0)(K, L)[0] @ z
    torch.testing.assert_close(left, 6 * torch.linalg.solve(K, phi), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("pairs", [1, 2, 4])
def test_number_of_eigenpairs(pairs):
    K, L, _ = matrices()
    B = SSGE(share=1.0, pairs=pairs)(K, L)[0]
    assert torch.linalg.matrix_rank(B, rtol=1e-9) <= pairs
    eigenvalues, U = torch.linalg.eigh(K)
    lead = U[:, -pairs:] / eigenvalues[-pairs:]
    torch.testing.assert_close(B, lead @ U[:, -pairs:].mT @ L[0], rtol=1e-9, atol=1e-10)


def test_share_keeps_the_fewest_pairs_that_carry_it():
    K = torch.diag(torch.tensor([6.0, 3.0, 0.9, 0.1]))
    L = torch.eye(4)[None]
    for share, kept in [(0.5, 1), (0.6, 1), (0.61, 2), (0.9, 2), (0.95, 3), (0.999, 4), (1.0, 4)]:
        assert (SSGE(share=share)(K, L)[0].diagonal() != 0).sum() == kept


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: SGE(-0.1), "eta must be zero or positive"),
        (lambda: SSGE(share=0.0), "share must lie in"),
        (lambda: SSGE(share=1.1), "share must lie in"),
        (lambda: SSGE(pairs=0), "pairs must be at least 1"),
        (lambda: SSGE(eta=-1.0), "eta must be zero or positive"),
    ],
)
def test_senseless_settings_are_refused(make, sentence):
    with pytest.raises(ConfigError, match=sentence):
        make()


def test_flows():
    K, L, _ = matrices()
    mix, B = shoal.flows.Wasserstein(KDE())(K, L, torch.tensor(6))
    assert mix is None
    torch.testing.assert_close(B[0], torch.diag(1 / K.sum(1)) @ L[0])
    mix, B = shoal.flows.Stein()(K, L, torch.tensor(6))
    torch.testing.assert_close(mix, K / 6)
    torch.testing.assert_close(B, L / 6)

"""Eigenpairs and solutions of matrices as small as an ensemble."""

import pytest
import torch
from triton_ready import runs_kernels

from shoal.engine.kernels import small_matrices as small

kernels = runs_kernels(small.small_kernels)
SIZES = [1, 2, 3, 5, 16, 17, 33]


def kernel_matrix(members, kind):
    generator = torch.Generator().manual_seed(members)
    x = torch.randn(members, 7, generator=generator)
    wide, singular = torch.exp(-torch.cdist(x, x).square() / 14), x @ x.mT
    return {"wide": wide, "singular": singular, "ones": torch.ones_like(wide)}[kind]


def check(eigenvalues, U, K):
    scale = float(K.diagonal().sum())
    torch.testing.assert_close((U * eigenvalues) @ U.mT, K, rtol=0, atol=1e-5 * scale)
    torch.testing.assert_close(U.mT @ U, torch.eye(len(K)), rtol=0, atol=2e-5)
    exact = torch.linalg.eigvalsh(K.double()).flip(-1).float()
    torch.testing.assert_close(eigenvalues, exact, rtol=0, atol=1e-5 * scale)


@pytest.mark.parametrize("kind", ["wide", "singular", "ones"])
@pytest.mark.parametrize("members", SIZES)
def test_eigenpairs_give_the_matrix_back_largest_first(members, kind):
    K = kernel_matrix(members, kind)
    check(*small.eigenpairs(K), K)


@kernels
@pytest.mark.filterwarnings("ignore:overflow")
@pytest.mark.parametrize("kind", ["wide", "singular", "ones"])
@pytest.mark.parametrize("members", SIZES)
def test_the_kernel_finds_the_same_eigenpairs(members, kind):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    K = kernel_matrix(members, kind)
    values, vectors = (t.cpu() for t in small.small_kernels.eigenpairs(K.to(device)))
    order = values.argsort(descending=True)
    check(values[order], vectors[:, order], K)


@kernels
@pytest.mark.parametrize("members", SIZES)
def test_the_kernel_inverts(members):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    K = kernel_matrix(members, "wide") + 0.1 * torch.eye(members)
    found = small.small_kernels.inverse(K.to(device)).cpu()
    torch.testing.assert_close(found @ K, torch.eye(members), rtol=0, atol=1e-4)


@pytest.mark.parametrize("members", SIZES)
def test_solving_is_the_inverse_times_every_site(members):
    K = (kernel_matrix(members, "wide") + 0.1 * torch.eye(members)).double()
    L = torch.randn(3, members, members, dtype=torch.float64)
    torch.testing.assert_close(K @ small.solve(K, L), L)

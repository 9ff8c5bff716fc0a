"""The two products with the coordinates: by matrix products, and by kernels where Triton runs."""

import pytest
import torch
from triton_ready import runs_kernels

from shoal.interaction import cloud

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def kernels(test):
    """A test of kernels; Triton's interpreter warns about conversions and about NaN."""
    for warning in ("invalid value", "Conversion of an array"):
        test = pytest.mark.filterwarnings(f"ignore:{warning}")(test)
    return runs_kernels(cloud.cloud_kernels)(test)


WIDTHS = (784, 100, 10, 16, 1, 7, 129, 256, 64, 2100)
"""More than one launch serves; aligned and not, shorter than a strip and longer."""


def problem(members):
    generator = torch.Generator().manual_seed(members)
    leaves = [torch.randn(members, 1, width, generator=generator) for width in WIDTHS]
    drives = [torch.randn(members, width, generator=generator) for width in WIDTHS]
    B = torch.randn(members, members, generator=generator)
    alive = torch.ones(members, dtype=torch.bool)
    alive[1] = False
    B[:, 1] = 0.0  # nothing comes from the dead
    return leaves, drives, B, alive


def centred(leaves, alive):
    z = torch.cat([leaf[:, 0] for leaf in leaves], 1).double()
    return torch.where(alive[:, None], z - z[alive].mean(0), 0.0)


def assert_same_products(gram, z):
    """Equal to eight roundings of the largest product."""
    exact = z @ z.mT
    atol = 8 * torch.finfo(gram.dtype).eps * float(exact.abs().max())
    torch.testing.assert_close(gram.double(), exact, rtol=0, atol=atol)


def moved_to(device, *trees):
    return [[t.to(device) for t in x] if isinstance(x, list) else x.to(device) for x in trees]


@pytest.mark.parametrize("members", [3, 10, 20])
def test_products_of_centred_coordinates(members):
    leaves, drives, B, alive = problem(members)
    z, found = centred(leaves, alive), cloud.Cloud.of(leaves, alive)
    assert_same_products(found.gram[0], z)
    d = torch.cat(drives, 1).double()
    moved, lengths = found.added_to(drives, B[None], 0.5)
    torch.testing.assert_close(
        torch.cat(moved, 1).double(), d + 0.5 * B.double() @ z, rtol=0, atol=1e-4
    )
    torch.testing.assert_close(lengths.double(), d.norm(dim=1), rtol=1e-5, atol=0)


def test_strips_of_any_width_give_the_same_products(monkeypatch):
    leaves, drives, B, alive = problem(20)
    z, d = centred(leaves, alive), torch.cat(drives, 1).double()
    for numbers in (1, 2_000, 10**9):  # 64 coordinates at least, 100, all
        monkeypatch.setattr(cloud.cloud_blocks, "STRIP", numbers)
        gram, found = cloud.cloud_blocks.gram(leaves, alive)
        assert torch.equal(found, alive)
        assert_same_products(gram[0], z)
        own = [drive.clone() for drive in drives]
        moved, lengths = cloud.cloud_blocks.plus_product(own, B, leaves, alive, 0.5)
        want = d + 0.5 * B.double() @ z
        torch.testing.assert_close(torch.cat(moved, 1).double(), want, rtol=0, atol=1e-4)
        torch.testing.assert_close(lengths.double(), d.norm(dim=1), rtol=1e-5, atol=0)


def test_members_that_lie_close_together_keep_their_distances():
    generator = torch.Generator().manual_seed(0)
    apart = torch.randn(4, 1, 500, generator=generator, dtype=torch.float64)
    near = (100 + 1e-3 * apart).float()
    gram = cloud.Cloud.of([near], torch.ones(4, dtype=torch.bool)).gram[0].double()
    found = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    exact = torch.cdist(near[:, 0].double(), near[:, 0].double()).square()
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("far", range(4))
def test_one_member_far_away_does_not_blur_the_others(far):
    generator = torch.Generator().manual_seed(0)
    points = torch.randn(4, 1, 500, generator=generator)
    points[far] += 1e3
    alive = torch.ones(4, dtype=torch.bool)
    gram = cloud.cloud_blocks.gram([points], alive)[0][0].double()
    found = gram.diagonal()[:, None] + gram.diagonal() - 2 * gram
    exact = torch.cdist(points[:, 0].double(), points[:, 0].double()).square()
    rest = [i for i in range(4) if i != far]
    rounding = 4 * torch.finfo(torch.float32).eps * float(gram.max())
    torch.testing.assert_close(found[rest][:, rest], exact[rest][:, rest], rtol=0, atol=rounding)


def test_members_that_lie_close_together_are_pushed_exactly():
    generator = torch.Generator().manual_seed(0)
    near = (100 + 1e-3 * torch.randn(4, 1, 500, generator=generator, dtype=torch.float64)).float()
    B = torch.randn(4, 4, generator=generator)  # its rows need not sum to zero
    alive = torch.ones(4, dtype=torch.bool)
    found = cloud.Cloud.of([near], alive).added_to([torch.zeros(4, 500)], B[None], 2.0)[0][0]
    exact = 2.0 * B.double() @ centred([near], alive)
    torch.testing.assert_close(found.double(), exact, rtol=0, atol=1e-5 * float(exact.abs().max()))


def test_nobody_alive_is_no_error():
    leaves, drives, B, alive = problem(3)
    gram, found = cloud.cloud_blocks.gram(leaves, alive & False)
    assert not gram.any() and not found.any()
    moved, _ = cloud.cloud_blocks.plus_product([d.clone() for d in drives], B, leaves, found, 0.5)
    assert all(torch.equal(m, d) for m, d in zip(moved, drives, strict=True))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_members_that_are_not_finite_are_left_out(value):
    leaves, drives, B, alive = problem(5)
    leaves[4][2] = value
    B[:, 2] = 0.0
    rest = torch.tensor([True, False, False, True, True])
    z, found = centred(leaves, rest), cloud.Cloud.of(leaves, alive)
    assert torch.equal(found.alive, rest)
    assert_same_products(found.gram[0], z)
    want = torch.cat(drives, 1).double() + 0.5 * B.double() @ z
    moved, _ = found.added_to(drives, B[None], 0.5)
    torch.testing.assert_close(torch.cat(moved, 1).double(), want, rtol=0, atol=1e-4)


@kernels
@pytest.mark.parametrize("members", [3, 10, 20])
def test_kernels_give_the_same_products(members):
    leaves, drives, B, alive = problem(members)
    z, d = centred(leaves, alive), torch.cat(drives, 1).double()
    leaves, drives, B, alive = moved_to(DEVICE, leaves, drives, B, alive)
    gram, found = cloud.cloud_kernels.gram(leaves, alive)
    assert torch.equal(found, alive)
    torch.testing.assert_close(gram[0].cpu().double(), z @ z.mT, rtol=0, atol=2e-3)
    moved, lengths = cloud.cloud_kernels.plus_product(drives, B, leaves, alive, 0.5)
    want = d + 0.5 * B.cpu().double() @ z
    torch.testing.assert_close(torch.cat(moved, 1).cpu().double(), want, rtol=0, atol=1e-3)
    torch.testing.assert_close(lengths.cpu().double(), d.norm(dim=1), rtol=1e-5, atol=0)


@kernels
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_kernels_leave_out_members_that_are_not_finite(value):
    leaves, _, _, alive = problem(5)
    leaves[4][2] = value
    (leaves, alive) = moved_to(DEVICE, leaves, alive)
    gram, found = cloud.cloud_kernels.gram(leaves, alive)
    assert found.tolist() == [True, False, False, True, True]
    assert gram.isfinite().all() and not gram[0, 2].any()


@kernels
@pytest.mark.parametrize("frozen", [0, 4])
@pytest.mark.parametrize("multiples", [False, True])
def test_kernels_add_multiples_of_the_trained_members(frozen, multiples):
    leaves, drives, B, alive = problem(10)
    B, drives = B[frozen:], [drive[frozen:] for drive in drives]
    factors = [-0.1 * (1 + i) for i in range(len(leaves))]
    own = torch.cat([f * leaf[frozen:, 0] for f, leaf in zip(factors, leaves, strict=True)], 1)
    d = torch.cat(drives, 1).double() + (own.double() if multiples else 0.0)
    want = d + 0.5 * B.double() @ centred(leaves, alive)
    given = moved_to(DEVICE, drives, B, leaves, alive)
    moved, lengths = cloud.cloud_kernels.plus_product(*given, 0.5, factors if multiples else None)
    torch.testing.assert_close(torch.cat(moved, 1).cpu().double(), want, rtol=0, atol=1e-3)
    torch.testing.assert_close(lengths.cpu().double(), d.norm(dim=1), rtol=1e-5, atol=0)


@kernels
def test_many_programs_share_the_strips(monkeypatch):
    monkeypatch.setattr(cloud.cloud_kernels, "PROGRAMS", 3)
    leaves, drives, B, alive = problem(20)
    z, d = centred(leaves, alive), torch.cat(drives, 1).double()
    leaves, drives, B, alive = moved_to(DEVICE, leaves, drives, B, alive)
    gram, _ = cloud.cloud_kernels.gram(leaves, alive)
    torch.testing.assert_close(gram[0].cpu().double(), z @ z.mT, rtol=0, atol=2e-3)
    moved, _ = cloud.cloud_kernels.plus_product(drives, B, leaves, alive, 0.5)
    want = d + 0.5 * B.cpu().double() @ z
    torch.testing.assert_close(torch.cat(moved, 1).cpu().double(), want, rtol=0, atol=1e-3)

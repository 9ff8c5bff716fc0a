"""Rotation of images against its geometry."""

import pytest
import torch

from shoal.core.errors import DataError
from shoal.core.random import generator
from shoal.data.sets.images import rotated, signs


def images(*shape: int) -> torch.Tensor:
    return torch.rand(*shape, generator=generator(0, "images"), dtype=torch.float64)


@pytest.mark.parametrize("degrees", [0.0, 360.0, -720.0])
@pytest.mark.parametrize("shape", [(3, 2, 8, 8), (2, 1, 5, 9)])
def test_whole_turns_change_nothing(degrees, shape):
    x = images(*shape)
    torch.testing.assert_close(rotated(x, degrees), x, atol=1e-12, rtol=0)


@pytest.mark.parametrize("quarters", [1, 2, 3])
def test_quarter_turns_permute_pixels_anticlockwise(quarters):
    x = images(2, 3, 8, 8)
    expected = torch.rot90(x, quarters, dims=(2, 3))
    torch.testing.assert_close(rotated(x, 90.0 * quarters), expected, atol=1e-12, rtol=0)


def test_half_turn_of_an_oblong_image():
    x = images(2, 1, 4, 7)
    torch.testing.assert_close(rotated(x, 180.0), x.flip(2, 3), atol=1e-12, rtol=0)


def test_a_point_of_an_oblong_image_moves_on_a_circle():
    """A narrow bump three pixels right of the centre goes to angle a on the circle of radius 3."""
    height, width = 21, 31
    y, x = torch.meshgrid(
        torch.arange(height, dtype=torch.float64) - 10,
        torch.arange(width, dtype=torch.float64) - 15,
        indexing="ij",
    )
    bump = torch.exp(-((x - 3) ** 2 + y**2) / 4)[None, None]
    for degrees in (30.0, 135.0):
        out = rotated(bump, degrees)[0, 0]
        angle = torch.tensor(degrees, dtype=torch.float64).deg2rad()
        assert abs((out * x).sum() / out.sum() - 3 * angle.cos()) < 0.02
        assert abs((out * y).sum() / out.sum() + 3 * angle.sin()) < 0.02


def test_each_image_has_its_own_angle():
    x = images(3, 1, 8, 8)
    degrees = torch.tensor([10.0, -40.0, 0.0])
    one_by_one = [rotated(x[i : i + 1], float(degrees[i])) for i in range(3)]
    torch.testing.assert_close(rotated(x, degrees), torch.cat(one_by_one))


def test_nothing_comes_in_from_outside():
    x = torch.ones(1, 1, 8, 8)
    assert rotated(x, 45.0)[0, 0, 0, 0] == 0


def test_refuses_what_is_not_images():
    with pytest.raises(DataError, match=r"only images \[B, C, H, W\] can be rotated"):
        rotated(torch.zeros(3, 64), 10.0)


def test_signs_are_fair_and_seeded():
    s = signs(1000, generator(3))
    assert set(s.tolist()) == {-1.0, 1.0}
    assert abs(s.mean()) < 5 / 1000**0.5
    assert torch.equal(s, signs(1000, generator(3)))

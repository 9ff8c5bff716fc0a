"""Mild shifts: closed forms of each, and inputs that have none."""

import pytest
import torch

from shoal.data.sets.mild_shifts import (
    CONTRAST,
    NOISE,
    blurred,
    flatter,
    mild_shifts,
    noisy,
    translated,
)


def test_noise_has_the_scale_of_each_column():
    scales = torch.tensor([0.1, 1.0, 50.0, 0.0])
    x = torch.randn(20_000, 4, generator=torch.Generator().manual_seed(0)) * scales
    added = noisy(x, seed=0) - x
    assert added.std(0).tolist() == pytest.approx((NOISE * x.std(0)).tolist(), rel=0.03, abs=1e-6)
    assert added.mean(0).abs().lt(0.02 * scales + 1e-6).all()


def test_noise_of_images_has_the_scale_of_each_channel():
    x = torch.randn(200, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    x[:, 1] *= 10
    added = noisy(x, seed=0) - x
    assert added.std((0, 2, 3)).tolist() == pytest.approx([NOISE, 10 * NOISE], rel=0.05)


def test_the_seed_fixes_the_noise():
    x = torch.rand(8, 3)
    assert torch.equal(noisy(x, 1), noisy(x, 1))
    assert not torch.equal(noisy(x, 1), noisy(x, 2))


def test_translation_moves_a_pixel_by_a_tenth_of_the_side():
    x = torch.zeros(1, 1, 20, 10)
    x[0, 0, 5, 5] = 1
    moved = translated(x)
    assert moved[0, 0, 7, 6] == 1
    assert moved.sum() == 1


def test_translation_repeats_the_border():
    x = torch.arange(10.0).expand(1, 1, 10, 10)
    assert translated(x)[0, 0, 0].tolist() == [0, *range(9)]


def test_contrast_keeps_the_mean_and_shrinks_the_differences():
    x = torch.rand(3, 2, 6, 6)
    found = flatter(x)
    torch.testing.assert_close(found.mean((-2, -1)), x.mean((-2, -1)))
    torch.testing.assert_close(found.std((-2, -1)), CONTRAST * x.std((-2, -1)))


def test_blur_spreads_a_pixel_over_nine():
    x = torch.zeros(1, 1, 5, 5)
    x[0, 0, 2, 2] = 9
    expected = torch.zeros(5, 5)
    expected[1:4, 1:4] = 1
    torch.testing.assert_close(blurred(x)[0, 0], expected)
    torch.testing.assert_close(blurred(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))


@pytest.mark.parametrize("x", [torch.arange(6).view(3, 2), torch.rand(5), torch.rand(1, 3), "text"])
def test_inputs_that_are_no_table_of_real_numbers_have_no_copies(x):
    assert mild_shifts(x, seed=0) == {}

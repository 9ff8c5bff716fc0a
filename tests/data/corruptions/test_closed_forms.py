"""Corruptions against their formulas, and against the libraries they were published with."""

import colorsys
import math

import numpy as np
import pytest
import torch

from shoal.data.corruptions import blur, corrupt
from shoal.data.corruptions.blur import disc
from shoal.data.corruptions.filters import blurred, luminance, motion_blurred, zoomed
from shoal.data.corruptions.noise import poisson
from shoal.data.corruptions.registry import Draws
from shoal.data.corruptions.weather import ice, plasma

GAUSSIAN = (0.04, 0.06, 0.08, 0.09, 0.10)


def flat(value, count=40, channels=3, side=32):
    return torch.full((count, channels, side, side), value)


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_gaussian_noise_has_the_published_moments(severity):
    noise = corrupt(flat(0.5), "gaussian-noise", severity) - 0.5
    wanted = GAUSSIAN[severity - 1]
    count = noise.numel()
    assert abs(float(noise.mean())) < 5 * wanted / math.sqrt(count)
    assert float(noise.std()) == pytest.approx(wanted, rel=5 / math.sqrt(2 * count))
    kurtosis = float((noise / noise.std()).pow(4).mean())
    assert kurtosis == pytest.approx(3, abs=5 * math.sqrt(24 / count) + 0.01)


@pytest.mark.parametrize("value", [0.25, 0.5])
def test_speckle_noise_grows_with_the_light(value):
    noise = corrupt(flat(value), "speckle-noise", 5) - value
    assert float(noise.std()) == pytest.approx(0.2 * value, rel=0.02)


@pytest.mark.parametrize("severity, photons", [(1, 500), (5, 50)])
def test_shot_noise_is_a_count_of_photons(severity, photons):
    counts = corrupt(flat(0.4), "shot-noise", severity) * photons
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    rate, n = 0.4 * photons, counts.numel()
    assert float(counts.mean()) == pytest.approx(rate, abs=5 * math.sqrt(rate / n))
    assert float(counts.var()) == pytest.approx(rate, rel=0.03)


def test_poisson_counts_are_the_quantiles():
    special = pytest.importorskip("scipy.stats")
    random = torch.Generator().manual_seed(0)
    u = torch.rand(20_000, generator=random, dtype=torch.float64)
    u[:4] = torch.tensor([1e-12, 1 - 1e-12, 1e-6, 1 - 1e-6], dtype=u.dtype)
    for scale in (0.0, 1e-9, 1e-3, 0.5, 5.0, 50.0, 500.0):
        rate = scale * torch.rand(len(u), generator=random, dtype=torch.float64)
        wanted = special.poisson.ppf(u.numpy(), rate.numpy())
        assert np.array_equal(poisson(rate, u).numpy(), wanted)


@pytest.mark.parametrize("severity, share", [(1, 0.01), (3, 0.03), (5, 0.07)])
def test_impulses_are_as_many_as_published_half_of_them_white(severity, share):
    y = corrupt(flat(0.5), "impulse-noise", severity)
    n = y.numel()
    for value in (0.0, 1.0):
        found = float((y == value).double().mean())
        assert found == pytest.approx(share / 2, abs=5 * math.sqrt(share / 2 / n))
    assert ((y == 0) | (y == 1) | (y == 0.5)).all()


@pytest.mark.parametrize("severity, more", [(1, 0.05), (5, 0.3)])
def test_brightness_is_hsv_value(severity, more, colour):
    y = corrupt(colour[:1], "brightness", severity)[0]
    for row, column in ((3, 5), (10, 10), (20, 20)):
        hue, saturation, value = colorsys.rgb_to_hsv(*colour[0, :, row, column].tolist())
        wanted = colorsys.hsv_to_rgb(hue, saturation, min(value + more, 1))
        assert y[:, row, column].tolist() == pytest.approx(wanted, abs=1e-5)
    grey = luminance(colour[:2])
    torch.testing.assert_close(corrupt(grey, "brightness", severity), (grey + more).clamp(max=1))
    torch.testing.assert_close(corrupt(flat(0.0), "brightness", severity), flat(more))


@pytest.mark.parametrize("severity, factor, more", [(1, 0.3, 0.0), (4, 2.0, 0.1), (5, 2.5, 0.2)])
def test_saturate_is_hsv_saturation(severity, factor, more, colour):
    x = colour[:1].clone()
    x[0, :, 0, 0] = 0.6  # without a hue
    y = corrupt(x, "saturate", severity)[0]
    for row, column in ((0, 0), (3, 5), (10, 10), (29, 2)):
        hue, saturation, value = colorsys.rgb_to_hsv(*x[0, :, row, column].tolist())
        wanted = colorsys.hsv_to_rgb(hue, min(factor * saturation + more, 1), value)
        assert y[:, row, column].tolist() == pytest.approx(wanted, abs=1e-5)
    grey = luminance(colour)
    assert torch.equal(corrupt(grey, "saturate", severity), grey)


@pytest.mark.parametrize("severity, keep", [(1, 0.75), (5, 0.15)])
def test_contrast_shrinks_towards_the_mean_of_each_channel(severity, keep, colour):
    mean = colour.mean((2, 3), keepdim=True)
    wanted = (colour - mean) * keep + mean
    torch.testing.assert_close(corrupt(colour, "contrast", severity), wanted)


BLURS = ["gaussian-blur", "defocus-blur", "glass-blur", "motion-blur", "zoom-blur"]


@pytest.mark.parametrize("name", [*BLURS, "elastic-transform", "pixelate", "contrast"])
def test_a_flat_image_stays(name):
    for severity in (1, 5):
        torch.testing.assert_close(corrupt(flat(0.3, 2), name, severity), flat(0.3, 2))


def test_gaussian_blur_keeps_the_mean_of_what_is_far_from_the_border():
    x = torch.zeros(1, 3, 32, 32, dtype=torch.float64)
    x[..., 16, 16] = 1
    y = corrupt(x, "gaussian-blur", 5)
    torch.testing.assert_close(y.sum((2, 3)), torch.ones(1, 3, dtype=torch.float64))
    offset = torch.arange(32, dtype=torch.float64) - 16
    spread = (y[0, 0].sum(0) * offset.square()).sum()
    assert float(spread) == pytest.approx(1.0, abs=1e-2)


@pytest.mark.parametrize("border", ["nearest", "reflect"])
@pytest.mark.parametrize("sigma", [0.05, 0.4, 1.0, 6.4])
def test_gaussian_blur_is_that_of_scipy(sigma, border, colour):
    ndimage = pytest.importorskip("scipy.ndimage")
    image = colour[0, 0].double()
    wanted = ndimage.gaussian_filter(image.numpy(), sigma, mode=border, truncate=3.0)
    found = blurred(image[None, None], sigma, 3.0, border)[0, 0]
    np.testing.assert_allclose(found.numpy(), wanted, atol=1e-7)


@pytest.mark.parametrize("factor", [1.0, 1.01, 1.05, 1.25, 2.25])
def test_zoom_is_that_of_scipy(factor, colour):
    ndimage = pytest.importorskip("scipy.ndimage")
    image = colour[0, 0].double().numpy()
    kept = math.ceil(32 / factor)
    start = (32 - kept) // 2
    large = ndimage.zoom(image[start : start + kept, start : start + kept], factor, order=1)
    trim = (len(large) - 32) // 2
    wanted = large[trim : trim + 32, trim : trim + 32]
    np.testing.assert_allclose(zoomed(colour[:1, :1].double(), factor)[0, 0], wanted, atol=1e-6)


def test_disc_of_the_largest_radius_is_nearly_the_mean_of_nine():
    kernel = disc(1.5, 0.1)
    wanted = torch.zeros(5, 5, dtype=torch.float64)
    wanted[1:4, 1:4] = 1 / 9
    torch.testing.assert_close(kernel, wanted, atol=1e-12, rtol=0)
    side = math.exp(-0.5 / 0.4**2)
    assert float(disc(0.3, 0.4)[1, 1]) == pytest.approx((1 / (1 + 2 * side)) ** 2)


def test_motion_blur_smears_along_its_line():
    x = torch.zeros(3, 1, 21, 21, dtype=torch.float64)
    x[..., 10, 10] = 1
    y = motion_blurred(x, 4, 2.0, torch.tensor([0.0, 90.0, 45.0], dtype=torch.float64))
    weight = torch.exp(-0.5 * (torch.arange(9.0, dtype=torch.float64) / 2).square())
    weight /= weight.sum()
    torch.testing.assert_close(y[0, 0, 10, 2:11].flip(0), weight)
    torch.testing.assert_close(y[1, 0, 2:11, 10].flip(0), weight)
    diagonal = y[2, 0].diagonal()
    assert float(diagonal.sum()) == pytest.approx(1)
    assert float(diagonal[10]) == pytest.approx(float(weight[0]))


@pytest.mark.parametrize(("severity", "passes"), [(1, 1), (4, 2)])
def test_glass_is_what_the_published_swaps_of_views_do(severity, passes, monkeypatch):
    """Without the blurs around them; a view that is written to is another view's new value."""
    monkeypatch.setattr(blur, "blurred", lambda images, sigma: images)
    numbers = torch.arange(3.0 * 32 * 32).div(3071).view(1, 3, 32, 32).repeat(4, 1, 1, 1)
    found = corrupt(numbers, "glass-blur", severity, seed=5)
    draws = Draws(5, f"glass-blur-{severity}", torch.arange(4))
    wanted = numbers.clone().permute(0, 2, 3, 1).contiguous().numpy()
    for number in range(passes):
        moves = draws.uniform(f"pass {number}", 2, 32, 32, low=-1, high=1).floor().long().numpy()
        assert set(np.unique(moves)) == {-1, 0}
        for x, (up, left) in zip(wanted, moves, strict=True):
            for h in range(31, 1, -1):
                for w in range(31, 1, -1):
                    there = h + up[h, w], w + left[h, w]
                    x[h, w], x[there] = x[there], x[h, w]
    torch.testing.assert_close(found, torch.from_numpy(wanted).permute(0, 3, 1, 2))


def test_plasma_fills_the_unit_interval_and_repeats_at_its_edges():
    clouds = plasma(Draws(0, "fog-1", torch.arange(6)), 32, 32, 2.0)
    assert clouds.amin((1, 2)).tolist() == [0] * 6
    assert clouds.amax((1, 2)).tolist() == [1] * 6
    inside = (clouds[:, :, 1:] - clouds[:, :, :-1]).square().mean()
    across = (clouds[:, :, 0] - clouds[:, :, -1]).square().mean()
    assert float(across) < 3 * float(inside)


def test_fog_follows_its_clouds(colour):
    clouds = plasma(Draws(7, "fog-2", torch.arange(len(colour))), 32, 32, 3.0).float()
    brightest = colour.amax((1, 2, 3), keepdim=True)
    wanted = (colour + 0.5 * clouds[:, None]) * brightest / (brightest + 0.5)
    torch.testing.assert_close(corrupt(colour, "fog", 2, seed=7), wanted)


def test_frost_is_a_pale_bluish_layer():
    pane = ice(Draws(0, "frost-1", torch.arange(200)), 32, 32)
    assert pane.min() >= 0 and pane.max() <= 1
    assert 0.4 < float(pane.mean()) < 0.6
    red, green, blue = pane.mean((0, 2, 3)).tolist()
    assert red < green < blue
    black = corrupt(flat(0.0, 200), "frost", 3)
    wanted = 0.4 * ice(Draws(0, "frost-3", torch.arange(200)), 32, 32).float()
    torch.testing.assert_close(black, wanted)


def test_snow_only_brightens(colour):
    for severity in (1, 5):
        assert (corrupt(colour, "snow", severity) >= colour - 1e-6).all()


def test_spatter_is_water_that_brightens_then_mud_that_covers():
    grey = flat(0.5, 20)
    water = corrupt(grey, "spatter", 3)
    drops = (water != grey).any(1)
    assert (water >= grey).all()
    assert 0.1 < float(drops.double().mean()) < 0.6
    mud = corrupt(grey, "spatter", 5)
    assert (mud <= grey + 1e-6).all()
    darkest = mud.flatten(2).amin(2).amin(0)
    torch.testing.assert_close(darkest, torch.tensor([63, 42, 20]) / 255, atol=0.03, rtol=0)


def test_elastic_keeps_what_is_linear_linear():
    """An affine map of a ramp is a ramp: its second differences vanish away from the border."""
    ramp = (torch.arange(32.0, dtype=torch.float64) / 62).expand(6, 1, 32, 32) + 0.2
    inner = corrupt(ramp, "elastic-transform", 1)[..., 8:24, 8:24]
    second = inner[..., 2:] - 2 * inner[..., 1:-1] + inner[..., :-2]
    assert float(second.abs().max()) < 1e-9
    assert float((inner - ramp[..., 8:24, 8:24]).abs().max()) > 1e-3

"""Pixelate and JPEG beside the library that the published files were made with."""

import io

import numpy as np
import pytest
import torch

from shoal.data.corruptions import corrupt
from shoal.data.corruptions.digital import box, compressed, cosines

QUALITIES = (80, 65, 58, 50, 40)


def bytes_of(image):
    array = (255 * image).round().permute(1, 2, 0).to(torch.uint8).numpy()
    return array[..., 0] if array.shape[-1] == 1 else array


def tensor_of(picture):
    array = np.asarray(picture)
    array = array[..., None] if array.ndim == 2 else array
    return torch.from_numpy(array.copy()).permute(2, 0, 1).float() / 255


@pytest.mark.parametrize("severity", [1, 2, 3, 4, 5])
def test_jpeg_is_that_of_pillow(severity, images):
    Image = pytest.importorskip("PIL.Image")
    ours, theirs = corrupt(images, "jpeg-compression", severity), []
    for image in images:
        file = io.BytesIO()
        Image.fromarray(bytes_of(image)).save(file, "JPEG", quality=QUALITIES[severity - 1])
        theirs.append(tensor_of(Image.open(file)))
    # the integers of the library round a frequency half-way between two steps to either of them
    error = 255 * (ours - torch.stack(theirs)).abs()
    loss = 255 * (ours - images).abs()
    assert float(error.mean()) < 0.3
    assert float(error.flatten().quantile(0.9)) <= 1
    assert float(error.mean()) < float(loss.mean()) / 8


def test_the_cosine_transform_is_orthonormal():
    waves = cosines()
    torch.testing.assert_close(waves @ waves.T, torch.eye(8, dtype=torch.float64))
    ramp = waves @ torch.ones(8, dtype=torch.float64)
    torch.testing.assert_close(ramp, torch.eye(8, dtype=torch.float64)[0] * 8**0.5)


def test_the_finest_quality_loses_hardly_anything(colour):
    grey = colour[:, :1]
    assert float((compressed(grey, 100) - grey).abs().max()) < 2 / 255


@pytest.mark.parametrize("severity, share", [(1, 0.95), (3, 0.85), (5, 0.65)])
def test_pixelate_is_that_of_pillow(severity, share, images):
    Image = pytest.importorskip("PIL.Image")
    side = images.shape[-1]
    small = int(share * side)
    ours = corrupt(images, "pixelate", severity)
    for image, found in zip(images[:6], ours, strict=False):
        picture = Image.fromarray(bytes_of(image))
        coarse = picture.resize((small, small), Image.Resampling.BOX)
        wanted = tensor_of(coarse.resize((side, side), Image.Resampling.BOX))
        assert float((found - wanted).abs().max()) * 255 < 1.6


def test_pixelate_has_no_more_values_than_coarse_pixels():
    x = torch.rand(1, 1, 32, 32)
    y = corrupt(x, "pixelate", 5)
    assert len(y.unique()) <= int(0.65 * 32) ** 2
    rows = [bool((y[0, 0, i] == y[0, 0, i + 1]).all()) for i in range(31)]
    assert sum(rows) == 32 - int(0.65 * 32)


@pytest.mark.parametrize("size, side", [(30, 32), (5, 7), (32, 20), (8, 8)])
def test_resizing_keeps_constants(size, side):
    torch.testing.assert_close(box(size, side).sum(1), torch.ones(size))

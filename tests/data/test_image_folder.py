"""Folders of images, whole and damaged."""

import contextlib
import os
import random

import numpy as np
import pytest
import torch
from PIL import Image

from shoal.core.errors import DataError
from shoal.data import load
from shoal.data.load import class_folders, load_file, read_images


def picture(path, array):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.asarray(array, np.uint8)).save(path)


@pytest.fixture
def pets(tmp_path):
    """Two classes of grey 4 x 5 images whose first pixel counts them."""
    for label, name in enumerate(("cat", "dog")):
        for index in range(3):
            image = np.full((4, 5), 50 * label)
            image[0, 0] = 10 * label + index
            picture(tmp_path / "pets" / name / f"{index}.png", image)
    return tmp_path / "pets"


def test_folders_are_classes_in_the_order_of_their_names(pets):
    split = load_file(pets)
    assert split.x.shape == (6, 1, 4, 5)
    assert split.y.tolist() == [0, 0, 0, 1, 1, 1]
    assert (255 * split.x[:, 0, 0, 0]).round().tolist() == [0, 1, 2, 10, 11, 12]
    assert class_folders(pets) == ("cat", "dog")


def test_one_colour_image_makes_all_of_them_coloured(pets):
    picture(pets / "dog" / "9.png", np.tile([[[200, 100, 0]]], (4, 5, 1)))
    split = load_file(pets)
    assert split.x.shape == (7, 3, 4, 5)
    assert (255 * split.x[6, :, 0, 0]).round().tolist() == [200, 100, 0]
    assert (255 * split.x[5, :, 0, 0]).round().tolist() == [12, 12, 12]


def test_images_without_folders_have_no_labels(pets):
    split = load_file(pets / "cat")
    assert split.x.shape == (3, 1, 4, 5) and split.y is None


def test_images_are_brought_to_a_wanted_shape(pets):
    """A constant image stays constant whatever the size; colours become their brightness."""
    picture(pets / "bird" / "0.png", np.full((9, 9, 3), 120))
    split = read_images(pets / "bird", (1, 4, 5))
    assert split.x.shape == (1, 1, 4, 5)
    assert (255 * split.x).round().unique().tolist() == [120]
    with pytest.raises(DataError, match=r"holds images, but inputs have shape \(7,\)"):
        read_images(pets / "bird", (7,))


def test_a_data_set_of_folders(pets, tmp_path):
    picture(tmp_path / "test" / "dog" / "0.png", np.full((4, 5), 50))
    picture(tmp_path / "noise" / "a.png", np.full((8, 8), 3))
    data = load(
        {
            "name": "file",
            "train": str(pets),
            "test": str(tmp_path / "test"),
            "ood": str(tmp_path / "noise"),
        }
    )
    assert (data.name, data.classes, data.outputs) == ("pets", ("cat", "dog"), 2)
    assert data.test is not None and data.test.y.tolist() == [1]
    assert data.ood["noise"].x.shape == (1, 1, 4, 5)


def test_as_ood_set_of_another_data_set(tmp_path):
    picture(tmp_path / "shots" / "a.png", np.full((16, 16, 3), 255))
    data = load({"name": "digits", "ood": [str(tmp_path / "shots")]})
    assert list(data.ood) == ["shots"]
    assert torch.equal(data.ood["shots"].x, torch.ones(1, 1, 8, 8))


def test_a_class_of_the_test_that_is_not_trained_on(pets, tmp_path):
    picture(tmp_path / "test" / "fish" / "0.png", np.zeros((4, 5)))
    with pytest.raises(DataError, match="has a class 'fish' .* they have cat, dog"):
        load({"name": "file", "train": str(pets), "test": str(tmp_path / "test")})


def test_sizes_that_differ_are_named(pets):
    picture(pets / "dog" / "9.png", np.zeros((7, 5)))
    with pytest.raises(DataError, match=r"9.png has 5 x 7 pixels, .*0.png has 5 x 4; resize them"):
        load_file(pets)


@pytest.mark.parametrize("content", [b"", b"not an image", None])
def test_damaged_images_are_named(pets, content):
    path = pets / "cat" / "1.png"
    path.write_bytes(path.read_bytes()[:-20] if content is None else content)
    with pytest.raises(DataError, match="1.png is not an image that can be read") as caught:
        load_file(pets)
    assert "\n" not in str(caught.value)


def test_an_image_that_claims_to_be_huge_is_refused_before_it_is_unpacked(pets):
    """The size stands in the header of a PNG at bytes 16 to 24, followed by a check sum."""
    import struct
    import zlib

    path = pets / "cat" / "1.png"
    data = bytearray(path.read_bytes())
    for size in (9000, 60000):
        data[16:24] = struct.pack(">II", size, size)
        data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
        path.write_bytes(data)
        with pytest.raises(DataError, match=r"1.png (has 9,000 x 9,000 pixels|is not an image)"):
            load_file(pets)


@pytest.mark.parametrize("name", ["pets", "pets/cat/empty"])
def test_folders_without_images(tmp_path, name):
    (tmp_path / name).mkdir(parents=True)
    with pytest.raises(DataError, match=r"holds no images \(.png"):
        load_file(tmp_path / "pets")


def deep_images(folder, values):
    """The same grey image of 16 bits in every format that has such."""
    image = np.asarray(values, np.uint16)
    folder.mkdir()
    Image.fromarray(image).save(folder / "a.png")
    Image.fromarray(image).save(folder / "b.tif")
    Image.fromarray(image.astype(">u2")).save(folder / "c.tif")
    Image.fromarray(image.astype(np.int32)).save(folder / "d.pgm")
    return image


@pytest.mark.parametrize("shape", [None, (1, 2, 3), (3, 2, 3)])
def test_pixels_of_16_bits_are_scaled_and_not_cut_off(tmp_path, shape):
    image = deep_images(tmp_path / "deep", [[0, 255, 256], [32768, 60000, 65535]])
    found = read_images(tmp_path / "deep", shape)
    assert found.x.shape == (4, *(shape or (1, 2, 3)))
    wanted = torch.from_numpy((image / 65535).astype(np.float32)).expand_as(found.x)
    torch.testing.assert_close(found.x, wanted, rtol=0, atol=0.5 / 255 + 1e-6)


def test_a_tiff_of_12_bits_is_scaled_by_its_own_range(tmp_path):
    shades = np.asarray([[0, 2048], [4095, 1024]], np.uint16)
    Image.fromarray(shades).save(tmp_path / "a.tif")
    data = (tmp_path / "a.tif").read_bytes()
    packed = b"".join(  # two pixels of 12 bits in three bytes
        bytes([a >> 4, (a & 15) << 4 | b >> 8, b & 255]) for a, b in shades.tolist()
    )
    tag = np.asarray([258, 3], np.uint16).tobytes() + np.asarray([1], np.uint32).tobytes()
    at = data.index(tag) + len(tag)
    data = data[:at] + bytes([12]) + data[at + 1 :]
    data = data.replace(shades.tobytes(), packed + b"\0\0")
    (tmp_path / "a.tif").write_bytes(data)
    found = read_images(tmp_path).x[0, 0]
    wanted = torch.from_numpy((shades / 4095).astype(np.float32))
    torch.testing.assert_close(found, wanted, rtol=0, atol=0.5 / 255 + 1e-6)


@pytest.mark.parametrize("kind", [np.int32, np.float32])
def test_pixels_of_32_bits_are_refused(tmp_path, kind):
    Image.fromarray(np.ones((2, 2), kind)).save(tmp_path / "a.tif")
    with pytest.raises(DataError, match=r"a\.tif has pixels of 32 bits") as caught:
        read_images(tmp_path)
    assert "\n" not in str(caught.value)


@pytest.mark.timeout(20)
def test_a_pipe_is_not_waited_for(pets):
    os.mkfifo(pets / "cat" / "3.png")
    with pytest.raises(DataError, match=r"3\.png is not an ordinary file"):
        load_file(pets)


@pytest.mark.parametrize("ending", ["png", "tif", "gif", "bmp", "jpg", "webp", "ppm"])
def test_random_damage_gives_an_error_of_ours_or_an_image(tmp_path, ending):
    path, chance = tmp_path / f"a.{ending}", random.Random(ending)
    noise = np.random.default_rng(0).integers(0, 255, (6, 5, 3), np.uint8)
    Image.fromarray(noise).save(path)
    sound = path.read_bytes()
    for _ in range(40):
        data = bytearray(sound)
        for _ in range(chance.randrange(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        path.write_bytes(data[: chance.randrange(1, len(data))] if chance.random() < 0.3 else data)
        with contextlib.suppress(DataError):
            assert read_images(tmp_path, (3, 6, 5)).x.shape == (1, 3, 6, 5)


def test_a_small_file_that_claims_many_pixels_is_refused_before_they_are_unpacked(pets):
    header = b"P6 8000 8000 255\n"
    (pets / "cat" / "3.ppm").write_bytes(header + bytes(90))
    with pytest.raises(DataError, match=r"3\.ppm claims 8,000 x 8,000 pixels in 107 bytes"):
        load_file(pets, shape=(3, 4, 4))

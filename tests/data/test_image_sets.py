"""The image sets, on a few made-up images in place of the published ones."""

import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError, DataError
from shoal.data import load
from shoal.data.files.raw import RAW
from shoal.data.sets.images import flipped, pixel_range, rotated

SIZES = {"mnist": (1, 28), "fashion-mnist": (1, 28), "kmnist": (1, 28), "notmnist": (1, 28)}
SIZES |= {"cifar10": (3, 32), "svhn": (3, 32)}
COUNTS = {"train": 30, "test": 12}


def images(name, part):
    channels, side = SIZES[name]
    seed = sum(map(ord, name + part))
    count = 2100 if name == "notmnist" else COUNTS[part]
    x = np.random.default_rng(seed).integers(0, 256, (count, channels, side, side), dtype=np.uint8)
    return x, np.arange(count, dtype=np.uint8) % 10


@pytest.fixture(autouse=True)
def made_up(monkeypatch):
    """No test here reads a file or asks a server."""
    for name in RAW:
        monkeypatch.setitem(RAW, name, lambda part, name=name: images(name, part))


@pytest.mark.parametrize("name", SIZES)
def test_images_are_floats_from_zero_to_one_with_labels(name):
    data = load(name)
    channels, side = SIZES[name]
    assert data.input_shape == (channels, side, side)
    assert (data.task, data.outputs) == ("classification", 10)
    assert data.train.x.dtype == torch.float32 and data.train.y.dtype == torch.int64
    x, y = images(name, "test")
    count = len(data.test)
    assert torch.equal((255 * data.test.x).round().byte(), torch.from_numpy(x[-count:]))
    assert data.test.y.tolist() == y[-count:].tolist()
    assert data.test.x.min() >= 0 and data.test.x.max() <= 1
    assert all(split.x.shape[1:] == data.train.x.shape[1:] for split in data.ood.values())
    assert all(split.y is None for split in data.ood.values())
    assert data.validation is None and data.pixel_range == (0.0, 1.0)


def test_ood_sets_as_in_the_field():
    assert list(load("mnist").ood) == ["notmnist", "fashion-mnist", "kmnist"]
    assert list(load("fashion-mnist").ood) == ["mnist"]
    assert list(load("cifar10").ood) == ["svhn"]
    ood = load({"name": "mnist", "ood": "kmnist"}).ood
    assert list(ood) == ["kmnist"]
    expected = torch.from_numpy(images("kmnist", "test")[0]).float() / 255
    assert torch.equal(ood["kmnist"].x, expected)
    assert load({"name": "cifar10", "ood": []}).ood == {}


def test_signed_pixels_stretch_everything_alike():
    unit, signed = load("mnist"), load({"name": "mnist", "pixels": "signed"})
    assert signed.pixel_range == (-1.0, 1.0)
    for one, other in [
        (unit.train, signed.train),
        (unit.test, signed.test),
        (unit.shifts["rotated-30"], signed.shifts["rotated-30"]),
        (unit.ood["notmnist"], signed.ood["notmnist"]),
    ]:
        torch.testing.assert_close(other.x, 2 * one.x - 1)


def test_standard_pixels_by_the_images_that_are_trained_on():
    settings = {"name": "cifar10", "validation": 5, "subset": 7}
    unit, standard = load(settings), load({**settings, "pixels": "standard"})
    mean, deviation = unit.train.x.double().mean(), unit.train.x.double().std(correction=0)
    for one, other in [
        (unit.train, standard.train),
        (unit.validation, standard.validation),
        (unit.test, standard.test),
        (unit.ood["svhn"], standard.ood["svhn"]),
    ]:
        expected = (one.x.double() - mean) / deviation
        torch.testing.assert_close(other.x.double(), expected, rtol=0, atol=1e-5)
    low, high = standard.pixel_range
    assert (low, high) == pytest.approx((float(-mean / deviation), float((1 - mean) / deviation)))


def test_images_of_one_shade_cannot_be_standard():
    with pytest.raises(DataError, match="all pixels of the training images are equal"):
        pixel_range("standard", np.full((2, 3, 4, 4), 7, dtype=np.uint8))


def test_validation_is_first_and_the_subset_follows():
    x, y = images("cifar10", "train")
    data = load({"name": "cifar10", "validation": 5, "subset": 7})
    assert data.validation is not None
    assert data.validation.y.tolist() == y[:5].tolist()
    assert data.train.y.tolist() == y[5:12].tolist()
    assert torch.equal((255 * data.train.x).round().byte(), torch.from_numpy(x[5:12]))
    assert len(load({"name": "cifar10", "validation": 5}).train) == 25


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"subset": 0}, "subset must be from 1 to 30, not 0"),
        ({"subset": 31}, "subset must be from 1 to 30, not 31"),
        ({"subset": 21, "validation": 10}, "subset must be from 1 to 20, not 21"),
        ({"validation": 30}, "validation must be from 0 to 29, not 30"),
        ({"validation": -1}, "validation must be from 0 to 29, not -1"),
        ({"pixels": "sined"}, "there is no pixel range called 'sined'; did you mean 'signed'"),
        ({"subset": "5"}, "data.subset must be a whole number"),
        ({"ood": 3}, "data.ood must be"),
    ],
)
def test_settings_out_of_range(settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load({"name": "fashion-mnist", **settings})


def test_rotated_sets_go_to_either_side_the_same_at_every_angle():
    data = load({"name": "mnist", "angles": [20, 50]})
    assert list(data.shifts) == ["rotated-20", "rotated-50", "rotated-flipped"]
    sides = []
    for angle in (20, 50):
        shift = data.shifts[f"rotated-{angle}"]
        left, right = (rotated(data.test.x, float(a)) for a in (angle, -angle))
        is_left = (shift.x - left).abs().amax((1, 2, 3)) < 1e-6
        assert torch.all(is_left ^ ((shift.x - right).abs().amax((1, 2, 3)) < 1e-6))
        assert torch.equal(shift.y, data.test.y)
        sides.append(is_left)
    assert torch.equal(*sides) and 0 < sides[0].sum() < len(sides[0])


def test_rotated_and_flipped_images_keep_the_middle_and_follow_the_seed(monkeypatch):
    """A centred disc stays where it is under every turn and mirror; its neighbour does not."""
    y, x = np.mgrid[:28, :28] - 13.5
    disc = np.broadcast_to(255 * (x**2 + y**2 < 36), (400, 1, 28, 28)).astype(np.uint8)
    corner = disc * (x > 0) * (y > 0)
    for shape, same in ((disc, True), (corner.astype(np.uint8), False)):
        monkeypatch.setitem(RAW, "mnist", lambda part, x=shape: (x, np.zeros(400, np.uint8)))
        data = load({"name": "mnist", "ood": [], "angles": []})
        tumbled = data.shifts["rotated-flipped"].x
        assert ((tumbled - data.test.x).abs().mean((1, 2, 3)) < 0.03).all() == same
    # In a quarter disc every direction and both ways of turning come about equally often.
    mass = tumbled.sum((1, 2, 3))
    across = (tumbled[:, 0] * torch.from_numpy(x)).sum((1, 2)) / mass
    down = (tumbled[:, 0] * torch.from_numpy(y)).sum((1, 2)) / mass
    assert across.mean().abs() < 0.5 and down.mean().abs() < 0.5
    other = load({"name": "mnist", "ood": [], "angles": [], "seed": 1})
    assert not torch.equal(other.shifts["rotated-flipped"].x, tumbled)


def test_flips_mirror_only_what_the_masks_say():
    x = torch.arange(4.0 * 6).reshape(4, 1, 2, 3)
    across, down = torch.tensor([0, 1, 0, 1]).bool(), torch.tensor([0, 0, 1, 1]).bool()
    out = flipped(x, across, down)
    assert torch.equal(out[0], x[0])
    assert torch.equal(out[1], x[1].flip(2))
    assert torch.equal(out[2], x[2].flip(1))
    assert torch.equal(out[3], x[3].flip(1, 2))


def test_letters_are_split_but_complete_as_ood_set():
    data = load("notmnist")
    assert (len(data.train), len(data.test)) == (100, 2000)
    assert len(load("mnist").ood["notmnist"]) == 2100


def test_the_spec_makes_it_again():
    data = load({"name": "mnist", "subset": 4, "ood": ["kmnist"]})
    assert data.spec is not None and data.spec["pixels"] == "unit"
    again = load(data.spec)
    assert again.spec == data.spec and torch.equal(again.train.x, data.train.x)

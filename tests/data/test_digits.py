"""The embedded digits."""

import pytest
import torch
from sklearn.datasets import load_digits

from shoal.core.errors import ConfigError
from shoal.core.random import generator
from shoal.data import registry
from shoal.data.sets.builtin import ANGLES, digits, photograph_patches
from shoal.data.sets.images import rotated, signs


@pytest.fixture(scope="module")
def data():
    return registry.make("digits")


def test_sizes_types_and_range(data):
    assert (len(data.train), len(data.test)) == (1297, 500)
    assert data.input_shape == (1, 8, 8)
    assert (data.task, data.outputs) == ("classification", 10)
    assert data.train.x.dtype == torch.float32
    assert data.train.y.dtype == torch.int64
    assert data.train.x.min() == 0
    assert data.train.x.max() == 1


def test_the_parts_are_all_of_it_and_do_not_overlap(data):
    bunch = load_digits()
    whole = torch.tensor(bunch.data).float() / 16
    rows = torch.cat([data.train.x, data.test.x]).flatten(1)
    labels = torch.cat([data.train.y, data.test.y])
    ours = sorted((*row, y) for row, y in zip(rows.tolist(), labels.tolist(), strict=True))
    theirs = sorted((*row, y) for row, y in zip(whole.tolist(), bunch.target.tolist(), strict=True))
    assert ours == theirs


@pytest.mark.parametrize("test_size", [10, 500, 1000])
def test_classes_keep_their_proportions(test_size):
    part = digits(test_size=test_size)
    counts = torch.bincount(part.test.y, minlength=10)
    total = torch.bincount(torch.cat([part.train.y, part.test.y]))
    assert counts.sum() == test_size
    assert (counts - total * test_size / 1797).abs().max() <= 1


def test_the_seed_decides_everything(data):
    again, other = digits(seed=0), digits(seed=1)
    assert torch.equal(again.train.x, data.train.x)
    assert torch.equal(again.ood["photographs"].x, data.ood["photographs"].x)
    assert not torch.equal(other.test.y, data.test.y)
    assert not torch.equal(other.ood["photographs"].x, data.ood["photographs"].x)


@pytest.mark.parametrize("angle", ANGLES)
def test_shifts_are_test_images_turned_to_either_side(data, angle):
    shift = data.shifts[f"rotated-{angle}"]
    assert torch.equal(shift.y, data.test.y)
    left, right = (rotated(data.test.x, a) for a in (float(angle), -float(angle)))
    is_left = (shift.x - left).abs().amax((1, 2, 3)) < 1e-6
    is_right = (shift.x - right).abs().amax((1, 2, 3)) < 1e-6
    assert torch.all(is_left ^ is_right)
    assert torch.equal(is_left, signs(500, generator(0, "digits", "side")) > 0)


def test_photographs_are_grey_patches_without_labels(data):
    ood = data.ood["photographs"]
    assert ood.y is None
    assert ood.x.shape == (500, 1, 8, 8)
    assert ood.x.min() >= 0
    assert ood.x.max() <= 1
    assert len(ood.x.flatten(1).unique(dim=0)) == 500


def test_patches_come_half_from_each_photograph():
    """The flower is on a dark ground, the temple under a bright sky."""
    patches = photograph_patches(201, seed=5)
    assert len(patches) == 201
    assert patches[:101].mean() > patches[101:].mean()


@pytest.mark.parametrize("test_size", [0, 9, 1788, 5000])
def test_refuses_a_test_size_that_loses_a_class(test_size):
    with pytest.raises(ConfigError, match="test_size must be from 10 to 1787"):
        digits(test_size=test_size)

"""The published data sets themselves: counts, classes, means and digests as they are known."""

import hashlib

import pytest
import torch

from shoal.data import human_labels, load
from shoal.data.catalogue import CIFAR_BATCHES, COLLECTIONS
from shoal.data.files.raw import RAW
from shoal.data.sets.images import as_pixels
from shoal.data.sets.uci import PROBLEMS

pytestmark = pytest.mark.full

MD5 = {
    "mnist/train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
    "mnist/train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
    "mnist/t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
    "mnist/t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
    "fashion-mnist/train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
    "fashion-mnist/train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
    "fashion-mnist/t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
    "fashion-mnist/t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
    "kmnist/t10k-images-idx3-ubyte.gz": "5c965bf0a639b31b8f53240b1b52f4d7",
    "kmnist/t10k-labels-idx1-ubyte.gz": "7320c461ea6c1c855c0b718fb2a4b134",
}
"""As the libraries of the field publish them: another algorithm than the catalogue's."""


@pytest.mark.parametrize("path", MD5)
def test_the_catalogue_describes_the_files_the_field_uses(full, path):
    content = (full / path).read_bytes()
    assert hashlib.md5(content, usedforsecurity=False).hexdigest() == MD5[path]
    file = next(f for f in COLLECTIONS[path.partition("/")[0]].files if f.path == path)
    assert file.size == len(content)
    assert file.digest == f"sha256:{hashlib.sha256(content).hexdigest()}"


SHA1 = {
    "data_batch_1": "aadd24acce27caa71bf4b10992e9e7b2d74c2540",
    "data_batch_5": "26e2849e66a845b7f1e4614ae70f4889ae604628",
    "test_batch": "67eb016db431130d61cd03c7ad570b013799c88c",
}


@pytest.mark.parametrize("name", SHA1)
def test_the_batches_of_cifar(full, name):
    file = next(f for f in CIFAR_BATCHES if f.path.endswith(f"/{name}.bin"))
    content = (full / file.path).read_bytes()
    assert hashlib.sha1(content, usedforsecurity=False).hexdigest() == SHA1[name]


EQUAL = {"train": [6000] * 10, "test": [1000] * 10}
KNOWN = {
    # Class counts; then the mean and spread of a pixel by which each set is usually normalised.
    ("mnist", "train"): (
        [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
        0.1307,
        0.3081,
    ),
    ("mnist", "test"): ([980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009], None, None),
    ("fashion-mnist", "train"): (EQUAL["train"], 0.2860, 0.3530),
    ("fashion-mnist", "test"): (EQUAL["test"], None, None),
    ("kmnist", "test"): (EQUAL["test"], None, None),
    ("notmnist", "test"): (EQUAL["test"], None, None),
    ("cifar10", "test"): (EQUAL["test"], None, None),
    ("svhn", "test"): ([684, 1968, 1590, 1104, 964, 909, 773, 767, 621, 620], None, None),
}


@pytest.mark.parametrize(("name", "part"), KNOWN)
def test_counts_classes_and_pixels(full, name, part):
    counts, mean, spread = KNOWN[name, part]
    x, y = RAW[name](part)
    assert torch.bincount(torch.from_numpy(y.astype("int64"))).tolist() == counts
    side, channels = (32, 3) if name in ("cifar10", "svhn") else (28, 1)
    assert x.shape == (sum(counts), channels, side, side)
    assert (x.min(), x.max()) == (0, 255)
    if mean is not None:
        found = torch.std_mean(as_pixels(x), correction=0)
        assert [float(value) for value in found] == pytest.approx([spread, mean], abs=1e-4)


def test_the_channels_of_cifar_are_red_green_blue(full):
    """Means of the 50,000 training images by channel: 0.4914, 0.4822, 0.4465."""
    x, y = RAW["cifar10"]("train")
    assert torch.bincount(torch.from_numpy(y.astype("int64"))).tolist() == [5000] * 10
    means = [x[:, channel].mean() / 255 for channel in range(3)]
    assert means == pytest.approx([0.4914, 0.4822, 0.4465], abs=1e-4)


def test_mnist_as_it_is_loaded(full):
    data = load({"name": "mnist", "subset": 1000, "validation": 500, "angles": [30]})
    assert [len(s) for s in (data.train, data.validation, data.test)] == [1000, 500, 10_000]
    assert list(data.shifts) == ["rotated-30", "rotated-flipped"]
    assert {name: len(split) for name, split in data.ood.items()} == dict.fromkeys(
        ("notmnist", "fashion-mnist", "kmnist"), 10_000
    )
    assert data.test.y[:5].tolist() == [7, 2, 1, 0, 4]
    x, _ = RAW["mnist"]("train")
    assert torch.equal(data.train.x, as_pixels(x[500:1500]))
    # Turning moves ink and makes none; what leaves the frame is little at 30 degrees.
    ink = data.shifts["rotated-30"].x.sum() / data.test.x.sum()
    assert 0.97 < ink < 1.01


def test_people_agree_with_the_labels_of_cifar(full):
    """On 99.2 % of the test images most people choose the label (Peterson et al. 2019)."""
    votes = human_labels()
    assert votes.shape == (10_000, 10)
    torch.testing.assert_close(votes.sum(1), torch.ones(10_000))
    y = torch.from_numpy(RAW["cifar10"]("test")[1].astype("int64"))
    assert float((votes.argmax(1) == y).double().mean()) == pytest.approx(0.992, abs=1e-3)


ROWS = {
    "boston": (506, 13, 20),
    "concrete": (1030, 8, 20),
    "energy": (768, 8, 20),
    "kin8nm": (8192, 8, 20),
    "naval": (11934, 16, 20),
    "power": (9568, 4, 20),
    "protein": (45730, 9, 5),
    "wine": (1599, 11, 20),
    "yacht": (308, 6, 20),
}


@pytest.mark.parametrize("problem", PROBLEMS)
def test_regression_problems(full, problem):
    """A tenth is held out in every split, and targets come back in their units."""
    rows, columns, splits = ROWS[problem]
    data = load({"name": "uci", "problem": problem, "split": splits - 1})
    assert len(data.train) + len(data.test) == rows and data.input_shape == (columns,)
    assert abs(len(data.test) - rows / 10) <= 1
    for values in (data.train.x, data.test.x, data.train.y, data.test.y):
        assert values.isfinite().all()
    assert data.train.x.mean(0).abs().max() < 1e-4
    assert data.train.y.std(correction=0) == pytest.approx(1, abs=1e-4)
    if problem == "boston":
        assert data.scaling.mean == pytest.approx(22.5, abs=0.5)

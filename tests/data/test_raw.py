"""Readers of the published formats, on tiny files made here."""

import gzip
import struct
import tracemalloc

import numpy as np
import pytest
from scipy.io import savemat

from shoal.core.errors import DataError
from shoal.data.files import raw
from shoal.data.files.raw import content_digest, read_batch, read_svhn_mat, read_svhn_npz
from shoal.data.files.readers import read_idx

IMAGES = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)


def idx(array, kind=8, shape=None, axes=None):
    shape = array.shape if shape is None else shape
    header = struct.pack(f">BBBB{len(shape)}I", 0, 0, kind, axes or len(shape), *shape)
    return header + array.tobytes()


@pytest.fixture
def save(tmp_path):
    def write(content, name="a.gz"):
        path = tmp_path / name
        path.write_bytes(content)
        return path

    return write


@pytest.mark.parametrize("pack", [gzip.compress, bytes], ids=["gzip", "plain"])
def test_idx(save, pack):
    assert np.array_equal(read_idx(save(pack(idx(IMAGES))), 3), IMAGES)
    assert read_idx(save(pack(idx(IMAGES[0, 0]))), 1).tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "does not begin with an IDX header"),
        (b"\0\0\x08", "does not begin with an IDX header"),
        (b"PNG!" + idx(IMAGES)[4:], "does not begin with an IDX header"),
        (idx(IMAGES, kind=13), r"holds type 13 in 3 axes; wanted bytes \(8\) in 3"),
        (idx(IMAGES, axes=1), "holds type 8 in 1 axes"),
        (idx(IMAGES)[:-1], "claims 24 bytes, but it holds 23"),
        (idx(IMAGES) + b"!", "more than the 24 bytes"),
        (idx(IMAGES, shape=(2, 3, 0)), "claims 0 bytes, which it cannot hold"),
        (idx(IMAGES, shape=(2**32 - 1,) * 3), "which it cannot hold"),
        (
            gzip.compress(idx(IMAGES, shape=(2**31, 2, 2)), mtime=0),
            "claims 8,589,934,592 bytes, which it",
        ),
        (gzip.compress(idx(IMAGES), mtime=0)[:-12], "is not a sound (gzip|IDX) file"),
        (gzip.compress(idx(IMAGES), mtime=0)[:-8] + b"12345678", "is not a sound gzip file"),
        (b"\x1f\x8bnonsense", "is not a sound gzip file"),
    ],
)
def test_damaged_idx_files_are_refused_without_allocating(save, content, sentence):
    path = save(content)
    tracemalloc.start()
    with pytest.raises(DataError, match=sentence) as caught:
        read_idx(path, 3)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20
    assert str(caught.value).startswith(str(path)) and "\n" not in str(caught.value)


def test_batches_of_cifar(save):
    """A record is the label, then all red values, then green, then blue."""
    records = np.random.default_rng(0).integers(0, 256, (5, 3073), dtype=np.uint8)
    records[:, 0] = [0, 9, 3, 3, 1]
    x, y = read_batch(save(records.tobytes(), "batch.bin"))
    assert x.shape == (5, 3, 32, 32) and y.tolist() == [0, 9, 3, 3, 1]
    assert np.array_equal(x[2, 1].ravel(), records[2, 1 + 1024 : 1 + 2048])


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b"", "has 0 bytes, not a whole number of records of 3,073"),
        (bytes(3072), "has 3,072 bytes, not a whole number"),
        (bytes(3073) + bytes([10]) + bytes(3072), "has label 10 at place 1; wanted 0 to 9"),
    ],
)
def test_damaged_batches_are_refused(save, content, sentence):
    with pytest.raises(DataError, match=sentence):
        read_batch(save(content, "batch.bin"))


def test_house_numbers_from_matlab(tmp_path):
    """MATLAB's axes are rows, columns, colours, images; its zero is called ten."""
    x = np.random.default_rng(0).integers(0, 256, (32, 32, 3, 4), dtype=np.uint8)
    savemat(tmp_path / "a.mat", {"X": x, "y": np.array([[1], [10], [9], [2]])})
    images, labels = read_svhn_mat(tmp_path / "a.mat", 3)
    assert labels.tolist() == [1, 0, 9]
    assert np.array_equal(images[2, 0], x[:, :, 0, 2])


@pytest.mark.parametrize(
    ("arrays", "sentence"),
    [
        ({"X": np.zeros((32, 32, 3, 2), np.uint8)}, "is not a MATLAB file with X and y"),
        ({"X": np.zeros((32, 32, 3, 2)), "y": [1, 2]}, "wanted 32 x 32 x 3"),
        ({"X": np.zeros((32, 32, 3, 2), np.uint8), "y": [1]}, "and 1 labels"),
    ],
)
def test_other_matlab_files_are_refused(tmp_path, arrays, sentence):
    savemat(tmp_path / "a.mat", arrays)
    with pytest.raises(DataError, match=sentence):
        read_svhn_mat(tmp_path / "a.mat")


def test_what_is_not_matlab_at_all(save):
    with pytest.raises(DataError, match="is not a MATLAB file"):
        read_svhn_mat(save(b"no" * 200, "a.mat"))


def test_packed_house_numbers_are_known_by_their_content(tmp_path, monkeypatch):
    x = np.random.default_rng(0).integers(0, 256, (4, 32, 32, 3), dtype=np.uint8)
    y = np.array([1, 0, 9, 2], np.uint8)
    np.savez_compressed(tmp_path / "a.npz", x=x, y=y)
    with pytest.raises(DataError, match="is altered: it does not hold the first 10,000"):
        read_svhn_npz(tmp_path / "a.npz")
    monkeypatch.setattr(raw, "_SVHN_CONTENT", content_digest(x, y))
    images, labels = read_svhn_npz(tmp_path / "a.npz")
    assert np.array_equal(images[3, 2], x[3, :, :, 2]) and labels.tolist() == y.tolist()
    np.savez(tmp_path / "b.npz", x=x)
    with pytest.raises(DataError, match=r"b.npz cannot be used: it holds x, but no array called y"):
        read_svhn_npz(tmp_path / "b.npz")


def test_a_digest_of_content_minds_numbers_and_not_layout():
    array = np.arange(6.0).reshape(2, 3)
    assert content_digest(array) == content_digest(np.asfortranarray(array))
    assert content_digest(array) != content_digest(array + 1)

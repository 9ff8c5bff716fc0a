"""Files: what is read, and what is refused before it can do harm."""

import io
import os
import struct
import tracemalloc
import zipfile

import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError, DataError, ShoalError, StorageError
from shoal.data import registry
from shoal.data.load import load_file

X = np.arange(12.0).reshape(4, 3)
Y = np.array([0, 1, 1, 0])


@pytest.fixture
def save(tmp_path):
    """Write bytes or named arrays and give back the path."""

    def write(name, content=None, **arrays):
        path = tmp_path / name
        if content is None:
            np.savez(path, **arrays)
        elif isinstance(content, np.ndarray):
            np.save(path, content)
        else:
            path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def header(shape, descr="'<f8'", version=1):
    text = f"{{'descr': {descr}, 'fortran_order': False, 'shape': {shape}, }}\n".encode()
    length = struct.pack("<H" if version == 1 else "<I", len(text))
    return b"\x93NUMPY" + bytes([version, 0]) + length + text


def npz(**members):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in members.items():
            archive.writestr(f"{name}.npy", content)
    return buffer.getvalue()


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def test_npz_with_and_without_targets(save):
    split = load_file(save("a.npz", x=X, y=Y))
    assert split.x.dtype == torch.float32
    assert split.x.tolist() == X.tolist()
    assert split.y.tolist() == Y.tolist()
    assert load_file(save("b.npz", x=X, z=X)).y is None


@pytest.mark.parametrize(
    "array",
    [X, np.asfortranarray(X), X.astype(">f8"), X.astype(np.float16), X.reshape(4, 1, 3)],
    ids=["plain", "fortran", "big-endian", "half", "image"],
)
def test_npy(save, array):
    assert load_file(save("a.npy", array)).x.tolist() == array.tolist()


def test_version_two_headers(save):
    path = save("a.npy", header((4, 3), version=2) + X.tobytes())
    assert load_file(path).x.tolist() == X.tolist()


def test_compressed_archives(save, tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=X, y=Y)
    assert load_file(str(tmp_path / "a.npz")).x.tolist() == X.tolist()


@pytest.mark.parametrize(
    "text",
    [
        "1,2,0\n3,4.5,1\n",
        "a,b,c\n1,2,0\n3,4.5,1\n",
        '\ufeff"a","b","c"\r\n1, 2, 0\r\n\r\n3,4.5e0,1\r\n\n',
        "1,2,0\n3,4.5,1",
    ],
)
def test_csv_with_and_without_names(save, text):
    path = save("a.csv", text)
    assert load_file(path).x.tolist() == [[1, 2, 0], [3, 4.5, 1]]
    assert load_file(path).y is None
    classes, values = load_file(path, target="class"), load_file(path, target="value")
    assert classes.x.tolist() == values.x.tolist() == [[1, 2], [3, 4.5]]
    assert classes.y.tolist() == values.y.tolist() == [0, 1]
    assert classes.y.dtype == torch.int64
    assert values.y.dtype == torch.float32


def test_one_row_is_still_a_table(save):
    assert load_file(save("a.csv", "1,2,3\n")).x.shape == (1, 3)
    assert load_file(save("b.csv", "1\n2\n")).x.shape == (2, 1)


def test_target_overrides_the_type_of_an_array(save):
    whole = save("a.npz", x=X, y=Y.astype(float))
    assert load_file(whole).y.dtype == torch.float32
    assert load_file(whole, target="class").y.dtype == torch.int64
    assert load_file(save("b.npz", x=X, y=Y), target="value").y.dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("a.txt", "1,2", r"ends in '.txt'; Shoal reads .npz, .npy, .csv"),
        ("noending", "1,2", r"ends in ''; Shoal reads"),
        ("a.npz", b"", "it is not a sound .npz archive"),
        ("a.npz", b"\x89PNG\r\n\x1a\n" * 100, "it is not a sound .npz archive"),
        ("a.npz", npz(), "it holds nothing, but no array called x"),
        ("a.npz", npz(x_train=npy(X), y=npy(Y)), "it holds x_train, y, but no array called x"),
        ("a.npz", npz(x=npy(X), y=npy(Y[:2])), "x has 4 points but y has 2 points"),
        ("a.npz", npz(x=npy(X * np.nan)), "x has 12 values that are not finite"),
        ("a.npz", npz(x=npy(X), y=npy(np.array(list("abcd")))), "array of type <U1; wanted real"),
        ("a.npz", npz(x=b"junk"), "it does not begin like an array that numpy saved"),
        ("a.npy", b"", "it does not begin like an array"),
        ("a.npy", b"\x93NUMPY\x03\x00", "it does not begin like an array"),
        ("a.npy", b"\x93NUMPY\x01\x00\xff\xff(((((", "it does not begin like an array"),
        ("a.npy", header((4, 3)) + X.tobytes()[:-1], "claims 96 bytes of numbers, but it has 95"),
        ("a.npy", header((4, 3)) + X.tobytes() + b"!", "claims 96 bytes .*, but it has 97"),
        ("a.npy", header((-4, -3)) + X.tobytes(), r"an impossible shape \(-4, -3\)"),
        ("a.npy", header((0, 10**30)), "it holds an empty array"),
        ("a.npy", header((1,) * 99) + bytes(8), "impossible shape"),
        ("a.npy", header((2,), "'|O'") + b"cos\nsystem\n", "array of type object; wanted"),
        ("a.npy", header((2,), "[('a', '<f8')]") + bytes(16), "wanted real numbers or integers"),
        ("a.npy", header((2, 1), "'<c16'") + bytes(32), "array of type complex128; wanted"),
        ("a.npy", header((10**11,)) + bytes(64), "claims 800,000,000,000 bytes .* it has 64"),
        ("a.npy", header((2**62, 2**62)), "bytes of numbers, but it has 0"),
        ("a.csv", "", "it holds no rows of numbers"),
        ("a.csv", "\n\n", "it holds no rows of numbers"),
        ("a.csv", "a,b\n", "it holds no rows of numbers"),
        ("a.csv", "a,b\n1,x\n", "it is not a table of numbers: could not convert string 'x'"),
        ("a.csv", "1,x\n1,2\n", "it is not a table of numbers: could not convert string 'x'"),
        ("a.csv", "1,2\n3\n", "it is not a table of numbers: the number of columns changed"),
        ("a.csv", "1,2\n3,\n", "it is not a table of numbers"),
        ("a.csv", "1,2\n3,nan\n", r"x has 1 value that is not finite .* x\[1, 1\], nan"),
        ("a.csv", "1;2\n3;4\n", "it is not a table of numbers|it holds no rows"),
        ("a.csv", b"a,b\n\xff\xfe,2\n", "it is not text in UTF-8"),
        ("a.csv", b"1,2\n\x00,2\n", "it is not a table of numbers"),
    ],
)
def test_bad_content_is_a_data_error_that_names_the_file(save, name, content, sentence):
    path = save(name, content)
    with pytest.raises(DataError, match=sentence) as caught:
        load_file(path)
    assert str(caught.value).startswith(str(path))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("1,2,0.5\n", "target number 0 is 0.5, which is not a class; type target = 'value'"),
        ("1,2,0\n1,2,nan\n", "target number 1 is nan, which is not a class"),
        ("1,2,1e300\n", r"target number 0 is 1e\+300, which is not a class"),
        ("1,2,0\n1,2,-1\n", r"labels must be 0, 1, 2, ... but y\[1\] is -1"),
        ("1\n2\n", r"its shape is \(2, 1\); to take the last column"),
    ],
)
def test_bad_classes(save, text, sentence):
    with pytest.raises(DataError, match=sentence):
        load_file(save("a.csv", text), target="class")


def test_pickled_arrays_never_run(save, tmp_path):
    mark = tmp_path / "ran"

    class Trap:
        def __reduce__(self):
            return (os.mkdir, (str(mark),))

    trap = np.array([Trap()], dtype=object)
    np.save(tmp_path / "trap.npy", trap, allow_pickle=True)
    np.savez(tmp_path / "trap.npz", x=trap)
    for name in ("trap.npy", "trap.npz"):
        with pytest.raises(DataError, match="array of type object"):
            load_file(tmp_path / name)
    assert not mark.exists()


def bomb():
    return npz(x=header((200 * 2**20, 1), "'|u1'") + bytes(200 * 2**20))


def lying_bomb():
    """An archive whose directory claims that the member is as large packed as unpacked."""
    data = bytearray(bomb())
    size = struct.pack("<I", zipfile.ZipFile(io.BytesIO(data)).infolist()[0].file_size)
    entry = data.rindex(b"PK\x01\x02")
    data[entry + 20 : entry + 24] = size
    return bytes(data)


@pytest.mark.parametrize("make", [bomb, lying_bomb])
def test_an_archive_that_explodes_is_refused_without_unpacking(save, make):
    path = save("bomb.npz", make())
    assert path.stat().st_size < 2**19
    tracemalloc.start()
    with pytest.raises(DataError, match="more than 200 times; .* numpy.savez"):
        load_file(path)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**20


def test_sparse_data_of_moderate_size_may_compress_well(tmp_path):
    np.savez_compressed(tmp_path / "a.npz", x=np.zeros((1000, 1000), dtype=np.uint8))
    assert load_file(tmp_path / "a.npz").x.shape == (1000, 1000)


def test_two_members_of_one_name_are_refused(save):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive, pytest.warns(UserWarning, match="Duplicate"):
        archive.writestr("x.npy", npy(X))
        archive.writestr("x.npy", npy(2 * X))
    with pytest.raises(DataError, match="it holds 2 arrays called x"):
        load_file(save("a.npz", buffer.getvalue()))


def test_a_compression_that_numpy_does_not_write_is_refused(save):
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_BZIP2) as archive:
        archive.writestr("x.npy", npy(X))
    with pytest.raises(DataError, match="compressed in a way that numpy does not write"):
        load_file(save("a.npz", buffer.getvalue()))


@pytest.mark.parametrize("name", ["a.npz", "a.npy", "a.csv"])
def test_damage_is_an_error_with_a_sentence_or_does_no_harm(save, name):
    """Every truncation and hundreds of changed bytes: never another kind of exception."""
    sound = {
        "a.npz": npz(x=npy(X), y=npy(Y)),
        "a.npy": npy(X),
        "a.csv": "\n".join(",".join(map(str, row)) for row in X.tolist()).encode(),
    }[name]
    random = np.random.default_rng(0)
    damaged = [sound[:k] for k in range(0, len(sound), 3)]
    for _ in range(400):
        data = bytearray(sound)
        data[random.integers(len(data))] = random.integers(256)
        damaged.append(bytes(data))
    for data in damaged:
        try:
            load_file(save(name, data))
        except ShoalError as error:
            assert "\n" not in str(error)


def test_a_flipped_byte_in_an_archive_is_found(save):
    data = bytearray(npz(x=npy(np.random.default_rng(0).normal(size=(50, 4)))))
    data[500] ^= 1
    with pytest.raises(DataError, match="it is not a sound .npz archive"):
        load_file(save("a.npz", bytes(data)))


def test_what_cannot_be_opened_is_a_storage_error(tmp_path):
    with pytest.raises(StorageError, match="there is no file called .*missing.npz"):
        load_file(tmp_path / "missing.npz")
    (tmp_path / "folder.npz").mkdir()
    with pytest.raises(StorageError, match="folder.npz is not a regular file"):
        load_file(tmp_path / "folder.npz")
    os.mkfifo(tmp_path / "pipe.npy")
    with pytest.raises(StorageError, match="pipe.npy is not a regular file"):
        load_file(tmp_path / "pipe.npy")
    with pytest.raises(StorageError, match="cannot be read: File name too long"):
        load_file(tmp_path / ("a" * 400 + ".npy"))


def test_an_unknown_target_is_a_config_error(save):
    with pytest.raises(ConfigError, match="target must be 'class' or 'value'"):
        load_file(save("a.csv", "1,2\n"), target="label")


def test_a_dataset_of_files(save):
    spec = {
        "name": "file",
        "train": str(save("mine.npz", x=X, y=Y)),
        "test": str(save("test.npz", x=X[:2], y=Y[:2])),
        "ood": [str(save("noise.npy", X)), str(save("more.npz", x=X, y=Y))],
        "shifts": str(save("tilted.npz", x=X[1:], y=Y[1:])),
    }
    data = registry.make(spec)
    assert data.name == "mine"
    assert (data.task, data.outputs, data.input_shape) == ("classification", 2, (3,))
    assert (len(data.train), len(data.test), len(data.shifts["tilted"])) == (4, 2, 3)
    assert set(data.ood) == {"noise", "more"}
    assert all(part.y is None for part in data.ood.values())


@pytest.mark.parametrize(
    ("parts", "error", "sentence"),
    [
        ({}, ConfigError, "dataset 'file' needs a file to train on; type train = 'your.npz'"),
        ({"train": "bare"}, DataError, "the training file of 'bare' has no targets"),
        ({"train": "good", "test": "bare"}, DataError, "the file of 'test' has no targets"),
        ({"train": "good", "test": "wide"}, DataError, r"'test' have shape \(4,\), .* \(3,\)"),
        ({"train": "good", "ood": "wide"}, DataError, r"wide has inputs of shape \(4,\)"),
        ({"train": "good", "test": "more"}, DataError, r"y\[0\] is 7, but the network has 2"),
        ({"train": "good", "test": "real"}, DataError, "y holds floats"),
        ({"train": "missing"}, StorageError, "there is no file called"),
    ],
)
def test_files_that_do_not_fit_together(save, tmp_path, parts, error, sentence):
    save("good.npz", x=X, y=Y)
    save("bare.npz", x=X)
    save("wide.npz", x=np.ones((4, 4)), y=Y)
    save("more.npz", x=X, y=Y + 7)
    save("real.npz", x=X, y=Y * 1.0)
    settings = {part: str(tmp_path / f"{name}.npz") for part, name in parts.items()}
    with pytest.raises(error, match=sentence):
        registry.make({"name": "file", **settings})

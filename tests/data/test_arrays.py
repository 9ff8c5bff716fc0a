"""What becomes what, and the sentence for everything that cannot be used."""

import math

import numpy as np
import pytest
import torch

from shoal.core.errors import DataError
from shoal.data.batches.arrays import as_inputs, as_targets, check_columns, check_labels

NUMBERS = [[0.5, 1.0], [2.0, -3.0], [4.0, 5.0]]


@pytest.mark.parametrize(
    "x",
    [
        NUMBERS,
        np.array(NUMBERS),
        np.array(NUMBERS, dtype=np.float16),
        np.array(NUMBERS, dtype=np.longdouble),
        np.array(NUMBERS, dtype=">f8"),
        np.array(NUMBERS)[::-1][::-1],
        np.asfortranarray(NUMBERS),
        np.ma.array(NUMBERS),
        torch.tensor(NUMBERS, dtype=torch.float64, requires_grad=True),
        [torch.tensor(row) for row in NUMBERS],
        tuple(np.array(row) for row in NUMBERS),
    ],
    ids=lambda x: f"{type(x).__name__}-{getattr(x, 'dtype', '')}",
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_real_numbers_take_the_type_asked_for(x, dtype):
    got = as_inputs(x, dtype)
    assert not got.requires_grad
    torch.testing.assert_close(got, torch.tensor(NUMBERS, dtype=dtype), rtol=0, atol=0)


def test_a_read_only_array_is_copied_and_a_writable_one_shared():
    x = np.ones((2, 2), dtype=np.float32)
    assert as_inputs(x).data_ptr() == x.ctypes.data
    x.flags.writeable = False
    assert as_inputs(x).data_ptr() != x.ctypes.data


def test_bytes_are_scaled():
    image = np.arange(256, dtype=np.uint8).reshape(1, 16, 16)
    torch.testing.assert_close(as_inputs(image).flatten(), torch.linspace(0, 1, 256))


@pytest.mark.parametrize("kind", [np.int8, np.int32, np.int64, np.uint16, np.uint32])
def test_other_integers_keep_their_values(kind):
    got = as_inputs(np.array([[3, 7]], dtype=kind))
    assert got.dtype == torch.int64
    assert got.tolist() == [[3, 7]]


def test_booleans_are_zero_and_one():
    assert as_inputs([[True, False]]).tolist() == [[1.0, 0.0]]
    assert as_inputs([[True, False]]).dtype == torch.float32


def with_bad(value, *places, shape=(5, 3)):
    x = np.zeros(shape)
    for place in places:
        x[place] = value
    return x


@pytest.mark.parametrize(
    ("x", "sentence"),
    [
        ([], r"there are no data: x has shape \(0,\)"),
        (np.zeros((0, 3)), r"there are no data: x has shape \(0, 3\)"),
        (np.zeros((4, 0)), r"there are no data: x has shape \(4, 0\)"),
        (np.zeros(4), r"x has shape \(4,\), but each data point must be a row; type x\[:, None\]"),
        (3.0, r"x has shape \(\), but each data point must be a row"),
        (with_bad(np.nan, (4, 2)), r"x has 1 value that is not finite .* first at x\[4, 2\], nan"),
        (
            with_bad(np.inf, (1, 0), (3, 1), (3, 2)),
            r"x has 3 values that are not finite .* first at x\[1, 0\], inf",
        ),
        (with_bad(1e300, (0, 1)), r"not finite in float32, the first at x\[0, 1\], 1e\+300"),
        (with_bad(-np.inf, (2, 1, 1), shape=(3, 2, 2)), r"x\[2, 1, 1\], -inf"),
        (np.array([[1, None]], dtype=object), r"x holds NoneType objects.* x\[0, 1\]"),
        ([[1.0], [None]], r"x holds NoneType objects.* x\[1, 0\]"),
        (None, "x holds NoneType objects, not numbers"),
        ([["a", "b"]], "x holds str_ objects, not numbers"),
        ("data.npz", "x holds str_ objects, not numbers"),
        ([[1.0, 2.0], [3.0]], "x is not a regular array: its rows differ in length"),
        ([torch.zeros(2), torch.zeros(3)], "x is not a regular array"),
        (np.zeros((2, 2), dtype=complex), "x is of type complex128; wanted real numbers"),
        (torch.zeros(2, 2, dtype=torch.complex64), "x is of type torch.complex64; wanted real"),
        (np.zeros((2, 2), dtype="datetime64[s]"), r"x is of type datetime64\[s\]; wanted real"),
        (np.zeros(2, dtype=[("a", float)]), "wanted real numbers or integers"),
        (torch.eye(3).to_sparse(), r"x is a sparse tensor; type x.to_dense\(\)"),
        (np.ma.array([[1.0, 2.0]], mask=[[0, 1]]), "x has masked values"),
    ],
)
def test_inputs_that_are_refused(x, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        as_inputs(x)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("y", "labels"),
    [
        ([0, 2, 1], [0, 2, 1]),
        (np.array([0, 2, 1], dtype=np.uint8), [0, 2, 1]),
        (torch.tensor([0, 2, 1], dtype=torch.int32), [0, 2, 1]),
        (np.array([[0], [2], [1]]), [0, 2, 1]),
        ([True, False, True], [1, 0, 1]),
    ],
)
def test_integers_and_booleans_are_labels(y, labels):
    got = as_targets(y, 3)
    assert got.dtype == torch.int64
    assert got.tolist() == labels


@pytest.mark.parametrize("y", [[0.0, 1.0, 2.0], np.ones((3, 1)), torch.ones(3, 4).double()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_floats_stay_real_even_when_whole(y, dtype):
    got = as_targets(y, 3, dtype)
    assert got.dtype == dtype
    assert got.shape == np.shape(y)


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        ([0, 1], "x has 3 points but y has 2 points; each x needs its own y"),
        ([], "x has 3 points but y has 0 points"),
        (1, "x has 3 points but y has no points"),
        ([0.0, np.nan, np.nan], r"y has 2 values that are not finite .* first at y\[1\], nan"),
        ([[0.0], [1.0], [np.inf]], r"the first at y\[2, 0\], inf"),
        (np.zeros((3, 0)), r"y has shape \(3, 0\); wanted"),
        (["cat", "dog", "cat"], "y holds str_ objects, not numbers.* numpy.unique"),
        (np.array([0, 1, None]), r"y has a gap, None at y\[2\]; leave out such points"),
    ],
)
def test_targets_that_are_refused(y, sentence):
    with pytest.raises(DataError, match=sentence) as caught:
        as_targets(y, 3)
    assert "\n" not in str(caught.value)


def test_labels_in_range_pass():
    check_labels(torch.tensor([0, 4, 2]), classes=5)


@pytest.mark.parametrize(
    ("y", "sentence"),
    [
        (torch.tensor([0, 5, 6]), r"y\[1\] is 5, but the network has 5 outputs for .* 0 to 4"),
        (torch.tensor([0, 1, -1]), r"y\[2\] is -1"),
        (torch.tensor([0.0, 1.0]), r"y holds floats, .* type y.astype\(int\)"),
        (torch.tensor([0.0, 0.5]), r"y\[1\] is 0.5, which is not a whole number"),
    ],
)
def test_labels_that_are_refused(y, sentence):
    with pytest.raises(DataError, match=sentence):
        check_labels(y, classes=5)


LABELS = torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0], [0.0, 1.0, 0.0]])


@pytest.mark.parametrize(
    ("y", "words"),
    [
        (LABELS, ["3 columns of 0 and 1", "(y[:, 0] == 1).astype(int)"]),
        (torch.eye(3), ["3 columns of 0 and 1", "y.argmax(1)"]),
        (2 * LABELS - 1, ["columns of -1 and 1", "(y[:, 0] == 1).astype(int)"]),
        (LABELS.repeat(1000, 1), ["3 columns of 0 and 1"]),
    ],
    ids=["several labels", "one-hot", "signs", "many"],
)
def test_columns_of_two_values_are_not_taken_for_numbers(y, words):
    with pytest.raises(DataError) as caught:
        check_columns(y)
    for word in [*words, "likelihood='gaussian'"]:
        assert word in str(caught.value)


@pytest.mark.parametrize(
    "y",
    [
        LABELS[:, :1],
        LABELS[:, 0],
        LABELS.long(),
        LABELS + torch.arange(3.0),
        torch.zeros(5, 2),
        torch.tensor([[0.3, 0.7]]),
        torch.cat([LABELS.repeat(1000, 1), torch.full((1, 3), 0.5)]),
    ],
    ids=["a column", "a row", "integers", "reals", "nothing", "one point", "a real far down"],
)
def test_other_columns_are(y):
    check_columns(y)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [(0, 0), (500, 3), (999, 36)])
def test_one_value_that_is_not_finite_is_found_anywhere(dtype, value, place):
    x = torch.randn(1000, 37).to(dtype)
    as_inputs(x, dtype)
    x[place] = value
    with pytest.raises(
        DataError, match=rf"1 value that is not finite.*x\[{place[0]}, {place[1]}\]"
    ):
        as_inputs(x, dtype)

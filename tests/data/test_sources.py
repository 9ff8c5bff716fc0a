"""Whatever a user hands over, as tensors or batches."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data import Dataset as TorchDataset

from shoal.core.errors import ConfigError, DataError
from shoal.data import Dataset, Split
from shoal.data.batches.sources import (
    ArrayBatches,
    LoaderBatches,
    as_split,
    batches_of,
    input_batches,
)

X = torch.arange(12.0).reshape(6, 2)
Y = torch.tensor([0, 1, 2, 0, 1, 2])


class Pairs(TorchDataset):
    def __len__(self):
        return 6

    def __getitem__(self, i):
        return X[i], Y[i]


@pytest.mark.parametrize(
    "data",
    [
        (X, Y),
        [X, Y],
        (X.numpy(), Y.numpy()),
        [X.double().numpy(), Y.numpy()],
        (X.tolist(), Y.tolist()),
        Split(X, Y),
        Dataset("d", train=Split(X, Y), test=Split(X[:1], Y[:1])),
    ],
)
def test_everything_with_inputs_and_targets_is_a_split(data):
    split = as_split(data)
    assert torch.equal(split.x, X)
    assert torch.equal(split.y, Y)
    source = batches_of(data, 4)
    assert isinstance(source, ArrayBatches)
    assert (source.n, source.steps_per_epoch) == (6, 2)


@pytest.mark.parametrize("data", [X, X.numpy(), X.tolist(), (X, None), Split(X)])
def test_inputs_alone(data):
    split = as_split(data)
    assert torch.equal(split.x, X)
    assert split.y is None
    with pytest.raises(DataError, match=r"there are inputs but no targets; pass a pair \(x, y\)"):
        batches_of(data)


def test_two_points_as_lists_are_inputs_and_not_a_pair():
    assert as_split([[1.0, 2.0], [3.0, 4.0]]).x.shape == (2, 2)


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        ((X, Y, Y, Y), "a tuple of 4 is not data that fits in one piece"),
        ((X, Y, Y[:2]), "sample_weight has shape"),
        (DataLoader(TensorDataset(X, Y)), "a DataLoader is not data that fits in one piece"),
        (([], []), "there are no data"),
        ((X, Y[:-1]), "x has 6 points but y has 5 points"),
    ],
)
def test_what_is_no_split(data, sentence):
    with pytest.raises(DataError, match=sentence):
        as_split(data)


@pytest.mark.parametrize(
    "data",
    [DataLoader(TensorDataset(X, Y), 4), Pairs(), [(X, Y)], [[X, Y], [X, Y]]],
    ids=["loader", "torch-dataset", "list-of-pairs", "list-of-lists"],
)
def test_everything_that_gives_batches_is_a_loader(data):
    assert isinstance(batches_of(data, 4), LoaderBatches)


def test_a_torch_dataset_is_shuffled():
    source = batches_of(Pairs(), 2, seed=1)
    orders = {tuple(torch.cat([y for _, y in source.batches(e)]).tolist()) for e in range(8)}
    assert len(orders) > 1
    assert (source.n, source.steps_per_epoch) == (6, 3)


def test_a_tensor_dataset_is_two_tensors():
    assert isinstance(batches_of(TensorDataset(X, Y)), ArrayBatches)


def test_types_and_devices_are_those_asked_for():
    (x, y), *_ = batches_of((X, X[:, 0]), dtype=torch.float64, device="cpu").batches(0)
    assert x.dtype == y.dtype == torch.float64
    source = batches_of((X, Y), device=torch.device("meta"))
    assert isinstance(source, ArrayBatches)
    assert source.x.device.type == source.y.device.type == "meta"


@pytest.mark.parametrize("data", ["text", {"x": X}, 3.0, None, iter([(X, Y)])])
def test_what_cannot_be_trained_on(data):
    with pytest.raises(DataError):
        batches_of(data)


@pytest.mark.parametrize(
    "data",
    [
        X,
        (X, Y),
        Split(X, Y),
        DataLoader(TensorDataset(X, Y), 4),
        DataLoader(X, 4),
        Pairs(),
        [(X, Y)],
    ],
    ids=["tensor", "pair", "split", "loader", "loader-of-inputs", "torch-dataset", "list"],
)
def test_inputs_come_in_their_own_order(data):
    torch.testing.assert_close(torch.cat(list(input_batches(data, 4))), X)


def test_inputs_come_in_batches():
    assert [len(x) for x in input_batches(X, 4)] == [4, 2]
    assert next(input_batches(np.zeros((1, 2)), dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(ConfigError, match="batch_size must be"):
        next(input_batches(X, 0))
    with pytest.raises(DataError, match="'d' has several splits; pass one, such as data.test"):
        next(input_batches(Dataset("d", train=Split(X, Y))))


def test_importing_loads_nothing_optional():
    code = (
        "import sys, shoal.data as d, shoal.models as m; "
        "assert {'digits', 'toy-regression', 'toy-classification', 'file'} <= set(d.registry); "
        "assert {'mlp', 'small-cnn', 'linear'} <= set(m.registry); "
        "print([n for n in ('sklearn', 'PIL', 'scipy', 'matplotlib') if n in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"

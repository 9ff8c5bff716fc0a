"""Batches: pure in (seed, epoch, step), whole, and resumable."""

import random

import numpy as np
import pytest
import torch
from torch.utils.data import (
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    SubsetRandomSampler,
    TensorDataset,
)

from shoal.core.errors import ConfigError, DataError
from shoal.data.batches.arrays import check_labels
from shoal.data.batches.loaders import LoaderBatches
from shoal.data.batches.sources import ArrayBatches

N = 23
X = torch.arange(N, dtype=torch.float32).unsqueeze(1)
Y = torch.arange(N)


class Augmented(Dataset):
    """Points with noise from every generator that a user may reach for."""

    def __len__(self):
        return N

    def __getitem__(self, i):
        noise = [float(torch.rand(())), np.random.rand(), random.random()]  # noqa: NPY002
        return torch.tensor([float(i), *noise]), i


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(row, label) for row, label in zip(X, Y, strict=True)])


class Reiterable:
    """Batches from an object that torch knows nothing about."""

    def __iter__(self):
        order = torch.randperm(N)
        return iter([(X[rows], Y[rows]) for rows in order.split(5)])


SOURCES = {
    "arrays": lambda seed: ArrayBatches(X, Y, 5, seed),
    "drop-last": lambda seed: ArrayBatches(X, Y, 5, seed, drop_last=True),
    "shuffled": lambda seed: LoaderBatches(DataLoader(Augmented(), 5, shuffle=True), seed),
    "own-generator": lambda seed: LoaderBatches(
        DataLoader(Augmented(), 5, shuffle=True, generator=torch.Generator()), seed
    ),
    "distributed": lambda seed: LoaderBatches(
        DataLoader(Augmented(), 5, sampler=DistributedSampler(Augmented(), 1, 0)), seed
    ),
    "workers": lambda seed: LoaderBatches(
        DataLoader(Augmented(), 5, shuffle=True, num_workers=1), seed
    ),
    "iterable": lambda seed: LoaderBatches(Reiterable(), seed),
}


def same(left, right):
    return len(left) == len(right) and all(
        torch.equal(a, c) and torch.equal(b, d) for (a, b), (c, d) in zip(left, right, strict=True)
    )


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
def test_what_a_batch_holds_depends_on_seed_and_epoch_alone(make):
    source = make(0)
    first = list(source.batches(1))
    torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    list(source.batches(2))
    assert same(first, list(source.batches(1)))
    assert same(first, list(make(0).batches(1)))
    assert not same(first, list(source.batches(2)))


@pytest.mark.parametrize("make", SOURCES.values(), ids=SOURCES)
@pytest.mark.parametrize("start", [0, 1, 4, 9])
def test_resuming_gives_the_tail_of_the_epoch_whatever_the_training_draws(make, start):
    source = make(3)
    whole = []
    for batch in source.batches(1):
        torch.rand(7), random.random()
        whole.append(batch)
    assert same(whole[start:], list(source.batches(1, start=start)))


@pytest.mark.parametrize("name", [name for name in SOURCES if name != "drop-last"])
def test_an_epoch_holds_every_point_once(name):
    source = SOURCES[name](0)
    batches = list(source.batches(0))
    labels = torch.cat([y for _, y in batches])
    assert sorted(labels.tolist()) == list(range(N))
    assert all(torch.equal(x[:, 0].long(), y) for x, y in batches)
    assert source.n == N
    assert source.steps_per_epoch == len(batches) == 5


def test_different_seeds_give_different_orders():
    orders = {tuple(y.tolist()) for s in range(20) for _, y in ArrayBatches(X, Y, N, s).batches(0)}
    assert len(orders) == 20


def test_the_batches_of_an_epoch_follow_its_order():
    """A captured step reads the order alone, and must see the batches that others see."""
    source = ArrayBatches(X, Y, 5, seed=2)
    seen = torch.cat([y for _, y in source.batches(4)])
    assert torch.equal(seen, source.orders(4))
    assert not torch.equal(seen, source.orders(5))


def test_orders_are_fair():
    """Each point is in the first batch with probability 5 / 23."""
    source, epochs = ArrayBatches(X, Y, 5), 2000
    counts = sum(torch.bincount(next(source.batches(e))[1], minlength=N) for e in range(epochs))
    share = 5 / N
    spread = (share * (1 - share) / epochs) ** 0.5
    assert (counts / epochs - share).abs().max() < 5 * spread


def test_drop_last_keeps_full_batches_only():
    source = SOURCES["drop-last"](0)
    assert [len(x) for x, _ in source.batches(0)] == [5] * 4
    assert (source.n, source.steps_per_epoch) == (N, 4)


@pytest.mark.parametrize(("size", "steps"), [(1, 23), (22, 2), (23, 1), (24, 1)])
def test_steps(size, steps):
    source = ArrayBatches(X, Y, size)
    assert source.steps_per_epoch == steps == len(list(source.batches(0)))


@pytest.mark.parametrize("size", [0, -1, 2.5, "8"])
def test_refuses_a_batch_size(size):
    with pytest.raises(ConfigError, match="batch_size must be a whole number from 1 on, not"):
        ArrayBatches(X, Y, size)


def test_refuses_to_drop_everything():
    with pytest.raises(ConfigError, match="no batch of 24 can be filled from 23 points"):
        ArrayBatches(X, Y, 24, drop_last=True)


def test_global_generators_are_left_as_they_were():
    source = SOURCES["shuffled"](0)
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
    expected = torch.rand(3), np.random.rand(3), random.random()  # noqa: NPY002
    torch.manual_seed(1), np.random.seed(1), random.seed(1)  # noqa: NPY002
    list(source.batches(0))
    assert torch.equal(torch.rand(3), expected[0])
    assert np.array_equal(np.random.rand(3), expected[1])  # noqa: NPY002
    assert random.random() == expected[2]


def test_points_are_counted_where_nobody_says():
    for loader in (DataLoader(Stream(), 5), Reiterable(), [(X[:20], Y[:20]), (X[20:], Y[20:])]):
        source = LoaderBatches(loader)
        assert source.n == N
        assert source.steps_per_epoch == len(list(source.batches(0)))


def test_a_subset_counts_as_the_data():
    loader = DataLoader(TensorDataset(X, Y), 4, sampler=SubsetRandomSampler(range(10)))
    assert LoaderBatches(loader).n == 10


def test_an_epoch_aware_sampler_is_told_the_epoch():
    data = TensorDataset(X, Y)
    source = LoaderBatches(DataLoader(data, N, sampler=DistributedSampler(data, 2, 1)))
    orders = {tuple(y.tolist()) for epoch in range(6) for _, y in source.batches(epoch)}
    assert len(orders) == 6
    assert source.n == N


def test_a_loader_that_drops_its_last_batch_still_stands_for_all_points():
    source = LoaderBatches(DataLoader(TensorDataset(X, Y), 5, shuffle=True, drop_last=True))
    assert (source.n, source.steps_per_epoch) == (N, 4)


def test_batches_are_converted():
    image = torch.full((2, 1, 4, 4), 255, dtype=torch.uint8)
    ((x, y),) = LoaderBatches([(image, np.array([1, 0]))], dtype=torch.float64).batches(0)
    assert x.dtype == torch.float64
    assert torch.equal(x, torch.ones(2, 1, 4, 4, dtype=torch.float64))
    assert y.tolist() == [1, 0]


@pytest.mark.parametrize(
    ("loader", "sentence"),
    [
        ([], "the loader gave no batches"),
        ([{"x": X, "z": Y}], "batch 0 is a dict of 'x', 'z'; it needs .* under 'labels'"),
        ([(X, Y), (X, Y, Y, Y)], "batch 1 of the loader is a tuple of 4; wanted a pair"),
        ([(X, Y, Y[:4])], r"sample_weight has shape \(4,\); wanted one number per point, \(23,\)"),
        ([(X, Y, -Y)], "sample_weight must be numbers from 0 on"),
        ([X], "batch 0 of the loader is a Tensor; wanted a pair"),
        ([(X, Y[:4])], "in batch 0 of the loader, x has 23 points but y has 4 points"),
        ([(X / 0, Y)], "in batch 0 of the loader, x has 23 values that are not finite"),
        (((x, y) for x, y in [(X, Y)]), "a generator can be read only once"),
        (zip([X], [Y], strict=True), "a zip can be read only once"),
        (DataLoader(TensorDataset(X[:0])), "the loader's dataset is empty"),
    ],
)
def test_loaders_that_are_refused(loader, sentence):
    with pytest.raises(DataError, match=sentence):
        LoaderBatches(loader)


def test_labels_beyond_the_outputs_are_refused_before_they_reach_the_device():
    source = LoaderBatches(DataLoader(TensorDataset(X, Y), 5), check=lambda y: check_labels(y, 12))
    with pytest.raises(DataError, match=r"in batch 2 of the loader, y\[2\] is 12, but the network"):
        list(source.batches(0))

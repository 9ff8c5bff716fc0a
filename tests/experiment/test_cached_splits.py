"""The data of a grid are moved and looked through once, and nothing else changes."""

import hashlib

import pytest
import torch

from shoal.core.errors import DataError
from shoal.data.batches.arrays import as_inputs, mark_constant
from shoal.data.batches.sources import batches_of
from shoal.data.dataset import Dataset, Split
from shoal.experiment.grid import CachedSplits, resident
from shoal.training.folder import provenance

CPU = torch.device("cpu")


def split(n=20, seed=0):
    x = torch.rand(n, 3, generator=torch.Generator().manual_seed(seed))
    return Split(x, torch.arange(n) % 2)


@pytest.fixture
def data():
    return Dataset("d", split(), split(seed=1), {"a": split(seed=2)}, {"far": Split(split().x + 9)})


def test_every_part_is_what_it_was(data):
    there = resident(data, None)
    for mine, theirs in (
        (there.train, data.train),
        (there.test, data.test),
        (there.shifts["a"], data.shifts["a"]),
        (there.ood["far"], data.ood["far"]),
    ):
        assert torch.equal(mine.x, theirs.x)
        assert (mine.y is None) == (theirs.y is None)


def test_the_digest_is_made_once_and_is_the_same(data, monkeypatch):
    plain = provenance.digest(batches_of(data))
    x, y = data.train.x, data.train.y
    literal = hashlib.sha256()
    for tensor in (x, y):
        literal.update(
            repr((tuple(tensor.shape), tensor.dtype)).encode() + tensor.numpy().tobytes()
        )
    assert plain == literal.hexdigest()
    there = resident(data, None)
    assert provenance.digest(batches_of(there)) == plain
    monkeypatch.setattr(provenance, "add_to_digest", lambda total, _: total.update(b"changed"))
    again = hashlib.sha256()
    again.update(repr((tuple(x.shape), x.dtype)).encode() + x.numpy().tobytes())
    again.update(b"changed")
    assert provenance.digest(batches_of(there)) == again.hexdigest()


def test_what_is_not_settled_is_looked_through_every_time():
    x = torch.zeros(4, 2)
    as_inputs(x)
    x[1, 1] = torch.nan
    with pytest.raises(DataError, match=r"x\[1, 1\]"):
        as_inputs(x)


def test_what_is_settled_is_found_out_all_the_same():
    x = torch.tensor([[1.0, torch.inf]])
    mark_constant(x)
    for _ in range(2):
        with pytest.raises(DataError, match="not finite"):
            as_inputs(x)


def test_parts_are_kept_while_there_is_room():
    made = []

    class Made(dict):
        def __getitem__(self, name):
            made.append(name)
            return split()

    size = split().x.numel() * 4
    kept = CachedSplits(Made(a=None, b=None), CPU, room=size)
    for _ in range(3):
        assert torch.equal(kept["a"].x, split().x) and len(kept["b"]) == 20
    assert made == ["a", "b", "b", "b"]
    assert list(kept) == ["a", "b"] and len(kept) == 2

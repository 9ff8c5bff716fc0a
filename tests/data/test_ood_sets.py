"""OOD sets of the user's choice, for every data set."""

import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.data import load, registry
from shoal.data.dataset import Dataset, Split
from shoal.data.files.raw import RAW
from shoal.data.load import ood_sets

TOY = {"name": "toy-classification", "points": 4}


def test_files_other_sets_and_own_sets_for_a_set_without_such_a_setting(tmp_path):
    np.savez(tmp_path / "mine.npz", x=np.full((3, 2), 7.0))
    data = load({**TOY, "ood": ["ring", str(tmp_path / "mine.npz")]})
    assert list(data.ood) == ["ring", "mine"]
    assert torch.equal(data.ood["ring"].x, load(TOY).ood["ring"].x)
    assert torch.equal(data.ood["mine"].x, torch.full((3, 2), 7.0))
    again = load(data.spec)
    assert list(again.ood) == ["ring", "mine"]
    assert list(load({"name": "toy-regression", "ood": "toy-regression"}).ood) == ["toy-regression"]
    assert load({**TOY, "ood": []}).ood == {}


def test_without_the_key_nothing_changes():
    data = load(TOY)
    assert list(data.ood) == ["ring", "centre"] and "ood" not in data.spec


@pytest.mark.parametrize("shape", [(5, 28, 28), (5, 1, 28, 28), (5, 28, 28, 1), (5, 784)], ids=str)
def test_grey_images_may_come_in_any_of_these_shapes(tmp_path, shape):
    x = np.random.default_rng(0).integers(0, 256, (5, 28, 28), dtype=np.uint8)
    np.save(tmp_path / "a.npy", x.reshape(shape))
    found = ood_sets(str(tmp_path / "a.npy"), (1, 28, 28), (-1.0, 1.0))["a"].x
    torch.testing.assert_close(found[:, 0], torch.from_numpy(x).float() / 127.5 - 1)


def test_colours_may_come_last(tmp_path):
    x = np.random.default_rng(0).integers(0, 256, (5, 32, 32, 3), dtype=np.uint8)
    np.save(tmp_path / "a.npy", x)
    found = ood_sets(str(tmp_path / "a.npy"), (3, 32, 32))["a"].x
    assert torch.equal(found[4, 2], torch.from_numpy(x[4, :, :, 2]).float() / 255)


@pytest.mark.parametrize(
    ("ood", "error", "sentence"),
    [
        ("rings", ConfigError, "ood 'rings' is neither a data set nor a file .* mean 'ring'"),
        (
            "digits",
            DataError,
            r"digits has inputs of shape \(1, 8, 8\), but training inputs have shape \(2,",
        ),
        (["ring", "ring"], ConfigError, "there are two OOD sets called 'ring'"),
        (7, ConfigError, "data.ood must be text or a list of text, not 7"),
        ("a" * 400, ConfigError, "is neither a data set nor a file"),
    ],
)
def test_what_cannot_be_an_ood_set(ood, error, sentence):
    with pytest.raises(error, match=sentence):
        load({**TOY, "ood": ood})


def test_an_ood_set_that_cannot_be_had_may_be_left_out(monkeypatch):
    def offline(part):
        raise StorageError("cannot download it")

    monkeypatch.setitem(RAW, "kmnist", offline)
    with pytest.raises(StorageError, match="cannot download it; or leave 'kmnist' out of ood"):
        ood_sets("kmnist", (1, 28, 28))


def test_a_set_without_a_test_part(tmp_path, monkeypatch):
    monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    bare = registry.register("bare")
    bare(lambda: Dataset("bare", Split(torch.zeros(2, 2), torch.zeros(2))))
    with pytest.raises(DataError, match="the data set 'bare' has no test set"):
        load({**TOY, "ood": "bare"})

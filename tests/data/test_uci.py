"""UCI problems: standardised by the training part alone, from shared files or published text."""

import io

import numpy as np
import pytest
import torch

from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.data import load
from shoal.data.dataset import standardise
from shoal.data.files.raw import content_digest
from shoal.data.sets import uci

ROWS, SPLITS = 40, 20


def problem(seed):
    random = np.random.default_rng(seed)
    x = random.normal(3.0, 2.0, (ROWS, 3))
    x[:, 1] = 0.1  # a constant, as two columns of naval are
    test = np.zeros((SPLITS, ROWS), bool)
    for split in range(SPLITS):
        test[split, random.permutation(ROWS)[:4]] = True
    return x, random.normal(50.0, 10.0, ROWS), test


@pytest.fixture
def made_up(monkeypatch):
    """Problems of forty rows in place of the published ones."""
    problems = {name: problem(seed) for seed, name in enumerate(uci.PROBLEMS)}
    for name, arrays in problems.items():
        monkeypatch.setitem(uci.PROBLEMS, name, content_digest(*arrays))
    return problems


@pytest.fixture
def shared(tmp_path, cache, made_up, monkeypatch):
    arrays = {
        f"{name}_{part}": array
        for name, found in made_up.items()
        for part, array in zip(("x", "y", "test"), found, strict=True)
    }
    path = tmp_path / "shared" / "uci" / "uci_regression.npz"
    path.parent.mkdir(parents=True)
    np.savez(path, **arrays)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "shared"))
    return path


@pytest.mark.parametrize("split", [0, 19])
def test_the_training_part_has_mean_zero_and_spread_one(shared, made_up, split):
    data = load({"name": "uci", "problem": "wine", "split": split})
    x, y, test = made_up["wine"]
    held = test[split]
    assert (len(data.train), len(data.test)) == (36, 4)
    assert (data.task, data.outputs, data.name) == ("regression", 1, "uci-wine")
    torch.testing.assert_close(data.train.y.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(data.train.y.std(correction=0), torch.tensor(1.0))
    spread = x[~held].std(0)
    expected = (x[held][:, 0] - x[~held].mean(0)[0]) / spread[0]
    np.testing.assert_allclose(data.test.x[:, 0], expected, rtol=1e-5)
    np.testing.assert_allclose(data.train.x[:, 1], 0, atol=1e-6)
    assert data.scaling is not None
    np.testing.assert_allclose(data.scaling.original(data.test.y), y[held], rtol=1e-5)


def test_validation_is_taken_from_the_training_part_and_not_standardised_by(shared, made_up):
    whole = load({"name": "uci", "problem": "yacht"})
    data = load({"name": "uci", "problem": "yacht", "validation": 6, "seed": 3})
    assert data.validation is not None and data.scaling != whole.scaling
    assert (len(data.train), len(data.validation), len(data.test)) == (30, 6, 4)
    np.testing.assert_allclose(data.train.y.mean(), 0, atol=1e-6)
    originals = [data.scaling.original(s.y) for s in (data.train, data.validation)]
    together = torch.cat(originals).sort().values
    torch.testing.assert_close(together, whole.scaling.original(whole.train.y).sort().values)


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"problem": "bostn"}, "there is no UCI problem 'bostn'; did you mean 'boston'"),
        ({"split": 20}, "split of 'boston' must be from 0 to 19, not 20"),
        ({"split": -1}, "split of 'boston' must be from 0 to 19, not -1"),
        ({"validation": 35}, "validation must be from 0 to 34, not 35"),
    ],
)
def test_settings_out_of_range(shared, settings, sentence):
    with pytest.raises(ConfigError, match=sentence):
        load({"name": "uci", **settings})


def test_an_altered_shared_file_is_named(shared):
    shared.write_bytes(shared.read_bytes()[:-100])
    with pytest.raises(
        DataError, match=r"uci_regression.npz cannot be used for 'boston'"
    ) as caught:
        load("uci")
    assert str(caught.value).startswith(str(shared))


def text(array):
    file = io.BytesIO()
    np.savetxt(file, array, fmt="%.17g" if array.dtype.kind == "f" else "%d")
    return file.getvalue()


@pytest.fixture
def published(site, cache, made_up, monkeypatch):
    """The folders of text: the target is the second column of four."""
    for name, (x, y, test) in made_up.items():
        folder = f"{uci._FOLDERS[name]}/data/"
        table = np.column_stack([x[:, 0], y, x[:, 1:]])
        site.put(folder + "data.txt", text(table))
        site.put(folder + "index_features.txt", text(np.array([0.0, 2.0, 3.0])))
        site.put(folder + "index_target.txt", b"1\n")
        for split, held in enumerate(test):
            site.put(f"{folder}index_test_{split}.txt", text(np.flatnonzero(held)))
    monkeypatch.setattr(uci, "_SPLITS", {})
    monkeypatch.setattr(uci, "UCI_TEXT", site.address)
    fetch = uci.fetch_problem
    monkeypatch.setattr(uci, "fetch_problem", lambda name, base=site.address: fetch(name, base))
    return site


def test_text_is_put_together_once_and_checked(published, cache, made_up):
    data = load({"name": "uci", "problem": "naval", "split": 2})
    x, y, test = made_up["naval"]
    np.testing.assert_allclose(data.scaling.original(data.test.y), y[test[2]], rtol=1e-5)
    asked = len(published.requests)
    assert asked == 9 * (3 + SPLITS)
    assert (cache / "uci" / "uci_regression.npz").is_file()
    load({"name": "uci", "problem": "power"})
    assert len(published.requests) == asked


def test_altered_text_is_refused(published, cache):
    place = "/concrete/data/data.txt"
    published.pages[place[1:]] = type(published.pages[place])(text(np.ones((ROWS, 4))))
    with pytest.raises(DataError, match="UCI problem 'concrete' differs from"):
        load("uci")
    assert not (cache / "uci" / "uci_regression.npz").exists()


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("data.txt", b"1 2\n3 x\n", "is not a table of numbers"),
        ("data.txt", b"", "is empty|is not a table"),
        ("index_test_3.txt", b"40\n", "lists indices outside 0 to 39"),
        ("index_test_3.txt", b"1.5\n", "lists indices outside"),
        ("index_features.txt", b"-1\n", "lists indices outside 0 to 3"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_damaged_text_is_named(published, name, content, sentence):
    published.put(f"yacht/data/{name}", content)
    with pytest.raises(DataError, match=sentence):
        uci.fetch_problem("yacht", published.address)


def test_a_missing_page_is_named(published):
    del published.pages["/yacht/data/index_target.txt"]
    with pytest.raises(StorageError, match=r"index_target.txt \(the server answers 404"):
        uci.fetch_problem("yacht", published.address)


def test_a_damaged_file_in_the_cache_is_made_again(published, cache, capsys):
    load("uci")
    path = cache / "uci" / "uci_regression.npz"
    path.write_bytes(path.read_bytes()[:-100])
    load("uci")
    assert "fetching it again" in capsys.readouterr().err


def test_constant_columns_are_only_centred():
    like = torch.tensor([[0.1, 1.0]] * 3 + [[0.1, 4.0]], dtype=torch.float64)
    x, mean, spread = standardise(torch.tensor([[0.3, 4.0]], dtype=torch.float64), like)
    assert spread.tolist() == [1.0, pytest.approx(1.299038)]
    assert x.tolist() == [[pytest.approx(0.2), pytest.approx(1.7320508)]]

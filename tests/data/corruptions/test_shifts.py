"""Corrupted copies as shifts: named, chosen, made when looked at, read from files when asked."""

import numpy as np
import pytest
import torch

import shoal
from shoal.core.errors import ConfigError, DataError, StorageError
from shoal.data import Dataset, Split
from shoal.data.corruptions import corrupt, registry, shifts, with_corruptions
from shoal.data.corruptions.shifts import PublishedFiles
from shoal.data.dataset import LazySplits, sizes


@pytest.fixture
def photographs(colour):
    y = torch.arange(len(colour)) % 10
    split = Split(colour, y)
    turned = {"turned": Split(colour.flip(3), y)}
    return Dataset("photographs", split, split, turned, classes=tuple("0123456789"))


def test_nothing_is_made_before_it_is_looked_at(photographs, monkeypatch):
    made = []

    def spy(images, name, severity, *rest, **options):
        made.append((name, severity))
        return corrupt(images, name, severity, *rest, **options)

    monkeypatch.setattr(shifts, "corrupt", spy)
    data = with_corruptions(photographs)
    assert len(data.shifts) == 1 + 19 * 5
    assert "fog-3" in data.shifts and "fog-6" not in data.shifts and "fog" not in data.shifts
    assert sizes(data.shifts) == dict.fromkeys(data.shifts, 24)
    assert list(data.shifts)[:3] == ["turned", "gaussian-noise-1", "gaussian-noise-2"]
    assert "fog-3" in repr(data.shifts)
    assert made == []
    found = data.shifts["fog-3"]
    assert made == [("fog", 3)]
    assert torch.equal(found.x, corrupt(photographs.test.x, "fog", 3))
    assert found.y is photographs.test.y
    assert data.shifts["turned"] is photographs.shifts["turned"]
    through = iter(data.shifts.items())
    assert [next(through)[0] for _ in range(3)][1:] == ["gaussian-noise-1", "gaussian-noise-2"]
    assert made[1:] == [("gaussian-noise", 1), ("gaussian-noise", 2)]
    with pytest.raises(KeyError):
        data.shifts["fog-6"]


@pytest.mark.parametrize("span", [(-1.0, 1.0), (-1.8816, 2.0989), (-0.3, 2.7)])
@pytest.mark.parametrize("name", ["gaussian-noise", "contrast", "pixelate", "fog"])
def test_copies_have_the_range_of_the_images(photographs, name, span):
    low, width = span[0], span[1] - span[0]
    pixels = photographs.test.x.clone()
    pixels[0, :, 0, :3] = torch.tensor([0.0, 1 / 255, 1.0])  # ends meet the bounds but for rounding
    stretched = Split(pixels * width + low, photographs.test.y)
    data = Dataset("stretched", stretched, stretched, pixel_range=span)
    found = with_corruptions(data, [name]).shifts[f"{name}-4"].x
    wanted = corrupt(pixels, name, 4) * width + low
    assert wanted.min() < low + 0.35 * width
    torch.testing.assert_close(found, wanted, atol=1e-5, rtol=0)


def test_images_beyond_their_own_range_are_refused(photographs):
    wrong = Split(3 * photographs.test.x, photographs.test.y)
    data = Dataset("wrong", wrong, wrong, pixel_range=(-1.0, 1.0))
    with pytest.raises(DataError, match="must lie in"):
        with_corruptions(data)


def test_nothing_is_kept(photographs):
    data = with_corruptions(photographs, ["contrast"])
    first, second = data.shifts["contrast-1"], data.shifts["contrast-1"]
    assert torch.equal(first.x, second.x)
    assert first.x.data_ptr() != second.x.data_ptr()


@pytest.mark.parametrize(
    "chosen, names",
    [
        ("all", registry.names()),
        ("standard", registry.names()[:15]),
        ("fog", ["fog"]),
        (["fog", "snow", "fog"], ["fog", "snow"]),
    ],
)
def test_corruptions_are_chosen(photographs, chosen, names):
    data = with_corruptions(photographs, chosen, severities=[5, 1])
    wanted = [f"{name}-{severity}" for name in names for severity in (5, 1)]
    assert list(data.shifts) == ["turned", *wanted]


def test_words_leave_out_what_would_change_nothing():
    names = set(shoal.data.load({"name": "digits", "corruptions": "all"}).shifts)
    assert {name.rpartition("-")[0] for name in names} == {"rotated", *registry} - {"saturate"}


def test_any_set_of_images_can_be_corrupted_by_its_table():
    table = {"name": "digits", "seed": 4, "corruptions": ["fog"], "severities": [1, 3]}
    data = shoal.data.load(table)
    assert list(data.shifts)[-2:] == ["fog-1", "fog-3"]
    assert data.spec == {"test_size": 500, **table}
    assert torch.equal(data.shifts["fog-3"].x, corrupt(data.test.x, "fog", 3, seed=4))
    again = shoal.data.load(data.spec)
    assert again.spec == data.spec
    assert isinstance(again.shifts, LazySplits)


@pytest.mark.parametrize(
    "settings, error, sentence",
    [
        ({"corruptions": ["fogg"]}, ConfigError, "no corruption called 'fogg'; did you mean 'fog'"),
        ({"corruptions": "standart"}, ConfigError, "did you mean 'standard'"),
        ({"corruptions": []}, ConfigError, "corruptions is empty"),
        ({"corruptions": 3}, ConfigError, "data.corruptions must be"),
        ({"corruptions": "all", "severities": []}, ConfigError, "severities is empty"),
        ({"corruptions": "all", "severities": [6]}, ConfigError, "from 1 to 5, not 6"),
        ({"corruptions": "all", "severities": ["3"]}, ConfigError, "data.severities must be"),
        ({"severities": [3]}, ConfigError, "data.severities needs corruptions"),
        ({"corruptions": "all", "corruption_files": "yes"}, ConfigError, "true or false"),
    ],
)
def test_mistakes_in_a_table(settings, error, sentence):
    with pytest.raises(error, match=sentence):
        shoal.data.load({"name": "digits", **settings})


def test_only_images_can_be_corrupted():
    with pytest.raises(DataError, match="only images"):
        shoal.data.load({"name": "toy-classification", "corruptions": "all"})


def test_a_test_part_is_needed(photographs):
    bare = Dataset("bare", photographs.train)
    with pytest.raises(DataError, match="'bare' has no test set to corrupt"):
        with_corruptions(bare)


COUNT = 4


@pytest.fixture
def published(tmp_path, monkeypatch):
    """Two small files as CIFAR-10-C has them; value 10 s + i in image i of severity s."""
    place = tmp_path / "CIFAR-10-C"
    place.mkdir()
    values = [10 * s + i for s in (1, 2, 3, 4, 5) for i in range(COUNT)]
    x = np.zeros((5 * COUNT, 32, 32, 3), np.uint8) + np.array(values, np.uint8)[:, None, None, None]
    x[:, 0, 1, 2] = 255
    for name in ("fog", "gaussian_noise"):
        np.save(place / f"{name}.npy", x)
    np.save(place / "labels.npy", np.tile(np.arange(COUNT), 5).astype(np.uint8))
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path))
    return place


def test_published_files_are_used_when_asked_for(published, photographs):
    data = with_corruptions(photographs, ["fog", "gaussian-noise"], [2, 5], files=True)
    assert sizes(data.shifts)["fog-2"] == COUNT
    split = data.shifts["gaussian-noise-5"]
    assert split.x.shape == (COUNT, 3, 32, 32)
    assert torch.equal(split.x[:, 0, 0, 0], torch.tensor([50.0, 51, 52, 53]) / 255)
    assert split.x[0, 2, 0, 1] == 1
    assert split.y is not None and split.y.tolist() == [0, 1, 2, 3]
    assert split.y.dtype == torch.int64


def test_only_the_asked_for_part_is_read(published, monkeypatch):
    files = PublishedFiles()
    mapped = files._images("fog")
    assert isinstance(mapped, np.memmap)
    assert not mapped.flags.writeable


@pytest.mark.parametrize(
    "file, content, error, sentence",
    [
        ("fog.npy", None, StorageError, "Zenodo record 2535967"),
        ("labels.npy", None, StorageError, "there is no file"),
        ("fog.npy", b"not an array", DataError, "fog.npy is not a sound array of numpy"),
        ("fog.npy", np.zeros((20, 32, 32, 3)), DataError, r"holds float64 \[20, 32, 32, 3\]"),
        ("fog.npy", np.zeros((21, 32, 32, 3), np.uint8), DataError, "five severities"),
        ("fog.npy", np.zeros((0, 32, 32, 3), np.uint8), DataError, "numpy|five severities"),
        ("labels.npy", np.zeros(20), DataError, "one whole number per image"),
        ("labels.npy", np.zeros(15, np.int64), DataError, "15 labels, but 20 images in fog.npy"),
        ("labels.npy", np.full(20, 10), DataError, "10"),
        ("fog.npy", np.zeros((20, 8, 8, 3), np.uint8), DataError, "leave out corruption_files"),
    ],
)
def test_a_wrong_file_is_refused_in_a_sentence(
    published, photographs, file, content, error, sentence
):
    path = published / file
    path.unlink()
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif content is not None:
        np.save(path, content)
    with pytest.raises(error, match=sentence) as raised:
        with_corruptions(photographs, ["fog"], files=True)
    assert "\n" not in str(raised.value)


def test_a_file_cut_short_is_refused(published, photographs):
    path = published / "fog.npy"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="fog.npy is not a sound array"):
        with_corruptions(photographs, ["fog"], files=True)


def test_a_pickle_is_never_opened(published, photographs):
    np.save(published / "fog.npy", np.array([{"a": 1}] * 20), allow_pickle=True)
    with pytest.raises(DataError, match="fog.npy is not a sound array"):
        with_corruptions(photographs, ["fog"], files=True)

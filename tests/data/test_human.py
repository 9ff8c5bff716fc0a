"""Votes of people, published as an array of counts."""

import io

import numpy as np
import pytest
import torch

from shoal.core.errors import DataError
from shoal.data import human_labels
from shoal.data.files import raw as human
from shoal.data.files.raw import content_digest

COUNTS = np.array([[50, 0, 1], [10, 30, 10]])
SHARES = torch.tensor([[50 / 51, 0, 1 / 51], [0.2, 0.6, 0.2]])


def saved(array):
    file = io.BytesIO()
    np.save(file, array, allow_pickle=array.dtype == object)
    return file.getvalue()


@pytest.fixture
def published(site, cache, monkeypatch):
    monkeypatch.setattr(human, "_CONTENT", content_digest(COUNTS.astype(np.uint8)))
    monkeypatch.setattr(human, "VOTES_ADDRESS", site.put("counts.npy", saved(COUNTS)))
    return site


def test_counts_become_shares_and_are_fetched_once(published, cache):
    torch.testing.assert_close(human_labels(), SHARES)
    torch.testing.assert_close(human_labels(), SHARES)
    assert len(published.requests) == 1
    (cache / human._PATH).write_bytes(b"damaged")
    torch.testing.assert_close(human_labels(), SHARES)


@pytest.mark.parametrize(
    "content",
    [saved(COUNTS + 1), saved(COUNTS)[:-9], b"page not found", saved(np.array([None]))],
    ids=["altered", "truncated", "another page", "pickled"],
)
def test_other_content_is_refused_and_not_kept(published, cache, content):
    published.put("counts.npy", content)
    with pytest.raises(DataError, match="counts.npy cannot be used: ") as caught:
        human_labels()
    assert "\n" not in str(caught.value)
    assert not (cache / human._PATH).exists()


def test_a_bad_shared_file_is_named_and_left_alone(published, tmp_path, monkeypatch):
    path = tmp_path / "shared" / human._PATH
    path.parent.mkdir(parents=True)
    np.savez(path, counts=COUNTS)
    monkeypatch.setenv("SHOAL_DATA", str(tmp_path / "shared"))
    with pytest.raises(DataError, match="does not hold the votes .* replace or remove it"):
        human_labels()
    assert path.exists() and published.requests == []

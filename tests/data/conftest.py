"""Folders of their own for the data files of a test, and a server to get some from."""

import os
from pathlib import Path

import pytest
from file_server import serving


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, no SHOAL_DATA, and no proxy between here and here."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("SHOAL_DATA", raising=False)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    return tmp_path / "home" / "shoal" / "data"


@pytest.fixture
def site():
    with serving() as site:
        yield site


@pytest.fixture
def full():
    """The folder with full data sets."""
    folder = os.environ.get("SHOAL_DATA")
    if not folder or not Path(folder).is_dir():
        pytest.skip("SHOAL_DATA names no folder with full data sets")
    return Path(folder)

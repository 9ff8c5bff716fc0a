"""Downloads from a server on this machine that breaks off, lies, or has nothing."""

import hashlib
from dataclasses import replace

import pytest
from file_server import described

from shoal.core.display.progress import quiet
from shoal.core.errors import StorageError
from shoal.data.catalogue import COLLECTIONS
from shoal.data.files import download as module
from shoal.data.files.download import download, fetch_bytes, flaw

CONTENT = bytes(range(256)) * 4000


@pytest.fixture
def target(cache):
    cache.mkdir(parents=True)
    return cache / "letters.bin"


def part(target):
    return target.with_name("letters.bin.part")


def test_a_whole_file(site, target):
    file = described("set/letters.bin", CONTENT, site.put("a", CONTENT))
    download(file, target)
    assert target.read_bytes() == CONTENT
    assert [path.name for path in target.parent.iterdir()] == ["letters.bin"]
    assert site.requests == [("/a", None)]


def test_other_digests_will_do(site, target):
    md5 = hashlib.md5(CONTENT, usedforsecurity=False).hexdigest()
    file = replace(described("a", CONTENT, site.put("a", CONTENT)), digest=f"md5:{md5}")
    download(file, target)
    assert flaw(target, file) is None
    assert "md5 is" in str(flaw(target, replace(file, digest="md5:0")))


@pytest.mark.parametrize("ranges", [True, False])
def test_a_broken_download_goes_on_where_it_stopped(site, target, ranges):
    """A server that knows no ranges sends everything, which then replaces the part."""
    file = described("a", CONTENT, site.put("a", CONTENT, ranges=ranges))
    part(target).write_bytes(CONTENT[:1000])
    download(file, target)
    assert target.read_bytes() == CONTENT
    assert site.requests == [("/a", "bytes=1000-")]


def test_a_file_that_broke_off_is_continued_at_the_next_address(site, target):
    first = site.put("a", CONTENT, cut=5000)
    file = described("a", CONTENT, first, site.put("b", CONTENT))
    download(file, target)
    assert target.read_bytes() == CONTENT
    assert site.requests == [("/a", None), ("/b", "bytes=5000-")]


def test_a_file_that_always_breaks_off_is_refused_and_its_part_kept(site, target):
    file = described("a", CONTENT, site.put("a", CONTENT, cut=5000))
    with pytest.raises(StorageError, match="cannot download a .*127.0.0.1.*") as caught:
        download(file, target)
    assert "\n" not in str(caught.value)
    assert not target.exists()
    assert part(target).read_bytes() == CONTENT[:5000]


def test_a_finished_part_is_not_asked_for_again(site, target):
    file = described("a", CONTENT, site.put("a", CONTENT))
    part(target).write_bytes(CONTENT)
    download(file, target)
    assert target.read_bytes() == CONTENT
    assert site.requests == []


@pytest.mark.parametrize("old", [b"?" * 1000, b"?" * len(CONTENT), b"?" * (len(CONTENT) + 9)])
def test_a_part_of_something_else_is_thrown_away(site, target, old, capsys):
    file = described("a", CONTENT, site.put("a", CONTENT))
    part(target).write_bytes(old)
    download(file, target)
    assert target.read_bytes() == CONTENT
    assert site.requests[-1] == ("/a", None)
    assert "fetching it again" in capsys.readouterr().err


def test_a_part_longer_than_what_the_server_has(site, target):
    """The server answers 416: the range cannot be had."""
    short = described("a", CONTENT, site.put("a", CONTENT[:500]), site.put("b", CONTENT))
    part(target).write_bytes(b"?" * 800)
    download(short, target)
    assert target.read_bytes() == CONTENT


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (b"!" + CONTENT[1:], "is altered: its sha256 is"),
        (CONTENT + b"more", "is not the published file"),
        (CONTENT[:-1], "is truncated: it has 1,023,999 bytes instead of 1,024,000"),
        (b"", "is truncated: it has 0 bytes"),
    ],
)
def test_what_is_not_the_published_file_is_refused(site, target, wrong, words):
    bad = site.put("bad", wrong)
    with pytest.raises(StorageError, match=words) as caught:
        download(described("a", CONTENT, bad), target)
    assert "\n" not in str(caught.value)
    assert not target.exists()
    download(described("a", CONTENT, bad, site.put("good", CONTENT)), target)
    assert target.read_bytes() == CONTENT


def test_a_missing_page_and_then_a_mirror(site, target):
    file = described("a", CONTENT, site.address + "nothing", site.put("b", CONTENT))
    download(file, target)
    assert target.read_bytes() == CONTENT
    assert [path for path, _ in site.requests] == ["/nothing", "/b"]


def test_without_a_network_the_sentence_says_what_to_do(target):
    address = "http://127.0.0.1:9/digits.gz"
    file = described("mnist/digits.gz", CONTENT, address)
    with pytest.raises(StorageError) as caught:
        download(file, target)
    sentence = str(caught.value)
    assert "cannot download mnist/digits.gz (127.0.0.1:9: Connection refused)" in sentence
    assert f"fetch {address} by other means and put it at {target}" in sentence
    assert "SHOAL_DATA" in sentence and "\n" not in sentence


def test_a_file_without_an_address(target):
    with pytest.raises(StorageError, match=r"\(it has no address\); fetch it by other means"):
        download(described("a", CONTENT), target)


def test_a_folder_that_cannot_be_written_is_not_blamed_on_the_network(site, target):
    file = described("a", CONTENT, site.put("a", CONTENT), site.put("b", CONTENT))
    part(target).mkdir()
    with pytest.raises(StorageError, match=r"cannot (read|write) .*letters.bin.part"):
        download(file, target)


def test_a_line_says_what_is_downloaded_unless_quiet(site, target, capsys):
    file = described("set/letters.bin", CONTENT, site.put("a", CONTENT))
    download(file, target)
    assert "downloading set/letters.bin, 1.0 MB, from 127.0.0.1" in capsys.readouterr().err
    token = quiet.set(True)
    try:
        download(file, target)
    finally:
        quiet.reset(token)
    assert capsys.readouterr().err == ""


def test_a_terminal_shows_how_far_it_is(site, target, capsys, monkeypatch):
    monkeypatch.setattr(module.sys.stderr, "isatty", lambda: True, raising=False)
    download(described("a", CONTENT, site.put("a", CONTENT)), target)
    shown = capsys.readouterr().err
    assert "\r  100%  1.0 MB" in shown
    assert shown.endswith("\r\x1b[K")


def test_small_files_are_bounded(site):
    address = site.put("a", b"12345")
    assert fetch_bytes(address, 5, "set/a") == b"12345"
    with pytest.raises(StorageError, match="has more than 4 bytes"):
        fetch_bytes(address, 4, "set/a")
    sentence = "the server answers 404 .* without a network, put set/a below the folder"
    with pytest.raises(StorageError, match=sentence):
        fetch_bytes(site.address + "no", 4, "set/a")


@pytest.mark.parametrize("digest", ["", "md5:0cc175b9c0f1b6a831c399e269772661"])
def test_plain_http_needs_a_known_sha256(target, digest):
    file = replace(described("a", CONTENT, "http://example.org/a"), digest=digest)
    with pytest.raises(StorageError, match="not secure, and no SHA-256") as caught:
        download(file, target)
    assert "\n" not in str(caught.value) and not part(target).exists()
    with pytest.raises(StorageError, match="not secure, and no SHA-256"):
        fetch_bytes("http://example.org/a", 10, "a")


def test_a_redirection_to_plain_http_is_not_followed(site):
    with pytest.raises(StorageError, match="not secure, and no SHA-256"):
        fetch_bytes(site.put("a", b"", status=302, moved="http://example.org/a"), 10, "a")


def test_every_plain_address_of_the_catalogue_has_a_sha256():
    files = [file for each in COLLECTIONS.values() for file in (*each.files, each.archive) if file]
    plain = [file for file in files if any(a.startswith("http://") for a in file.addresses)]
    assert plain
    assert all(file.digest.startswith("sha256:") and len(file.digest) == 71 for file in plain)

"""One file from the network: resumed where it stopped, checked, and there whole or not at all."""

import contextlib
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from shoal.core.disk import storage_errors, sync
from shoal.core.errors import StorageError
from shoal.core.progress import notice, quiet
from shoal.data.catalogue import File

__all__ = ["download", "fetch_bytes", "flaw"]

_CHUNK = 1 << 18
_SECONDS = 30.0
_NETWORK = (OSError, http.client.HTTPException, ValueError)


def flaw(path: Path, file: File) -> str | None:
    """What is wrong with a file that should be `file`, or None."""
    with storage_errors("read", path):
        size = path.stat().st_size
        if size != file.size:
            kind = "truncated" if size < file.size else "not the published file"
            return f"is {kind}: it has {size:,} bytes instead of {file.size:,}"
        algorithm, _, wanted = file.digest.partition(":")
        with path.open("rb") as content:
            found = hashlib.file_digest(content, lambda: _hash(algorithm)).hexdigest()
    return None if found == wanted else f"is altered: its {algorithm} is {found}, not {wanted}"


def download(file: File, target: Path) -> None:
    """Fetch a file from the first address that has it.

    What came before a break is kept beside the target as `.part` and continued. A file that is
    not what its digest says is thrown away and asked for again, then from the next address.
    """
    part = target.with_name(target.name + ".part")
    problems = []
    for address in file.addresses:
        try:
            _complete(file, address, part)
        except StorageError:
            raise
        except _NETWORK as error:
            problems.append(f"{urlsplit(address).netloc}: {_reason(error)}")
            continue
        with storage_errors("write", target):
            sync(part)
            os.replace(part, target)
            sync(target.parent)
        return
    reasons = "; ".join(dict.fromkeys(problems)) or "it has no address"
    first = next(iter(file.addresses), "it")
    raise StorageError(
        f"cannot download {file.path} ({reasons}); fetch {first} by other means and put it at "
        f"{target}, or below the folder that SHOAL_DATA names"
    )


def fetch_bytes(address: str, limit: int, instead: str) -> bytes:
    """A small file whose content the caller checks.

    Args:
        address: where it is.
        limit: bytes that it may have.
        instead: path of the file that does as well, for the sentence when there is no network.
    """
    try:
        with _opened(address) as answer:
            content = answer.read(limit + 1)
    except _NETWORK as error:
        raise StorageError(
            f"cannot download {address} ({_reason(error)}); without a network, put {instead} "
            f"below the folder that SHOAL_DATA names"
        ) from error
    if len(content) > limit:
        raise StorageError(f"{address} has more than {limit:,} bytes, which it should not")
    return content


def _complete(file: File, address: str, part: Path) -> None:
    """Bring the partial file to its end, from the start if what was there does not fit."""
    resumed = part.exists() and part.stat().st_size > 0
    if not resumed or part.stat().st_size < file.size:
        _fill(file, address, part)
    wrong = flaw(part, file)
    if wrong is None:
        return
    if part.stat().st_size < file.size:
        raise OSError(f"the file {wrong}")  # kept: the next attempt goes on from here
    part.unlink()
    if not resumed:
        raise OSError(f"the file {wrong}")
    notice(f"{part.name} {wrong}; fetching it again")
    _complete(file, address, part)


def _fill(file: File, address: str, part: Path) -> None:
    start = part.stat().st_size if part.exists() else 0
    try:
        with _opened(address, start) as answer:
            if start and not _continues(answer, start):
                start = 0
            mode = "ab" if start else "wb"
            with storage_errors("write", part, file.size), part.open(mode) as sink:
                _pour(answer, sink, _Line(file, address, start))
    except urllib.error.HTTPError as error:
        if not start or error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        part.unlink()
        _fill(file, address, part)


def _pour(answer: http.client.HTTPResponse, sink: IO[bytes], line: "_Line") -> None:
    try:
        while line.done <= line.file.size:
            # An error of the network passes here as it is, one of the disk becomes a sentence.
            try:
                chunk = answer.read(_CHUNK)
            except _NETWORK as error:
                raise _BrokenError(_reason(error)) from error
            if not chunk:
                return
            sink.write(chunk)
            line.more(len(chunk))
    finally:
        line.end()


class _BrokenError(http.client.HTTPException):
    """The connection ended too early."""


def _continues(answer: http.client.HTTPResponse, start: int) -> bool:
    """Whether a server sends the rest, not the whole file again."""
    sent = answer.headers.get("Content-Range", "")
    return answer.status == http.client.PARTIAL_CONTENT and sent.startswith(f"bytes {start}-")


@contextlib.contextmanager
def _opened(address: str, start: int = 0) -> Iterator[http.client.HTTPResponse]:
    headers = {"User-Agent": "shoal", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(address, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=_SECONDS) as answer:
            yield answer
    except urllib.error.HTTPError as error:
        error.close()
        raise


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        return error.reason.strerror or str(error.reason)
    return str(error) or type(error).__name__


def _hash(algorithm: str) -> "hashlib._Hash":
    return hashlib.new(algorithm, usedforsecurity=False)


class _Line:
    """How far a download is: a line that moves on a terminal, two lines elsewhere."""

    def __init__(self, file: File, address: str, start: int) -> None:
        self.file, self.done = file, start
        self.moving = not quiet.get() and sys.stderr.isatty()
        where = f" at {start / 1e6:.1f} MB" if start else ""
        verb = "resuming" if start else "downloading"
        host = urlsplit(address).netloc
        notice(f"{verb} {file.path}{where}, {file.size / 1e6:.1f} MB, from {host}")

    def more(self, count: int) -> None:
        self.done += count
        if self.moving:
            share = self.done / max(self.file.size, 1)
            print(
                f"\r  {share:4.0%}  {self.done / 1e6:.1f} MB", end="", file=sys.stderr, flush=True
            )

    def end(self) -> None:
        if self.moving:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

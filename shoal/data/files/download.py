"""Download of one file: resumable, checked, and either complete or absent."""

import contextlib
import hashlib
import http.client
import os
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from shoal.core.display.progress import notice, quiet
from shoal.core.errors import StorageError
from shoal.core.storage.disk import storage_errors, sync
from shoal.data.catalogue import File

__all__ = ["download", "fetch_bytes", "flaw"]

_CHUNK = 1 << 18
_SECONDS = 30.0
_NETWORK = (OSError, http.client.HTTPException, ValueError)


def flaw(path: Path, file: File) -> str | None:
    """The defect of a file that should be `file`; None if it is correct."""
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

    An interrupted download stays next to the target as `.part` and is continued. A file with a
    wrong digest is removed and downloaded again, then from the next address.
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
        f"{target}, or below the folder SHOAL_DATA"
    )


def fetch_bytes(address: str, limit: int, instead: str) -> bytes:
    """A small file whose content the caller checks.

    Args:
        address: address of the file.
        limit: largest allowed number of bytes.
        instead: path of an alternative file, for the error message.
    """
    try:
        with _opened(address) as response:
            content = response.read(limit + 1)
    except _NETWORK as error:
        raise StorageError(
            f"cannot download {address} ({_reason(error)}); without a network, put {instead} "
            f"below the folder SHOAL_DATA"
        ) from error
    if len(content) > limit:
        raise StorageError(f"{address} has more than {limit:,} bytes, the limit for this file")
    return content


def _complete(file: File, address: str, part: Path) -> None:
    """Complete the partial file; download from the start if its content is wrong."""
    resumed = part.exists() and part.stat().st_size > 0
    if not resumed or part.stat().st_size < file.size:
        _fill(file, address, part)
    wrong = flaw(part, file)
    if wrong is None:
        return
    if part.stat().st_size < file.size:
        raise OSError(f"the file {wrong}")  # kept: the next attempt continues from here
    part.unlink()
    if not resumed:
        raise OSError(f"the file {wrong}")
    notice(f"{part.name} {wrong}; fetching it again")
    _complete(file, address, part)


def _fill(file: File, address: str, part: Path) -> None:
    start = part.stat().st_size if part.exists() else 0
    try:
        with _opened(address, start, file.digest.startswith("sha256:")) as response:
            if start and not _continues(response, start):
                start = 0
            mode = "ab" if start else "wb"
            with storage_errors("write", part, file.size), part.open(mode) as sink:
                _pour(response, sink, _Line(file, address, start))
    except urllib.error.HTTPError as error:
        if not start or error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        part.unlink()
        _fill(file, address, part)


def _pour(response: http.client.HTTPResponse, sink: IO[bytes], line: "_Line") -> None:
    try:
        while line.done <= line.file.size:
            # A network error passes unchanged, a disk error becomes a StorageError.
            try:
                chunk = response.read(_CHUNK)
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


def _continues(response: http.client.HTTPResponse, start: int) -> bool:
    """Whether a server sends the rest of the file, not the complete file."""
    sent = response.headers.get("Content-Range", "")
    return response.status == http.client.PARTIAL_CONTENT and sent.startswith(f"bytes {start}-")


@contextlib.contextmanager
def _opened(
    address: str, start: int = 0, known: bool = False
) -> Iterator[http.client.HTTPResponse]:
    """The answer of a server; plain HTTP is allowed only where a SHA-256 is known."""
    if not known:
        _refuse_plain(address)
    headers = {"User-Agent": "shoal", "Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    request = urllib.request.Request(address, headers=headers)
    try:
        opener = urllib.request.build_opener(*([] if known else [_StaysSecure]))
        with opener.open(request, timeout=_SECONDS) as response:
            yield response
    except urllib.error.HTTPError as error:
        error.close()
        raise


class _StaysSecure(urllib.request.HTTPRedirectHandler):
    """Follows no redirection to plain HTTP."""

    def redirect_request(
        self, req: Any, fp: Any, code: Any, msg: Any, headers: Any, newurl: str
    ) -> Any:
        _refuse_plain(newurl)
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def _refuse_plain(address: str) -> None:
    parts = urlsplit(address)
    if parts.scheme != "https" and parts.hostname not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(
            f"{parts.scheme}://{parts.netloc} is not secure, and no SHA-256 of the file is known"
        )


def _reason(error: BaseException) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"the server answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError) and isinstance(error.reason, OSError):
        return error.reason.strerror or str(error.reason)
    return str(error) or type(error).__name__


def _hash(algorithm: str) -> "hashlib._Hash":
    return hashlib.new(algorithm, usedforsecurity=False)


class _Line:
    """Progress of a download: a line that is updated on a terminal, plain lines elsewhere."""

    def __init__(self, file: File, address: str, start: int) -> None:
        self.file, self.done = file, start
        self.moving = not quiet.get() and sys.stderr.isatty()
        where = f" at {start / 1e6:.1f} MB" if start else ""
        action = "resuming" if start else "downloading"
        host = urlsplit(address).netloc
        notice(f"{action} {file.path}{where}, {file.size / 1e6:.1f} MB, from {host}")

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

"""A web server on this machine that serves made-up files, well or badly."""

import hashlib
import threading
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from shoal.data.catalogue import File


@dataclass
class Page:
    """What is behind one address.

    Attributes:
        content: the bytes.
        status: the answer of the server.
        ranges: whether a part can be asked for.
        cut: break the connection after so many bytes.
        wait: an event to wait for before the last byte is sent.
        moved: the address that the server redirects to.
    """

    content: bytes
    status: int = 200
    ranges: bool = True
    cut: int | None = None
    wait: threading.Event | None = None
    moved: str | None = None


@dataclass
class Site:
    """The pages by their paths, the requests that came, and the address of the whole."""

    address: str
    pages: dict[str, Page] = field(default_factory=dict)
    requests: list[tuple[str, str | None]] = field(default_factory=list)

    def put(self, path, content, **behaviour):
        self.pages[path] = Page(content, **behaviour)
        return self.address + path


@contextmanager
def serving():
    """A site that lives as long as the block."""
    site = Site("")

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked = self.headers.get("Range")
            site.requests.append((self.path, asked))
            page = site.pages.get(self.path, Page(b"nothing here", status=404))
            start = int(asked[6:-1]) if asked and page.ranges and page.status == 200 else 0
            if start and start >= len(page.content):
                self.send_error(416)
                return
            self.send_response(206 if start else page.status)
            if start:
                size = len(page.content)
                self.send_header("Content-Range", f"bytes {start}-{size - 1}/{size}")
            if page.moved is not None:
                self.send_header("Location", page.moved)
            self.send_header("Content-Length", str(len(page.content) - start))
            self.end_headers()
            if page.wait is not None:
                self.wfile.write(page.content[start:-1])
                page.wait.wait()
                start = len(page.content) - 1
            self.wfile.write(page.content[start : page.cut])

        def log_message(self, *_):
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    site.address = f"http://127.0.0.1:{server.server_port}/"
    site.pages = _Slashed()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    try:
        yield site
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


class _Slashed(dict):
    """Pages are put without the slash that requests begin with."""

    def __setitem__(self, path, page):
        super().__setitem__(f"/{path}", page)


def described(path, content, *addresses):
    """The entry of the catalogue for some bytes."""
    digest = hashlib.sha256(content).hexdigest()
    return File(path, len(content), f"sha256:{digest}", tuple(addresses))

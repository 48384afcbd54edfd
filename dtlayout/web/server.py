"""Server: the page and its questions on this machine, for the people who sit at it.

It listens on loopback alone, under an address with a random token. Another site's page that runs in the same browser
can reach loopback too, so a request also has to name this host (a rebound name of another site does not) and, where a
browser says who asks, this page. Nothing but the page's own files is sent, and a POST asks a question.
"""

import json
import secrets
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.resources import files
from typing import Any

from dtlayout.base.errors import DtlayoutError
from dtlayout.base.files import parse_json

Ask = Callable[[Any], Mapping[str, Any]]
"""Function from a question to the document that answers it."""
_HOSTS = ("127.0.0.1", "localhost", "[::1]")
"""Names of this host; a port that ssh forwards has another number than the server's."""
_TYPES = {"html": "text/html", "css": "text/css", "js": "text/javascript", "svg": "image/svg+xml"}
"""Suffix of a file of the page → its type."""
_MOST_BYTES = 1_000_000
"""Longest question; a file in it is shorter."""
_LIMIT_S = 30.0
"""Longest time that a client may take to send a request."""
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}
"""Headers of every answer: the page loads its own files alone, and tells its address to nobody."""


@dataclass(frozen=True)
class StaticFile:
    """A file of the page."""

    type: str
    content: bytes


@cache
def read_static() -> dict[str, StaticFile]:
    """The files of the page by the path below the token; the look is that of all pages (report/page.css)."""
    folder = files("dtlayout.web").joinpath("static")
    found = {each.name: each.read_bytes() for each in folder.iterdir() if each.is_file()}
    found["page.css"] = files("dtlayout.report").joinpath("page.css").read_bytes()
    known = {name: StaticFile(_TYPES[name.rpartition(".")[2]], content) for name, content in found.items()}
    return {"": known["index.html"], **known}


class PageServer(ThreadingHTTPServer):
    """The server of one page, which answers with `ask`; each request has a thread of its own."""

    daemon_threads = True

    def __init__(self, ask: Ask, port: int = 0, token: str | None = None):
        """`port` 0 takes any that is free. DtlayoutError if the port is taken."""
        self.ask, self.token = ask, token or secrets.token_urlsafe(24)
        try:
            super().__init__(("127.0.0.1", port), _PageRequest)
        except OSError as error:
            raise DtlayoutError(f"port {port} cannot be had: {error.strerror}; --port 0 takes a free one") from None

    @property
    def address(self) -> str:
        """Address of the page, which whoever knows it may ask."""
        return f"http://127.0.0.1:{self.server_address[1]}/{self.token}/"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of a browser that has gone away."""


class _PageRequest(BaseHTTPRequestHandler):
    server: PageServer
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "dtlayout", ""
    timeout = _LIMIT_S

    def do_GET(self) -> None:
        """Send a file of the page."""
        if (path := self._find_path()) is None:
            return
        if (file := read_static().get(path)) is None:
            self._refuse(HTTPStatus.NOT_FOUND)
        else:
            self._send(HTTPStatus.OK, f"{file.type}; charset=utf-8", file.content)

    def do_POST(self) -> None:
        """Answer a question."""
        path = self._find_path()
        if path is None:
            return
        if path != "ask":
            self._refuse(HTTPStatus.NOT_FOUND)
            return
        if self.headers.get_content_type() != "application/json":
            self._refuse(HTTPStatus.UNSUPPORTED_MEDIA_TYPE)  # a page of another site may send other types unasked
            return
        length = self.headers.get("Content-Length", "")
        if not (length.isascii() and length.isdigit()):
            self._refuse(HTTPStatus.LENGTH_REQUIRED)
            return
        if len(length) > 12 or int(length) > _MOST_BYTES:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        try:
            question = parse_json(self.rfile.read(int(length)))
        except ValueError:
            self._refuse(HTTPStatus.BAD_REQUEST)
            return
        try:
            document = json.dumps(self.server.ask(question), allow_nan=False).encode()
        except Exception:  # a bug of the planner: the page says so, and other questions are still answered
            traceback.print_exc()
            self._refuse(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self._send(HTTPStatus.OK, "application/json", document)

    def _find_path(self) -> str | None:
        """The path below the token; None for a request of somebody else, which is refused."""
        hosts = self.headers.get_all("Host", [])
        is_here = len(hosts) == 1 and hosts[0].rpartition(":")[0] in _HOSTS
        is_own = is_here and self.headers.get("Origin") in (None, f"http://{hosts[0]}")
        if not is_own or self.headers.get("Sec-Fetch-Site", "none") not in ("none", "same-origin"):
            self._refuse(HTTPStatus.FORBIDDEN)
            return None
        token, slash, path = self.path.partition("?")[0].removeprefix("/").partition("/")
        if not slash or not secrets.compare_digest(token.encode(), self.server.token.encode()):
            self._refuse(HTTPStatus.NOT_FOUND)
            return None
        return path

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True  # what it has sent was perhaps not read
        self._send(status, "text/plain; charset=utf-8", f"{status.phrase}\n".encode())

    def _send(self, status: HTTPStatus, kind: str, content: bytes) -> None:
        self.send_response(status)
        for name, value in {**_HEADERS, "Content-Type": kind, "Content-Length": str(len(content))}.items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        self.wfile.write(content)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Refuse a request that is none, or whose method is no GET and no POST, without saying more."""
        self._refuse(HTTPStatus(code))

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing: an address has the token."""

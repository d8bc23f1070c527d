"""A small HTTP server for what people and Prometheus read about a job, and for the buttons of a page.

Requests carry the token, as `Authorization: Bearer TOKEN` or as `?token=TOKEN`. On loopback, public pages need none. A button
sends a POST with that header, which no page of another site can do.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import socket
import threading
import time
from collections.abc import Callable, Collection, Generator, Mapping
from contextlib import closing, suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple
from urllib.parse import parse_qs

from commlayer.config import is_loopback, join_host
from commlayer.errors import InvalidInput

log = logging.getLogger("commlayer")

REQUEST_S = 10.0
"""Seconds in which a client must send its request and take the answer."""
MAX_CONNECTIONS = 32
NO_TOKEN = ("this needs the token that the command printed: ?token=TOKEN in the address, or the header Authorization: Bearer "
            "TOKEN [E-SECRET]")


class Page(NamedTuple):
    """An answer. The parts of a generator are sent as they come, until the client needs more than REQUEST_S for one of them."""

    content_type: str
    body: bytes | Generator[bytes]
    headers: Mapping[str, str] = MappingProxyType({})
    status: HTTPStatus = HTTPStatus.OK


Pages = Mapping[str, Callable[[], Page]]
"""Functions that return a page, by path."""
Actions = Mapping[str, Callable[[], None]]
"""Functions of buttons, by path."""


def read_token(secret: bytes, number: int = 0) -> str:
    """Returns the token with which a job's pages can be read. It follows from the secret and the number, but does not reveal
    the secret: HTTP is not encrypted."""
    return hmac.digest(secret, b"commlayer: read the job's pages %d" % number, hashlib.sha256).hex()[:32]


class WebServer:
    """Serves pages on threads of its own, from construction to close()."""

    def __init__(self, host: str, port: int, token: Callable[[], str], pages: Pages, *, public: Collection[str] = (),
                 actions: Actions = MappingProxyType({})) -> None:
        """`token`: returns the token that is valid now. `public`: paths of pages that need no token if `host` is loopback."""
        slots, unread = threading.BoundedSemaphore(MAX_CONNECTIONS), dict[Any, float]()

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if slots.acquire(blocking=False):
                    unread[request] = time.monotonic()
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    unread.pop(request, None)
                    slots.release()

            def service_actions(self) -> None:
                """Called twice a second. Ends connections whose request is not complete in time, however often bytes come."""
                for request, begin in tuple(unread.items()):
                    if time.monotonic() - begin > REQUEST_S:
                        unread.pop(request, None)
                        with suppress(OSError):
                            request.shutdown(socket.SHUT_RDWR)

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.debug("a web request from %s failed", client_address, exc_info=True)

        class Handler(_Handler):
            def parse_request(self) -> bool:
                complete = super().parse_request()
                unread.pop(self.request, None)
                return complete

        Handler.pages, Handler.token, Handler.public = pages, staticmethod(token), public if is_loopback(host) else ()
        Handler.actions = actions
        try:
            self._server = Server((host, port), Handler)
        except OSError as error:
            raise InvalidInput("E-ADDRESS", f"cannot listen on {join_host(host, port)}: {error.strerror or error}; choose "
                                            "another address or port") from None
        self.address = join_host(host, self._server.server_address[1])
        self._thread = threading.Thread(target=self._server.serve_forever, name="commlayer-web", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(REQUEST_S)


class _Handler(BaseHTTPRequestHandler):
    pages: Pages = MappingProxyType({})
    token: Callable[[], str] = staticmethod(str)
    public: Collection[str] = ()
    actions: Actions = MappingProxyType({})
    timeout = REQUEST_S
    server_version, sys_version = "commlayer", ""

    def do_GET(self) -> None:
        path, _, query = self.path.partition("?")
        page = self.pages.get(path)
        if not (self._is_public(path) or self._allowed(query)):
            self._say(HTTPStatus.UNAUTHORIZED, NO_TOKEN)
        elif page is None:
            self._say(HTTPStatus.NOT_FOUND, f"no such page; there are {', '.join(self.pages)}")
        else:
            self._answer(page())

    def do_POST(self) -> None:
        act = self.actions.get(self.path)
        if not self._allowed(""):
            self._say(HTTPStatus.UNAUTHORIZED, NO_TOKEN)
        elif act is None:
            self._say(HTTPStatus.NOT_FOUND, "this page has no such button")
        else:
            try:
                act()
            except OSError as error:
                self._say(HTTPStatus.INTERNAL_SERVER_ERROR, str(error))
            else:
                self._say(HTTPStatus.OK, "done")

    def _is_public(self, path: str) -> bool:
        """Returns whether a request for `path` needs no token. Its Host must name this machine: a foreign web page can make
        its own domain resolve to 127.0.0.1, and then sends that domain as Host."""
        return path in self.public and is_loopback(re.sub(r":\d+$", "", self.headers.get("Host", "")).strip("[]"))

    def _allowed(self, query: str) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip() or parse_qs(query).get("token", [""])[0]
        return bool(given) and hmac.compare_digest(given.encode(), self.token().encode())

    def _say(self, status: HTTPStatus, line: str) -> None:
        self._answer(Page("text/plain; charset=utf-8", f"{line}\n".encode(), status=status))

    def _answer(self, page: Page) -> None:
        headers = {"Content-Type": page.content_type, "Cache-Control": "no-store", "X-Content-Type-Options": "nosniff"}
        if page.status is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        if isinstance(page.body, bytes):
            self._head(page.status, {**headers, **page.headers, "Content-Length": str(len(page.body))})
            self.wfile.write(page.body)
            return
        with closing(page.body):
            part = next(page.body)  # a generator that has begun can release what it holds, even if the client is gone
            self._head(page.status, {**headers, **page.headers})
            self.wfile.write(part)
            token = self.token()
            for part in page.body:
                if self.token() != token:
                    break  # a certificate was revoked: the client needs the new token
                self.wfile.write(part)

    def _head(self, status: HTTPStatus, headers: Mapping[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        """Logs requests only for debugging, because there is one every few seconds, and without the token."""
        log.debug("web: %s", (format % args).replace(self.token(), "TOKEN"))

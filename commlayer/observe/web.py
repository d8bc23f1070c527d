"""A small HTTP server for what people and Prometheus read about a job. It only answers GET, and changes nothing.

On another address than loopback, each request must carry the token: `Authorization: Bearer TOKEN`.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import MappingProxyType
from typing import Any, NamedTuple

from commlayer.config import is_loopback, join_host
from commlayer.errors import InvalidInput
from commlayer.observe.events import EventLog, decode
from commlayer.observe.job_view import JobView
from commlayer.observe.metrics import CONTENT_TYPE, exposition

log = logging.getLogger("commlayer")

REQUEST_S = 10.0
"""Seconds in which a client must send its request and take the answer."""
MAX_CONNECTIONS = 32


class Page(NamedTuple):
    content_type: str
    body: bytes


Pages = Mapping[str, Callable[[], Page]]
"""Functions that return a page, by path."""


def read_token(secret: str) -> str:
    """Returns the token with which a job's pages can be read. It follows from the job's secret, but does not reveal it: HTTP is
    not encrypted."""
    return hmac.digest(secret.encode(), b"commlayer: read the job's pages", hashlib.sha256).hex()[:32]


class Follower:
    """A JobView that follows an EventLog. Thread-safe."""

    def __init__(self, events: EventLog) -> None:
        self._events, self._view, self._cursor = events, JobView(), 0
        self._lock = threading.Lock()

    def metrics(self) -> Page:
        with self._lock:
            while (batch := self._events.since(self._cursor)).lines:
                self._cursor = batch.cursor
                for line in batch.lines:
                    if (event := decode(line)) is not None:
                        self._view.apply(event)
            return Page(CONTENT_TYPE, exposition(self._view, time.time()).encode())


class WebServer:
    """Serves pages on threads of its own, from construction to close()."""

    def __init__(self, host: str, port: int, token: str, pages: Pages) -> None:
        """`token`: needed by requests unless `host` is loopback."""
        needed = "" if is_loopback(host) else token
        slots = threading.BoundedSemaphore(MAX_CONNECTIONS)

        class Server(ThreadingHTTPServer):
            address_family = socket.AF_INET6 if ":" in host else socket.AF_INET
            daemon_threads = True

            def process_request(self, request: Any, client_address: Any) -> None:
                if slots.acquire(blocking=False):
                    super().process_request(request, client_address)
                else:
                    self.shutdown_request(request)

            def process_request_thread(self, request: Any, client_address: Any) -> None:
                try:
                    super().process_request_thread(request, client_address)
                finally:
                    slots.release()

            def handle_error(self, request: Any, client_address: Any) -> None:
                log.debug("a web request from %s failed", client_address, exc_info=True)

        class Handler(_Handler):
            pass

        Handler.pages, Handler.token = pages, needed
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
    token = ""
    timeout = REQUEST_S
    server_version, sys_version = "commlayer", ""

    def do_GET(self) -> None:
        page = self.pages.get(self.path.partition("?")[0])
        if not self._allowed():
            self._refuse(HTTPStatus.UNAUTHORIZED, "this address needs the header Authorization: Bearer TOKEN, with the token "
                                                  "that `commlayer serve` printed [E-SECRET]")
        elif page is None:
            self._refuse(HTTPStatus.NOT_FOUND, f"no such page; there are {', '.join(self.pages)}")
        else:
            self._answer(HTTPStatus.OK, page())

    def _allowed(self) -> bool:
        given = self.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        return not self.token or hmac.compare_digest(given.encode(), self.token.encode())

    def _refuse(self, status: HTTPStatus, line: str) -> None:
        self._answer(status, Page("text/plain; charset=utf-8", f"{line}\n".encode()))

    def _answer(self, status: HTTPStatus, page: Page) -> None:
        self.send_response(status)
        headers = {"Content-Type": page.content_type, "Content-Length": str(len(page.body)), "Cache-Control": "no-store",
                   "X-Content-Type-Options": "nosniff"}
        if status is HTTPStatus.UNAUTHORIZED:
            headers["WWW-Authenticate"] = "Bearer"
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(page.body)

    def log_message(self, format: str, *args: Any) -> None:
        """Logs requests only for debugging: Prometheus makes one every few seconds."""
        log.debug("web: " + format, *args)

"""Strangers: processes that know no secret of the job, and open connections to its ports. Run as a module: one of them."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import json
import os
import select
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Callable

import msgspec

from commlayer.config import host_port
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.handshake import Hello
from commlayer.transport.keys.secret import new_nonce
from commlayer.transport.keys.tls import DATA
from commlayer.transport.protocol import Header, Kind
from support import ROOT

WAIT_S = 30.0


class Stranger(contextlib.AbstractContextManager["Stranger"]):
    """A process without the secret that opens connections from `source`, or from several, with commas. `how`, what it does on
    each of them:

    "hold": nothing. "trickle": sends "hello" byte by byte. "garbage": random bytes. "tls": begins a TLS handshake. "enrol":
    asks for a certificate and begins a TLS handshake. "hello": the first frame of a data connection. "grpc": begins HTTP/2.
    "close": closes at once. All but "close" keep the latest `most` connections open.
    """

    def __init__(self, address: str, how: str, *, source: str = "127.0.0.2", rate: float = 100.0, most: int = 500) -> None:
        """`rate`: connections a second."""
        line = [sys.executable, "-m", "support.strangers", address, how, source, str(rate), str(most)]
        environment = os.environ | {"PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
        self.process = subprocess.Popen(line, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment)
        self.report: dict[str, float] = {}
        """After close(): opened, failed, seconds."""
        self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        assert select.select([self.process.stdout], [], [], WAIT_S)[0], "the stranger sent no report"
        return self.process.stdout.readline()

    def close(self) -> dict[str, float]:
        """Ends it; its report."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            out, _ = self.process.communicate(timeout=WAIT_S)
            self.report = json.loads(out.splitlines()[-1])
        return self.report

    def __exit__(self, *_: object) -> None:
        self.close()


def first_bytes(how: str) -> bytes:
    """What a stranger sends on each connection."""
    hello = msgspec.msgpack.encode(Hello("", 0, nonce=new_nonce()))
    sent: dict[str, Callable[[], bytes]] = {
        "garbage": functools.partial(os.urandom, 1000),
        "tls": _client_hello,
        "enrol": lambda: b"COMMLAYER ENROL 1\n" + _client_hello(),
        "hello": lambda: framing.encode(Header(Kind.HELLO), len(hello), crc32c(hello)) + hello,
        "trickle": lambda: framing.encode(Header(Kind.HELLO), len(hello), crc32c(hello)) + hello,
        "grpc": lambda: b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0)),
    }
    return sent.get(how, bytes)()


def _client_hello() -> bytes:
    context, out = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), ssl.MemoryBIO()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols([DATA])
    with contextlib.suppress(ssl.SSLWantReadError):
        context.wrap_bio(ssl.MemoryBIO(), out).do_handshake()
    return out.read()


def _strange(address: str, how: str, source: str, rate: str, most: str) -> None:
    """The loop of a stranger. One that is late catches up, for at most half a second."""
    over = list[bool]()  # an Event would deadlock: the handler may run inside its lock
    signal.signal(signal.SIGTERM, lambda *_: over.append(True))
    target, first, opened, failed = host_port(address), first_bytes(how), 0, 0
    sources = itertools.cycle(source.split(","))
    kept = collections.deque[tuple[socket.socket, list[int]]]()
    begin = due = time.monotonic()
    print("begins", flush=True)
    while not over:
        now = time.monotonic()
        due = max(due, now - 0.5)
        while due <= now and not over:
            due += 1 / float(rate)
            sock = socket.socket()
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")  # closing leaves no TIME_WAIT
            sock.settimeout(0.5)
            try:
                sock.bind((next(sources), 0))
                sock.connect(target)
                opened += 1
                if how != "trickle":
                    sock.sendall(first)
            except OSError:
                failed += 1
            kept.append((sock, [0]))
            if how == "close" or len(kept) > int(most):
                kept.popleft()[0].close()
        for sock, at in kept if how == "trickle" else ():
            with contextlib.suppress(OSError):
                sock.send(first[at[0] : at[0] + 1])
            at[0] += 1
        time.sleep(max(0.001, due - time.monotonic()) if how != "trickle" else 0.2)
    print(json.dumps({"opened": opened, "failed": failed, "seconds": time.monotonic() - begin}), flush=True)


if __name__ == "__main__":
    _strange(*sys.argv[1:])

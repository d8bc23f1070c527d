"""Connections that are cut: a proxy that ends them at given bytes, and ranks and servers that talk through it."""

from __future__ import annotations

import functools
import random
import socket
import threading
from collections import Counter
from typing import Any, NamedTuple

from bench.chaos.proxy import accepted, end
from commlayer.transport.endpoint import Address, Settings, StreamTransport
from commlayer.transport.handshake import Hello
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE
from commlayer.transport.reconnect import ReconnectingTransport, ReconnectPolicy
from support.meshes import soon

UP, DOWN = 0, 1


class Cut(NamedTuple):
    """After that many bytes in one direction, the connection that carries the next one ends, or that byte is changed."""

    way: int
    after: int
    how: str = "reset"
    """reset, close or flip."""


class Cutter:
    """A proxy before one address. `shots` counts the cuts that were made, `passed` the bytes each way."""

    def __init__(self, target: Address, cuts: list[Cut], host: str = "127.0.0.1") -> None:
        self._target = target
        self._cuts = [sorted((c for c in cuts if c.way == way), key=lambda c: c.after) for way in (UP, DOWN)]
        self._lock = threading.Lock()
        self.passed, self.shots, self.connections = [0, 0], 0, 0
        self._open: set[socket.socket] = set()
        self._near: set[socket.socket] = set()
        self._quiet: set[socket.socket] = set()
        self._listener = socket.create_server((host, 0))
        self.address: Address = self._listener.getsockname()[:2]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for near, far in accepted(self._listener, self._target):
            with self._lock:
                self._open |= {near, far}
                self._near.add(near)
                self.connections += 1
            for way, source, sink in ((UP, near, far), (DOWN, far, near)):
                threading.Thread(target=self._pump, args=(way, source, sink), daemon=True).start()

    def _pump(self, way: int, source: socket.socket, sink: socket.socket) -> None:
        try:
            while data := source.recv(1 << 16):
                with self._lock:
                    cut = self._cuts[way][0] if self._cuts[way] else None
                    room = len(data) if cut is None else max(0, min(len(data), cut.after - self.passed[way]))
                    self.passed[way] += room
                    fired = cut is not None and room < len(data)
                    if fired:
                        self._cuts[way].pop(0)
                        self.shots += 1
                    if flip := fired and cut is not None and cut.how == "flip":
                        self.passed[way] += len(data) - room
                if flip:
                    sink.sendall(data[:room] + bytes([data[room] ^ 0x10]) + data[room + 1 :])
                    continue
                sink.sendall(data[:room])
                if fired:
                    assert cut is not None
                    end(source, reset=cut.how == "reset")
                    end(sink, reset=cut.how == "reset")
                    return
            if source not in self._quiet:
                sink.shutdown(socket.SHUT_WR)
        except OSError:
            if source not in self._quiet and sink not in self._quiet:
                end(source, reset=True)
                end(sink, reset=True)

    def cut_next(self, cut: Cut) -> None:
        """Adds a cut after that many more bytes."""
        with self._lock:
            self._cuts[cut.way].append(cut._replace(after=self.passed[cut.way] + cut.after))

    def break_near(self) -> None:
        """Breaks the dialling ends only."""
        with self._lock:
            near, self._near = self._near, set()
        for one in near:
            self._quiet.add(one)
            end(one, reset=True)

    def break_all(self) -> None:
        """Every connection, now."""
        with self._lock:
            ends, self._open = self._open, set()
        for one in ends:
            end(one, reset=True)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)  # else the thread in accept() takes one more
        self._listener.close()
        self.break_all()


class Breakable:
    """As transport.loopback.Hub, over TCP, with a cutter between each worker and each server.

    `cuts[worker]` are those of its connections to the first server.
    """

    def __init__(self, cuts: dict[int, list[Cut]] | None = None, *, host: str = "127.0.0.1", window_s: float = 20.0,
                 keys: dict[int, Keys] | None = None) -> None:
        self._cuts, self._host, self._window_s, self._keys = cuts or {}, host, window_s, keys or {}
        self._targets: dict[int, Address] = {}
        self.cutters: dict[tuple[int, int], Cutter] = {}
        self.servers: dict[int, StreamTransport] = {}
        self.workers: dict[int, ReconnectingTransport] = {}

    def transport(self, rank: int) -> Any:
        settings = Settings(resume=True, keys=self._keys.get(rank), refused=lambda *_: None)
        if rank >= SERVER_BASE:
            stream_transport = self.servers[rank] = StreamTransport(Hello("job", rank), settings=settings)
            self._targets[rank] = stream_transport.listen()
            return stream_transport
        carrier = StreamTransport(Hello("job", rank, session=bytes([rank]) * 16), settings=settings)
        resumed = self.workers[rank] = ReconnectingTransport(carrier, carrier, ReconnectPolicy(self._window_s),
                                                             carrier.pool.give)
        for server, target in self._targets.items():
            cutter = self.cutters[rank, server] = Cutter(
                target, self._cuts.get(rank, []) if server == SERVER_BASE else [], self._host)
            resumed.connect(server, functools.partial(carrier.dial, server, cutter.address), soon())
        return resumed

    @property
    def shots(self) -> int:
        return sum(cutter.shots for cutter in self.cutters.values())

    def close(self) -> None:
        for cutter in self.cutters.values():
            cutter.close()


def random_cuts(
    chance: random.Random, up_nbytes: int, down_nbytes: int, kinds: tuple[str, ...] = ("reset", "close", "flip"),
) -> list[Cut]:
    """One to four, anywhere in what passes in a whole run."""
    results = []
    for _ in range(chance.randint(1, 4)):
        way = chance.choice((UP, DOWN))
        results.append(Cut(way, chance.randrange((up_nbytes, down_nbytes)[way]), chance.choice(kinds)))
    return results


class Counted:
    """Ops that count what is added, by round. A contribution that counts twice shows, as does one that is lost."""

    def __init__(self, inner: Any, added: Counter[tuple[int, int]], bucket: int) -> None:
        self._inner, self._added, self._bucket = inner, added, bucket

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None:
        self._added[self._bucket, r] += 1
        self._inner.add(r, payload, acc, first)

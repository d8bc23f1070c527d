"""A TCP proxy that injects network faults, by worker and direction. Reads frames only to find the worker of a connection.

It runs between workers and servers on loopback, so that network faults need no root. Data that it holds back is late, not lost,
as after an outage of a network: TCP would send it again.
"""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator

from tests.chaos.wire import Seen, Stretch

UP, DOWN = 0, 1
CHUNK_NBYTES = 1 << 16
CONNECT_S = 5.0
_RESET = struct.pack("ii", 1, 0)
Address = tuple[str, int]


class Way:
    """One direction of the traffic between a worker and all servers. `shots` counts the chunks that were disturbed."""

    def __init__(self, chance: random.Random) -> None:
        self._open = threading.Event()
        self._open.set()
        self.delay_s = 0.0
        self.flips = 0
        """Number of following chunks in which a bit is flipped."""
        self.shots = 0
        self.nbytes = 0
        """Bytes that have passed."""
        self._chance, self._lock = chance, threading.Lock()

    def hold(self) -> None:
        self._open.clear()

    def release(self) -> None:
        self._open.set()

    def carry(self, data: bytes) -> bytes:
        """Applies the faults to a chunk; blocks while the direction is held."""
        if not self._open.is_set():
            self.shots += 1
            self._open.wait()
        if self.delay_s:
            self.shots += 1
            time.sleep(self.delay_s)
        with self._lock:
            self.nbytes += len(data)
            if not self.flips:
                return data
            self.flips -= 1
            self.shots += 1
            at = self._chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << self._chance.randrange(8)]) + data[at + 1 :]


class Link:
    """A worker's two directions, and its connections through the proxy."""

    def __init__(self, chance: random.Random) -> None:
        self.ways = Way(chance), Way(chance)
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, socket.socket] = {}
        """The worker's end of each connection -> the server's end."""
        self._quiet: set[socket.socket] = set()

    @property
    def shots(self) -> int:
        return sum(way.shots for way in self.ways)

    @property
    def open(self) -> int:
        """Number of connections."""
        with self._lock:
            return len(self._ends)

    def add(self, near: socket.socket, far: socket.socket) -> None:
        with self._lock:
            self._ends[near] = far

    def drop(self, near: socket.socket) -> bool:
        """Removes a connection; returns whether it was still there."""
        with self._lock:
            return self._ends.pop(near, None) is not None

    def left(self, far: socket.socket) -> bool:
        """Whether that end was left open on purpose."""
        with self._lock:
            return far in self._quiet

    def cut(self, *, reset: bool, halves: bool = False) -> int:
        """Ends all connections and returns their number. `halves`: leaves the servers' ends open."""
        with self._lock:
            ends, self._ends = self._ends, {}
            if halves:
                self._quiet |= set(ends.values())
        for near, far in ends.items():
            end(near, reset=reset)
            if not halves:
                end(far, reset=reset)
        return len(ends)

    def close(self) -> None:
        for way in self.ways:
            way.delay_s = 0.0
            way.release()
        self.cut(reset=True)
        for far in self._quiet:
            end(far, reset=True)


class Proxy:
    """Listens on one address. The worker of a connection is `rank` if given. Otherwise `whose` finds it by the address of the
    connection's worker end, or, without `whose`, the connection's first frame names it."""

    def __init__(self, listen: Address, target: Address, links: list[Link], seen: Seen, rank: int = -1,
                 whose: Callable[[Address], int] | None = None) -> None:
        self._target, self._links, self._seen, self._rank, self._whose = target, links, seen, rank, whose
        self._nobody = Link(random.Random(0))
        self._listener = socket.create_server(listen, backlog=128)
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        for near, far in accepted(self._listener, self._target):
            rank = self._rank if self._whose is None else self._whose(near.getpeername())
            link = self._links[rank] if rank >= 0 else self._nobody
            link.add(near, far)
            stretch = Stretch(self._seen) if self._rank < 0 and self._whose is None else None
            over: list[int] = []
            for way in (UP, DOWN):
                threading.Thread(target=self._pump, args=(way, near, far, link, stretch, over), daemon=True).start()

    def _pump(self, way: int, near: socket.socket, far: socket.socket, link: Link, stretch: Stretch | None,
              over: list[int]) -> None:
        """Moves bytes in one direction. `over`: the directions that have ended in order, shared by both threads."""
        source, sink = (near, far) if way == UP else (far, near)
        with contextlib.suppress(OSError):
            while data := source.recv(CHUNK_NBYTES):
                if stretch is not None:
                    before = stretch.rank
                    stretch.feed(way, data)
                    if stretch.rank != before and 0 <= stretch.rank < len(self._links) and link.drop(near):
                        self._links[stretch.rank].add(near, far)
                    link = self._links[stretch.rank] if 0 <= stretch.rank < len(self._links) else self._nobody
                sink.sendall(link.ways[way].carry(data))
            if sink is far and self._left(far):
                return  # the worker's end is gone, and the server must not notice
            sink.shutdown(socket.SHUT_WR)
            over.append(way)
            if len(over) < 2:
                return
        for one in (link, *self._links):  # its worker may just have become known
            one.drop(near)
        if not self._left(far):
            end(near, reset=len(over) < 2)
            end(far, reset=len(over) < 2)

    def _left(self, far: socket.socket) -> bool:
        return any(one.left(far) for one in self._links)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # otherwise the thread in accept() takes one more connection
        self._listener.close()
        self._nobody.close()


def accepted(listener: socket.socket, target: Address) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Both ends of each new connection, until the listener is closed."""
    while True:
        try:
            near, _ = listener.accept()
        except OSError:
            return
        try:
            far = socket.create_connection(target, CONNECT_S)
        except OSError:  # nothing listens there at the moment
            end(near, reset=True)
            continue
        far.settimeout(None)
        for one in (near, far):
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        yield near, far


def end(one: socket.socket, *, reset: bool) -> None:
    with contextlib.suppress(OSError):
        if reset:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET)
        one.shutdown(socket.SHUT_RD if reset else socket.SHUT_RDWR)  # a close alone would not wake the reading thread
    one.close()

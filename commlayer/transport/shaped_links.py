"""Link shaping: a transport that emulates slow links between hosts (a WAN) on one machine, without root. The demo uses it.

Only the sender waits. A frame waits for the sender's uplink in order of (step, order), then for the delay and the receiver's
downlink, and is passed to the inner transport when it should arrive. Traffic between peers on one host is not shaped.
"""

from __future__ import annotations

import fcntl
import heapq
import mmap
import os
import struct
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from commlayer.errors import CommError, InvalidInput, RecordError
from commlayer.records import View
from commlayer.transport import mailbox
from commlayer.transport.framing import HEADER_NBYTES
from commlayer.transport.protocol import SERVER_BASE, Handle, Header, Key, Transport, Wrapper

CHUNK_NBYTES = 16 << 10
"""Bytes for which an uplink is reserved at once. Small reservations let the processes of one host share the uplink fairly."""
FLUSH_S = 5.0
_SLOT = struct.Struct("=d")


class HostLink(NamedTuple):
    """A host's link to all other hosts. math.inf bits per second and 0.0 s mean no limit."""

    up_bps: float
    down_bps: float
    delay_s: float = 0.0
    """One-way delay in seconds. A frame is delayed by the sum of the sender's and the receiver's delay."""


class ShapedLinks:
    """The links of all hosts of a run, with their state in a file. Processes that use the same `path` share the file, which the
    first process creates. The file contains two doubles per host: when its uplink and when its downlink become free."""

    def __init__(self, path: Path | str, hosts: Sequence[HostLink]) -> None:
        self.hosts = tuple(hosts)
        for i, link in enumerate(self.hosts):
            if not (link.up_bps > 0 and link.down_bps > 0 and link.delay_s >= 0):
                raise InvalidInput("E-ARGUMENT", f"host {i} has {link}: rates must be above 0 bits/s and the delay at least 0 "
                                                 "s")
        nbytes = max(1, 2 * _SLOT.size * len(self.hosts))
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, nbytes)
        self._free = mmap.mmap(self._fd, nbytes)
        self._lock = threading.Lock()  # the file lock works only between processes

    def send(self, host: int, queued: float, nbytes: int) -> float:
        """Reserves the uplink for a chunk of a frame that was queued at time `queued`. Returns when the chunk's last bit is
        sent."""
        return self._reserve(2 * host, queued, nbytes * 8 / self.hosts[host].up_bps)

    def receive(self, source: int, host: int, out: float, nbytes: int) -> float:
        """Reserves the host's downlink for a frame whose last bit left `source` at time `out`. Returns when it has arrived.

        Bits are forwarded as they arrive, so an idle downlink that is as fast as the uplink adds no time. Frames of several
        senders use the downlink one after the other, in the order of the calls.
        """
        last_bit = out + self.hosts[source].delay_s + self.hosts[host].delay_s
        first_bit = last_bit - nbytes * 8 / self.hosts[source].up_bps
        return max(last_bit, self._reserve(2 * host + 1, first_bit, nbytes * 8 / self.hosts[host].down_bps))

    def _reserve(self, slot: int, earliest: float, duration_s: float) -> float:
        with self._lock:
            fcntl.lockf(self._fd, fcntl.LOCK_EX)
            try:
                (free,) = _SLOT.unpack_from(self._free, slot * _SLOT.size)
                end: float = max(earliest, free) + duration_s
                _SLOT.pack_into(self._free, slot * _SLOT.size, end)
            finally:
                fcntl.lockf(self._fd, fcntl.LOCK_UN)
        return end

    def close(self) -> None:
        self._free.close()
        os.close(self._fd)


class _Frame(NamedTuple):
    """A frame that waits. Frames sort by `key`: (step, order, number) on the uplink, later (time of arrival, number)."""

    key: tuple[float, ...]
    operation: Handle
    header: Header
    body: memoryview


class Shaped(Wrapper):
    """A Transport with shaped links. `hosts` maps each peer, including this one, to an index into links.hosts. Peers that are
    not in `hosts` are not shaped."""

    def __init__(self, inner: Transport, links: ShapedLinks, hosts: Mapping[int, int]) -> None:
        super().__init__(inner)
        self._links, self._hosts = links, hosts
        self._work = threading.Condition()
        self._uplink: list[_Frame] = []
        self._arriving: list[_Frame] = []
        self._last: dict[int, float] = {}
        """Maps a peer to the latest arrival time of a frame at that peer. Frames to one peer never overtake each other after
        the uplink."""
        self._number, self._busy, self._closed = 0, False, False
        for what in (self._send_frames, self._deliver_frames):
            threading.Thread(target=what, name="shaped link", daemon=True).start()

    def send(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        host = self._hosts[self.rank]
        if self._hosts.get(peer, host) == host or self._closed:
            return self._inner.send(peer, header, body)
        operation = mailbox.sending(peer, header)
        with self._work:
            self._number += 1
            key = header.step, header.order, self._number, time.monotonic()
            heapq.heappush(self._uplink, _Frame(key, operation, header, memoryview(body).cast("B")))
            self._work.notify_all()
        return operation

    def _send_frames(self) -> None:
        """Emulates the uplink: sends one frame after the other, in chunks so that the processes of this host share it."""
        host = self._hosts[self.rank]
        while (frame := self._next(self._uplink, lambda _: 0.0)) is not None:
            peer = frame.operation.peer
            nbytes = HEADER_NBYTES + len(frame.body)
            for begin in range(0, nbytes, CHUNK_NBYTES):
                out = self._links.send(host, frame.key[-1], min(CHUNK_NBYTES, nbytes - begin))
                time.sleep(max(0.0, out - time.monotonic()))
            with self._work:
                due = max(self._links.receive(host, self._hosts[peer], out, nbytes), self._last.get(peer, 0.0))
                self._last[peer], self._busy = due, False
                heapq.heappush(self._arriving, frame._replace(key=(due, *frame.key[2:3])))
                self._work.notify_all()

    def _deliver_frames(self) -> None:
        while (frame := self._next(self._arriving, lambda frame: frame.key[0] - time.monotonic())) is not None:
            frame.operation.follow(self._inner.send(frame.operation.peer, frame.header, frame.body))

    def _next(self, queue: list[_Frame], wait_s: Callable[[_Frame], float]) -> _Frame | None:
        """Waits until the first frame of the queue is due, removes the frame and returns it; None after close()."""
        with self._work:
            while not self._closed:
                left_s = wait_s(queue[0]) if queue else None
                if left_s is not None and left_s <= 0:
                    self._busy = self._busy or queue is self._uplink
                    self._work.notify_all()
                    return heapq.heappop(queue)
                self._work.wait(left_s)
        return None

    def recv(self, peer: int, match: Key | None = None) -> Handle:
        return self._inner.recv(peer, match)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        with self._work:
            dropped = [frame for frame in (*self._uplink, *self._arriving) if peer in (None, frame.operation.peer)]
            for queue in (self._uplink, self._arriving):
                queue[:] = [frame for frame in queue if frame not in dropped]
                heapq.heapify(queue)
        for frame in dropped:
            frame.operation.fail(reason)
        self._inner.abort(reason, peer)

    def close(self, flush_s: float | None = None) -> None:
        with self._work:
            self._work.wait_for(lambda: not (self._uplink or self._arriving or self._busy),
                                FLUSH_S if flush_s is None else flush_s)
            self._closed = True
            self._work.notify_all()
        self._inner.close(flush_s)
        for frame in (*self._uplink, *self._arriving):
            frame.operation.fail(CommError("this end of the transport was closed", code="E-SESSION-CLOSED"))


ALLOWED = "path=FILE,hosts=N,up_bps=X,down_bps=X,delay_s=X (delay one way), or empty for none"


def shaped_by(setting: str, transport: Transport, view: View) -> Transport:
    """Returns a transport whose links to peers on other nodes are shaped as in `setting`; the given transport if there is
    nothing to shape."""
    if not setting:
        return transport
    nodes = {m.rank: m.node for m in view.members} | {SERVER_BASE + s.id: s.node for s in view.servers}
    return Shaped(transport, parse_shape(setting), nodes)


def parse_shape(setting: str) -> ShapedLinks:
    """Parses the setting `shape`; all hosts have the same link. Processes that name the same path share the links' state."""
    try:
        words = dict(part.split("=", 1) for part in setting.split(","))
        path, hosts = words.pop("path"), int(words.pop("hosts"))
        link = HostLink(**{name: float(value) for name, value in words.items()})
        return ShapedLinks(path, [link] * hosts)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError("E-ARGUMENT", f"shape: got {setting!r} ({error}), allowed: {ALLOWED}") from None

"""Link shaping: a transport that emulates slow links between hosts (a WAN) on one machine, without root. The demo uses it.

A frame waits for the sender's uplink in order of (step, order). It is passed to the inner transport when its last bit is sent.
The receiver delivers it after the delay and the transfer over the downlink. Traffic between peers on one host is not shaped.
"""

from __future__ import annotations

import fcntl
import heapq
import mmap
import os
import struct
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from commlayer.errors import CommError, CorruptFrame, InvalidInput, RecordError
from commlayer.records import View
from commlayer.transport import framing, mailbox
from commlayer.transport.framing import HEADER_NBYTES
from commlayer.transport.mailbox import Mailbox, Operation
from commlayer.transport.protocol import SERVER_BASE, Handle, Header, Key, Kind, Message, Transport, Wrapper

CHUNK_NBYTES = 16 << 10
"""Bytes for which an uplink is reserved at once, so the processes of one host share the uplink fairly."""

_SLOT = struct.Struct("=d")


class HostLink(NamedTuple):
    """A host's link to all other hosts. math.inf bits per second and 0.0 s mean no limit."""

    up_bps: float
    down_bps: float
    delay_s: float = 0.0
    """One-way delay in seconds. A frame is delayed by the sum of the sender's and the receiver's delay."""


class Clock(Protocol):
    """A clock that tests can replace by a simulated one."""

    def now(self) -> float: ...

    def sleep_until(self, at: float, wake: threading.Event) -> None:
        """Sleeps until time `at`, or until `wake` is set."""
        ...


class MonotonicClock:
    """time.monotonic, which is the same in all processes of a machine."""

    def now(self) -> float:
        return time.monotonic()

    def sleep_until(self, at: float, wake: threading.Event) -> None:
        left_s = at - time.monotonic()
        if left_s > 0:
            wake.wait(left_s)


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

    def reaches(self, source: int, host: int, out: float, nbytes: int) -> tuple[float, float]:
        """Returns when the first and the last bit reach the host's downlink, if the last bit left `source` at time `out`."""
        last_bit = out + self.hosts[source].delay_s + self.hosts[host].delay_s
        return last_bit - nbytes * 8 / self.hosts[source].up_bps, last_bit

    def receive(self, host: int, first_bit: float, last_bit: float, nbytes: int) -> float:
        """Reserves the downlink. Returns when the frame has arrived completely.

        Bits are forwarded as they arrive, so an idle downlink that is as fast as the uplink adds no time. Frames of several
        senders use the downlink one after the other, in the order of the calls.
        """
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


_WATCH: Key = (Kind.BYE, 0, 0, 0, 0, 0)
"""Key of a receive that ends only when the peer ends, since underlying transports never deliver BYE."""
FLUSH_S = 5.0


class _Arrival(NamedTuple):
    """An incoming frame, or the loss of a peer. `reserved`: the downlink is reserved and the frame is due when it is complete;
    before that it is due at its first bit."""

    peer: int
    what: Message | CommError
    last_bit: float
    reserved: bool = False


def shaped(inner: Transport, links: ShapedLinks, hosts: Mapping[int, int], clock: Clock | None = None) -> Shaped:
    """Wraps a transport so that its links are shaped. `hosts` maps each peer, including this one, to an index into links.hosts.
    Peers that are not in `hosts` are not shaped."""
    return Shaped(inner, links, hosts, clock or MonotonicClock())


class Shaped(Wrapper):
    """A Transport with shaped links, created by shaped(). `sent_nbytes` and `received_nbytes` count the bytes of frames per
    peer, including headers."""

    def __init__(self, inner: Transport, links: ShapedLinks, hosts: Mapping[int, int], clock: Clock) -> None:
        super().__init__(inner)
        self._links, self._hosts, self._clock = links, hosts, clock
        self.sent_nbytes: Counter[int] = Counter()
        self.received_nbytes: Counter[int] = Counter()
        self._mailbox = Mailbox()
        self._work = threading.Condition()
        self._up: list[tuple[int, int, int, float, Operation, Header, memoryview]] = []
        self._down: list[tuple[float, int, _Arrival]] = []
        self._newest: dict[int, float] = {}  # by peer: latest first bit, and
        self._whole: dict[int, float] = {}  # latest completion time
        self._seq = 0
        self._sending = False
        self._watched: set[int] = set()
        self._stop, self._wake = threading.Event(), threading.Event()
        self._threads = [
            threading.Thread(target=self._pace, name="shaped uplink", daemon=True),
            threading.Thread(target=self._delay, name="shaped downlink", daemon=True),
        ]
        for thread in self._threads:
            thread.start()
        for peer in inner.peers:
            self._watch(peer)
        inner.recv().on_done(self._arrived)

    def _near(self, peer: int) -> bool:
        host = self._hosts[self.rank]
        return self._hosts.get(peer, host) == host

    # ---- sending

    def send(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        self._watch(peer)
        view = memoryview(body).cast("B")
        framing.pack(header, len(view))  # raises errors now instead of on the pacing thread
        operation = mailbox.sending(peer, header)
        if (error := self._mailbox.failure(peer)) is not None:
            operation.fail(error)
            return operation
        with self._work:
            self.sent_nbytes[peer] += HEADER_NBYTES + len(view)
            if not self._near(peer):
                self._seq += 1
                heapq.heappush(self._up, (header.step, header.order, self._seq, self._clock.now(), operation, header, view))
                self._work.notify_all()
        if self._near(peer):
            mailbox.follow(operation, self._inner.send(peer, header, view))
        return operation

    def _pace(self) -> None:
        """Emulates the uplink: sends one frame after the other, in chunks so that the processes of this host share it."""
        host = self._hosts[self.rank]
        while not self._stop.is_set():
            with self._work:
                self._sending = False
                self._work.notify_all()
                while not self._up:
                    self._work.wait()
                    if self._stop.is_set():
                        return
                *_, queued, operation, header, body = heapq.heappop(self._up)
                self._sending = True
            remaining = HEADER_NBYTES + len(body)
            while remaining > 0 and not self._stop.is_set():
                nbytes = min(remaining, CHUNK_NBYTES)
                self._clock.sleep_until(self._links.send(host, queued, nbytes), self._stop)
                remaining -= nbytes
            assert operation.peer is not None
            mailbox.follow(operation, self._inner.send(operation.peer, header, body))

    # ---- receiving

    def _arrived(self, handle: Handle) -> None:
        """Handles arrived messages in order, then posts one receive."""
        while handle.error() is None:
            self._take(handle.message())
            handle = self._inner.recv()
            if not handle.done():
                handle.on_done(self._arrived)
                return
        # The inner transport has ended; each peer's watch reports it.

    def _take(self, message: Message) -> None:
        peer, nbytes = message.peer, HEADER_NBYTES + len(message.body)
        with self._work:
            self.received_nbytes[peer] += nbytes
        if self._near(peer):
            self._deliver(peer, message)
        else:
            first_bit, last_bit = self._links.reaches(self._hosts[peer], self._hosts[self.rank], self._clock.now(), nbytes)
            self._put(first_bit, _Arrival(peer, message, last_bit))

    def _watch(self, peer: int) -> None:
        with self._work:
            if peer in self._watched or (self._mailbox.failure(peer) is not None and peer not in self._inner.peers):
                return
            self._watched.add(peer)
        self._mailbox.admit(peer)
        self._inner.recv(peer, _WATCH).on_done(lambda handle: self._lost(peer, handle))

    def _lost(self, peer: int, handle: Handle) -> None:
        error = handle.error()
        assert error is not None
        if self._near(peer):
            self._deliver(peer, error)
        else:
            self._put(0.0, _Arrival(peer, error, 0.0))

    def _put(self, due: float, arrival: _Arrival) -> None:
        """Queues an incoming frame, or the loss of a peer, until time `due`. Arrivals of one peer never overtake each other."""
        with self._work:
            self._seq += 1
            due = self._newest[arrival.peer] = max(due, self._newest.get(arrival.peer, due))
            heapq.heappush(self._down, (due, self._seq, arrival))
            self._wake.set()
            self._work.notify_all()

    def _delay(self) -> None:
        """Emulates delay and downlink: a frame reserves the downlink when its first bit arrives, and is delivered when its last
        bit has arrived."""
        host = self._hosts[self.rank]
        while not self._stop.is_set():
            with self._work:
                self._wake.clear()
                while not self._down:
                    self._work.wait()
                    if self._stop.is_set():
                        return
                due, seq, arrival = self._down[0]
                ready = due <= self._clock.now()
                if ready:
                    heapq.heappop(self._down)
            if not ready:
                self._clock.sleep_until(due, self._wake)  # or until an arrival that may be due earlier
            elif arrival.reserved:
                self._deliver(arrival.peer, arrival.what)
            else:
                if isinstance(arrival.what, Message):
                    nbytes = HEADER_NBYTES + len(arrival.what.body)
                    complete_s = self._links.receive(host, due, arrival.last_bit, nbytes)
                    self._whole[arrival.peer] = max(complete_s, self._whole.get(arrival.peer, complete_s))
                with self._work:
                    heapq.heappush(self._down, (self._whole.get(arrival.peer, due), seq, arrival._replace(reserved=True)))

    def _deliver(self, peer: int, what: Message | CommError) -> None:
        if isinstance(what, CommError):
            with self._work:
                self._watched.discard(peer)
            self._mailbox.end(what, peer)
            return
        self._watch(peer)
        try:
            self._mailbox.deliver(what)
        except CorruptFrame as error:
            self.abort(error, peer)

    # ---- Transport

    def recv(self, peer: int | None = None, match: Key | None = None) -> Handle:
        if peer is not None:
            self._watch(peer)
        return self._mailbox.recv(peer, match)

    def wait(self, handle: Handle, deadline: float) -> Message:
        return mailbox.wait(handle, deadline)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        self._mailbox.abort(reason, peer)
        with self._work:
            dropped = [item for item in self._up if peer in (None, item[4].peer)]
            self._up = [item for item in self._up if peer not in (None, item[4].peer)]
            heapq.heapify(self._up)
        for item in dropped:
            item[4].fail(reason)
        self._inner.abort(reason, peer)

    def close(self, flush_s: float | None = None) -> None:
        with self._work:
            self._work.wait_for(lambda: not self._up and not self._sending, FLUSH_S if flush_s is None else flush_s)
        self._stop.set()
        with self._work:
            self._wake.set()
            self._work.notify_all()
        reason = CommError("this end of the transport was closed", code="E-SESSION-CLOSED")
        self._mailbox.abort(reason)
        for item in self._up:
            item[4].fail(reason)
        self._inner.close(flush_s)
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join(1.0)


ALLOWED = "path=FILE,hosts=N,up_bps=X,down_bps=X,delay_s=X (delay one way), or empty for none"


def shaped_by(setting: str, transport: Transport, view: View) -> Transport:
    """Returns the transport itself, or one whose links to peers on other nodes are shaped as in `setting`."""
    if not setting:
        return transport
    nodes = {m.rank: m.node for m in view.members} | {SERVER_BASE + s.id: s.node for s in view.servers}
    return shaped(transport, parse_shape(setting), nodes)


def parse_shape(setting: str) -> ShapedLinks:
    """Parses the setting `shape`; all hosts have the same link. Processes that name the same path share the links' state."""
    try:
        words = dict(part.split("=", 1) for part in setting.split(","))
        path, hosts = words.pop("path"), int(words.pop("hosts"))
        link = HostLink(**{name: float(value) for name, value in words.items()})
        return ShapedLinks(path, [link] * hosts)
    except (KeyError, TypeError, ValueError) as error:
        raise RecordError("E-ARGUMENT", f"shape: got {setting!r} ({error}), allowed: {ALLOWED}") from None

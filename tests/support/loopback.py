"""In-process transport: peers are threads of one process, without sockets. Used by tests."""

from __future__ import annotations

import heapq
import threading
from collections.abc import Callable, Iterable, Sequence

from commlayer.errors import CommError, CorruptFrame, InvalidInput, PeerEnded, PeerLost
from commlayer.transport import framing
from commlayer.transport.protocol import Handle, Header, Message, complete_send, make_send_handle, peer_name
from support.mailbox import Mailbox, Receives

_LAST = 1 << 32
"""Sorts after every step, so that the end of a wire is delivered last."""


class _Wire:
    """One direction between two peers. A thread that finds it idle delivers until the queue is empty; others only enqueue."""

    def __init__(self, source: int, target: Loopback) -> None:
        self._source, self._target = source, target
        self._lock = threading.Lock()
        self._queue: list[tuple[int, int, int, Handle | None, Header, memoryview]] = []
        self._seq = 0
        self._busy = False

    def put(self, operation: Handle | None, header: Header, body: memoryview) -> None:
        """An item without an operation is the end of the wire."""
        with self._lock:
            self._seq += 1
            step = _LAST if operation is None else header.step
            heapq.heappush(self._queue, (step, header.order, self._seq, operation, header, body))
            if self._busy:
                return
            self._busy = True
        while (item := self._next()) is not None:
            *_, operation, header, body = item
            if operation is None:
                self._target.end(PeerEnded("closed its end", peer=peer_name(self._source)), self._source)
                continue
            try:
                if self._target.mailbox.failure(self._source) is None:
                    self._target.arrived(Message(self._source, header, body))
            except CorruptFrame as error:
                self._target.end(error, self._source)
            complete_send(operation, header)

    def _next(self) -> tuple[int, int, int, Handle | None, Header, memoryview] | None:
        with self._lock:
            self._busy = bool(self._queue)
            return heapq.heappop(self._queue) if self._queue else None


class Hub:
    """Connects the peers of one process. A new peer is connected to all existing ones immediately."""

    def __init__(self, max_nbytes: int = framing.DEFAULT_MAX_NBYTES) -> None:
        self.max_nbytes = max_nbytes
        self._lock = threading.Lock()
        self._ends: dict[int, Loopback] = {}

    def transport(self, rank: int) -> Loopback:
        end = Loopback(self, rank)
        with self._lock:
            if rank in self._ends:
                raise InvalidInput("E-TRANSPORT-USE", f"{peer_name(rank)} is already connected: close it first")
            self._ends[rank] = end
            for other in self._ends.values():
                if other is not end:
                    other.connect(end)
                    end.connect(other)
        return end

    def mesh(self, ranks: Iterable[int]) -> list[Loopback]:
        return [self.transport(rank) for rank in ranks]

    def leave(self, rank: int) -> None:
        with self._lock:
            self._ends.pop(rank, None)


class Loopback(Receives):
    """Created by a Hub."""

    def __init__(self, hub: Hub, rank: int) -> None:
        self._hub, self._rank = hub, rank
        self.mailbox = Mailbox()
        self.arrived: Callable[[Message], None] = self.mailbox.deliver
        self.ended: Callable[[int, CommError], None] = lambda *_: None
        self._lock = threading.Lock()
        self._wires: dict[int, _Wire] = {}
        self._others: dict[int, Loopback] = {}

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def peers(self) -> tuple[int, ...]:
        with self._lock:
            return tuple(sorted(peer for peer in self._wires if self.mailbox.failure(peer) is None))

    def connect(self, other: Loopback) -> None:
        with self._lock:
            self._wires[other.rank] = _Wire(self._rank, other)
            self._others[other.rank] = other
        self.mailbox.admit(other.rank)

    def send(self, peer: int, header: Header, body: memoryview | bytes = b"") -> Handle:
        data = bytes(body)  # copies, as a socket does
        if len(data) > self._hub.max_nbytes:
            raise InvalidInput("E-TRANSPORT-USE",
                               f"message to {peer_name(peer)}: its body has {len(data)} bytes, allowed {self._hub.max_nbytes}")
        framing.pack(header, len(data))  # raises the errors that a socket transport raises
        operation = make_send_handle(peer, header)
        with self._lock:
            wire = self._wires.get(peer)
        error = self.mailbox.failure(peer)
        if error is None and wire is None:
            error = PeerLost("not connected", peer=peer_name(peer))
        if error is not None:
            operation.fail(error)
        elif wire is not None:
            wire.put(operation, header, memoryview(data))
        return operation

    def send_all(self, peers: Sequence[int], header: Header, body: memoryview | bytes = b"") -> None:
        for peer in peers:
            self.send(peer, header, body)

    def end(self, reason: CommError, peer: int) -> None:
        if self.mailbox.failure(peer) is None:
            self.mailbox.end(reason, peer)
            self.ended(peer, reason)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        with self._lock:
            peers = [other for rank, other in self._others.items() if peer in (None, rank)]
        self.mailbox.abort(reason, peer)
        for other in peers:
            self.ended(other.rank, reason)
            other.end(PeerLost("connection closed", peer=peer_name(self._rank)), self._rank)

    def close(self, flush_s: float | None = None) -> None:
        self._hub.leave(self._rank)
        with self._lock:
            wires, self._wires = self._wires, {}
        self.mailbox.abort(CommError("this end of the transport was closed", code="E-SESSION-CLOSED"))
        for wire in wires.values():
            wire.put(None, Header(0), memoryview(b""))

"""Matching of received messages with posted receives."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict, deque
from collections.abc import Callable

from commlayer.errors import CommError, CorruptFrame
from commlayer.transport.protocol import KIND_NAMES, Handle, Header, Key, Message, key, peer_name

log = logging.getLogger("commlayer")

DEFAULT_MAX_KEPT_NBYTES = 4 << 30
KEPT_OVERHEAD_NBYTES = 512
"""Bytes that each stored message counts in addition to its body, so a flood of empty messages also reaches the limit."""

_NO_BODY = memoryview(b"")
_SENDS = {kind: f"send of {name}" for kind, name in KIND_NAMES.items()}


def sending(peer: int, header: Header) -> Handle:
    return Handle(_SENDS[header.kind], peer, header.step, header.bucket)


def sent(operation: Handle, header: Header) -> None:
    operation.complete(Message(operation.peer, header, _NO_BODY))


def clear_traceback(error: CommError) -> CommError:
    """Clears the traceback and context of an error that is stored for later. Their frames would keep message bodies and
    connections in memory."""
    error.__traceback__ = error.__context__ = None
    return error


class Mailbox:
    """Matches received messages with receives. Thread-safe.

    First in, first out: a message completes the oldest matching receive, and a receive returns the oldest matching message.
    """

    def __init__(self, max_kept_nbytes: int = DEFAULT_MAX_KEPT_NBYTES) -> None:
        self._lock = threading.Lock()
        self._seq = 0
        self._posted: dict[tuple[int, Key | None], deque[tuple[int, Handle]]] = {}
        self._subscribers: dict[int, tuple[Callable[[Message], None], Callable[[CommError], None]]] = {}
        self._kept: OrderedDict[int, Message] = OrderedDict()  # in order of arrival
        self._index: dict[tuple[int, Key], deque[int]] = {}  # the same messages, by peer and key
        self._kept_nbytes: dict[int, int] = {}
        self.max_kept_nbytes = max_kept_nbytes
        self._failed: dict[int | None, CommError] = {}

    def failure(self, peer: int | None) -> CommError | None:
        """Returns the error that ended this peer (None: all peers). The value is None if no error has occurred."""
        return self._failed.get(None) or self._failed.get(peer)

    def recv(self, peer: int, match: Key | None) -> Handle:
        step, bucket = (None, None) if match is None else match[2:4]
        what = "receive" if match is None else f"receive of {KIND_NAMES[match[0]]}"
        operation = Handle(what, peer, step, bucket)
        with self._lock:
            message = self._take(peer, match)
            error = self.failure(peer)
            if message is None and error is None:
                self._seq += 1
                self._posted.setdefault((peer, match), deque()).append((self._seq, operation))
        if message is not None:
            operation.complete(message)
        elif error is not None:
            operation.fail(error)
        return operation

    def deliver(self, message: Message) -> None:
        """Delivers a checked message. Raises CorruptFrame if its sender exceeds the limit of bytes without a posted receive."""
        peer = message.peer
        with self._lock:
            if self._failed and self.failure(peer) is not None:
                return
            operation = self._posted_for(peer, key(message.header)) if self._posted else None
            subscriber = self._subscribers.get(peer)
            if operation is None and subscriber is None:
                self._keep(message, key(message.header))
                return
        if operation is not None:
            operation.complete(message)
        elif subscriber is not None:
            subscriber[0](message)

    def subscribe(self, peer: int, arrived: Callable[[Message], None], ended: Callable[[CommError], None]) -> None:
        """See Transport.subscribe."""
        while True:
            with self._lock:
                message, error = self._take(peer, None), self.failure(peer)
                if message is None and error is None:
                    self._subscribers[peer] = arrived, ended
                    return
            if message is not None:
                arrived(message)
            elif error is not None:
                ended(error)
                return

    def end(self, reason: CommError, peer: int) -> None:
        """Ends a peer: receives fail with `reason`, but messages that have already arrived can still be received. If the peer
        has ended before, its first reason is kept."""
        with self._lock:
            reason = self._failed.setdefault(peer, clear_traceback(reason))
            pending = self._unpost(peer)
        _fail(pending, reason)

    def abort(self, reason: CommError, peer: int | None = None) -> None:
        """Ends one peer, or all, like `end`, and drops the messages that have arrived."""
        with self._lock:
            reason = self._failed.setdefault(peer, clear_traceback(reason))
            for seq in [s for s, m in self._kept.items() if peer is None or m.peer == peer]:
                self._forget(seq)
            pending = self._unpost(peer)
        _fail(pending, reason)

    def admit(self, peer: int) -> None:
        """Clears the error of a peer that has connected again."""
        with self._lock:
            self._failed.pop(peer, None)

    def _posted_for(self, peer: int, k: Key) -> Handle | None:
        queue, other = self._posted.get((peer, k)), self._posted.get((peer, None))
        place: tuple[int, Key | None] = (peer, k)
        if queue is None or (other is not None and other[0][0] < queue[0][0]):
            queue, place = other, (peer, None)
        if queue is None:
            return None
        _, operation = queue.popleft()
        if not queue:
            del self._posted[place]
        return operation

    def _keep(self, message: Message, k: Key) -> None:
        peer, charge = message.peer, len(message.body) + KEPT_OVERHEAD_NBYTES
        total = self._kept_nbytes.get(peer, 0) + charge
        if total > self.max_kept_nbytes:
            raise CorruptFrame(f"sent more than {self.max_kept_nbytes} bytes for which no receive is "
                               "posted", peer=peer_name(peer))
        self._kept_nbytes[peer] = total
        self._seq += 1
        self._kept[self._seq] = message
        self._index.setdefault((peer, k), deque()).append(self._seq)

    def _take(self, peer: int, match: Key | None) -> Message | None:
        if match is not None:
            queue = self._index.get((peer, match))
            return self._forget(queue[0]) if queue else None
        seq = next((seq for seq, message in self._kept.items() if message.peer == peer), None)
        return None if seq is None else self._forget(seq)

    def _forget(self, seq: int) -> Message:
        """Removes and returns a stored message. The message must be the oldest of its peer and key, unless the caller removes
        all such messages."""
        message = self._kept.pop(seq)
        place = (message.peer, key(message.header))
        queue = self._index[place]
        queue.popleft()
        if not queue:
            del self._index[place]
        self._kept_nbytes[message.peer] -= len(message.body) + KEPT_OVERHEAD_NBYTES
        return message

    def _unpost(self, peer: int | None) -> list[Callable[[CommError], None]]:
        """Removes the receives and the subscriber of a peer, or of all. Returns the functions that end them."""
        places = [place for place in self._posted if peer is None or place[0] == peer]
        subscribed = [other for other in self._subscribers if peer is None or other == peer]
        return [*(operation.fail for place in places for _, operation in self._posted.pop(place)),
                *(self._subscribers.pop(other)[1] for other in subscribed)]


def _fail(pending: list[Callable[[CommError], None]], reason: CommError) -> None:
    for fail in pending:
        fail(reason)

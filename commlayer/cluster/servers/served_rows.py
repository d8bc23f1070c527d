"""Exchanges rows over a server: the row is one more bucket of server 0, whose result is the rows of all members in order.

The codec of that bucket is "gather" (gather.py). A row is closed by the same rule as any other bucket: if members leave, the
contributions of the remaining members are enough.
"""

from __future__ import annotations

import array
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from commlayer.cluster.calls import messages
from commlayer.cluster.processes.bounded_calls import CHECK_S
from commlayer.cluster.processes.rows import Failed, PendingRows, RowTransport
from commlayer.cluster.servers.gather import GATHER, ROW_BUCKET
from commlayer.errors import CorruptFrame, DeadlineExceeded
from commlayer.transport.protocol import SERVER_BASE, Handle, Header, Kind, Message, peer_name
from commlayer.transport.reconnect import ReconnectingTransport


class ServedRows(RowTransport):
    """Exchanges rows over server 0. A server accepts only the next row of a bucket, so each row is sent when the result of the
    previous one has arrived."""

    def __init__(self, transport: ReconnectingTransport, member: int, timeout_s: float) -> None:
        """`member`: this rank's number in messages."""
        super().__init__(timeout_s)
        self._transport, self._member = transport, member
        self._lock = threading.Lock()
        self._queue: deque[_ServedRow] = deque()
        """The row in flight, and the rows after it."""
        self._generation = 0

    def start(self, row: list[float], what: str) -> PendingRows:
        body = array.array("d", row).tobytes()
        with self._lock:
            header = Header(Kind.PUSH, self._generation, self.number, ROW_BUCKET, codec=GATHER, sender=self._member,
                            joined=self.joined)
            self.number += 1
            pending = _ServedRow(header, body, what, self.missing)
            self._queue.append(pending)
            is_first = len(self._queue) == 1
        if is_first:
            self._send(pending)
        return pending

    def _send(self, row: _ServedRow) -> None:
        def answered(answer: Handle) -> None:
            row.end(answer)
            with self._lock:
                if not self._queue or self._queue[0] is not row:
                    return  # the plan has ended
                self._queue.popleft()
                following = self._queue[0] if self._queue else None
            if following is not None:
                self._send(following)

        self._transport.request(SERVER_BASE, row.header, row.body).on_done(answered)

    def missing(self) -> tuple[str, ...]:
        number, missing = self.stalled.get(ROW_BUCKET, (-1, ()))
        with self._lock:
            in_flight = self._queue[0].header.step if self._queue else -1
        return tuple(map(peer_name, missing)) if number == in_flight else ()

    def begin(self, generation: int) -> None:
        with self._lock:
            self._queue.clear()
            self._generation, self.number = generation, 0


class _ServedRow:
    """A row that was sent or waits for that, and the answer."""

    def __init__(self, header: Header, body: bytes, what: str, missing: Callable[[], tuple[str, ...]]) -> None:
        """`missing` returns the names of the members that have not sent the row in flight, as far as they are known."""
        self.header, self.body, self._what, self._missing = header, body, what, missing
        self._over = threading.Event()
        self._answer: Any = None

    def end(self, answer: Handle) -> None:
        self._answer = answer
        self._over.set()

    def is_over(self) -> bool:
        return self._over.is_set()

    def wait(self, deadline: float, failed: Failed) -> dict[int, list[float]]:
        while not self._over.wait(max(0.0, min(CHECK_S, deadline - time.monotonic()))):
            if (cause := failed()) is not None:
                raise cause
            if time.monotonic() >= deadline:
                # The header's step counts rows, so the error names what the row is for, and no step.
                server = peer_name(SERVER_BASE)
                if names := self._missing():
                    raise DeadlineExceeded(f"sent no row before the deadline ({server} waits for it): {self._what}",
                                           peer=", ".join(names))
                raise DeadlineExceeded(f"sent no rows of all ranks before the deadline: {self._what}", peer=server)
        return rows_in(self._answer.message())


def rows_in(message: Message) -> dict[int, list[float]]:
    """Returns the rows in a result of the bucket of rows, by sender."""
    bodies = messages.unpack(message.body, list[tuple[int, bytes]], peer_name(message.peer), "rows")
    if any(len(body) % 8 for _, body in bodies):
        raise CorruptFrame("sends rows that are not numbers", peer=peer_name(message.peer))
    return {member: array.array("d", body).tolist() for member, body in bodies}

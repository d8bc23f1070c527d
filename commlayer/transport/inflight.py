"""In-flight requests of one end to one peer, kept so that they can be replayed after a reconnect.

Bodies are not copied: the caller leaves a body unchanged until the answer arrives. A payload is therefore replayed with the
same bytes, and keeping it costs no extra memory.
"""

from __future__ import annotations

from commlayer.transport.protocol import ANSWERED_BY, KIND_NAMES, NUMBERED, Handle, Header, Key, Kind, answer_key, key

_NUMBERED_ANSWERS = frozenset(ANSWERED_BY[kind] for kind in NUMBERED if kind in ANSWERED_BY)
ANSWERS = frozenset(ANSWERED_BY.values())


class Request(Handle):
    """A request in flight: the handle that its sender gets, with its bytes and the most recent send. A request that expects an
    answer is done when the answer arrives, since the request may be sent again until then."""

    __slots__ = ("body", "header", "sending")

    def __init__(self, peer: int, header: Header, body: memoryview | bytes) -> None:
        what = "answer to" if header.kind in ANSWERED_BY else "send of"
        super().__init__(f"{what} {KIND_NAMES[header.kind]}", peer, header.step, header.bucket)
        self.header, self.body = header, body
        self.sending: Handle | None = None


class InFlightRequests:
    """The in-flight requests of one end to one peer. For each key, at most one of them expects an answer."""

    def __init__(self, peer: int) -> None:
        self._peer = peer
        self._kept: dict[Key | int, Request] = {}  # in the order of sending
        self._number = 0

    @property
    def nbytes(self) -> int:
        return sum(len(request.body) for request in self.pending())

    def __len__(self) -> int:
        return len(self._kept)

    def add(self, header: Header, body: memoryview | bytes) -> Request:
        """Records a request and returns it as it must be sent: with a sequence number if its kind has one."""
        if header.kind in NUMBERED:
            self._number += 1
            header = header._replace(used=self._number)
        request = Request(self._peer, header, body)
        slot: Key | int
        if header.kind in ANSWERED_BY:
            slot = answer_key(header)
        else:  # only the latest of its kind counts: it replaces the previous one, also one of another generation
            slot = self._number if header.kind == Kind.UNDO else key(header._replace(generation=0))
        self._kept.pop(slot, None)  # a replaced request moves to the end
        self._kept[slot] = request
        return request

    def find_request(self, header: Header) -> Request | None:
        """Returns the request with this header's key, if it is in flight and expects an answer."""
        return self._kept.get(answer_key(header))

    def forget(self, request: Request) -> None:
        """Drops a request that will not be sent."""
        self._kept = {slot: kept for slot, kept in self._kept.items() if kept is not request}

    def answer(self, header: Header) -> Request | None:
        """Removes and returns the request that this header answers. Returns None if no such request is in flight."""
        request = self._kept.get(slot := key(header))
        if request is None:
            return None
        if header.kind in _NUMBERED_ANSWERS and header.used != request.header.used:
            return None
        del self._kept[slot]
        if header.kind in _NUMBERED_ANSWERS:
            self._ack_undos(header.used)
        return request

    def _ack_undos(self, number: int) -> None:
        """Drops UNDO requests with lower numbers. Requests arrive in the order of their numbers, so the peer has received
        them."""
        for slot, request in list(self._kept.items()):
            if request.header.kind == Kind.UNDO and request.header.used < number:
                del self._kept[slot]

    def pending(self) -> list[Request]:
        """Returns all requests in flight, in the order of sending."""
        return list(self._kept.values())

    def clear(self) -> list[Request]:
        """Drops and returns all requests, because no answers will arrive."""
        kept = self.pending()
        self._kept.clear()
        return kept

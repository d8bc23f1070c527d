"""In-flight requests of one end to one peer, kept so that they can be replayed after a reconnect.

Bodies are not copied: the caller leaves a body unchanged until the answer arrives. A payload is therefore replayed with the
same bytes, and keeping it costs no extra memory.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from commlayer.transport.protocol import ANSWERED_BY, NUMBERED, Flag, Header, Key, Kind, key

KEPT = frozenset((*ANSWERED_BY, Kind.UNDO, Kind.PACE))
"""Kinds that are replayed."""
_NUMBERED_ANSWERS = frozenset(ANSWERED_BY[kind] for kind in NUMBERED if kind in ANSWERED_BY)
_ANSWERS = frozenset(ANSWERED_BY.values())

T = TypeVar("T")


class Request(NamedTuple, Generic[T]):
    """A request in flight; `tag` belongs to the caller."""

    header: Header
    body: memoryview | bytes
    tag: T


def is_answer(header: Header) -> bool:
    return header.kind in _ANSWERS


class Unanswered(Generic[T]):
    """The in-flight requests of one end to one peer. At most one request at a time expects a given answer's key."""

    def __init__(self) -> None:
        self._kept: dict[Key | int, Request[T]] = {}  # in the order of sending
        self._had: dict[tuple[int, ...], tuple[int, int]] = {}  # generation and step of the last answer of each kind
        self._number = 0

    @property
    def nbytes(self) -> int:
        return sum(len(request.body) for request in self.again())

    def __len__(self) -> int:
        return len(self._kept)

    def ask(self, header: Header, body: memoryview | bytes, tag: T) -> Request[T]:
        """Records a request. Returns it as it must be sent: with a sequence number if its kind has one."""
        if header.kind in NUMBERED:
            self._number += 1
            header = header._replace(used=self._number)
        request = Request(header, body, tag)
        place: Key | int
        if header.kind in ANSWERED_BY:
            place = key(header._replace(kind=ANSWERED_BY[header.kind]))
        else:  # only the latest of its kind counts: it replaces the previous one, also one of another generation
            place = self._number if header.kind == Kind.UNDO else key(header._replace(generation=0))
        self._kept.pop(place, None)  # a replaced request moves to the end
        self._kept[place] = request
        return request

    def forget(self, request: Request[T]) -> None:
        """Drops a request that will not be sent."""
        self._kept = {place: kept for place, kept in self._kept.items() if kept is not request}

    def answer(self, header: Header) -> Request[T] | None:
        """Removes and returns the request that this header answers. None if no such request is in flight."""
        request = self._kept.get(place := key(header))
        if request is None:
            return None
        if header.kind in _NUMBERED_ANSWERS and header.used != request.header.used:
            return None
        if header.flags & request.header.flags & Flag.AGAIN:
            return None  # an earlier demand to encode again, which the kept request already meets
        del self._kept[place]
        self._had[_place(header)] = header.generation, header.step
        if header.kind in _NUMBERED_ANSWERS:
            self._heard(header.used)
        return request

    def had(self, header: Header) -> bool:
        """Whether the header repeats an earlier answer. Otherwise it answers no request of this end."""
        return key(header) in self._kept or (header.generation, header.step) <= self._had.get(_place(header), (-1, 0))

    def _heard(self, number: int) -> None:
        """Drops earlier UNDO requests: requests arrive in the order of their numbers, so the peer has received them."""
        for place, request in list(self._kept.items()):
            if request.header.kind == Kind.UNDO and request.header.used < number:
                del self._kept[place]

    def again(self) -> list[Request[T]]:
        """All requests in flight, in the order of sending."""
        return list(self._kept.values())

    def end(self, generation: int) -> list[Request[T]]:
        """Drops and returns the requests of earlier generations."""
        dropped = [request for request in self.again() if request.header.generation < generation]
        self._kept = {place: kept for place, kept in self._kept.items() if kept.header.generation >= generation}
        return dropped

    def clear(self) -> list[Request[T]]:
        """Drops and returns all requests: no answers will come."""
        kept = self.again()
        self._kept.clear()
        return kept


def _place(header: Header) -> tuple[int, ...]:
    return header.kind, header.bucket, header.part, header.round

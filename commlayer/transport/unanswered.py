"""What one end has asked another and not yet heard the answer to, to be asked again. Knows headers; no connection, no clock.

Bodies are not copied: who asks leaves them as they are until the answer is there. So a payload is sent again as it was coded,
and what is kept is memory that its owner has anyway.
"""

from __future__ import annotations

from typing import Generic, NamedTuple, TypeVar

from commlayer.transport.protocol import ANSWERED_BY, NUMBERED, Flag, Header, Key, Kind, key

KEPT = frozenset((*ANSWERED_BY, Kind.UNDO, Kind.PACE))
"""Kinds that are asked again."""
_NUMBERED_ANSWERS = frozenset(ANSWERED_BY[kind] for kind in NUMBERED if kind in ANSWERED_BY)
_ANSWERS = frozenset(ANSWERED_BY.values())

T = TypeVar("T")


class Request(NamedTuple, Generic[T]):
    """One that is kept; `tag` is its owner's."""

    header: Header
    body: memoryview | bytes
    tag: T


def is_answer(header: Header) -> bool:
    return header.kind in _ANSWERS


class Unanswered(Generic[T]):
    """Of one end with one peer. One request at a time has a given answer's key."""

    def __init__(self) -> None:
        self._kept: dict[Key | int, Request[T]] = {}  # in the order of asking
        self._had: dict[tuple[int, ...], tuple[int, int]] = {}  # generation and step of the last answer of each kind
        self._number = 0

    @property
    def nbytes(self) -> int:
        return sum(len(request.body) for request in self.again())

    def __len__(self) -> int:
        return len(self._kept)

    def ask(self, header: Header, body: memoryview | bytes, tag: T) -> Request[T]:
        """Keeps it. As it is to be sent: with a number, where its kind has one."""
        if header.kind in NUMBERED:
            self._number += 1
            header = header._replace(used=self._number)
        made = Request(header, body, tag)
        place: Key | int
        if header.kind in ANSWERED_BY:
            place = key(header._replace(kind=ANSWERED_BY[header.kind]))
        else:  # of one that tells only the latest, that takes the place of the one before, whatever generation that was of
            place = self._number if header.kind == Kind.UNDO else key(header._replace(generation=0))
        self._kept.pop(place, None)  # and goes to the end
        self._kept[place] = made
        return made

    def forget(self, request: Request[T]) -> None:
        """It will not be sent."""
        self._kept = {place: kept for place, kept in self._kept.items() if kept is not request}

    def answer(self, header: Header) -> Request[T] | None:
        """What this answers, which is kept no longer. None: nothing that is still asked."""
        request = self._kept.get(place := key(header))
        if request is None:
            return None
        if header.kind in _NUMBERED_ANSWERS and header.used != request.header.used:
            return None
        if header.flags & request.header.flags & Flag.AGAIN:
            return None  # of the one before, which was coded again already
        del self._kept[place]
        self._had[_place(header)] = header.generation, header.step
        if header.kind in _NUMBERED_ANSWERS:
            self._heard(header.used)
        return request

    def had(self, header: Header) -> bool:
        """Whether this was answered before. Else it is nothing that was ever asked."""
        return key(header) in self._kept or (header.generation, header.step) <= self._had.get(_place(header), (-1, 0))

    def _heard(self, number: int) -> None:
        """Requests arrive in the order of their numbers, so those that have no answer were heard ahead of this one."""
        for place, request in list(self._kept.items()):
            if request.header.kind == Kind.UNDO and request.header.used < number:
                del self._kept[place]

    def again(self) -> list[Request[T]]:
        """Everything, in the order of asking."""
        return list(self._kept.values())

    def end(self, generation: int) -> list[Request[T]]:
        """Those of generations before that one, which are asked no more."""
        over = [request for request in self.again() if request.header.generation < generation]
        self._kept = {place: kept for place, kept in self._kept.items() if kept.header.generation >= generation}
        return over

    def clear(self) -> list[Request[T]]:
        """The same, and forgets it: there will be no answers."""
        kept = self.again()
        self._kept.clear()
        return kept


def _place(header: Header) -> tuple[int, ...]:
    return header.kind, header.bucket, header.part, header.round

"""Chunking: splits large message bodies into several frames (parts) and reassembles them.

A body is sent in parts so that a more urgent message can be sent between two of them. A message that interrupts another is
always more urgent than all unfinished bodies. The unfinished bodies therefore form a stack, and each part that arrives belongs
to the top of the stack. A message without a body can replace an unfinished one of the same key.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Annotated

from msgspec import Meta

from commlayer.errors import CorruptFrame
from commlayer.records import Record
from commlayer.transport import framing
from commlayer.transport.crc import crc32c
from commlayer.transport.framing import Frame
from commlayer.transport.protocol import KIND_NAMES, MAY_LACK_ZEROS, Flag, Header, Key, key
from commlayer.transport.zero_chunks import restore_zeros

MAX_PARTS = 0xFFFF
OVERHEAD_NBYTES = 512
"""Bytes that each unfinished body counts against the limit in addition to its size."""
MAX_HELD, MIN_HELD_PART_NBYTES = 48, 4 << 10
"""Unfinished bodies that a connection leaves to the peer's next one: their number, so that a greeting has room for them, and
the smallest size of their parts, so that the sender's list of parts stays small."""


class HeldBody(Record, frozen=True, array_like=True):
    """An unfinished body of the former connection, as a greeting announces it. This end still has the parts before `part`."""

    key: Key
    part: Annotated[int, Meta(ge=1, le=MAX_PARTS)]
    part_nbytes: Annotated[int, Meta(ge=MIN_HELD_PART_NBYTES)]
    crc: int
    """See `prefix_crc`."""


def prefix_crc(header: Header, prefix: memoryview) -> int:
    """Returns the CRC-32C of a body's first part's header and of the beginning of the body. A sender continues a body only if
    it would send the same bytes."""
    return crc32c(prefix, crc32c(framing.pack(header, 0)))


def split_parts(nbytes: int, part_nbytes: int) -> list[tuple[int, int]]:
    """Splits a body of `nbytes` into parts, returned as pairs (start, stop). A part has at most `part_nbytes`, or more if
    MAX_PARTS would be exceeded. All parts have equal size except the last, which may be smaller."""
    parts = min(MAX_PARTS, max(1, -(-nbytes // part_nbytes)))
    size = max(1, -(-nbytes // parts))
    return [(start, min(start + size, nbytes)) for start in range(0, max(nbytes, 1), size)]


class _Body:
    def __init__(self, header: Header, room: memoryview, part_nbytes: int) -> None:
        self.header, self.room, self.part_nbytes = header, room, part_nbytes
        self.next = self.filled = 0

    def held(self) -> HeldBody:
        return HeldBody(key(self.header), self.next, self.part_nbytes, prefix_crc(self.header, self.room[: self.filled]))


UnfinishedBodies = dict[Key, _Body]


class Assembly:
    """Reassembles the bodies of one connection. `place` returns the memory for a frame's body before the body is read. `whole`
    is called with each frame whose checksum was verified."""

    def __init__(self, take: Callable[[int], memoryview], max_nbytes: Callable[[Header], int], kept: Callable[[], int],
                 most: Callable[[], float] = lambda: math.inf, former: UnfinishedBodies | None = None) -> None:
        """`take` allocates memory. `max_nbytes` returns the limit of the body of a message with this header; `kept` and `most`
        return the limits of the bytes and of the number of all unfinished bodies together. `former`: the unfinished bodies of
        the peer's former connection, which the peer may continue."""
        self._take, self._max_nbytes, self._kept, self._most = take, max_nbytes, kept, most
        self._stack: list[_Body] = []
        self._former = {**(former or {})}
        self._unfinished_nbytes = sum(len(body.room) + OVERHEAD_NBYTES for body in self._former.values())

    @property
    def at_message_boundary(self) -> bool:
        """True: no body is partly received."""
        return not self._stack

    def unfinished(self) -> UnfinishedBodies:
        """Returns the bodies that the peer may continue on its next connection. Called after the last frame."""
        bodies = [body for body in (*self._stack, *self._former.values()) if body.next and
                  body.part_nbytes >= MIN_HELD_PART_NBYTES and body.header.kind in MAY_LACK_ZEROS]
        return {key(body.header): body for body in bodies[:MAX_HELD]}

    def _forget(self, keys: Sequence[Key]) -> None:
        for k in keys:
            self._unfinished_nbytes -= len(self._former.pop(k).room) + OVERHEAD_NBYTES

    def place(self, header: Header, nbytes: int) -> memoryview:
        if self._former:
            self._continue(header)
        if header.parts == 1:
            if nbytes > (most := self._max_nbytes(header)):
                raise CorruptFrame(f"announces a {KIND_NAMES[header.kind]} body of {nbytes} bytes, allowed {most}",
                                   step=header.step, bucket=header.bucket)
            if self._stack:
                self._drop(header)
            return self._take(nbytes)
        if header.part == 0:
            self._begin(header, nbytes)
        body = self._stack[-1] if self._stack else None
        if body is None or header.part != body.next or header._replace(part=0) != body.header:
            raise _breach(header, "is not the next part of the unfinished message")
        last = header.part + 1 == header.parts
        if not (0 < nbytes <= body.part_nbytes if last else nbytes == body.part_nbytes):
            raise _breach(header, f"has {nbytes} bytes, but the first part has {body.part_nbytes}")
        return body.room[body.filled : body.filled + nbytes]

    def _drop(self, header: Header) -> None:
        """Drops the unfinished body that this message replaces, if there is one."""
        for place, body in enumerate(self._stack):
            if key(body.header) == key(header):
                self._unfinished_nbytes -= len(body.room) + OVERHEAD_NBYTES
                del self._stack[place]
                return

    def _continue(self, header: Header) -> None:
        """Continues the unfinished body to which this frame belongs, if there is one; drops the body if the frame begins it
        again."""
        first = header._replace(part=0)
        if (body := self._former.get(key(first))) is None:
            return
        if header.part == 0:
            self._forget([key(first)])
        elif header.part == body.next and first == body.header:
            self._check_urgency(header)
            self._stack.append(self._former.pop(key(first)))

    def _check_urgency(self, header: Header) -> None:
        if self._stack and (header.step, header.order) >= _rank(self._stack[-1].header):
            raise _breach(header, "is not more urgent than the unfinished message that it interrupts")

    def _begin(self, header: Header, nbytes: int) -> None:
        self._check_urgency(header)
        total, most = header.parts * nbytes, self._max_nbytes(header)
        if nbytes == 0 or total - nbytes >= most:
            raise _breach(header, f"of {nbytes} bytes starts a message that is empty or larger than {most} bytes")
        most_nbytes = self._kept() - total - OVERHEAD_NBYTES
        if len(self._stack) + len(self._former) >= self._most() or self._unfinished_nbytes > most_nbytes:
            self._forget([*self._former])  # the peer may no longer need them
        if len(self._stack) >= self._most():
            raise _breach(header, f"starts a message while {len(self._stack)} others are unfinished")
        if self._unfinished_nbytes > most_nbytes:
            raise _breach(header, f"starts a message that makes all unfinished messages together exceed {self._kept()} bytes")
        self._unfinished_nbytes += total + OVERHEAD_NBYTES
        self._stack.append(_Body(header, self._take(total), nbytes))

    def whole(self, frame: Frame) -> Frame | None:
        """Adds a frame whose checksum was verified. If the frame completes a message, returns the message as its sender passed
        it to send(); otherwise None."""
        if frame.header.parts == 1:
            return self._expand_zeros(frame)
        body = self._stack[-1]
        body.next += 1
        body.filled += len(frame.body)
        if body.next < body.header.parts:
            return None
        self._stack.pop()
        self._unfinished_nbytes -= len(body.room) + OVERHEAD_NBYTES
        return self._expand_zeros(Frame(body.header._replace(parts=1), body.room[: body.filled]))

    def _expand_zeros(self, frame: Frame) -> Frame:
        h, body = frame
        if not h.flags & Flag.WITHOUT_ZEROS:
            return frame
        try:
            body = restore_zeros(body, self._max_nbytes(h), self._take)
        except CorruptFrame as error:
            raise CorruptFrame(error.what, step=h.step, bucket=h.bucket) from None
        return Frame(h._replace(flags=h.flags & ~Flag.WITHOUT_ZEROS), body)


def _rank(header: Header) -> tuple[int, int]:
    return header.step, header.order


def _breach(header: Header, what: str) -> CorruptFrame:
    return CorruptFrame(f"part {header.part} of {header.parts} {what}", step=header.step, bucket=header.bucket)

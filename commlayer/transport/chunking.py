"""Chunking: splits large message bodies into several frames (parts) and reassembles them.

A body is sent in parts so that a more urgent message can be sent between two of them. A message that interrupts another is
always more urgent than all unfinished bodies. The unfinished bodies therefore form a stack, and each part that arrives belongs
to the top of the stack.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from commlayer.errors import CorruptFrame
from commlayer.transport.framing import Frame
from commlayer.transport.protocol import KIND_NAMES, Flag, Header
from commlayer.transport.zero_chunks import restore_zeros

MAX_PARTS = 0xFFFF
OVERHEAD_NBYTES = 512
"""Bytes that each unfinished body counts against the limit in addition to its size."""


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


class Assembly:
    """Reassembles the bodies of one connection. `place` returns the memory for a frame's body before the body is read. `whole`
    is called with each frame whose checksum was verified."""

    def __init__(self, take: Callable[[int], memoryview], max_nbytes: Callable[[Header], int], kept: Callable[[], int],
                 most: Callable[[], float] = lambda: math.inf) -> None:
        """`take` allocates memory. `max_nbytes` returns the limit of the body of a message with this header; `kept` and `most`
        return the limits of the bytes and of the number of all unfinished bodies together."""
        self._take, self._max_nbytes, self._kept, self._most = take, max_nbytes, kept, most
        self._stack: list[_Body] = []
        self._held = 0

    @property
    def between(self) -> bool:
        """True: no body is partly received."""
        return not self._stack

    def place(self, header: Header, nbytes: int) -> memoryview:
        if header.parts == 1:
            if nbytes > (most := self._max_nbytes(header)):
                raise CorruptFrame(f"announces a {KIND_NAMES[header.kind]} body of {nbytes} bytes, allowed {most}",
                                   step=header.step, bucket=header.bucket)
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

    def _begin(self, header: Header, nbytes: int) -> None:
        if self._stack and (header.step, header.order) >= _rank(self._stack[-1].header):
            raise _breach(header, "is not more urgent than the unfinished message that it interrupts")
        total, most = header.parts * nbytes, self._max_nbytes(header)
        if nbytes == 0 or total - nbytes >= most:
            raise _breach(header, f"of {nbytes} bytes starts a message that is empty or larger than {most} bytes")
        if len(self._stack) >= self._most():
            raise _breach(header, f"starts a message while {len(self._stack)} others are unfinished")
        if self._held + total + OVERHEAD_NBYTES > self._kept():
            raise _breach(header, f"starts a message that makes all unfinished messages together exceed {self._kept()} bytes")
        self._held += total + OVERHEAD_NBYTES
        self._stack.append(_Body(header, self._take(total), nbytes))

    def whole(self, frame: Frame) -> Frame | None:
        """Adds a frame whose checksum was verified. If the frame completes a message, returns the message as its sender passed
        it to send(); otherwise None."""
        if frame.header.parts == 1:
            return self._as_given(frame) if frame.header.flags & Flag.WITHOUT_ZEROS else frame
        body = self._stack[-1]
        body.next += 1
        body.filled += len(frame.body)
        if body.next < body.header.parts:
            return None
        self._stack.pop()
        self._held -= len(body.room) + OVERHEAD_NBYTES
        return self._as_given(Frame(body.header._replace(parts=1), body.room[: body.filled]))

    def _as_given(self, frame: Frame) -> Frame:
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

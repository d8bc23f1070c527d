"""Chunking: splits large bodies into several frames and reassembles them.

A body is sent in parts so that a more urgent frame can go between them. Such a frame is always more urgent than all
unfinished bodies, so the unfinished bodies form a stack and each part belongs to its top.
"""

from __future__ import annotations

from collections.abc import Callable

from commlayer.errors import CorruptFrame
from commlayer.transport.framing import Frame
from commlayer.transport.protocol import Flag, Header
from commlayer.transport.zero_chunks import put_back

MOST_PARTS = 0xFFFF
UNDER_WAY_NBYTES = 512
"""Charged for each unfinished body in addition to its size."""


def cut(nbytes: int, part_nbytes: int) -> list[tuple[int, int]]:
    """Parts of equal size, at most part_nbytes unless that needs more than MOST_PARTS; only the last may be smaller."""
    parts = min(MOST_PARTS, max(1, -(-nbytes // part_nbytes)))
    size = max(1, -(-nbytes // parts))
    return [(start, min(start + size, nbytes)) for start in range(0, max(nbytes, 1), size)]


class _Body:
    def __init__(self, header: Header, room: memoryview, part_nbytes: int) -> None:
        self.header, self.room, self.part_nbytes = header, room, part_nbytes
        self.next = self.filled = 0


class Assembly:
    """Reassembles the bodies of one connection. `place` returns the memory for each frame before its body is read; `whole`
    takes each frame after its check."""

    def __init__(self, take: Callable[[int], memoryview], max_nbytes: Callable[[], int], kept: Callable[[], int]) -> None:
        """`max_nbytes` limits one body; `kept` limits all unfinished bodies together."""
        self._take, self._max_nbytes, self._kept = take, max_nbytes, kept
        self._stack: list[_Body] = []
        self._held = 0

    @property
    def between(self) -> bool:
        """Whether no body is unfinished."""
        return not self._stack

    def place(self, header: Header, nbytes: int) -> memoryview:
        if header.parts == 1:
            return self._take(nbytes)
        if header.part == 0:
            self._begin(header, nbytes)
        body = self._stack[-1] if self._stack else None
        if body is None or header.part != body.next or header._replace(part=0) != body.header:
            raise _breach(header, "is not what follows of the body under way")
        last = header.part + 1 == header.parts
        if not (0 < nbytes <= body.part_nbytes if last else nbytes == body.part_nbytes):
            raise _breach(header, f"has {nbytes} bytes, the first one {body.part_nbytes}")
        return body.room[body.filled : body.filled + nbytes]

    def _begin(self, header: Header, nbytes: int) -> None:
        if self._stack and (header.step, header.order) >= _rank(self._stack[-1].header):
            raise _breach(header, "is not more urgent than the body under way")
        total = header.parts * nbytes
        if nbytes == 0 or total - nbytes >= self._max_nbytes():
            raise _breach(header, f"of {nbytes} bytes announces a body of more than {self._max_nbytes()}, or an empty one")
        if self._held + total + UNDER_WAY_NBYTES > self._kept():
            raise _breach(header, f"begins more bodies than the {self._kept()} bytes that are allowed under way")
        self._held += total + UNDER_WAY_NBYTES
        self._stack.append(_Body(header, self._take(total), nbytes))

    def whole(self, frame: Frame) -> Frame | None:
        """The frame itself, or the body that it completes, as its sender passed it; None while parts are missing."""
        if frame.header.parts == 1:
            return self._as_given(frame)
        body = self._stack[-1]
        body.next += 1
        body.filled += len(frame.body)
        if body.next < body.header.parts:
            return None
        self._stack.pop()
        self._held -= len(body.room) + UNDER_WAY_NBYTES
        return self._as_given(Frame(body.header._replace(parts=1), body.room[: body.filled]))

    def _as_given(self, frame: Frame) -> Frame:
        h, body = frame
        if not h.flags & Flag.WITHOUT_ZEROS:
            return frame
        try:
            body = put_back(body, self._max_nbytes(), self._take)
        except CorruptFrame as error:
            raise CorruptFrame(error.what, step=h.step, bucket=h.bucket) from None
        return Frame(h._replace(flags=h.flags & ~Flag.WITHOUT_ZEROS), body)


def _rank(header: Header) -> tuple[int, int]:
    return header.step, header.order


def _breach(header: Header, what: str) -> CorruptFrame:
    return CorruptFrame(f"part {header.part} of {header.parts} {what}", step=header.step, bucket=header.bucket)

"""Chunking: splits large message bodies into several frames (parts) and reassembles them.

A body is sent in parts so that a more urgent message can be sent between two of them. A message that interrupts another is
always more urgent than all unfinished bodies. The unfinished bodies therefore form a stack, and each part that arrives belongs
to the top of the stack.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

from commlayer.errors import CorruptFrame
from commlayer.transport.framing import Frame
from commlayer.transport.protocol import KIND_NAMES, Flag, Header

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
            return self._as_given(frame)
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


# ---- Leaves zero chunks out of bodies before sending, and restores them after receiving. The short form is the body's size
# (u32), a bitmap with one bit per chunk (lowest bit first), and the nonzero chunks in order. The last chunk may be shorter. See
# docs/reference/wire.md, "Zero chunks". numpy is imported at the first body that is large enough: the coordinator, which starts
# during attach(), must not load it.

CHUNK_NBYTES = 32
"""Size of a chunk: 16 float16 numbers, so an embedding row has several chunks. The bitmap has 1/256 of the body's size."""
MIN_NBYTES = 4 << 10
"""Smallest message body from which zero chunks are left out. Smaller bodies fit in few packets, so leaving out zeros gains
little."""
MAX_NBYTES = 0xFFFFFFFF
SAMPLES = 64
"""Number of chunks of a body in the sample that is examined first. The complete body is examined only if at least half of the
sample is zero."""

FIRST_SAMPLES = 8
"""Number of chunks that are examined first, without numpy, whose calls cost more. Nearly all bodies have no zero chunk."""

_ZEROS = bytes(CHUNK_NBYTES)
_SIZE = struct.Struct("<I")


def drop_zeros(body: memoryview) -> bytes | None:
    """Returns the body without its zero chunks, or None if the result would exceed three quarters of the body."""
    nbytes = len(body)
    if not MIN_NBYTES <= nbytes <= MAX_NBYTES:
        return None
    full, rest = divmod(nbytes, CHUNK_NBYTES)
    step = CHUNK_NBYTES * ((full // FIRST_SAMPLES) | 1)
    if not any(body[at : at + CHUNK_NBYTES] == _ZEROS for at in range(0, full * CHUNK_NBYTES, step)):
        return None
    import numpy as np

    rows = np.frombuffer(body, np.uint64, full * CHUNK_NBYTES // 8).reshape(full, -1)
    sample = rows[:: (full // SAMPLES) | 1]  # an odd stride does not hit the same column of every matrix row
    if 2 * np.count_nonzero(sample.any(axis=1)) > len(sample):
        return None
    nonzero = np.empty(full + bool(rest), np.bool_)
    # Columns combined by `|`: any(axis=1) of short rows takes ten times as long.
    np.not_equal(rows[:, 0] | rows[:, 1] | rows[:, 2] | rows[:, 3], 0, out=nonzero[:full])
    last = bytes(body[full * CHUNK_NBYTES :])
    if rest:
        nonzero[full] = any(last)
    kept_nbytes = np.count_nonzero(nonzero[:full]) * CHUNK_NBYTES
    if 4 * (_SIZE.size + -(-len(nonzero) // 8) + kept_nbytes + rest) > 3 * nbytes:
        return None
    chunks = np.frombuffer(body, f"V{CHUNK_NBYTES}", full)[nonzero[:full]]
    bitmap = np.packbits(nonzero, bitorder="little")
    return b"".join((_SIZE.pack(nbytes), bitmap.data, chunks.view(np.uint8).data, last if any(last) else b""))


def restore_zeros(body: memoryview, max_nbytes: int, allocate: Callable[[int], memoryview]) -> memoryview:
    """Returns the complete body, in memory from `allocate`. Raises CorruptFrame, before it allocates, if the short form is
    invalid.

    A chunk that the bitmap marks as nonzero may be zero, because senders need not find all zeros.
    """
    if len(body) < _SIZE.size:
        raise CorruptFrame(f"a body without zero chunks has {len(body)} bytes, but its size field alone needs {_SIZE.size}")
    (nbytes,) = _SIZE.unpack(body[: _SIZE.size])
    if not 0 < nbytes <= max_nbytes:
        raise CorruptFrame(f"a body without zero chunks names a size of {nbytes} bytes, allowed 1 to {max_nbytes}")
    full, rest = divmod(nbytes, CHUNK_NBYTES)
    count = full + bool(rest)
    start = _SIZE.size + -(-count // 8)
    if len(body) < start:
        raise CorruptFrame(f"a body without zero chunks ends after {len(body)} bytes, within the bitmap of {count} chunks")
    import numpy as np

    bits = np.unpackbits(np.frombuffer(body[_SIZE.size : start], np.uint8), bitorder="little").view(np.bool_)
    if bits[count:].any():
        raise CorruptFrame(f"a body without zero chunks has bits in its bitmap after the last of {count} chunks")
    nonzero = np.count_nonzero(bits[:full])
    stop = start + nonzero * CHUNK_NBYTES
    expected = stop + (rest if rest and bits[full] else 0)
    if len(body) != expected:
        raise CorruptFrame(f"a body without zero chunks has {len(body)} bytes, but its bitmap requires {expected}")
    restored = allocate(nbytes)
    np.frombuffer(restored, np.uint8)[:] = 0  # the memory may have been used before
    chunk = f"V{CHUNK_NBYTES}"
    np.frombuffer(restored, chunk, full)[bits[:full]] = np.frombuffer(body[start:stop], chunk)
    if stop < expected:
        restored[full * CHUNK_NBYTES :] = body[stop:]
    return restored

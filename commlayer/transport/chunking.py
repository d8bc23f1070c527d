"""Chunking: splits large bodies into several frames and reassembles them.

A body is sent in parts so that a more urgent frame can go between them. Such a frame is always more urgent than all
unfinished bodies, so the unfinished bodies form a stack and each part belongs to its top.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from commlayer.errors import CorruptFrame
from commlayer.transport.framing import Frame
from commlayer.transport.protocol import Flag, Header

MAX_PARTS = 0xFFFF
OVERHEAD_NBYTES = 512
"""Charged for each unfinished body in addition to its size."""


def split_parts(nbytes: int, part_nbytes: int) -> list[tuple[int, int]]:
    """Parts of equal size, at most part_nbytes unless that needs more than MOST_PARTS; only the last may be smaller."""
    parts = min(MAX_PARTS, max(1, -(-nbytes // part_nbytes)))
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
        if self._held + total + OVERHEAD_NBYTES > self._kept():
            raise _breach(header, f"begins more bodies than the {self._kept()} bytes that are allowed under way")
        self._held += total + OVERHEAD_NBYTES
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
        self._held -= len(body.room) + OVERHEAD_NBYTES
        return self._as_given(Frame(body.header._replace(parts=1), body.room[: body.filled]))

    def _as_given(self, frame: Frame) -> Frame:
        h, body = frame
        if not h.flags & Flag.WITHOUT_ZEROS:
            return frame
        try:
            body = restore_zeros(body, self._max_nbytes(), self._take)
        except CorruptFrame as error:
            raise CorruptFrame(error.what, step=h.step, bucket=h.bucket) from None
        return Frame(h._replace(flags=h.flags & ~Flag.WITHOUT_ZEROS), body)


def _rank(header: Header) -> tuple[int, int]:
    return header.step, header.order


def _breach(header: Header, what: str) -> CorruptFrame:
    return CorruptFrame(f"part {header.part} of {header.parts} {what}", step=header.step, bucket=header.bucket)


# ---- Leaves zero chunks out of bodies before sending, and restores them.
#
# The short form is the body's size (u32), a bitmap with one bit per chunk (lowest bit first), and the nonzero chunks in order.
# The last chunk may be shorter. See docs/reference/wire.md, "Zero chunks".
#
# Imports numpy at the first body that is large enough: the coordinator, which starts during attach(), must not load it.

CHUNK_NBYTES = 32
"""16 halves: an embedding row has several chunks. The bitmap is 1/256 of the body."""
MIN_NBYTES = 4 << 10
"""Smaller bodies fit in few packets, so that leaving zeros out gains little."""
MAX_NBYTES = 0xFFFFFFFF
SAMPLES = 64
"""Chunks in the sample. The whole body is examined only if half of the sample is zero."""

FIRST_SAMPLES = 8
"""Chunks examined before that without numpy, whose calls cost more: nearly all bodies have no zero chunk."""

_ZEROS = bytes(CHUNK_NBYTES)
_SIZE = struct.Struct("<I")


def drop_zeros(body: memoryview) -> bytes | None:
    """The body without its zero chunks, or None if that would exceed three quarters of it."""
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
    """The whole body, in memory from `allocate`. Raises CorruptFrame before it allocates.

    A chunk named in the bitmap may still be zero: senders need not find all zeros.
    """
    if len(body) < _SIZE.size:
        raise CorruptFrame(f"a body without its zeros has {len(body)} bytes, the size alone {_SIZE.size}")
    (nbytes,) = _SIZE.unpack(body[: _SIZE.size])
    if not 0 < nbytes <= max_nbytes:
        raise CorruptFrame(f"a body without its zeros is of {nbytes} bytes, allowed 1 to {max_nbytes}")
    full, rest = divmod(nbytes, CHUNK_NBYTES)
    count = full + bool(rest)
    start = _SIZE.size + -(-count // 8)
    if len(body) < start:
        raise CorruptFrame(f"a body without its zeros ends after {len(body)} bytes, within the bitmap of {count} chunks")
    import numpy as np

    bits = np.unpackbits(np.frombuffer(body[_SIZE.size : start], np.uint8), bitorder="little").view(np.bool_)
    if bits[count:].any():
        raise CorruptFrame(f"a body without its zeros names chunks behind the {count} that it has")
    nonzero = np.count_nonzero(bits[:full])
    stop = start + nonzero * CHUNK_NBYTES
    expected = stop + (rest if rest and bits[full] else 0)
    if len(body) != expected:
        raise CorruptFrame(f"a body without its zeros has {len(body)} bytes, by its bitmap {expected}")
    restored = allocate(nbytes)
    np.frombuffer(restored, np.uint8)[:] = 0  # the memory may have been used before
    chunk = f"V{CHUNK_NBYTES}"
    np.frombuffer(restored, chunk, full)[bits[:full]] = np.frombuffer(body[start:stop], chunk)
    if stop < expected:
        restored[full * CHUNK_NBYTES :] = body[stop:]
    return restored

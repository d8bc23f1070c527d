"""Pool of receive buffers. A large new buffer costs a page fault every 4 KiB, so buffers are reused.

The owner of a message may return its body with Pool.give; not returning it only costs speed.
"""

from __future__ import annotations

import threading

MIN_NBYTES = 64 << 10
"""The allocator is faster for smaller buffers."""


class Pool:
    """Buffers by size class, eight classes per power of two. Free buffers are kept up to `cap_nbytes` in total."""

    def __init__(self, cap_nbytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[bytearray]] = {}
        self._room = cap_nbytes

    def take(self, nbytes: int) -> memoryview:
        if nbytes < MIN_NBYTES:
            return memoryview(bytearray(nbytes))
        size = size_class(nbytes)
        with self._lock:
            free = self._free.get(size)
            buffer = free.pop() if free else None
            if buffer is not None:
                self._room += size
        return memoryview(bytearray(size) if buffer is None else buffer)[:nbytes]

    def give(self, body: memoryview) -> None:
        """Takes back a body from take(). No array or tensor may still use it; this view raises ValueError from now on."""
        buffer = body.obj
        body.release()
        if not isinstance(buffer, bytearray) or len(buffer) < MIN_NBYTES or size_class(len(buffer)) != len(buffer):
            return
        with self._lock:
            if len(buffer) <= self._room:
                self._room -= len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)


def size_class(nbytes: int) -> int:
    """The smallest m * 2**e >= nbytes with 8 <= m < 16, so that at most an eighth is wasted."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step

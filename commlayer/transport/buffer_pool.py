"""A pool of receive buffers: a large new buffer costs a page fault every 4 KiB, so buffers are reused.

The receiver of a message may return its body with BufferPool.give; not returning it only costs speed.
"""

from __future__ import annotations

import threading
from typing import Any

MIN_NBYTES = 64 << 10
"""Smallest buffer that is pooled. For smaller ones the allocator is faster."""


class BufferPool:
    """Reusable buffers in size classes, eight classes per power of two. Free buffers are kept up to `cap_nbytes` in total."""

    def __init__(self, cap_nbytes: int = 256 << 20) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Any]] = {}
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
        return memoryview(_pages(size) if buffer is None else buffer)[:nbytes]

    def give(self, body: memoryview) -> None:
        """Returns a body from take() to the pool. No array or tensor may still use it; the memoryview raises ValueError from
        now on."""
        buffer: Any = body.obj
        body.release()
        if len(buffer) < MIN_NBYTES or not isinstance(buffer, type(_pages(0))) or size_class(len(buffer)) != len(buffer):
            return
        with self._lock:
            if len(buffer) <= self._room:
                self._room -= len(buffer)
                self._free.setdefault(len(buffer), []).append(buffer)


def _pages(nbytes: int) -> Any:
    """Returns memory that takes up space only as it is written, so a body that a peer announces costs what has arrived of it.
    A bytearray would fill all of it with zeros at once."""
    import numpy as np  # imported late, because the coordinator, which starts during attach(), must not load it

    return np.empty(nbytes, np.uint8)


def size_class(nbytes: int) -> int:
    """Returns the smallest m * 2**e >= nbytes with 8 <= m < 16. At most an eighth of such a buffer is unused."""
    step = 1 << max(0, nbytes.bit_length() - 4)
    return -(-nbytes // step) * step

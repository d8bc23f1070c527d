"""Leaves zero chunks out of bodies before sending, and restores them after receiving.

The short form is the body's size (u32), a bitmap with one bit per chunk (lowest bit first), and the nonzero chunks in order.
The last chunk may be shorter. See docs/reference/wire.md, "Zero chunks". numpy is imported at the first body that is large
enough: the coordinator, which starts during attach(), must not load it.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from commlayer.errors import CorruptFrame

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
    if 0 not in bytes(body[: full * CHUNK_NBYTES : step]):
        return None  # no chunk of the sample begins with a zero
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

"""Bodies without their chunks of zeros, and back again. Knows bytes only: no headers, no codecs, nor whether a body is sent so.

A body without its zeros is its size (u32), a bitmap with one bit for each chunk of it (the lowest bit first), and the chunks
that the bitmap names, in order; the last chunk of a body may be a shorter one. See docs/wire.md, "Zeros".

Loads numpy with the first body that is large enough: a coordinator, which starts in the way of attach(), does without.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

from commlayer.errors import CorruptFrame

CHUNK_NBYTES = 32
"""16 halves: a row of an embedding has several. The bitmap is 1/256 of the body."""
LEAST_NBYTES = 4 << 10
"""Smaller bodies are about as fast whole: they are in few packets anyway."""
MOST_NBYTES = 0xFFFFFFFF
LOOKS = 64
"""Chunks that are looked at first. Only if half of them are zero it is worth while to look at all."""

FIRST_LOOKS = 8
"""Chunks that are looked at before those: nearly all bodies have no zero among them, and numpy's calls cost more than that."""

_ZEROS = bytes(CHUNK_NBYTES)
_SIZE = struct.Struct("<I")


def left_out(body: memoryview) -> bytes | None:
    """The body without its zeros, or None where that would not be at most three quarters of it."""
    nbytes = len(body)
    if not LEAST_NBYTES <= nbytes <= MOST_NBYTES:
        return None
    full, rest = divmod(nbytes, CHUNK_NBYTES)
    step = CHUNK_NBYTES * ((full // FIRST_LOOKS) | 1)
    if not any(body[at : at + CHUNK_NBYTES] == _ZEROS for at in range(0, full * CHUNK_NBYTES, step)):
        return None
    import numpy as np

    rows = np.frombuffer(body, np.uint64, full * CHUNK_NBYTES // 8).reshape(full, -1)
    looked = rows[:: (full // LOOKS) | 1]  # an odd stride: else it could meet the same place of each row of a matrix
    if 2 * np.count_nonzero(looked.any(axis=1)) > len(looked):
        return None
    there = np.empty(full + bool(rest), np.bool_)
    # Columns by `|`: any(axis=1) of short rows takes ten times as long.
    np.not_equal(rows[:, 0] | rows[:, 1] | rows[:, 2] | rows[:, 3], 0, out=there[:full])
    last = bytes(body[full * CHUNK_NBYTES :])
    if rest:
        there[full] = any(last)
    kept_nbytes = np.count_nonzero(there[:full]) * CHUNK_NBYTES
    if 4 * (_SIZE.size + -(-len(there) // 8) + kept_nbytes + rest) > 3 * nbytes:
        return None
    chunks = np.frombuffer(body, f"V{CHUNK_NBYTES}", full)[there[:full]]
    bitmap = np.packbits(there, bitorder="little")
    return b"".join((_SIZE.pack(nbytes), bitmap.data, chunks.view(np.uint8).data, last if any(last) else b""))


def put_back(body: memoryview, max_nbytes: int, allocate: Callable[[int], memoryview]) -> memoryview:
    """The whole body, in memory from `allocate`. Raises CorruptFrame, and has allocated nothing for it then.

    A chunk that is named may be zero all the same: whether a sender looks closely is its own affair.
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
    kept = np.count_nonzero(bits[:full])
    stop = start + kept * CHUNK_NBYTES
    expected = stop + (rest if rest and bits[full] else 0)
    if len(body) != expected:
        raise CorruptFrame(f"a body without its zeros has {len(body)} bytes, by its bitmap {expected}")
    whole = allocate(nbytes)
    np.frombuffer(whole, np.uint8)[:] = 0  # it may be memory that was used before
    chunk = f"V{CHUNK_NBYTES}"
    np.frombuffer(whole, chunk, full)[bits[:full]] = np.frombuffer(body[start:stop], chunk)
    if stop < expected:
        whole[full * CHUNK_NBYTES :] = body[stop:]
    return whole

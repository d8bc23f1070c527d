"""CRC-32C (Castagnoli): the native implementation, or a portable one if there is no native core.

The portable implementation imports numpy at the first long input: the coordinator, which starts during attach(), must not load
numpy.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from commlayer import native

POLYNOMIAL = 0x82F63B78
LANE_NBYTES = 256
"""Bytes per lane. The portable implementation splits long data into lanes, and processes all lanes at once. Short data is
processed byte by byte."""
MIN_LANES = 32


def _byte_table() -> list[int]:
    table = []
    for value in range(256):
        for _ in range(8):
            value = value >> 1 ^ POLYNOMIAL * (value & 1)
        table.append(value)
    return table


_TABLE = _byte_table()


@functools.cache
def _lane_shift() -> list[list[int]]:
    """Returns four tables, one per byte of the CRC register. A table maps the byte's value to the register after LANE_NBYTES
    zero bytes."""
    import numpy as np

    table = np.array(_TABLE, np.uint32)
    register = np.array([value << 8 * place for place in range(4) for value in range(256)], np.uint32)
    for _ in range(LANE_NBYTES):
        register = table[register & 255] ^ register >> 8
    rows: list[list[int]] = register.reshape(4, 256).tolist()
    return rows


def _walk_lanes(register: int, data: memoryview) -> int:
    """Returns the CRC register after `data`, whose size is a multiple of LANE_NBYTES. The CRC is linear: the CRC of a lane,
    from 0, is XORed with the register after as many zero bytes."""
    import numpy as np

    table = np.array(_TABLE, np.uint32)
    columns = np.ascontiguousarray(np.frombuffer(data, np.uint8).reshape(-1, LANE_NBYTES).T)
    lanes = np.zeros(columns.shape[1], np.uint32)
    for column in columns:
        lanes = table[(lanes ^ column) & 255] ^ lanes >> 8
    t0, t1, t2, t3 = _lane_shift()
    for lane in lanes.tolist():
        register = t0[register & 255] ^ t1[register >> 8 & 255] ^ t2[register >> 16 & 255] ^ t3[register >> 24] ^ lane
    return register


def portable(data: Any, crc: int = 0) -> int:
    """Returns the CRC-32C of `data`, continuing from `crc`, without the native core."""
    view = memoryview(data).cast("B")
    register = crc ^ 0xFFFFFFFF
    lanes = len(view) // LANE_NBYTES
    if lanes >= MIN_LANES:
        register = _walk_lanes(register, view[: lanes * LANE_NBYTES])
        view = view[lanes * LANE_NBYTES :]
    for byte in view:
        register = _TABLE[(register ^ byte) & 255] ^ register >> 8
    return register ^ 0xFFFFFFFF


crc32c: Callable[..., int] = portable if native.core is None else native.core.crc32c

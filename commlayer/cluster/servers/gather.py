"""The codec "gather" of the bucket of rows: the server sends all members the list of their payloads, with their senders."""

from __future__ import annotations

import struct

import msgspec

from commlayer.errors import InvalidInput

ROW_BUCKET = (1 << 32) - 1
"""Number of the bucket of rows, which no plan contains."""
GATHER = 17
"""Number of the codec "gather"."""
ROW_NBYTES = 16 << 10
"""Largest size of a member's row."""
NUMBER_NBYTES = 8
LEAVES = struct.pack("=d", -1.0)
"""The last row of a member that leaves; see rows.py."""
MESSAGE_NBYTES = 16
"""Upper bound of the bytes that the result adds to each row, and to all rows together."""


class GatherOps:
    """Codec operations of the bucket of rows on the server; see CodecOps. The sum of rows is their list, in member order."""

    rounds, codec, in_means, means, max_state_nbytes = 1, GATHER, False, False, 0

    def __init__(self, members: int) -> None:
        self.senders: tuple[int, ...] = ()
        self.leavers: tuple[int, ...] = ()
        """Members whose last row has been emitted. If all leave after the same row, there is none: they may go on together."""
        self.allow(members)

    def allow(self, members: int) -> None:
        """Makes room for the rows of this number of members."""
        self.bound = self.most_journal_nbytes = (members + 1) * (ROW_NBYTES + MESSAGE_NBYTES)

    def new_accumulator(self, r: int) -> list[bytes]:
        return []

    def place(self, acc: list[bytes], out: memoryview) -> bool:
        return False

    def add(self, r: int, payload: memoryview, acc: list[bytes], first: bool) -> None:
        if len(payload) > ROW_NBYTES or len(payload) % NUMBER_NBYTES:
            raise InvalidInput("E-SIZE", f"a row has {len(payload)} bytes, allowed: numbers of {NUMBER_NBYTES}, up to "
                                         f"{ROW_NBYTES}")
        if first:
            acc.clear()
        acc.append(bytes(payload))

    def emit(self, r: int, acc: list[bytes], out: memoryview) -> int:
        left = tuple(sender for sender, row in zip(self.senders, acc, strict=True) if row == LEAVES)
        self.leavers = left if len(left) < len(acc) else ()
        data = msgspec.msgpack.encode([*zip(self.senders, acc, strict=True)])
        out[: len(data)] = data
        return len(data)

    def undo(self, mask: int) -> bool:
        return False

    def skip(self) -> None:
        """Does nothing: no state depends on earlier rows."""

    def keeps_payloads(self, members: int) -> bool:
        return False

    def snapshot(self) -> bytes:
        return b""

    def restore(self, data: bytes | memoryview) -> None:
        """Does nothing: there is no state."""

    def journal_state(self) -> bytes:
        return b""

    def restore_from_journal(self, data: bytes, sent: memoryview) -> None:
        """Does nothing: there is no state."""

    def begin_anew(self) -> None:
        """Does nothing: there is no state."""

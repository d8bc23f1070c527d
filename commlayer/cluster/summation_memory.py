"""Journal entries of a bucket's sum: encoding and decoding.

An entry is written before the server sends something that depends on it: a result, a request to code again, or a state.
Members repeat everything after that, since they have no reply to it yet.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from commlayer.errors import CorruptFrame
from commlayer.records import Record
from commlayer.transport.protocol import Header

WORDS_NBYTES = 1024
"""Upper bound of an entry's metadata without the result."""


class Memory(Record, frozen=True):
    """State of one bucket's sum: the next step and round, and the last result. Headers are tuples."""

    step: int | None
    round: int
    open: bool
    told: tuple[int | float, ...] | None = None
    """The header that asked members to code again, if there was one."""
    result: tuple[int | float, ...] | None = None
    body: bytes = b""


class Recalled(NamedTuple):
    """The same with decoded headers."""

    memory: Memory
    told: Header | None
    result: Header | None


def words_of(memory: Memory) -> bytes:
    return msgspec.msgpack.encode(memory)


def read(words: bytes) -> Recalled:
    """CorruptFrame if the entry is malformed."""
    try:
        memory = msgspec.msgpack.decode(words, type=Memory)
        return Recalled(memory, *(None if row is None else _header(row) for row in (memory.told, memory.result)))
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise CorruptFrame(f"an entry of the journal is malformed: {error}") from None


def _header(row: tuple[int | float, ...]) -> Header:
    header = Header(*row)  # type: ignore[arg-type]
    return header._replace(flags=int(header.flags))

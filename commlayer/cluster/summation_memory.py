"""What a sum is after a server that was killed: how it is written down, and taken up again. Knows sums; no files, no codec.

It is written whenever something is out of a server's hands: a result, a word to code again, a state that was asked for. What
has happened since then, members bring again, since nobody has answered them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from commlayer.errors import CorruptFrame
from commlayer.records import Record
from commlayer.transport.protocol import Header

WORDS_NBYTES = 1024
"""More than an entry's words have beside the result."""


class Memory(Record, frozen=True):
    """Of one bucket's sum: which step and round is next, and the last result. Headers as tuples."""

    step: int | None
    round: int
    open: bool
    told: tuple[int | float, ...] | None = None
    """How members were told to code again, if they were."""
    result: tuple[int | float, ...] | None = None
    body: bytes = b""


class Recalled(NamedTuple):
    """The same with headers."""

    memory: Memory
    told: Header | None
    result: Header | None


def words_of(memory: Memory) -> bytes:
    return msgspec.msgpack.encode(memory)


def read(words: bytes) -> Recalled:
    """CorruptFrame for what is none."""
    try:
        memory = msgspec.msgpack.decode(words, type=Memory)
        return Recalled(memory, *(None if row is None else _header(row) for row in (memory.told, memory.result)))
    except (msgspec.MsgspecError, ValueError, TypeError) as error:
        raise CorruptFrame(f"an entry of the journal is malformed: {error}") from None


def _header(row: tuple[int | float, ...]) -> Header:
    header = Header(*row)  # type: ignore[arg-type]
    return header._replace(flags=int(header.flags))

"""Damages bytes in ways that fit their format: numbers at their limits, wrong lengths, pieces of other inputs.

Uses the type bytes of msgpack, the syntax of JSON, and the position of a frame's checksums.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Sequence

from commlayer.transport.crc import crc32c
from commlayer.transport.framing import HEADER_NBYTES, MAGIC

NUMBERS = (
    0, 1, 2, 127, 128, 255, 256, 4095, 4096, 32767, 32768, 65535, 65536, 2**24, 2**31 - 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1,
)
LAYOUTS = ("B", "<H", ">H", "<I", ">I", "<Q", ">Q")
BEGINNINGS = (
    b"\xc0", b"\xc1", b"\xc2", b"\x80", b"\x90", b"\xa0", b"\xd9\xff", b"\xdb\xff\xff\xff\xff", b"\xc4\xff",
    b"\xc6\xff\xff\xff\xff", b"\xdc\xff\xff", b"\xdd\xff\xff\xff\xff", b"\xde\xff\xff", b"\xdf\xff\xff\xff\xff",
    b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00",
    b"\xcb\x7f\xf0\x00\x00\x00\x00\x00\x00", b"\xcf\xff\xff\xff\xff\xff\xff\xff\xff", b"\xd3\x80\x00\x00\x00\x00\x00\x00\x00",
    b"\xc7\xff\x01", b"\xd6\xff\x00\x00\x00\x00", b"\xff",
)
"""First bytes of msgpack values of every type, with lengths that the following bytes do not have."""
WORDS = (b"null", b"true", b"-1", b"0", b"1e999", b"99999999999999999999", b"\"\"", b"[]", b"{}", b"NaN", b"[[[[", b"\xff")
"""JSON values."""
MOST_NBYTES = 1 << 16
"""Upper limit for the size of an input, which repetitions could exceed."""


def mutated(rng: random.Random, examples: Sequence[bytes]) -> bytes:
    """Returns an example with up to four changes."""
    bad = bytearray(rng.choice(examples))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        rng.choice(_CHANGES)(rng, bad, examples)
    return bytes(bad[:MOST_NBYTES])


def resealed(data: bytes) -> bytes:
    """Corrects the checksums of frames that can still be parsed. Otherwise no input would get past the checksum test."""
    result, at = bytearray(data), 0
    while len(result) - at >= HEADER_NBYTES and result[at : at + 4] == MAGIC:
        nbytes = struct.unpack_from("<I", result, at + 56)[0]
        body = bytes(result[at + HEADER_NBYTES : at + HEADER_NBYTES + nbytes])
        struct.pack_into("<I", result, at + 60, crc32c(body))
        struct.pack_into("<I", result, at + 64, crc32c(bytes(result[at : at + 64])))
        at += HEADER_NBYTES + len(body)
    return bytes(result)


def _at(rng: random.Random, bad: bytearray) -> int:
    """A random position; the beginning is more likely, because headers are there."""
    return rng.randrange(min(len(bad), 80) if rng.random() < 0.5 else len(bad)) if bad else 0


def _flip(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    if bad:
        bad[_at(rng, bad)] ^= 1 << rng.randrange(8)


def _number(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    layout, at = rng.choice(LAYOUTS), _at(rng, bad)
    size = struct.calcsize(layout)
    if at + size <= len(bad):
        old = struct.unpack_from(layout, bad, at)[0]
        new = rng.choice((old + 1, old - 1, rng.choice(NUMBERS), rng.choice(NUMBERS), len(bad), len(bad) - at))
        struct.pack_into(layout, bad, at, new % (1 << 8 * size))


def _cut(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    del bad[_at(rng, bad) :]


def _drop(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    at = _at(rng, bad)
    del bad[at : at + rng.choice((1, 2, 4, 8, 68))]


def _repeat(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    at = _at(rng, bad)
    bad[at:at] = bad[at : at + rng.choice((1, 2, 4, 8, 68, 200))] * rng.choice((1, 1, 2, 50))


def _splice(rng: random.Random, bad: bytearray, examples: Sequence[bytes]) -> None:
    other = rng.choice(examples)
    at = _at(rng, bad)
    bad[at : at + rng.randrange(40)] = other[rng.randrange(len(other) + 1) :][: rng.randrange(1, 200)]


def _beginning(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    at, new = _at(rng, bad), rng.choice(BEGINNINGS)
    bad[at : at + rng.choice((0, 1, 1, len(new)))] = new


def _word(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    """Replaces the text between two JSON delimiters."""
    at = _at(rng, bad)
    begin = max(bad.rfind(mark, 0, at) for mark in b":[,")
    end = min((position for mark in b",]}" if (position := bad.find(mark, at)) >= 0), default=-1)
    if 0 <= begin < end:
        bad[begin + 1 : end] = rng.choice(WORDS)


def _deep(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    at = _at(rng, bad)
    bad[at:at] = rng.choice((b"\x91", b"\x81", b"\x81\xa1a", b"[", b'{"a":')) * rng.choice((3, 50, 3000))


def _noise(rng: random.Random, bad: bytearray, _: Sequence[bytes]) -> None:
    at = _at(rng, bad)
    bad[at : at + rng.randrange(9)] = rng.randbytes(rng.randrange(1, 17))


_CHANGES: tuple[Callable[[random.Random, bytearray, Sequence[bytes]], None], ...] = (
    _flip, _flip, _number, _number, _number, _cut, _drop, _repeat, _splice, _beginning, _word, _noise, _deep,
)

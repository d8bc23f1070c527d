"""The frame reader: bytes cut, corrupted and reordered at every place; golden files; the CRC twin."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commlayer import native
from commlayer.errors import CorruptFrame, Damaged
from commlayer.transport import crc, framing
from commlayer.transport.framing import HEADER_NBYTES, STAGING_NBYTES, Frame, Reader
from commlayer.transport.protocol import Flag, Header, Kind
from tests.chaos.frames import frames_in

GOLDEN = Path(__file__).parents[1] / "golden" / "frames"

FULL = Header(Kind.PUSH, generation=7, step=123456, bucket=42, part=2, parts=5, round=1, codec=9, sender=3, order=17,
              flags=Flag.ABANDON, weight=0.75, used=(1 << 63) | 5, total=1.5, undone=(1 << 62) | 3, joined=0x0102)
CASES = {
    "data-empty": (Header(Kind.DATA), b""),
    "push-full": (FULL, bytes(range(256))),
    "result-limits": (Header(Kind.RESULT, 2**32 - 1, 2**32 - 1, 2**32 - 1, 65534, 65535, 255, 255, 65535, 65535, Flag.NONE,
                             1.5, 2**64 - 1, joined=65535), b"\xff"),
    "bye": (Header(Kind.BYE, sender=0x8001), b""),
    "result-without-zeros": (Header(Kind.RESULT, 2, 9, 4, codec=2, sender=0x8000, flags=Flag.MEAN | Flag.WITHOUT_ZEROS,
                                    weight=2.0, used=1), struct.pack("<I16s", 4096, b"\x05") + bytes(range(64))),
}


def wire(header: Header, body: bytes) -> bytes:
    return framing.encode(header, len(body), crc.crc32c(body)) + body


def same(frame: Frame, header: Header, body: bytes) -> None:
    assert frame.header == header
    assert bytes(frame.body) == body


@pytest.mark.parametrize("name", CASES)
def test_golden_bytes(name: str) -> None:
    header, body = CASES[name]
    path = GOLDEN / f"{name}.bin"
    if os.environ.get("COMMLAYER_REGENERATE_GOLDEN"):
        path.write_bytes(wire(header, body))
    assert path.read_bytes() == wire(header, body)
    (frame,) = frames_in(Reader(), path.read_bytes())
    same(frame, header, body)


def test_documented_offsets() -> None:
    data = wire(FULL, b"abc")
    assert HEADER_NBYTES == 68
    assert data[:8] == b"CML2" + bytes([framing.VERSION, Kind.PUSH, Flag.ABANDON, 1])
    assert struct.unpack_from("<IIIHHHH", data, 8) == (7, 123456, 42, 2, 5, 3, 17)
    assert struct.unpack_from("<BBH", data, 28) == (9, 0, 0x0102)
    assert struct.unpack_from("<QQff", data, 32) == ((1 << 63) | 5, (1 << 62) | 3, 0.75, 1.5)
    assert struct.unpack_from("<III", data, 56) == (3, crc.crc32c(b"abc"), crc.crc32c(data[:64]))


@given(
    st.lists(st.integers(0, 3 * STAGING_NBYTES), min_size=1, max_size=5),
    st.lists(st.integers(1, 2 * STAGING_NBYTES), min_size=1),
)
@settings(max_examples=40, deadline=None)
def test_frames_of_any_size_cut_at_any_byte(sizes: list[int], cuts: list[int]) -> None:
    sent = [(Header(Kind.DATA, bucket=i), bytes([i + 1]) * n) for i, n in enumerate(sizes)]
    data = b"".join(wire(*frame) for frame in sent)
    reader, got, at, turn = Reader(), [], 0, 0
    while at < len(data):
        n = cuts[turn % len(cuts)]
        got += frames_in(reader, data[at : at + n])
        at, turn = at + n, turn + 1
    assert len(got) == len(sent)
    for frame, (header, body) in zip(got, sent, strict=True):
        same(frame, header, body)
    assert reader.at_frame_boundary


def test_truncated_stream_yields_no_frame_and_is_reported() -> None:
    data = wire(FULL, b"x" * 100)
    for cut in (1, HEADER_NBYTES - 1, HEADER_NBYTES, HEADER_NBYTES + 99):
        reader = Reader()
        assert frames_in(reader, data[:cut]) == []
        assert not reader.at_frame_boundary
    assert Reader().at_frame_boundary


def test_large_body_is_written_to_allocated_memory() -> None:
    body, given = os.urandom(5 * STAGING_NBYTES), []

    def allocate(nbytes: int) -> memoryview:
        given.append(memoryview(bytearray(nbytes)))
        return given[-1]

    (frame,) = frames_in(Reader(allocate=allocate), wire(FULL, body))
    assert bytes(frame.body) == body
    assert [frame.body.obj] == [g.obj for g in given]


def reheaded(data: bytes) -> bytes:
    """With a header CRC that matches the changed header."""
    return data[:64] + struct.pack("<I", crc.crc32c(data[:64])) + data[68:]


def test_oversized_body_is_refused_before_allocation() -> None:
    def allocate(_: int) -> memoryview:
        raise AssertionError("allocated")

    with pytest.raises(CorruptFrame, match=r"\b101 bytes\b.*\b100\b.*E-FRAME"):
        frames_in(Reader(100, allocate), wire(FULL, b"x" * 101))
    assert len(frames_in(Reader(100), wire(FULL, b"x" * 100))) == 1


@pytest.mark.parametrize(("offset", "value", "message"), [
    (4, 2, r"version 2\b.*E-VERSION"),
    (5, 0, r"kind 0\b.*E-FRAME"),
    (5, 77, r"kind 77\b.*E-FRAME"),
    (6, 0x80, r"flags 0x80\b.*E-FRAME"),
    (22, 2, r"part 2 of 2\b.*E-FRAME"),
    (29, 1, r"reserved 0x1\b.*E-FRAME"),
])
def test_malformed_header_with_a_valid_checksum_is_refused(offset: int, value: int, message: str) -> None:
    data = bytearray(wire(FULL, b"abc"))
    data[offset] = value
    with pytest.raises(CorruptFrame, match=message) as caught:
        frames_in(Reader(), reheaded(bytes(data)))
    assert not isinstance(caught.value, Damaged)


@pytest.mark.parametrize("kind", Kind)
def test_only_payloads_may_omit_zeros(kind: Kind) -> None:
    data = wire(Header(kind, flags=Flag.WITHOUT_ZEROS), b"abc")
    if kind in (Kind.PUSH, Kind.RESULT, Kind.FOLLOWED):
        assert len(frames_in(Reader(), data)) == 1
        return
    with pytest.raises(CorruptFrame, match=f"{kind.name} .*zeros.*PUSH and RESULT.*E-FRAME"):
        frames_in(Reader(), data)


@pytest.mark.parametrize(("start", "guess"), [
    (b"GET / HTTP/1.1\r\n", "web browser.*E-ADDRESS"), (b"HTTP/1.1 400 Bad", "HTTP server.*E-ADDRESS"),
    (b"PRI * HTTP/2.0\r\n", "gRPC.*E-ADDRESS"), (b"\x16\x03\x01\x02", "TLS client.*E-TLS"),
    (b"SSH-2.0-OpenSSH_9", "SSH server.*E-ADDRESS"), (b"CML9", "CML9.*E-VERSION"),
    (b"\x80\x04\x95\x00", r"x80\\x04.*E-ADDRESS"),
])
def test_wrong_magic_names_the_likely_protocol(start: bytes, guess: str) -> None:
    with pytest.raises(CorruptFrame, match=guess):
        frames_in(Reader(), start.ljust(HEADER_NBYTES, b"\0"))


def test_every_bit_flip_is_detected_and_the_error_latches() -> None:
    data = wire(FULL, b"0123456789abcdef")
    for bit in range(len(data) * 8):
        broken = bytearray(data)
        broken[bit // 8] ^= 1 << bit % 8
        reader = Reader()
        with pytest.raises(CorruptFrame) as first:
            frames_in(reader, bytes(broken))
        assert not reader.at_frame_boundary
        with pytest.raises(CorruptFrame) as second:
            frames_in(reader, data)
        assert second.value is first.value


def test_frames_before_the_fault_are_delivered_and_none_after() -> None:
    good, bad = wire(FULL, b"good"), bytearray(wire(FULL, b"bad"))
    bad[-1] ^= 1
    reader = Reader()
    (frame,) = frames_in(reader, good)
    assert bytes(frame.body) == b"good"
    with pytest.raises(CorruptFrame, match=r"\b3 bytes\b.*step 123456, bucket 42.*E-CHECKSUM"):
        frames_in(reader, bytes(bad) + good)


@given(st.binary(max_size=300))
@settings(max_examples=200, deadline=None)
def test_garbage_never_yields_a_frame(data: bytes) -> None:
    reader = Reader(1000)
    try:
        assert frames_in(reader, data) == []
    except CorruptFrame:
        assert not reader.at_frame_boundary


@given(st.binary(min_size=64, max_size=64), st.binary(max_size=64))
@settings(max_examples=200, deadline=None)
def test_random_header_with_a_valid_checksum_is_refused_or_round_trips(head: bytes, tail: bytes) -> None:
    """The CRC hides most header checks from the fuzz above; here it is always right."""
    data = b"CML2\x02" + head[5:]
    try:
        header, nbytes, check = framing.decode(memoryview(data + struct.pack("<I", crc.crc32c(data))), 1 << 32)
    except CorruptFrame:
        return
    if header.weight == header.weight and header.total == header.total:  # a NaN has many spellings
        assert framing.encode(header, nbytes, check)[:64] == data
    reader = Reader(64)
    with pytest.raises(CorruptFrame):
        frames_in(reader, framing.encode(header, len(tail) + 65, check) + tail)


@pytest.mark.parametrize("field", ["generation", "step", "bucket", "part", "round", "codec", "sender", "order", "used",
                                   "undone"])
def test_field_overflow_is_a_value_error(field: str) -> None:
    for value in (-1, 1 << 64):
        with pytest.raises(ValueError, match=rf"{field}={value}\b.*E-TRANSPORT-USE"):
            framing.encode(FULL._replace(**{field: value}), 0, 0)


def test_crc_known_answers() -> None:
    for crc32c in (crc.portable, crc.crc32c):
        assert crc32c(b"") == 0
        assert crc32c(b"123456789") == 0xE3069283
        assert crc32c(bytes(32)) == 0x8A9136AA
        assert crc32c(b"\xff" * 32) == 0x62A8AB43


@pytest.mark.skipif(native.core is None, reason="no native core")
@given(st.binary(max_size=2000))
@settings(max_examples=60, deadline=None)
def test_native_crc_equals_the_portable_one(data: bytes) -> None:
    assert crc.crc32c(data) == crc.portable(data)

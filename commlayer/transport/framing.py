"""Frame format: encodes headers and decodes bytes to frames, without I/O. Implements "Frames" in docs/reference/wire.md."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import NamedTuple

from commlayer.errors import CorruptFrame, Damaged, InvalidInput
from commlayer.records import MAX_FRAME_NBYTES
from commlayer.transport.crc import crc32c
from commlayer.transport.protocol import KIND_NAMES, MAY_LACK_ZEROS, Flag, Header, Kind

MAGIC = b"CML2"
VERSION = 12
DEFAULT_MAX_NBYTES = MAX_FRAME_NBYTES
STAGING_NBYTES = 32 << 10
"""Size of the staging buffer, in bytes. Small frames then need one system call; of a large body, at most this many bytes are
copied."""

_LAYOUT = struct.Struct("<4s4B3I4HBBHQQff3I")
_CRC = struct.Struct("<I")
HEADER_NBYTES = _LAYOUT.size
_CHECKED_NBYTES = HEADER_NBYTES - _CRC.size
_OTHER_PROTOCOLS = (
    (b"CML", "a commlayer of another wire format", "E-VERSION"),
    (b"HTTP", "an HTTP server", "E-ADDRESS"),
    (b"PRI ", "a gRPC or HTTP/2 client", "E-ADDRESS"),
    (b"\x00\x00", "a gRPC or HTTP/2 server", "E-ADDRESS"),
    (b"GET ", "a web browser or a health check", "E-ADDRESS"),
    (b"POST", "an HTTP client", "E-ADDRESS"),
    (b"SSH-", "an SSH server", "E-ADDRESS"),
    (b"\x16\x03", "a TLS client", "E-TLS"),
    (b"\x15\x03", "a TLS server", "E-TLS"),
    (b"", "not a commlayer peer", "E-ADDRESS"),
)


class Frame(NamedTuple):
    header: Header
    body: memoryview


def encode(header: Header, body_nbytes: int, crc: int) -> bytes:
    """Returns the header's bytes for a body of that size and CRC-32C (0 if the body is empty)."""
    return seal(pack(header, body_nbytes), crc)


def pack(header: Header, body_nbytes: int) -> bytes:
    """Returns the header's bytes without their checksums. Raises InvalidInput if a number does not fit its field."""
    h = header
    try:
        fixed = _LAYOUT.pack(
            MAGIC, VERSION, h.kind, h.flags, h.round, h.generation, h.step, h.bucket, h.part, h.parts, h.sender, h.order,
            h.codec, 0, h.joined, h.used, h.undone, h.weight, h.total, body_nbytes, 0, 0,
        )
    except (struct.error, OverflowError) as error:
        raise InvalidInput("E-TRANSPORT-USE",
                           f"{header} with a body of {body_nbytes} bytes does not fit a frame header: {error}") from None
    return fixed[: _CHECKED_NBYTES - _CRC.size]


def seal(packed: bytes, crc: int) -> bytes:
    checked = packed + _CRC.pack(crc)
    return checked + _CRC.pack(crc32c(checked))


def decode(data: memoryview, max_nbytes: int, *, begun: bool = False) -> tuple[Header, int, int]:
    """Decodes HEADER_NBYTES bytes to header, body size and the body's CRC. Raises CorruptFrame. `begun`: True: the connection
    has already received a valid frame, so wrong bytes mean damage, not another protocol."""
    (magic, version, kind, flags, round_, generation, step, bucket, part, parts, sender, order,
     codec, reserved, joined, used, undone, weight, total, nbytes, crc, own_crc) = _LAYOUT.unpack(data)
    if magic != MAGIC:
        _check_magic(data, begun=begun)
    if crc32c(data[:_CHECKED_NBYTES]) != own_crc:
        raise Damaged("the header's checksum does not match")
    if version != VERSION:
        raise CorruptFrame(f"got frame version {version}, but this process uses version {VERSION}: install the same commlayer "
                           "version on all machines",
                           code="E-VERSION")
    if kind not in _KINDS:
        raise CorruptFrame(f"got unknown frame kind {kind}, allowed {min(_KINDS)} to {max(_KINDS)}")
    if flags & ~Flag.ALL or reserved or part >= parts:
        raise CorruptFrame(f"got an invalid frame header: flags {flags:#x}, reserved {reserved:#x}, part {part} of {parts}")
    if flags & Flag.WITHOUT_ZEROS and kind not in MAY_LACK_ZEROS:
        raise CorruptFrame(f"got a {KIND_NAMES[kind]} frame with flag WITHOUT_ZEROS (zeros left out of its body), allowed only "
                           f"for {_MAY_LACK_ZEROS}")
    if nbytes > max_nbytes:
        raise CorruptFrame(f"announces a body of {nbytes} bytes, allowed {max_nbytes}")
    header = Header(kind, generation, step, bucket, part, parts, round_, codec, sender, order, flags, weight, used, total,
                    undone, joined)
    return header, nbytes, crc


_KINDS = frozenset(Kind)
_MAY_LACK_ZEROS = " and ".join(KIND_NAMES[kind] for kind in sorted(MAY_LACK_ZEROS))


def _check_magic(data: memoryview, *, begun: bool) -> None:
    if data[:4] != MAGIC:
        start = bytes(data[:4])
        who, code = next((who, code) for magic, who, code in _OTHER_PROTOCOLS if start.startswith(magic))
        line = f"wrong magic {start!r}, expected {MAGIC!r}: the other end is probably {who}"
        raise Damaged(line) if begun else CorruptFrame(line, code=code)


def allocate_bytes(nbytes: int) -> memoryview:
    return memoryview(bytearray(nbytes))


class Reader:
    """Decodes a byte stream to frames. The transport writes received bytes into wanted(), calls filled(n), then calls next()
    until next() returns None.

    Large bodies are read directly into memory from `allocate`, except for their beginning. After CorruptFrame every later call
    of next() raises the same error.
    """

    def __init__(self, max_nbytes: int = DEFAULT_MAX_NBYTES, allocate: Callable[[int], memoryview] = allocate_bytes) -> None:
        self.max_nbytes, self.allocate = max_nbytes, allocate
        self.place: Callable[[Header, int], memoryview] = lambda _, nbytes: allocate(nbytes)
        """Function that returns the memory for the body of a frame. The function may raise CorruptFrame before it allocates
        memory."""
        self._staging = memoryview(bytearray(STAGING_NBYTES))
        self._start = self._stop = 0  # the filled and unused part of the staging buffer
        self._header, self._crc = Header(0), 0
        self._body: memoryview | None = None  # None between two frames, and while a header is incomplete
        self._got = self._running = 0  # bytes of the body so far, and their checksum
        self._error: CorruptFrame | None = None
        self._begun = False

    @property
    def at_frame_boundary(self) -> bool:
        """True: the bytes so far end with a complete frame, so the connection may be closed now."""
        return self._error is None and self._body is None and self._start == self._stop

    def wanted(self) -> memoryview:
        """Returns the memory to write the next bytes to. It is not empty if next() has returned None."""
        return self._staging[self._stop :] if self._body is None else self._body[self._got :]

    def filled(self, nbytes: int) -> None:
        """Records that the transport wrote this many bytes at the beginning of wanted()."""
        if self._body is None:
            self._stop += nbytes
        else:
            self._take(self._body[self._got : self._got + nbytes])

    def next(self) -> Frame | None:
        """Returns the next complete frame, or None if bytes are missing."""
        if self._error is not None:
            # Without the traceback, to which each raise would add frames, which keep buffers alive.
            raise self._error.with_traceback(None)
        try:
            if self._body is None:
                if self._start == self._stop:
                    self._start = self._stop = 0
                    return None
                self._read_header()
            if self._body is None or self._got < len(self._body):
                return None
            if self._running != self._crc:
                raise Damaged(f"the checksum of a body of {len(self._body)} bytes does not match",
                              step=self._header.step, bucket=self._header.bucket)
        except CorruptFrame as error:
            self._error = error
            raise
        body, self._body = self._body, None
        return Frame(self._header, body)

    def _read_header(self) -> None:
        """Decodes a header, if it is complete, and moves the beginning of the body to the body's memory."""
        have = self._stop - self._start
        if have < HEADER_NBYTES:
            if have >= len(MAGIC):  # another protocol may send less than a header and close
                _check_magic(self._staging[self._start : self._stop], begun=self._begun)
            if self._start:  # moves the rest to the front, so the buffer has space for a complete header
                self._staging[:have] = bytes(self._staging[self._start : self._stop])
                self._start, self._stop = 0, have
            return
        raw = self._staging[self._start : self._start + HEADER_NBYTES]
        self._header, nbytes, self._crc = decode(raw, self.max_nbytes, begun=self._begun)
        self._begun = True
        self._start += HEADER_NBYTES
        body = self._body = self.place(self._header, nbytes)
        n = min(nbytes, self._stop - self._start)
        body[:n] = self._staging[self._start : self._start + n]
        self._start += n
        self._got = self._running = 0
        self._take(body[:n])

    def _take(self, piece: memoryview) -> None:
        """Updates the body's checksum with received bytes at once, while they are in the CPU's cache and the next bytes are in
        transit."""
        self._got += len(piece)
        self._running = crc32c(piece, self._running)

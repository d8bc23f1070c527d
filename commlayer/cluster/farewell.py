"""HTTP/2 GOAWAY frames, which give a gRPC client the reason why its connection is closed."""

from __future__ import annotations

import struct

_HEAD = struct.Struct(">3sBBI")
_SETTINGS, _GOAWAY = 4, 7
_ENHANCE_YOUR_CALM = 11
MOST_NBYTES = 1024


def goaway(reason: str) -> bytes:
    """All that a server sends before it closes. HTTP/2 requires SETTINGS as the first frame."""
    body = struct.pack(">II", 0, _ENHANCE_YOUR_CALM) + reason.encode()[:MOST_NBYTES]
    return _frame(_SETTINGS, b"") + _frame(_GOAWAY, body)


def reason_of(data: bytes) -> str:
    """The reason in a server's first bytes; "" if they are something else or incomplete.

    >>> reason_of(goaway("come again later"))
    'come again later'
    """
    at = 0
    while at + _HEAD.size <= len(data):
        size, kind, _, _ = _HEAD.unpack_from(data, at)
        nbytes, at = int.from_bytes(size, "big"), at + _HEAD.size
        if kind == _GOAWAY and at + nbytes <= len(data) and nbytes >= 8:
            return bytes(data[at + 8 : at + nbytes]).decode("utf-8", "replace")
        if kind != _SETTINGS:
            return ""
        at += nbytes
    return ""


def _frame(kind: int, body: bytes) -> bytes:
    return _HEAD.pack(len(body).to_bytes(3, "big"), kind, 0, 0) + body

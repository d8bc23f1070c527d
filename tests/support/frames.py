"""Decodes frames from bytes in memory."""

from __future__ import annotations

from commlayer.transport.framing import Frame, Reader


def frames_in(reader: Reader, data: bytes | memoryview) -> list[Frame]:
    """Adds these bytes to the reader and returns all frames that they complete."""
    rest, frames = memoryview(data), []
    while True:
        while (frame := reader.next()) is not None:
            frames.append(frame)
        if not rest:
            return frames
        room = reader.wanted()
        n = min(len(room), len(rest))
        room[:n] = rest[:n]
        reader.filled(n)
        rest = rest[n:]

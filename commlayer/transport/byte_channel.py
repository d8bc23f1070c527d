"""What the frames of a connection travel on: bytes in order, both ways, to an end. Knows no frames, and not who is there.

Three things are one: a socket, a TlsSocket, a GrpcStream. All above it is the same code: greeting, frames, parts, ends.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from commlayer.transport.key_folder import Certified


class ByteChannel(Protocol):
    """As a stream socket: one thread at a time may read and one write, and what one of them waits for any thread may end.

    Nothing is queued without a bound: who writes faster than the other end reads waits, or gets BlockingIOError.
    """

    def recv_into(self, buffer: Any, nbytes: int = ..., flags: int = ..., /) -> int:
        """At least one byte; 0 at the end of what the other end sends. TimeoutError after that of settimeout(): over then."""
        ...

    def sendmsg(self, buffers: Any, ancdata: Any = ..., flags: int = ..., /) -> int:
        """How many of these bytes are taken, 0 where the same ones must be given again. OSError when the other end is gone.

        `flags`: with MSG_DONTWAIT BlockingIOError instead of waiting.
        """
        ...

    def sendall(self, data: Any, flags: int = ..., /) -> None: ...

    def settimeout(self, value: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None:
        """SHUT_WR: an end behind what was written; SHUT_RDWR: over, now, and whoever waits wakes."""
        ...

    def close(self) -> None: ...


def binding_of(channel: ByteChannel) -> bytes:
    """What a proof over that channel is bound to; nothing on plain text."""
    bound: bytes = getattr(channel, "channel", b"")
    return bound


def tells_ends(channel: ByteChannel) -> bool:
    """Whether its end without a word means that the other machine is there, and has ended it; else it may be a cut link."""
    told: bool = getattr(channel, "tells_ends", True)
    return told


def certified_of(channel: ByteChannel) -> Certified | None:
    """Whose certificate the other end has shown."""
    peer: Certified | None = getattr(channel, "peer", None)
    return peer

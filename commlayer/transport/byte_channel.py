"""Byte channel under a connection: ordered bytes in both directions, over a socket, a TlsSocket or a GrpcStream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from commlayer.transport.key_folder import Certified


class ByteChannel(Protocol):
    """Behaves like a stream socket: one thread at a time may read and one may write, and any thread may shut it down.

    Buffering is bounded: a writer faster than the peer's reader blocks, or gets BlockingIOError.
    """

    def recv_into(self, buffer: Any, nbytes: int = ..., flags: int = ..., /) -> int:
        """Reads at least one byte; 0 at end of stream. After a TimeoutError (see settimeout) the channel cannot be used."""
        ...

    def sendmsg(self, buffers: Any, ancdata: Any = ..., flags: int = ..., /) -> int:
        """Returns how many bytes were accepted. After 0 the caller must pass the same bytes again. OSError if the peer is
        gone.

        With MSG_DONTWAIT in `flags` it raises BlockingIOError instead of blocking.
        """
        ...

    def sendall(self, data: Any, flags: int = ..., /) -> None: ...

    def settimeout(self, value: float | None, /) -> None: ...

    def shutdown(self, how: int, /) -> None:
        """SHUT_WR: end of stream after the written bytes. SHUT_RDWR: ends the channel now and wakes blocked threads."""
        ...

    def close(self) -> None: ...


def binding_of(channel: ByteChannel) -> bytes:
    """The bytes that bind a proof to this channel; empty without TLS."""
    bound: bytes = getattr(channel, "channel", b"")
    return bound


def tells_ends(channel: ByteChannel) -> bool:
    """Whether an end of stream without BYE shows that the peer's machine ended it. If False, the link may have been cut."""
    value: bool = getattr(channel, "tells_ends", True)
    return value


def certified_of(channel: ByteChannel) -> Certified | None:
    """The certificate that the peer has shown, if any."""
    peer: Certified | None = getattr(channel, "peer", None)
    return peer

"""The two ends of a gRPC stream: the server's handler and the client's dial."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, NamedTuple

from commlayer.errors import CommError, DeadlineExceeded, PeerLost, Refused, one_line
from commlayer.transport.backoff import Backoff
from commlayer.transport.grpc.event_loop import run_on_loop
from commlayer.transport.grpc.library import grpc
from commlayer.transport.grpc.stream import FRAME_OPTION, MESSAGE_NBYTES, GrpcStream, StreamCall
from commlayer.transport.keys.key_folder import SERVICE as NAMED
from commlayer.transport.keys.key_folder import Keys, PeerCertificate


def open_channel(address: str, options: list[tuple[str, Any]], keys: Keys | None, *, on_loop: bool = False) -> Any:
    """Opens a gRPC channel, with TLS if there are keys. `on_loop`: a grpc.aio channel on the running event loop."""
    kind: Any = grpc.aio if on_loop else grpc
    if keys is None:
        return kind.insecure_channel(address, options=options)
    # Certificates name nodes instead of addresses, so the address is not compared with the certificate.
    options = [*options, ("grpc.ssl_target_name_override", NAMED)]
    return kind.secure_channel(address, grpc.ssl_channel_credentials(keys.ca, keys.key, keys.certificate), options=options)


SERVICE, METHOD = "commlayer.Data", "Frames"
ACCEPTED = ("commlayer-frames", "1")
"""Initial metadata with which a server accepts a stream. A client must wait for it before it writes, or it would not receive
the reason of a refusal."""
OPTIONS = [
    FRAME_OPTION,
    ("grpc.max_receive_message_length", MESSAGE_NBYTES), ("grpc.max_send_message_length", MESSAGE_NBYTES),
    ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000), ("grpc.http2.max_pings_without_data", 0),
    # Otherwise the stream would share the connection of the control calls to the same address, and delay those calls.
    ("grpc.use_local_subchannel_pool", 1),
]
"""gRPC options of a client's channel for streams."""


class Caller(NamedTuple):
    """The other end of a gRPC call. `address`: its host and port; `source`: see FairShare."""

    address: str
    source: str
    certificate: PeerCertificate | None


AcceptStream = Callable[[GrpcStream, str, str], bool]
"""Accepts a stream with its address and its source. Returns False if the source opens too many, or the process is not ready
yet. Raises LookupError if the process accepts no streams."""

_dialed: set[tuple[str, int]] = set()
"""Addresses that this process has dialed. A forked child (a DataLoader worker) closes its copies of these connections' sockets.
gRPC does not expose the sockets, so the child finds them by address. Otherwise a dead training process would seem connected to
its peers."""


def handler(take: AcceptStream, identify: Callable[[Any], Awaitable[Caller]]) -> grpc.GenericRpcHandler:
    """Returns the server's handler of streams. `identify` returns the caller for gRPC's context of a call, or ends the call."""

    async def frames(_: Any, context: Any) -> None:
        caller = await identify(context)
        over, answered = asyncio.Event(), asyncio.Event()

        async def finish() -> None:
            over.set()

        async def write(data: bytes) -> None:
            await answered.wait()  # a message written before the initial metadata would end the stream
            await context.write(data)

        call = StreamCall(context.read, write, finish, over.set)
        certificate = caller.certificate
        stream = GrpcStream(call, channel=certificate.fingerprint if certificate else b"", peer=certificate)
        try:
            try:
                admitted = take(stream, f"{caller.address} (gRPC)", caller.source)
            except LookupError as error:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
            if not admitted:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "it accepts no more streams now: retry later")
            await context.send_initial_metadata((ACCEPTED,))
            answered.set()
            await over.wait()  # or cancelled: the peer is gone
        finally:
            stream.close()

    calls = {METHOD: grpc.stream_stream_rpc_method_handler(frames)}
    return grpc.method_handlers_generic_handler(SERVICE, calls)


def dial(opened: Callable[[], Any], host: str, port: int, deadline: float, channel: bytes = b"") -> GrpcStream:
    """Opens a stream over the grpc.aio channel that `opened` returns. Raises Refused, PeerLost or DeadlineExceeded with the
    address."""
    begin, where = time.monotonic(), f"{host}:{port} over gRPC"

    async def open_stream() -> GrpcStream:
        link = opened()
        call = link.stream_stream(f"/{SERVICE}/{METHOD}")()
        try:
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                await call.wait_for_connection()
                if ACCEPTED not in ((key, value) for key, value in await call.initial_metadata()):
                    await call.read()  # raises the server's reason
                    raise Refused(f"{where} answers, but is not a commlayer server: check the address", code="E-ADDRESS")
        except BaseException:
            call.cancel()
            await link.close()
            raise
        stream = GrpcStream(StreamCall(call.read, call.write, call.done_writing, lambda: stream.spawn(end())), channel=channel)

        async def end() -> None:
            call.cancel()
            await link.close()

        return stream

    with contextlib.suppress(OSError):
        _dialed.update(info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[misc]
    refusal: CommError | None = None
    backoff = Backoff(deadline)
    while True:
        try:
            stream: GrpcStream = run_on_loop(open_stream(), deadline - begin + 5.0)
            return stream
        except TimeoutError:
            # A reason from the server is more useful than the timeout of a later attempt.
            raise refusal or DeadlineExceeded(
                f"{where} did not answer within {deadline - begin:.1f} s: check the address, that a server runs "
                "there, and firewalls") from None
        except grpc.aio.AioRpcError as error:
            refusal = _refusal(error, f"{where} (deadline {deadline - begin:.1f} s)")
            # Retried if the server counted too many new streams or calls, since it forgets them soon, or if it is starting.
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or not backoff.wait():
                raise refusal from None


def _refusal(error: Any, where: str) -> CommError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Refused("the server at this address accepts no gRPC streams: check the address, and the setting carrier on its "
                       "machine",
                       code="E-ADDRESS")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Refused(f"refused the stream: {one_line(error.details())}")
    return PeerLost(f"cannot reach {where}: {one_line(error.details())}: check the address and that a server runs there")


def _close_copies() -> None:
    """Closes copies of the parent's sockets in a forked child, where gRPC is not used."""
    for name in os.listdir("/proc/self/fd") if _dialed and os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError, ValueError):
            copy = socket.socket(fileno=int(name))
            address = None
            with contextlib.suppress(OSError):
                address = copy.getpeername()
            # gRPC uses IPv6 sockets for IPv4 as well.
            if isinstance(address, tuple) and (address[0].removeprefix("::ffff:"), address[1]) in _dialed:
                copy.close()
            else:
                copy.detach()
    _dialed.clear()


os.register_at_fork(after_in_child=_close_copies)

"""The two ends of a gRPC data stream: the server's handler and the client's dial."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Any

from commlayer import config as settings
from commlayer.errors import CommError, DeadlineExceeded, PeerLost, Refused, one_line
from commlayer.transport import event_loop
from commlayer.transport.grpc_stream import FRAME_OPTION, MESSAGE_NBYTES, GrpcStream
from commlayer.transport.key_folder import Certified

settings.quiet_grpc()
import grpc  # noqa: E402  (after quiet_grpc(): grpc reads its settings once)
import grpc.aio  # noqa: E402

SERVICE, METHOD = "commlayer.Data", "Frames"
TAKEN = ("commlayer-frames", "1")
"""The server's initial metadata. A client that writes before it would not receive the reason of a refusal."""
OPTIONS = [
    FRAME_OPTION,
    ("grpc.max_receive_message_length", MESSAGE_NBYTES), ("grpc.max_send_message_length", MESSAGE_NBYTES),
    ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000), ("grpc.http2.max_pings_without_data", 0),
    # Otherwise it would share the connection of the control calls to the same address, and delay them.
    ("grpc.use_local_subchannel_pool", 1),
]
"""Options of a client's channel."""
AGAIN_S = 0.1
"""Pause after RESOURCE_EXHAUSTED: pending handshakes end soon."""
Take = Callable[[GrpcStream, str], bool]
"""Accepts a stream that was opened from an address. Returns False if too many are pending; LookupError if none are accepted."""

_dialled: set[tuple[str, int]] = set()
"""Addresses that this process has dialed. A forked child (a DataLoader worker) closes its copies of their sockets; gRPC
does not expose them, so the child finds them by address. Otherwise peers would see a dead trainer as connected."""


def handler(take: Take, certified: Callable[[str], Certified | None]) -> grpc.GenericRpcHandler:
    """The server's handler. `certified` maps gRPC's peer name to a certificate, or raises PermissionError if one is missing."""

    async def frames(_: Any, context: Any) -> None:
        name = context.peer()
        try:
            peer = certified(name)
        except PermissionError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        over, answered = asyncio.Event(), asyncio.Event()

        async def finish() -> None:
            over.set()

        async def write(data: bytes) -> None:
            await answered.wait()  # a message written before the initial metadata would end the stream
            await context.write(data)

        stream = GrpcStream(context.read, write, finish, over.set, channel=peer.fingerprint if peer else b"", peer=peer)
        try:
            try:
                room = take(stream, f"{name.removeprefix('ipv4:').removeprefix('ipv6:')} (gRPC)")
            except LookupError as error:
                await context.abort(grpc.StatusCode.UNIMPLEMENTED, str(error))
            if not room:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams are in their greeting: come again")
            await context.send_initial_metadata((TAKEN,))
            answered.set()
            await over.wait()  # or cancelled: the peer is gone
        finally:
            stream.close()

    calls = {METHOD: grpc.stream_stream_rpc_method_handler(frames)}
    return grpc.method_handlers_generic_handler(SERVICE, calls)


def dialled(opened: Callable[[], Any], host: str, port: int, deadline: float, channel: bytes = b"") -> GrpcStream:
    """Dials over the grpc.aio channel that `opened` returns. Raises PeerLost or DeadlineExceeded with the address."""
    begin, where = time.monotonic(), f"{host}:{port} over gRPC"

    async def made() -> GrpcStream:
        link = opened()
        call = link.stream_stream(f"/{SERVICE}/{METHOD}")()
        try:
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                await call.wait_for_connection()
                if TAKEN not in ((key, value) for key, value in await call.initial_metadata()):
                    await call.read()  # raises the server's reason
                    raise Refused(f"{where} answers, and is no server of commlayer's: check the address", code="E-ADDRESS")
        except BaseException:
            call.cancel()
            await link.close()
            raise
        stream = GrpcStream(call.read, call.write, call.done_writing, lambda: stream.spawn(end()), channel=channel)

        async def end() -> None:
            call.cancel()
            await link.close()

        return stream

    with contextlib.suppress(OSError):
        _dialled.update(info[4][:2] for info in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[misc]
    refusal: CommError | None = None
    while True:
        try:
            stream: GrpcStream = event_loop.run(made(), deadline - begin + 5.0)
            return stream
        except TimeoutError:
            # A reason from the server is more useful than the timeout of a later attempt.
            raise refusal or DeadlineExceeded(
                f"{where} gave no answer within {deadline - begin:.1f} s: check the address, that it runs, and the firewalls "
                "between") from None
        except grpc.aio.AioRpcError as error:
            refusal = _refusal(error, f"{where} (deadline {deadline - begin:.1f} s)")
            if error.code() is not grpc.StatusCode.RESOURCE_EXHAUSTED or time.monotonic() + AGAIN_S > deadline:
                raise refusal from None
        time.sleep(AGAIN_S)


def _refusal(error: Any, where: str) -> CommError:
    if error.code() is grpc.StatusCode.UNIMPLEMENTED:
        return Refused("takes no gRPC streams there: check the address, and the setting carrier on its machine",
                       code="E-ADDRESS")
    if error.code() is grpc.StatusCode.UNAUTHENTICATED:
        return Refused(f"does not let the stream in: {one_line(error.details())}")
    return PeerLost(f"cannot reach {where}: {one_line(error.details())}: check the address and that it runs there")


def _close_copies() -> None:
    """Runs in a forked child, where gRPC is not used: its fork support is off."""
    for name in os.listdir("/proc/self/fd") if _dialled and os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError, ValueError):
            copy = socket.socket(fileno=int(name))
            address = None
            with contextlib.suppress(OSError):
                address = copy.getpeername()
            # gRPC uses IPv6 sockets for IPv4 as well.
            if isinstance(address, tuple) and (address[0].removeprefix("::ffff:"), address[1]) in _dialled:
                copy.close()
            else:
                copy.detach()
    _dialled.clear()


os.register_at_fork(after_in_child=_close_copies)

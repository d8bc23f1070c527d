"""The two ends of a gRPC data stream: a server's handler and a client's dialling. Knows gRPC and addresses; no frames."""

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
import grpc  # noqa: E402  (after its settings, which it reads once)
import grpc.aio  # noqa: E402

SERVICE, METHOD = "commlayer.Data", "Frames"
TAKEN = ("commlayer-frames", "1")
"""What a server says first. Who writes ahead of it would not hear why a stream is not taken."""
OPTIONS = [
    FRAME_OPTION,
    ("grpc.max_receive_message_length", MESSAGE_NBYTES), ("grpc.max_send_message_length", MESSAGE_NBYTES),
    ("grpc.keepalive_time_ms", 20_000), ("grpc.keepalive_timeout_ms", 20_000), ("grpc.http2.max_pings_without_data", 0),
    # Else it would share the connection of the calls to the same address, and hold them up.
    ("grpc.use_local_subchannel_pool", 1),
]
"""Of a client's channel."""
AGAIN_S = 0.1
"""Behind an answer that there is no room just now: who greets makes room soon, or has to."""
Take = Callable[[GrpcStream, str], bool]
"""Takes a stream that somebody has opened from there; False if there is no room, LookupError if there is nobody to take any."""

_dialled: set[tuple[str, int]] = set()
"""Where streams of this process lead. A forked child (a DataLoader worker) closes its copies of their sockets, which gRPC does
not show, by these addresses: else a dead trainer would seem connected."""


def handler(take: Take, certified: Callable[[str], Certified | None]) -> grpc.GenericRpcHandler:
    """A server's end, for streams by the names that gRPC gives their connections. `certified` raises PermissionError for one
    that must have shown a certificate, and has not."""

    async def frames(_: Any, context: Any) -> None:
        name = context.peer()
        try:
            peer = certified(name)
        except PermissionError as error:
            await context.abort(grpc.StatusCode.UNAUTHENTICATED, str(error))
        over, begun = asyncio.Event(), asyncio.Event()

        async def finish() -> None:
            over.set()

        async def write(data: bytes) -> None:
            await begun.wait()  # a message on top of the metadata that begin the answer would end the stream
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
            begun.set()
            await over.wait()  # or this is cancelled: the other end is gone
        finally:
            stream.close()

    calls = {METHOD: grpc.stream_stream_rpc_method_handler(frames)}
    return grpc.method_handlers_generic_handler(SERVICE, calls)


def dialled(opened: Callable[[], Any], host: str, port: int, deadline: float, channel: bytes = b"") -> GrpcStream:
    """A client's end, over the grpc.aio channel that `opened` makes. PeerLost or DeadlineExceeded with the address."""
    begin, where = time.monotonic(), f"{host}:{port} over gRPC"

    async def made() -> GrpcStream:
        link = opened()
        call = link.stream_stream(f"/{SERVICE}/{METHOD}")()
        try:
            async with asyncio.timeout(max(0.001, deadline - time.monotonic())):
                await call.wait_for_connection()
                if TAKEN not in ((key, value) for key, value in await call.initial_metadata()):
                    await call.read()  # whose end has the reason
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
        _dialled.update(found[4][:2] for found in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM))  # type: ignore[misc]
    refusal: CommError | None = None
    while True:
        try:
            stream: GrpcStream = event_loop.run(made(), deadline - begin + 5.0)
            return stream
        except TimeoutError:
            # An answer that came is the better reason than a last try that time ran out on.
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
    """In a forked child, whose gRPC is not used: its fork support is off."""
    for name in os.listdir("/proc/self/fd") if _dialled and os.path.isdir("/proc/self/fd") else ():
        with contextlib.suppress(OSError, ValueError):
            copy = socket.socket(fileno=int(name))
            found = None
            with contextlib.suppress(OSError):
                found = copy.getpeername()
            # gRPC takes sockets of IPv6 for either.
            if isinstance(found, tuple) and (found[0].removeprefix("::ffff:"), found[1]) in _dialled:
                copy.close()
            else:
                copy.detach()
    _dialled.clear()


os.register_at_fork(after_in_child=_close_copies)

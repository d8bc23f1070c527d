"""A listening port with a gRPC server, behind a TLS terminator if there are keys."""

from __future__ import annotations

import errno
import inspect
import socket
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from commlayer import config as settings
from commlayer.cluster.messages import MAX_NBYTES, MAX_REPLY_NBYTES, SERVICE
from commlayer.cluster.tls_terminator import TlsTerminator
from commlayer.config import join_host
from commlayer.errors import CorruptFrame, InvalidInput
from commlayer.transport import grpc_stream
from commlayer.transport.grpc_stream import FRAME_OPTION, AcceptStream
from commlayer.transport.key_folder import Keys, PeerCertificate
from commlayer.transport.secret import AuthenticationFailed

settings.quiet_grpc()
import grpc  # noqa: E402  (after quiet_grpc(): grpc reads its settings once)
import grpc.aio  # noqa: E402

LOOPBACK = "127.0.0.1"
REPLY_ARRIVES_S = 1.0
"""Seconds that a reply may take to reach a client before the client's connection is closed."""


class GrpcPort:
    """A port with a gRPC server. Without keys gRPC listens on the port. With keys a TLS terminator listens on it, and gRPC on a
    loopback port."""

    def __init__(self, keys: Keys | None, bind: str, port: int, refused: Callable[[str, str], None]) -> None:
        self._bind, self.number = bind, port
        self._terminator = TlsTerminator(keys, bind, port, refused) if keys else None
        self._host: RpcServer | None = None

    def start(self, host: RpcServer) -> None:
        self._host = host
        if self._terminator is None:
            self.number = host.start(join_host(self._bind, self.number))
        else:
            self._terminator.start(host.start(join_host(LOOPBACK, 0)))
            self.number = self._terminator.port

    def caller(self, peer: str) -> PeerCertificate | None:
        """Returns the certificate of the connection that gRPC calls `peer`; None without keys. Raises AuthenticationFailed if
        the port requires TLS and the connection did not use TLS."""
        if self._terminator is None:
            return None
        caller = self._terminator.caller(peer)
        if caller is None:
            raise AuthenticationFailed
        return caller

    def streams(self, take: AcceptStream) -> Any:
        """Returns the gRPC handler of data streams on this port. It passes each new stream to `take`."""

        def certified(peer: str) -> PeerCertificate | None:
            try:
                return self.caller(peer)
            except AuthenticationFailed:
                raise PermissionError("this port requires TLS, and the connection does not use it") from None

        return grpc_stream.handler(take, certified)

    def where(self, peer: str) -> str:
        """Returns the certificate name and address of a connection, for errors and logs. With TLS, gRPC's own name for the
        connection is a loopback address."""
        return (self._terminator.where(peer) if self._terminator is not None else "") or peer

    def distrust(self, peer: str) -> None:
        """Treats a TLS connection as unauthenticated, and closes it after REPLY_ARRIVES_S seconds, in which the pending reply
        can arrive. Call it on the event loop."""
        if self._terminator is not None:
            self._terminator.distrust(peer)
            grpc_stream.event_loop().call_later(REPLY_ARRIVES_S, self._terminator.end, peer)

    def end(self, peer: str) -> None:
        """Closes this connection now, if it uses TLS."""
        if self._terminator is not None:
            self._terminator.end(peer)

    def drop(self, serials: frozenset[int]) -> None:
        """Closes all connections that use certificates with these serial numbers."""
        if self._terminator is not None:
            self._terminator.drop(serials)

    def close(self) -> None:
        """Stops the gRPC server and the TLS terminator. Idempotent."""
        if self._host is not None:
            self._host.close()
        if self._terminator is not None:
            self._terminator.close()


def open_stream_port(keys: Keys | None, bind: str, port: int, take: AcceptStream,
                     refused: Callable[[str, str], None]) -> GrpcPort:
    """Opens a port for data streams only. Raises InvalidInput if the port cannot be opened."""
    check_free(bind, port)
    stream_port = GrpcPort(keys, bind, port, refused)
    stream_port.start(RpcServer({}, [stream_port.streams(take)]))
    return stream_port


def check_free(host: str, port: int) -> None:
    """Raises InvalidInput with the reason if the port cannot be opened. gRPC's own error does not give the reason."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            where = join_host(host, port)
            if error.errno == errno.EADDRINUSE:
                line = f"{where} is in use: stop what listens there, or choose another --port (0 for any free one)"
            else:
                line = f"cannot listen on {where}: {error.strerror}; bind an address of this machine"
            raise InvalidInput("E-ADDRESS", line) from None


# ---- The server runs on the event loop, so an incomplete call occupies no thread. Handlers must not block, but may return
# awaitables.

MAX_CALLS = 1024
"""Maximum number of concurrent calls, including one stream per member; gRPC refuses further calls. Multiplied by MAX_NBYTES,
this bounds the memory that unauthenticated clients can use."""
WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20)]
"""gRPC options for the flow-control window of a call or stream: enough for 1 Gb/s at a round trip of 30 ms. gRPC's own estimate
grows with unauthenticated input, by 100 MB and more on a busy machine."""
START_S = 30.0
STOP_S = 0.5
Answer = Callable[[bytes, str], bytes | Awaitable[bytes]]
"""Handles a call: receives the request's bytes and the connection's name, returns the reply's bytes. Raises
AuthenticationFailed or CorruptFrame to refuse the call."""
Broke = Callable[[str, CorruptFrame], str]
"""Called with the connection's name when a call breaks the protocol. Returns the error text to send back."""


class RpcServer:
    """A gRPC server that dispatches calls by method name. close() is idempotent."""

    def __init__(self, answers: Mapping[str, Answer], handlers: Iterable[grpc.GenericRpcHandler] = (),
                 broke: Broke = lambda _, error: str(error)) -> None:
        self._answers, self._handlers, self._broke = answers, tuple(handlers), broke
        self._server: Any = None

    def start(self, address: str) -> int:
        """Starts to listen on `address`. Returns the port number."""
        return int(grpc_stream.run_on_loop(self._start(address), START_S))

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            grpc_stream.run_on_loop(server.stop(STOP_S), 10 * STOP_S)

    async def _start(self, address: str) -> int:
        self._server = grpc.aio.server(
            # With so_reuseport, a second coordinator could share the port and split the job.
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_NBYTES),
                     ("grpc.max_send_message_length", MAX_REPLY_NBYTES), FRAME_OPTION, *WINDOW,
                     # A stream may be silent for as long as a step takes; its ends send pings meanwhile.
                     ("grpc.http2.min_ping_interval_without_data_ms", 5_000), ("grpc.keepalive_time_ms", 20_000),
                     ("grpc.keepalive_timeout_ms", 20_000)],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        calls = {name: self._handler(answer) for name, answer in self._answers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls), *self._handlers))
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return int(port)

    def _handler(self, answer: Answer) -> grpc.RpcMethodHandler:
        async def call(data: bytes, context: Any) -> bytes:
            peer = context.peer()
            try:
                reply = answer(data, peer)
                return await reply if inspect.isawaitable(reply) else reply
            except AuthenticationFailed:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not prove that its sender knows the job's "
                                                                     "secret")
            except CorruptFrame as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._broke(peer, error))
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(call)

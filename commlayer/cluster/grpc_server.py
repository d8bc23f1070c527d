"""A port with a gRPC server, behind a TLS terminator if there are keys."""

from __future__ import annotations

import errno
import inspect
import socket
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from commlayer import config as settings
from commlayer.cluster.messages import MAX_NBYTES, MAX_REPLY_NBYTES, SERVICE
from commlayer.cluster.tls_terminator import TlsTerminator
from commlayer.config import join_host
from commlayer.errors import CorruptFrame, InvalidInput
from commlayer.transport import grpc_stream
from commlayer.transport.endpoint import MAX_CONNECTIONS_EACH
from commlayer.transport.grpc_stream import FRAME_OPTION, AcceptStream
from commlayer.transport.key_folder import Keys, PeerCertificate
from commlayer.transport.secret import AuthenticationFailed

settings.quiet_grpc()
import grpc  # noqa: E402  (after quiet_grpc(): grpc reads its settings once)
import grpc.aio  # noqa: E402

LOOPBACK = "127.0.0.1"
REPLY_ARRIVES_S = 1.0
"""How long a reply may take to reach a client before its connection is closed."""


class GrpcPort:
    """Without keys gRPC listens on the port. With keys the TLS terminator does, and gRPC listens on loopback."""

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
        """The certificate of the connection that gRPC calls `peer`. Unproved if the connection did not come through TLS."""
        if self._terminator is None:
            return None
        caller = self._terminator.caller(peer)
        if caller is None:
            raise AuthenticationFailed
        return caller

    def allow(self, most: int) -> None:
        """Raises the limit of connections per certificate; never lowers it."""
        if self._terminator is not None:
            self._terminator.allow(most)

    def streams(self, take: AcceptStream) -> Any:
        """The handler of data streams on this port."""

        def certified(peer: str) -> PeerCertificate | None:
            try:
                return self.caller(peer)
            except AuthenticationFailed:
                raise PermissionError("it did not come through TLS") from None

        return grpc_stream.handler(take, certified)

    def where(self, peer: str) -> str:
        """Certificate name and address of the connection, for errors and logs. With TLS, gRPC's own name for it is a loopback
        address."""
        return (self._terminator.where(peer) if self._terminator is not None else "") or peer

    def distrust(self, peer: str) -> None:
        """Treats a TLS connection as unauthenticated, and closes it after the pending reply had time to arrive. On the event
        loop."""
        if self._terminator is not None:
            self._terminator.distrust(peer)
            grpc_stream.event_loop().call_later(REPLY_ARRIVES_S, self._terminator.end, peer)

    def end(self, peer: str) -> None:
        """Closes that connection, if it came through TLS."""
        if self._terminator is not None:
            self._terminator.end(peer)

    def drop(self, serials: frozenset[int]) -> None:
        """Closes all connections with these certificates."""
        if self._terminator is not None:
            self._terminator.drop(serials)

    def close(self) -> None:
        """Idempotent."""
        if self._host is not None:
            self._host.close()
        if self._terminator is not None:
            self._terminator.close()


def open_stream_port(keys: Keys | None, bind: str, port: int, take: AcceptStream,
                     refused: Callable[[str, str], None]) -> GrpcPort:
    """A port for data streams only. InvalidInput if the port cannot be opened."""
    check_free(bind, port)
    stream_port = GrpcPort(keys, bind, port, refused)
    stream_port.allow(MAX_CONNECTIONS_EACH)
    stream_port.start(RpcServer({}, [stream_port.streams(take)]))
    return stream_port


def check_free(host: str, port: int) -> None:
    """InvalidInput with the reason if the port cannot be opened. gRPC's own error does not give it."""
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


# ---- The server runs on the event loop, so an incomplete call occupies no thread. Answers must not block, but may be
# awaitables.

MAX_CALLS = 1024
"""Concurrent calls, including one stream per member; gRPC refuses more. With MAX_NBYTES this bounds the memory that
unauthenticated clients can use."""
WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20)]
"""Flow-control window of a call or stream: enough for 1 Gb/s at 30 ms. gRPC's own estimate grows with unauthenticated input, by
100 MB and more on a busy machine."""
START_S = 30.0
STOP_S = 0.5
Answer = Callable[[bytes, str], bytes | Awaitable[bytes]]
"""Takes the body and the connection's name, returns the reply. Unproved or CorruptFrame refuse the call."""
Broke = Callable[[str, CorruptFrame], str]
"""Called when a call breaks the protocol, with the connection's name. Returns the line to send back."""


class RpcServer:
    """Serves these calls by name. close() is idempotent."""

    def __init__(self, answers: Mapping[str, Answer], handlers: Iterable[grpc.GenericRpcHandler] = (),
                 broke: Broke = lambda _, error: str(error)) -> None:
        self._answers, self._handlers, self._broke = answers, tuple(handlers), broke
        self._server: Any = None

    def start(self, address: str) -> int:
        """Returns the port that it listens on."""
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
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not prove that its sender knows the secret")
            except RateLimited as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except CorruptFrame as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._broke(peer, error))
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(call)


RATE, BURST = 1000.0, 8000.0
"""A worker makes a few calls per second, and some hundreds at once for a large plan. A certificate may serve many machines."""
EACH_RATE, EACH_BURST = 16.0, 128.0
"""Per worker of a job, if that is more, since a cluster may share one certificate. A waiting process calls 4 times per second,
and each process that sends heartbeats sends one per second."""
MOST_KNOWN = 4096
"""Callers that are remembered. The ones idle for longest are forgotten."""


class RateLimited(Exception):
    """The caller exceeds its call rate."""


class CallQuota:
    """Of one coordinator. Not thread-safe."""

    def __init__(self, rate: float = RATE, burst: float = BURST) -> None:
        self.rate, self._burst = rate, burst
        self._left: OrderedDict[str, tuple[float, float, int]] = OrderedDict()  # tokens, at what time, refusals in a row

    def expect(self, workers: int) -> None:
        """Raises the limits for a caller that may run all of these workers."""
        self.rate, self._burst = max(self.rate, EACH_RATE * workers), max(self._burst, EACH_BURST * workers)

    def excess_calls(self, who: str, now: float) -> int:
        """Counts a call. 0 if it is allowed, else how many in a row are not."""
        left, since, refused = self._left.pop(who, (self._burst, now, 0))
        left = min(self._burst, left + self.rate * (now - since))
        refused = 0 if left >= 1.0 else refused + 1
        self._left[who] = left if refused else left - 1.0, now, refused
        while len(self._left) > MOST_KNOWN:
            self._left.popitem(last=False)
        return refused

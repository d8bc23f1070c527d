"""A gRPC server for unary calls with bytes as request and reply, and for further handlers.

It runs on the event loop, so an incomplete call occupies no thread. Answers must not block, but may be awaitables.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

from commlayer import config as settings
from commlayer.cluster.call_quota import TooMany
from commlayer.cluster.messages import MAX_NBYTES, MAX_REPLY_NBYTES, SERVICE
from commlayer.cluster.proved_calls import Unproved
from commlayer.errors import CorruptFrame
from commlayer.transport import event_loop
from commlayer.transport.grpc_stream import FRAME_OPTION

settings.quiet_grpc()
import grpc  # noqa: E402  (after quiet_grpc: it reads its settings once)
import grpc.aio  # noqa: E402

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


class Host:
    """Serves these calls by name. close() is idempotent."""

    def __init__(self, answers: Mapping[str, Answer], handlers: Iterable[grpc.GenericRpcHandler] = (),
                 broke: Broke = lambda _, error: str(error)) -> None:
        self._answers, self._handlers, self._broke = answers, tuple(handlers), broke
        self._server: Any = None

    def start(self, address: str) -> int:
        """Returns the port that it listens on."""
        return int(event_loop.run(self._start(address), START_S))

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            event_loop.run(server.stop(STOP_S), 10 * STOP_S)

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
            except Unproved:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not prove that its sender knows the secret")
            except TooMany as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except CorruptFrame as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._broke(peer, error))
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(call)

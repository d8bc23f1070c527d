"""Serves calls on an event loop, so an incomplete call occupies no thread."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any
from weakref import WeakValueDictionary

from commlayer.cluster.calls.call_proofs import CHALLENGE, AuthenticationFailed
from commlayer.cluster.calls.messages import MAX_NBYTES, MAX_REPLY_NBYTES, SERVICE
from commlayer.errors import CorruptFrame
from commlayer.transport.grpc.event_loop import run_on_loop
from commlayer.transport.grpc.library import grpc
from commlayer.transport.grpc.stream import FRAME_OPTION
from commlayer.transport.grpc.stream_ends import Caller

MAX_CALL_S = 120.0
"""Longest deadline of a call. gRPC ends the call then, also if its request or its reply does not arrive. Clients wait at most a
minute (site_client.BYTES_S)."""
MAX_CONNECTION_CALLS = 64
"""Maximum number of concurrent calls of a connection. Clients delay further ones."""
UNPROVED = "the call does not prove that its sender knows the job's secret, or the connection does not use TLS"
Identify = Callable[[Any], Awaitable[Caller]]
"""GrpcPort.identify."""
WINDOW = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 4 << 20)]
"""gRPC options for the flow-control window of a call or stream: enough for 1 Gb/s at a round trip of 30 ms. gRPC's own estimate
grows with unauthenticated input, by 100 MB and more on a busy machine."""
START_S = 30.0
STOP_S = 0.5
MAX_UNSENT_NBYTES = 512 << 10
"""Bytes of a member's replies that may wait to be sent before its next reply is encoded. The largest reply may exceed it."""
PROMPT = frozenset((CHALLENGE, "Heartbeat", "Leave", "PlanPart", "Watch"))
"""Calls with small replies, which wait for no other reply. A member counts as dead if its heartbeats get no answer."""
Encode = Callable[[], bytes]
Answer = Callable[[bytes, str], Encode | Awaitable[Encode]]
"""Handles a call: receives the request's bytes and the connection's name, returns a function that encodes the reply. Raises
AuthenticationFailed or CorruptFrame to refuse the call."""
Broke = Callable[[str, CorruptFrame], str]
"""Called with the connection's name when a call breaks the protocol. Returns the error text to send back."""


class UnsentReplies:
    """Replies that wait to be sent to one source: the member's certificate, or without keys its connection. A reply is encoded
    when most of the earlier ones have been sent, so a member that does not read its replies holds few of them in memory. Use it
    on the event loop."""

    def __init__(self) -> None:
        self._turn, self._room, self._nbytes = asyncio.Lock(), asyncio.Event(), 0
        self._room.set()

    async def encode_in_turn(self, encode: Encode, context: Any, *, prompt: bool) -> bytes:
        """Returns the encoded reply to the call of this context. `prompt`: True: does not wait for earlier replies."""
        if prompt:
            return self._encoded(encode, context)
        async with self._turn:  # first in, first out
            await self._room.wait()
            return self._encoded(encode, context)

    def _encoded(self, encode: Encode, context: Any) -> bytes:
        reply = encode()
        self._count(len(reply))
        context.add_done_callback(lambda _: self._count(-len(reply)))
        return reply

    def _count(self, nbytes: int) -> None:
        self._nbytes += nbytes
        if self._nbytes <= MAX_UNSENT_NBYTES:
            self._room.set()
        else:
            self._room.clear()


class RpcServer:
    """A gRPC server that dispatches calls by method name. close() is idempotent."""

    def __init__(self, answers: Mapping[str, Answer], handlers: Iterable[grpc.GenericRpcHandler] = (),
                 broke: Broke = lambda _, error: str(error)) -> None:
        self._answers, self._handlers, self._broke = answers, tuple(handlers), broke
        self._unsent = WeakValueDictionary[str, UnsentReplies]()
        """By source; an entry lasts as long as a call of the source."""
        self._server: Any = None

    def start(self, address: str, identify: Identify) -> int:
        """Starts to listen on `address`. Returns the port number."""
        return int(run_on_loop(self._start(address, identify), START_S))

    def close(self) -> None:
        server, self._server = self._server, None
        if server is not None:
            run_on_loop(server.stop(STOP_S), 10 * STOP_S)

    async def _start(self, address: str, identify: Identify) -> int:
        self._server = grpc.aio.server(
            # With so_reuseport, a second coordinator could share the port and split the job.
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_NBYTES),
                     ("grpc.max_send_message_length", MAX_REPLY_NBYTES), FRAME_OPTION, *WINDOW,
                     ("grpc.max_concurrent_streams", MAX_CONNECTION_CALLS),
                     # A stream may be silent for as long as a step takes; its ends send pings meanwhile.
                     ("grpc.http2.min_ping_interval_without_data_ms", 5_000), ("grpc.keepalive_time_ms", 20_000),
                     ("grpc.keepalive_timeout_ms", 20_000)],
        )
        calls = {name: self._handler(answer, identify, prompt=name in PROMPT) for name, answer in self._answers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls), *self._handlers))
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return int(port)

    def _handler(self, answer: Answer, identify: Identify, *, prompt: bool) -> grpc.RpcMethodHandler:
        async def call(_: Any, context: Any) -> bytes:
            caller = await identify(context)
            left_s = context.time_remaining()
            if left_s is None or left_s > MAX_CALL_S:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, f"a call needs a deadline of at most {MAX_CALL_S:g} s")
            data, peer = await context.read(), context.peer()
            try:
                reply = answer(data or b"", peer)
                encode = await reply if inspect.isawaitable(reply) else reply
                unsent = self._unsent.setdefault(caller.source if caller.certificate else peer, UnsentReplies())
                return await unsent.encode_in_turn(encode, context, prompt=prompt)
            except AuthenticationFailed:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, UNPROVED)
            except CorruptFrame as error:
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, self._broke(peer, error))
            raise AssertionError("abort raises")

        # A handler of a stream runs from the first bytes of a call on. A callback of a single message would run after the
        # message has arrived, and until then the call would not be counted.
        return grpc.stream_unary_rpc_method_handler(call)

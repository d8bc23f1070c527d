"""A gRPC server of unary calls that are bytes both ways. Knows no call's meaning, and no seat.

It runs on an event loop, so that a call whose bytes do not come holds no thread; what it answers must not block.
"""

from __future__ import annotations

import asyncio
import logging
import selectors
import threading
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from commlayer import config as settings
from commlayer.control.call_quota import TooMany
from commlayer.control.messages import MAX_NBYTES, MAX_REPLY_NBYTES, SERVICE
from commlayer.control.proved_calls import Unproved
from commlayer.errors import CorruptFrame

settings.quiet_forks()
import grpc  # noqa: E402  (after the fork setting, which grpc reads once)
import grpc.aio  # noqa: E402

log = logging.getLogger("commlayer")

MAX_CALLS = 512
"""Under way at once; more are told to come again. With MAX_NBYTES it bounds what strangers can make this process hold."""
START_S = 30.0
STOP_S = 0.5
Answer = Callable[[bytes, str], bytes]
"""The body of a call and the connection that it came by: the answer. Unproved or CorruptFrame refuse it."""


class Host:
    """Of these calls by name. Twice closed is once."""

    def __init__(self, answers: Mapping[str, Answer]) -> None:
        self._answers = answers
        self._server: Any = None
        # An epoll would be shared with forked children, which take its entries out as they end.
        self._loop = asyncio.SelectorEventLoop(selectors.PollSelector())
        self._thread = threading.Thread(target=self._loop.run_forever, name="commlayer-control", daemon=True)

    def start(self, address: str) -> int:
        """The port that it listens on."""
        self._thread.start()
        return int(self._run(self._start(address), START_S))

    def close(self) -> None:
        if self._thread.is_alive() and not self._loop.is_closed():
            self._run(self._server.stop(STOP_S), 10 * STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(10 * STOP_S)

    def _run(self, what: Coroutine[Any, Any, Any], timeout_s: float) -> Any:
        return asyncio.run_coroutine_threadsafe(what, self._loop).result(timeout_s)

    async def _start(self, address: str) -> int:
        self._server = grpc.aio.server(
            # Without the first a second coordinator could share the port and split the job.
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_NBYTES),
                     ("grpc.max_send_message_length", MAX_REPLY_NBYTES)],
            maximum_concurrent_rpcs=MAX_CALLS,
        )
        calls = {name: self._handler(answer) for name, answer in self._answers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
        port = self._server.add_insecure_port(address)
        await self._server.start()
        return int(port)

    def _handler(self, answer: Answer) -> grpc.RpcMethodHandler:
        async def call(data: bytes, context: Any) -> bytes:
            peer = context.peer()
            try:
                return answer(data, peer)
            except Unproved:
                await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the call does not prove that its sender knows the secret")
            except TooMany as error:
                await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, str(error))
            except CorruptFrame as error:
                line = str(error) if error.peer else f"{peer}: {error}"
                log.warning("%s", line)
                await context.abort(grpc.StatusCode.INVALID_ARGUMENT, line)
            raise AssertionError("abort raises")

        return grpc.unary_unary_rpc_method_handler(call)

"""The gRPC server around the membership decisions: a lock, a clock and sockets. Decides nothing itself.

Every call is answered at once; who waits, asks again. So a few threads serve any number of waiting workers.
"""

from __future__ import annotations

import errno
import logging
import socket
import threading
import time
from collections.abc import Callable
from concurrent import futures
from typing import TypeVar

from commlayer import config as settings
from commlayer.config import Config
from commlayer.control import membership, messages
from commlayer.control.messages import MAX_NBYTES, SERVICE
from commlayer.errors import CorruptFrame
from commlayer.records import Record
from commlayer.transport.protocol import SERVER_BASE

settings.quiet_forks()
import grpc  # noqa: E402  (after the fork setting, which grpc reads once)

log = logging.getLogger("commlayer")

THREADS = 4
TICK_S = 0.25
Q = TypeVar("Q", bound=Record)


class Coordinator:
    """Listens from construction on. `over` is set when the job has begun and its last worker has left or died."""

    def __init__(self, config: Config, *, workers: int = 0, servers: int = 0,
                 ended: threading.Event | None = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`workers`: how many to wait for; 0 for as many as the first one says. `ended` is taken for `over` if given."""
        for what, count in (("workers", workers), ("servers", servers)):
            if not 0 <= count <= SERVER_BASE:
                raise ValueError(f"{what}: got {count}, allowed: 0 to {SERVER_BASE}")
        self.over, self._empty = ended or threading.Event(), threading.Event()
        self._state = membership.State(workers, servers)
        self._lock = threading.Lock()
        self._clock, self._heartbeat_s, self._dead_after_s = clock, config.heartbeat_s, config.dead_after_s
        self._closing = threading.Event()
        check_free(config.bind, config.port)
        self._server = grpc.server(
            futures.ThreadPoolExecutor(THREADS, "commlayer-control"),
            # Without this a second coordinator could share the port and split the job.
            options=[("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", MAX_NBYTES),
                     ("grpc.max_send_message_length", MAX_NBYTES)],
        )
        calls = {
            "Join": self._method(messages.Join, self._join),
            "Heartbeat": self._method(messages.Heartbeat, self._heartbeat),
            "Leave": self._method(messages.Leave, self._leave),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, calls),))
        port = self._server.add_insecure_port(settings.join_host(config.bind, config.port))
        self.address = settings.join_host(config.advertise or config.bind, port)
        # What others reach need not be reachable from here: routers seldom turn a packet around.
        self.near = settings.join_host({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(config.bind, config.bind), port)
        self._server.start()
        self._ticker = threading.Thread(target=self._tick, name="commlayer-membership", daemon=True)
        self._ticker.start()

    def close(self) -> None:
        """Stops listening; whoever asks later finds nobody. Twice is once.

        After the end of a job it first lets the servers elsewhere hear of it, for a few heartbeats.
        """
        with self._lock:
            over = membership.over(self._state)
        if over and not self._closing.is_set():
            self._empty.wait(3 * self._heartbeat_s)
        self._closing.set()
        self._ticker.join(timeout=5.0)
        self._server.stop(grace=0.5).wait(timeout=5.0)

    def _join(self, request: messages.Join) -> Record:
        with self._lock:
            began = self._state.view is not None
            self._state, reply = membership.join(self._state, request, self._clock())
            view = self._state.view
        if reply.error:
            log.warning("refused: %s", reply.error)
        if view is not None and not began:
            log.info("all in: %d workers, %d servers, plan %s", len(view.members), len(view.servers), view.plan or "none")
        return reply

    def _heartbeat(self, request: messages.Heartbeat) -> Record:
        with self._lock:
            self._state, pulse = membership.heartbeat(self._state, request.token, self._clock())
        return pulse

    def _leave(self, request: messages.Leave) -> Record:
        with self._lock:
            self._state = membership.leave(self._state, request.token, request.reason)
            self._note_end()
        return messages.Pulse()

    def _tick(self) -> None:
        while not self._closing.wait(TICK_S):
            with self._lock:
                before = self._state
                self._state = membership.tick(before, self._clock(), self._dead_after_s)
                self._note_end()
            for token, place in self._state.places.items():
                if place.dead and not before.places[token].dead:
                    log.warning("%s: %s", place.peer, place.dead)

    def _note_end(self) -> None:
        if membership.over(self._state):
            self.over.set()
        if membership.empty(self._state):
            self._empty.set()

    def _method(self, kind: type[Q], act: Callable[[Q], Record]) -> grpc.RpcMethodHandler:
        def call(data: bytes, context: grpc.ServicerContext) -> bytes:
            try:
                return messages.pack(act(messages.unpack(data, kind, context.peer())))
            except CorruptFrame as error:
                log.warning("%s", error)
                context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
                raise

        return grpc.unary_unary_rpc_method_handler(call)


def check_free(host: str, port: int) -> None:
    """OSError with one line if nothing can listen there. gRPC's own error does not say why."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            where = settings.join_host(host, port)
            if error.errno == errno.EADDRINUSE:
                line = f"{where} is in use: stop what listens there, or choose another --port (0 for any free one)"
            else:
                line = f"cannot listen on {where}: {error.strerror}; bind an address of this machine"
            raise OSError(error.errno, line) from None

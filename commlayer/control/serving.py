"""The data side of `commlayer serve`: listens, then sums what the plan gives this server. Knows codecs only through `sums`."""

from __future__ import annotations

import threading

import msgspec

from commlayer import records
from commlayer.config import Config, join_host
from commlayer.control import messages
from commlayer.control.shaping import shaped_by
from commlayer.control.sums import ops_of, senders_of
from commlayer.errors import CommError
from commlayer.records import Plan, View
from commlayer.transport.hello import Hello, same_job
from commlayer.transport.protocol import SERVER_BASE
from commlayer.transport.service import Summation
from commlayer.transport.summing import SumServer
from commlayer.transport.tcp import TcpTransport

READY_S = 9.0
"""How long a worker that dials is held until this server has its plan; less than the greeting's own deadline."""


class Serving:
    """Listens from construction on, so that the address is known before joining; admits workers once started."""

    def __init__(self, bind: str, port: int, config: Config) -> None:
        self._config = config
        self._ready = threading.Event()
        self._hello = Hello("", SERVER_BASE, version=messages.version())
        self._transport = TcpTransport(self._hello, self._admit)
        self._server: SumServer | None = None
        host, bound = self._transport.listen(bind, port)
        self.address = join_host(host, bound)

    def _admit(self, theirs: Hello) -> str:
        if not self._ready.wait(READY_S):
            return "has no plan yet: its coordinator still waits for others"
        return same_job(self._hello)(theirs)

    def start(self, view: View, plan: bytes, server: int) -> None:
        """Sums what that plan gives to server number `server`, for the members of that view."""
        decoded = records.decode(plan, Plan, "plan of worker 0")
        world = len(view.members)
        core = Summation(server, view.generation, dict(ops_of(decoded, server)), senders_of(decoded, world))
        self._hello = msgspec.structs.replace(self._hello, job=decoded.job, rank=SERVER_BASE + server, plan=view.plan)
        self._transport.hello = self._hello
        transport = shaped_by(self._config.shape, self._transport, view)
        self._server = SumServer(core, transport, range(world), stall_s=self._config.deadline_s / 4,
                                 recycle=self._transport.pool.give)
        self._ready.set()

    def wait(self, stop: threading.Event) -> None:
        """Until `stop` is set; the carrier's threads do the work."""
        stop.wait()

    def close(self, reason: CommError | None = None) -> None:
        if self._server is not None:
            self._server.close(reason)
        else:
            self._transport.close()

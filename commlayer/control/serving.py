"""The data side of `commlayer serve`: listens, then sums what the plan gives this server. Knows codecs only through `sums`."""

from __future__ import annotations

import logging
import threading

import msgspec

from commlayer import planner, records
from commlayer.compressors import kernels
from commlayer.config import Config, Launch, codec_threads, join_host
from commlayer.control import messages
from commlayer.control.audit import Audit
from commlayer.control.server_codecs import CodecOps, expected_nbytes, ops_of, senders_of
from commlayer.control.shaping import shaped_by
from commlayer.errors import CommError, RecordError
from commlayer.records import Plan, View
from commlayer.transport.hello import Hello, same_job
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, peer_name
from commlayer.transport.quarantine import OFTEN, WITHIN, Quarantine
from commlayer.transport.summation import Summation
from commlayer.transport.summation_server import SumServer
from commlayer.transport.tcp import Settings, TcpTransport

log = logging.getLogger("commlayer")

READY_S = 9.0
"""How long a worker that dials is held until this server has its plan; less than the greeting's own deadline."""
STALL_S = 5.0
"""How long a sum waits before those who wait hear for whom."""


class Serving:
    """Listens from construction on, so that the address is known before joining; admits workers once started."""

    def __init__(self, bind: str, port: int, config: Config) -> None:
        kernels.choose(config.backend)
        kernels.threads(codec_threads(config, Launch()))
        self._config = config
        self._ready = threading.Event()
        self._unfit = ""
        self._world = 0
        self._hello = Hello("", SERVER_BASE, version=messages.version())
        self._audit = Audit(config.audit)
        self._transport = TcpTransport(self._hello, self._admit, Settings(
            secret=config.token, user_timeout_s=config.deadline_s, keys=Keys(config.keys) if config.keys else None,
            refused=self._audit.refused))
        self._quarantine = None if config.quarantine == "off" else Quarantine(
            self._refused, finite_only=config.quarantine == "all")
        self._named: set[int] = set()
        self._server: SumServer | None = None
        self._ops: dict[int, CodecOps] = {}
        self._view: View | None = None
        host, bound = self._transport.listen(bind, port)
        self.address = join_host(host, bound)

    def _admit(self, theirs: Hello) -> str:
        if not self._ready.wait(READY_S):
            return "has no plan yet: its coordinator still waits for others"
        if self._unfit:
            return self._unfit
        if theirs.rank >= self._world:
            return f"is no member: the job has {self._world} workers"
        return same_job(self._hello)(theirs)

    def start(self, view: View, plan: bytes, server: int) -> None:
        """Sums what that plan gives to server number `server`, for the members of that view.

        ValueError if the plan cannot be served; then every worker that dials is refused with the same line.
        """
        world = len(view.members)
        try:
            decoded = _checked_plan(plan, view)
            self._ops = ops_of(decoded, server)
        except ValueError as error:
            self._unfit = str(error)
            self._ready.set()
            raise
        core = self._core(decoded, server, view.generation, world)
        self._view = view
        self._hello = msgspec.structs.replace(self._hello, job=decoded.job, rank=SERVER_BASE + server, plan=view.plan)
        self._transport.hello = self._hello
        self._world = world
        transport = shaped_by(self._config.shape, self._transport, view)
        self._server = SumServer(core, transport, range(world), stall_s=min(STALL_S, self._config.deadline_s / 4),
                                 recycle=self._transport.pool.give, replan=self._replan, pace=self._transport.pace)
        self._ready.set()

    def _core(self, plan: Plan, server: int, generation: int, world: int) -> Summation:
        self._transport.limit_kept(expected_nbytes(plan, server))
        return Summation(server, generation, dict(self._ops), senders_of(plan, world), self._quarantine)

    def _refused(self, member: int, step: int, bucket: int, why: str) -> None:
        """A contribution is in quarantine: each in the audit log, the first of each member in the log, too."""
        self._audit.note("quarantined", peer=peer_name(member), step=step, bucket=bucket, why=why)
        if member not in self._named:
            self._named.add(member)
            log.warning("%s: its contribution to step %d, bucket %d is refused: %s; the others' go on, and it is dropped if "
                        "that happens in %d of %d steps", peer_name(member), step, bucket, why, OFTEN, WITHIN)

    def _replan(self, plan: bytes, generation: int) -> Summation:
        """The sums of the plan that the workers go over to; ValueError, and nothing changed, if it cannot be served."""
        assert self._view is not None
        decoded = _checked_plan(plan, self._view)
        server = self._hello.rank - SERVER_BASE
        self._ops = ops_of(decoded, server, self._ops.values())
        self._audit.note("plan", peer=f"server {server}", generation=generation, plan=records.digest(decoded))
        return self._core(decoded, server, generation, self._world)

    @property
    def alone(self) -> bool:
        """Whether no worker is connected."""
        return not self._transport.peers

    def wait(self, stop: threading.Event) -> None:
        """Until `stop` is set; the carrier's threads do the work."""
        stop.wait()

    def close(self, reason: CommError | None = None) -> None:
        if self._server is not None:
            self._server.close(reason)
        else:
            self._transport.close()
        self._audit.close()


def _checked_plan(plan: bytes, view: View) -> Plan:
    """Worker 0 has checked it against its model, if it is a worker of ours."""
    what = "plan of worker 0"
    decoded = records.decode(plan, Plan, what)
    problems = planner.verify_alone(decoded, len(view.members))
    if decoded.servers > len(view.servers):
        problems.append(f"it is for {decoded.servers} servers, the job has {len(view.servers)}: start more, or make it again")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RecordError(f"{what}: {problems[0]}{more}")
    return decoded

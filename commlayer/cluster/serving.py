"""The data side of `commlayer serve`: listens for workers and runs the summation server for its part of the plan."""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections.abc import Callable

import msgspec

from commlayer import planner, records
from commlayer.cluster import messages
from commlayer.cluster.audit import Audit
from commlayer.cluster.coordinator import Coordinator
from commlayer.cluster.grpc_port import GrpcPort, stream_port
from commlayer.cluster.server_codecs import CodecOps, expected_nbytes, ops_of, senders_of
from commlayer.cluster.server_journal import About, ServerJournal
from commlayer.cluster.summation import Summation
from commlayer.cluster.summation_memory import WORDS_NBYTES
from commlayer.cluster.summation_server import SumServer
from commlayer.cluster.view_change import ViewChange, amiss, wire_generation
from commlayer.compressors import kernels
from commlayer.config import Config, Launch, codec_threads, host_port, join_host, reconnect_window_s, unheard_s
from commlayer.errors import CommError, CorruptFrame, InvalidInput, RecordError, coded, line_of, without_code
from commlayer.records import Plan, View
from commlayer.transport.hello import Hello, Later, same_job
from commlayer.transport.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE, peer_name
from commlayer.transport.shaped import shaped_by
from commlayer.transport.stream_transport import Settings, StreamTransport

log = logging.getLogger("commlayer")

READY_S = 9.0
"""How long a handshake waits for this server to get its plan; less than the handshake's own deadline."""
NOTICE_HEARTBEATS, LOOK_S = 3, 0.02
"""How many heartbeats to wait for the coordinator's newest view when a worker reports it first, and how often to check."""
MOST_TOLD = 64
"""Most dropped workers named in a heartbeat, which must stay small. The others are named after the first ones are gone."""
MOST_OVERDUE = 4096
"""If more workers than this are missing, heartbeats name none of them, and all workers stop at their deadline."""
STALL_S = 4.0
"""How long a sum waits before the waiting members are sent the missing ones."""


class Serving:
    """Listens from construction on, so that the address is known before joining. Admits workers after start()."""

    def __init__(self, bind: str, port: int, config: Config, coordinator: Coordinator | None = None) -> None:
        """`coordinator`: the one of this process, if any. gRPC streams then use its port, else a port of their own."""
        kernels.choose(config.backend)
        kernels.threads(codec_threads(config, Launch()))
        self._config = config
        self._ready = threading.Event()
        self._unfit = self._away = ""
        self._members: tuple[int, ...] = ()
        self._hello = Hello("", SERVER_BASE, version=messages.version())
        self._audit = Audit(config.audit)
        keys = Keys(config.keys) if config.keys else None
        self._transport = StreamTransport(self._hello, self._admit, Settings(
            secret=config.token, user_timeout_s=unheard_s(config), keys=keys,
            refused=self._audit.refused, resume=reconnect_window_s(config) > 0))
        self._transport.named = self._certificate_of
        self._server: SumServer | None = None
        self.journal = ServerJournal(config.journal, required=config.journal_required) if config.journal else None
        """State that a crashed server left, and that this one records."""
        self._token = ""
        self._ops: dict[int, CodecOps] = {}
        self._view: View | None = None
        self._plan: Plan | None = None
        streams_port = port and port + (config.carrier != "grpc")
        if (former := None if self.journal is None else self.journal.found) is not None:  # where workers look for it
            port = port or host_port(former.address)[1]
            streams_port = streams_port or (host_port(former.streams)[1] if former.streams else 0)
        self.streams = ""
        """Address for gRPC streams; empty if none are accepted."""
        self._streams: GrpcPort | None = None
        self.address = "" if config.carrier == "grpc" else join_host(*self._transport.listen(bind, port))
        if config.carrier != "tcp":
            self._take_streams(bind, streams_port, keys, coordinator)

    def _take_streams(self, bind: str, port: int, keys: Keys | None, coordinator: Coordinator | None) -> None:
        if coordinator is not None:
            coordinator.serve_streams(self._transport.take)
            self.streams = coordinator.address
        else:
            try:
                self._streams = stream_port(keys, bind, port, self._transport.take, self._audit.refused)
            except (InvalidInput, OSError) as error:
                if not self.address:
                    raise
                log.warning("no gRPC streams beside TCP: %s", line_of(error))
            else:
                self.streams = join_host(bind, self._streams.number)
        self.address = self.address or self.streams

    def _admit(self, theirs: Hello) -> str:
        if not self._ready.wait(READY_S):
            return Later("has no plan yet: its coordinator still waits for others")
        if self._away:
            return self._away
        if self._unfit:
            return self._unfit
        if theirs.rank not in self._members:
            return coded("E-RANK", f"is no member: the job has {len(self._members)} workers")
        return same_job(self._hello)(theirs)

    def _certificate_of(self, rank: int) -> str:
        return next((m.certificate for m in self._view.members if m.rank == rank), "") if self._view is not None else ""

    def start(self, view: View, plan: bytes, server: int, token: str = "", newest: Callable[[], View] | None = None) -> None:
        """Starts summing the plan's buckets of server number `server`, for the members of `view`. If the journal is of the
        same job and server, it resumes from it. `token`: of this server's registration. `newest`: returns the newest view
        known; None if members never change.

        ValueError if the plan cannot be served. Every worker that connects is then refused with the same reason.
        """
        former = self._former(view, server)
        self._view = view = former.view if former else view
        self._members, self._token = tuple(m.rank for m in view.members), token
        try:
            self._plan = decoded = _checked_plan(former.plan if former else plan, view)
            self._ops = ops_of(decoded, server, gradients=view.gradients)
            core = self._core(decoded, server, former.generation if former else view.generation)
            if former is not None:
                self._recall(core)
            self._write_down(core, former.plan if former else plan, server, view)
        except ValueError as error:
            self._unfit = str(error)
            self._ready.set()
            raise
        self._hello = msgspec.structs.replace(self._hello, job=decoded.job, rank=SERVER_BASE + server, plan=view.plan)
        self._transport.hello = self._hello
        transport = shaped_by(self._config.shape, self._transport, view)
        self._server = SumServer(core, transport, self._members, stall_s=min(STALL_S, self._config.deadline_s / 4),
                                 recycle=self._transport.pool.give, replan=self._replan, pace=self._transport.pace,
                                 regroup=functools.partial(self._regroup, newest) if newest is not None else None,
                                 out=self._out)
        self._ready.set()

    def _former(self, view: View, server: int) -> About | None:
        """What the journal says about an earlier process of this server in this job; None if there was none."""
        former = None if self.journal is None else self.journal.found
        if former is None or (_alike(former.view, view) and former.number == server):
            return former
        assert self.journal is not None
        self.journal.ignore("it is of another job, or of another server of this one")
        return None

    def _recall(self, core: Summation) -> None:
        assert self.journal is not None
        lost = []
        for bucket in core.cells:
            entry = self.journal.entries.get(bucket)
            try:
                if entry is None:
                    raise CorruptFrame("no whole entry")
                core.recall(bucket, *entry)
            except (CorruptFrame, ValueError) as error:
                lost.append(f"{bucket} ({without_code(error)})")
                core.forget(bucket)
        log.warning("journal: taken up where an earlier process ended, in generation %d, with %d of %d buckets",
                    core.generation, len(core.cells) - len(lost), len(core.cells))
        if lost:
            log.warning("journal: what was owed of %d buckets is lost, and their residuals begin anew: %s", len(lost),
                        ", ".join(lost[:8]))

    def _write_down(self, core: Summation, plan: bytes, server: int, view: View) -> None:
        """Starts journaling, if there is a journal."""
        if self.journal is None:
            return
        about = About(self._token, server, self.address, view, plan, core.generation, self.streams)
        sizes = {b: ops.memory_nbytes + ops.bound + WORDS_NBYTES for b, ops in self._ops.items()}
        if (keep := self.journal.begin(about, sizes)) is not None:
            core.remember(keep)
            if not self.journal.publish():
                core.remember(None)

    def _core(self, plan: Plan, server: int, generation: int) -> Summation:
        self._transport.limit_kept(expected_nbytes(plan, server))
        senders = {bucket: tuple(self._members[place] for place in places)
                   for bucket, places in senders_of(plan, len(self._members)).items()}
        return Summation(server, generation, dict(self._ops), senders)

    def _out(self, member: int, why: str) -> None:
        self._audit.note("dropped", peer=peer_name(member), why=why)

    def dropped(self) -> tuple[messages.Gone, ...]:
        """Reports members that broke the protocol, for the heartbeat."""
        dropped = {} if self._server is None else self._server.dropped()
        return tuple(messages.Gone(peer_name(member), why) for member, why in list(dropped.items())[:MOST_TOLD])

    def overdue(self) -> messages.Overdue | None:
        """Reports sums that wait, for the heartbeat."""
        if self._server is None or self._plan is None:
            return None
        # Under local steps, slow workers may contribute later.
        limit_s = self._config.deadline_s * self._plan.local_steps
        overdue = self._server.overdue(limit_s)
        if overdue is None:
            return None
        step, missing = overdue
        return messages.Overdue(step, missing if len(missing) <= MOST_OVERDUE else (), limit_s)

    def _replan(self, plan: bytes, generation: int) -> Summation:
        """The sums of the plan that the workers switch to. ValueError if it cannot be served; nothing has changed then."""
        assert self._view is not None
        return self._go_over(plan, generation, self._view)

    def _regroup(self, newest: Callable[[], View], change: ViewChange, generation: int, sender: int) -> Callable[[], Summation]:
        """Checks a change of members against the coordinator's newest view. Returns a function that makes the new sums, and
        changes nothing itself."""
        assert self._view is not None
        if generation == wire_generation(change.view) and change.view.generation <= self._view.generation:
            raise InvalidInput("E-EPOCH-ENDED",
                               f"view {change.view.generation} has ended: view {self._view.generation} is in force")
        if why := amiss(change, generation, sender, self._view):
            raise CorruptFrame(f"PLAN of other members: {why}", peer=peer_name(sender))
        # Checked now, because after the former sums have ended an error could not be undone.
        expected_nbytes(_checked_plan(change.plan, change.view), self._hello.rank - SERVER_BASE)
        until = time.monotonic() + NOTICE_HEARTBEATS * self._config.heartbeat_s
        while newest().generation < change.view.generation and time.monotonic() < until:
            time.sleep(LOOK_S)
        known = newest()
        if known.generation == change.view.generation and known != change.view:
            raise CorruptFrame(f"PLAN of other members: its view {known.generation} is not the coordinator's",
                               peer=peer_name(sender))
        if known != change.view:
            raise InvalidInput("E-EPOCH-ENDED",
                               f"view {change.view.generation} is not the coordinator's newest, which is {known.generation}")
        return functools.partial(self._goes_on, change, generation)

    def _goes_on(self, change: ViewChange, generation: int) -> Summation:
        """Makes the new members' sums. Residuals are scaled, since they now count in the mean of another number of members."""
        # The view first: from now on a worker with a new rank is checked against its certificate in that view.
        former, self._view = self._members, change.view
        self._members = tuple(m.rank for m in change.view.members)
        core = self._go_over(change.plan, generation, change.view, worth=len(self._members) / len(former))
        absent = ", ".join(peer_name(m) for m in former if m not in self._members)
        new = ", ".join(peer_name(m) for m in self._members if m not in former)
        self._audit.note("regrouped", peer=peer_name(self._hello.rank), generation=generation, without=absent, joined=new)
        return core

    def _go_over(self, plan: bytes, generation: int, view: View, worth: float = 1.0) -> Summation:
        decoded = _checked_plan(plan, view)
        server = self._hello.rank - SERVER_BASE
        before, self._ops = self._ops, ops_of(decoded, server, self._ops.values(), worth, gradients=view.gradients)
        core = self._core(decoded, server, generation)
        try:
            self._write_down(core, plan, server, view)
        except ValueError:
            self._ops = before
            raise
        self._plan = decoded
        self._audit.note("plan", peer=f"server {server}", generation=generation, plan=records.digest(decoded))
        return core

    def missed(self) -> tuple[str, ...]:
        """As StreamTransport.missed."""
        return self._transport.missed()

    def ended(self) -> tuple[str, ...]:
        """Workers that have closed their connections in order."""
        return () if self._server is None else self._server.ended()

    @property
    def finished(self) -> bool:
        """Whether all workers have closed their connections in order."""
        return self._server is not None and len(self.ended()) == len(self._members)

    @property
    def alone(self) -> bool:
        """Whether no worker is connected."""
        return not self._transport.peers

    def wait(self, stop: threading.Event) -> None:
        """Waits until `stop` is set; the transport's threads do the work."""
        stop.wait()

    def close(self, reason: CommError | None = None, *, over: bool = True, flush_s: float | None = None) -> None:
        """`flush_s`: how long queued messages may take to reach the workers. `over`: the coordinator has ended the job. If it
        has not and there is a journal, workers keep reconnecting until a restarted server resumes."""
        if self.journal is not None and not over:
            self._away, reason = Later("is being started again"), CommError("was stopped, and its journal is kept")
        if self._server is not None:
            self._server.close(reason, flush_s)
        else:
            self._transport.close()
        if self._streams is not None:
            self._streams.close()
        if self.journal is not None:
            self.journal.close(over=over)
        self._audit.close()


def _alike(one: View, other: View) -> bool:
    """Whether both views are of one job, even if some of its workers have left."""
    return (one.servers, one.plan) == (other.servers, other.plan) and \
        bool({*one.members} & {*other.members})


def _checked_plan(plan: bytes, view: View) -> Plan:
    """Decodes the plan and checks what does not need the model, which worker 0 has checked it against."""
    what = "plan of worker 0"
    try:
        decoded = records.decode(plan, Plan, what)
    except RecordError as error:
        raise RecordError("E-PLAN-REFUSED", error.what) from None
    problems = planner.verify_alone(decoded, len(view.members))
    if decoded.servers > len(view.servers):
        problems.append(f"it is for {decoded.servers} servers, the job has {len(view.servers)}: start more, or make it again")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RecordError("E-PLAN-REFUSED", f"{what}: {problems[0]}{more}")
    return decoded

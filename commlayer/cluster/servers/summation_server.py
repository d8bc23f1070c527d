"""Runs a Summation over a transport: receives from all members, sends replies, reports which members a sum waits for.

The transport has one receive thread per member, and contributions are added on these threads. Buckets of different members are
therefore added in parallel. Sends on these threads only queue.
"""

from __future__ import annotations

import functools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

import msgspec

from commlayer import planner, records
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.grpc_port import GrpcPort, open_stream_port
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.membership.epoch_change import EpochChange, change_problem, read_change, wire_generation
from commlayer.cluster.servers.bucket_sum import ENTRY_HEADER_NBYTES, KEPT_STEPS, MOST_REASON_NBYTES, Reply, Stall
from commlayer.cluster.servers.server_codecs import CodecOps, expected_nbytes, ops_of, senders_of
from commlayer.cluster.servers.server_journal import ServerIdentity, ServerJournal
from commlayer.cluster.servers.summation import Summation
from commlayer.compressors import kernels
from commlayer.config import Config, Launch, codec_threads, host_port, join_host, reconnect_window_s, unheard_s
from commlayer.errors import (
    MAX_PEER_TEXT_CHARS,
    CommError,
    CorruptFrame,
    Damaged,
    InvalidInput,
    PeerEnded,
    PeerLost,
    RecordError,
    coded,
    line_of,
    short_line,
    without_code,
)
from commlayer.records import MALFORMED, Epoch, Plan, Record
from commlayer.transport.connection import Limits
from commlayer.transport.endpoint import Refusal, Settings, StreamTransport
from commlayer.transport.handshake import Hello, RefusalLog, RetryLater, same_job
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import (
    NUMBERED,
    SERVER_BASE,
    Flag,
    Handle,
    Header,
    Key,
    Kind,
    Message,
    Transport,
    key,
    peer_name,
)

log = logging.getLogger("commlayer")

TICK_S = 0.25
REPEAT_S = 2.0
"""Seconds after which a stall report is repeated, since a missing member may have left in the meantime."""
MAX_PROBE_NBYTES = 16 << 20
"""Maximum size of a member's pending probes, whose replies are not sent yet. link_rates.py requests at most 8 MiB at once."""
LEAST_PROBE_NBYTES = 64 << 10
"""Bytes that a probe with a smaller reply counts for, so at most 256 are pending. link_rates.py has at most 8 at once."""
_ZEROS = memoryview(bytes(MAX_PROBE_NBYTES))
FAILURE_NOTICE_S = 2.0
"""Seconds between a failure of the server and the end of its connections, in which the reason can reach the members."""


class Stalled(Record, frozen=True):
    """Body of a STALLED frame: the sum of this bucket and step waits for the `missing` members."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    dropped: dict[int, str] = msgspec.field(default_factory=dict)
    """Maps each missing member that this server has dropped to the reason. The dropped members will not contribute."""
    failed: str = ""
    """Why the server itself has failed and will send no sums; "" if it has not failed."""


def stalled_key(generation: int) -> Key:
    """Returns the key that all STALLED frames have, so one posted receive matches each of them. The bucket and step are in the
    body."""
    return key(Header(Kind.STALLED, generation))


def follow_stalls(transport: Transport, server: int, generation: int, notify: Callable[[Stalled], None]) -> None:
    """Called on a member: calls notify() with each stall report of that server, in the transport's thread."""

    def arrived(handle: Handle) -> None:
        if handle.error() is None:
            try:
                notify(read_stalled(handle.message()))
            finally:  # also after a malformed report; after notify(), so that reports stay in order
                follow_stalls(transport, server, generation, notify)

    transport.recv(server, stalled_key(generation)).on_done(arrived)


def read_stalled(message: Message) -> Stalled:
    return messages.unpack(message.body, Stalled, peer_name(message.peer), "a STALLED frame")


AwaitEpoch = Callable[[int, float], Epoch]
"""Membership.await_epoch."""
CheckChange = Callable[[EpochChange, int, int], Callable[[], Summation]]
"""Checks a change of members, given with its generation and sender; may block. Returns a function that creates the new members'
Summation, to be called after the previous one has ended. Raises CorruptFrame if the sender broke the protocol, ValueError if
the server cannot apply the change."""


class SumServer:
    """Serves one Summation's members over a transport, from construction until close()."""

    def __init__(
        self, core: Summation, transport: Transport, members: Iterable[int], *, stall_s: float,
        recycle: Callable[[memoryview], None] = lambda _: None, replan: Callable[[bytes, int], Summation] | None = None,
        pace: Callable[[float], None] = lambda _: None, regroup: CheckChange | None = None,
    ) -> None:
        """Starts to listen to the members. `recycle` receives the bodies of messages that have been added, for reuse. `replan`
        creates the Summation of a new plan. `pace` is called with this machine's measured upload rate in bit/s. `regroup`: None
        if members never change."""
        self._core, self._transport, self._stall_s, self._recycle = core, transport, stall_s, recycle
        self._members = tuple(members)
        self._dropped: dict[int, str] = {}
        self._dropping = threading.Lock()
        self._ended: set[str] = set()
        self._reported: dict[int, tuple[Stall, float]] = {}
        self._stalls: list[Stall] = []
        """Sums that waited for contributions at the last check."""
        self._last_numbers: dict[int, int] = {}
        """Maps a member to the sequence number of its last completed request. Requests arrive in order, some of them twice."""
        self._probes, self._probing = Counter[int](), threading.Lock()
        """Maps a member to the bytes of its pending probes."""
        self._failing = threading.Lock()
        self._replan, self._regroup, self._switching = replan, regroup, threading.Lock()
        self._pace = pace
        self._failed: CommError | None = None
        self._failed_s = 0.0
        self._closing = threading.Event()
        for member in self._members:
            self._listen(member)
        self._thread = threading.Thread(target=self._watch, name="commlayer-stalls", daemon=True)
        self._thread.start()

    def _listen(self, member: int) -> None:
        """Handles all messages of the member that have arrived, then posts a receive."""
        while True:
            handle = self._transport.recv(member)
            if not handle.done():
                handle.on_done(self._arrived)
                return
            if (error := handle.error()) is not None or self._failed is not None:
                self._note_end(error)
                return  # the connection ended; the heartbeats show whether the member is dead
            self._take(handle.message())

    def _note_end(self, error: CommError | None) -> None:
        if isinstance(error, PeerEnded):
            self._ended.add(error.peer)
        elif isinstance(error, CorruptFrame) and not isinstance(error, Damaged):
            self._drop(error)  # the member broke the frame format, so its connection has ended already

    def dropped(self) -> dict[int, str]:
        """Maps each member that was disconnected because it broke the protocol to the reason. Members that have left the job
        are not included."""
        with self._dropping:
            return {m: why for m, why in self._dropped.items() if m in self._members}

    def overdue(self, limit_s: float) -> tuple[int, tuple[int, ...]] | None:
        """Returns the earliest step whose sums wait for contributions, and the members for which a sum of that step has waited
        `limit_s`. None if no sum waits.

        Members are blamed only if at least as many have contributed as are missing, because a small group of contributors may
        itself delay the others elsewhere. Dropped members are not listed, since `dropped` reports them.
        """
        stalls, now = self._stalls, time.monotonic()
        if not stalls:
            return None
        step = min(stall.step for stall in stalls)
        late: set[int] = set()
        for stall in stalls:
            if stall.step == step and now - stall.since >= limit_s:
                missing = [m for m in stall.missing if m not in self._dropped]
                if len(stall.waiting) >= len(missing):
                    late.update(missing)
        return step, tuple(sorted(late))

    def ended(self) -> tuple[str, ...]:
        """Returns the names of members that have closed their connections in order."""
        return tuple(name for name in map(peer_name, self._members) if name in self._ended)

    def _arrived(self, handle: Handle) -> None:
        self._note_end(handle.error())
        if handle.error() is None and self._failed is None:
            message = handle.message()
            self._take(message)
            self._listen(message.peer)

    def _take(self, message: Message) -> None:
        """Handles one message. After an error the transport still delivers the sender's later messages, so a faulty member is
        dropped by its number."""
        try:
            for reply in self._replies(message):
                self._transport.send(reply.peer, reply.header, reply.body)
        except CorruptFrame as error:
            self._drop(error)
        except Exception as error:
            self._fail(message, error)

    def _replies(self, message: Message) -> list[Reply]:
        h = message.header
        if h.kind == Kind.PUSH:
            return self._core.push(message, time.monotonic(), lambda added: self._recycle(added.body))
        if h.kind not in NUMBERED or not h.used:
            return self._handle(message)
        if h.used <= self._last_numbers.get(message.peer, 0):
            return self._core.repeated(message) if h.kind != Kind.PLAN else self._handle(message)
        replies = self._handle(message)
        self._last_numbers[message.peer] = h.used
        return replies

    def _handle(self, message: Message) -> list[Reply]:
        match message.header.kind:
            case Kind.STATE_GET:
                return self._core.snapshot(message)
            case Kind.STATE:
                return self._core.restore(message)
            case Kind.UNDO:
                self._core.undo(message)
                return []
            case Kind.PROBE:
                self._echo(message)
                return []
            case Kind.PACE:
                self._pace(float(message.header.used))
                return []
            case Kind.PLAN if message.header.flags & Flag.ABANDON:
                if self._regroup is None:
                    raise CorruptFrame("sent a change of members, but the members of this job cannot change (min_workers is "
                                       "not set)", peer=peer_name(message.peer))
                return [self._change_members(message, self._regroup)]
            case Kind.PLAN if self._replan is not None:
                return [self._switch(message, self._replan)]
            case kind:
                raise CorruptFrame(f"sent a {Kind(kind).name} message, which a server does not accept",
                                   peer=peer_name(message.peer))

    def _echo(self, message: Message) -> None:
        """Answers a probe."""
        h, peer = message.header, message.peer
        nbytes = max(h.used, LEAST_PROBE_NBYTES)
        with self._probing:
            pending = self._probes[peer] + nbytes
            if pending > MAX_PROBE_NBYTES:
                raise CorruptFrame(f"requests probe replies of {pending} bytes at once, allowed {MAX_PROBE_NBYTES}",
                                   peer=peer_name(peer))
            self._probes[peer] = pending

        def sent(_: Handle) -> None:
            with self._probing:
                self._probes[peer] -= nbytes

        answer = h._replace(kind=Kind.PROBE_OK, sender=self._core.peer, used=0)
        self._transport.send(peer, answer, _ZEROS[: h.used]).on_done(sent)

    def _switch(self, message: Message, replan: Callable[[bytes, int], Summation]) -> Reply:
        """Switches to a new plan between two steps, when no sum is in progress. A plan that the server cannot apply changes
        nothing."""
        generation, problem = message.header.generation, ""
        with self._switching:
            if generation == self._core.generation + 1 and not self._core.busy():
                try:
                    self._core = replan(bytes(message.body), generation)
                except Exception as error:  # nothing has changed, so one member's plan must not end the server
                    problem = _reason(error)
            elif generation != self._core.generation:
                problem = "a sum is in progress" if generation == self._core.generation + 1 else \
                    f"generation {generation} does not follow the server's generation {self._core.generation}"
        return self._switched(message, problem)

    def _change_members(self, message: Message, regroup: CheckChange) -> Reply:
        """Switches to other members in the middle of a step. The change is checked before any sum ends."""
        generation, problem, change = message.header.generation, "", read_change(message)
        if generation > self._core.generation:
            try:
                make = regroup(change, generation, message.peer)
            except CorruptFrame:
                raise
            except Exception as error:
                return self._switched(message, _reason(error))
            with self._switching:
                if generation > self._core.generation:
                    self._core.end(change.step, change.undone)
                    self._core = make()
                    self._set_members(tuple(m.rank for m in change.epoch.members))
        if generation < self._core.generation:
            problem = f"generation {generation} has ended; the server is in generation {self._core.generation}"
        return self._switched(message, problem)

    def _switched(self, message: Message, problem: str) -> Reply:
        self._reported.clear()
        return Reply(message.peer, message.header._replace(kind=Kind.PLAN_OK, sender=self._core.peer), problem.encode())

    def _set_members(self, members: tuple[int, ...]) -> None:
        """Sets the members: disconnects members that are gone, and listens to new ones."""
        former, self._members = self._members, members
        for member in former:
            if member not in members:
                self._transport.abort(PeerLost("is no longer a member of the job", peer=peer_name(member)), member)
        for member in members:
            if member not in former:
                self._listen(member)

    def _drop(self, error: CorruptFrame) -> None:
        """Drops a member that broke the protocol. The coordinator is informed by the next heartbeat. The other members are
        informed by the stall report of the sum that waits for the dropped member."""
        member, why = int(error.peer.removeprefix("worker ")), short_line(coded(error.code, error.what), MAX_PEER_TEXT_CHARS)
        with self._dropping:
            if member in self._dropped:
                return
            self._dropped[member] = why
        log.warning("dropped %s", short_line(error, MAX_PEER_TEXT_CHARS))
        self._transport.abort(error, member)

    def _fail(self, message: Message, error: Exception) -> None:
        """Handles a failure of this server: no sum can be trusted, so all members are sent the reason and disconnected."""
        h = message.header
        what = short_line(f"failed: {type(error).__name__}: {error}", MAX_PEER_TEXT_CHARS)
        with self._failing:
            if self._failed is not None or self._closing.is_set():
                return
            self._failed_s = time.monotonic()
            self._failed = CommError(what, peer=peer_name(self._core.peer), step=h.step, bucket=h.bucket)
        log.error("%s", self._failed, exc_info=error)
        for member in self._members:
            self._send_stalled(member, Stalled(h.bucket, h.step, (), failed=what))

    def _watch(self) -> None:
        while not self._closing.wait(TICK_S):
            if self._failed is not None:
                if time.monotonic() - self._failed_s >= FAILURE_NOTICE_S:
                    self._transport.abort(self._failed)
                    return
                continue
            self._check_stalls()

    def _check_stalls(self) -> None:
        """Sends reports about sums that wait for contributions. Only this thread checks for them: sums are locked while they
        are journaled, and a disk may block."""
        self._stalls = self._core.stalled(math.inf)
        before = time.monotonic() - self._stall_s
        for stall in self._stalls:
            if stall.since <= before:
                self._report(stall)

    def _report(self, stall: Stall) -> None:
        now = time.monotonic()
        last, sent_s = self._reported.get(stall.bucket, (None, 0.0))
        if last == stall and now - sent_s < REPEAT_S:
            return
        self._reported[stall.bucket] = (stall, now)
        with self._dropping:
            dropped = {m: self._dropped[m] for m in stall.missing if m in self._dropped}
        for member in stall.waiting:
            self._send_stalled(member, Stalled(stall.bucket, stall.step, stall.missing, dropped))

    def _send_stalled(self, member: int, what: Stalled) -> Handle:
        header = Header(Kind.STALLED, self._core.generation, sender=self._core.peer)
        return self._transport.send(member, header, msgspec.msgpack.encode(what))

    def close(self, reason: CommError | None = None, flush_s: float | None = None) -> None:
        self._closing.set()
        self._thread.join(2.0)
        if reason is not None:
            self._transport.abort(reason)
        self._transport.close(flush_s)


def _reason(error: Exception) -> str:
    """Returns why a plan is refused. An error that no check has raised is logged, as it is the server's own fault."""
    if isinstance(error, ValueError | CommError):
        return str(error)
    log.error("a plan was refused after an unexpected error", exc_info=error)
    return f"failed: {type(error).__name__}: {error}"


MESSAGES_SLACK = 64
"""Number of messages from or to one worker, in addition to those of two steps, that may be on their way at once."""
READY_S = 9.0
"""Seconds for which a handshake waits until this server has its plan; less than the handshake's own deadline."""
NOTICE_HEARTBEATS = 3
"""Number of heartbeats to wait for the coordinator's newest epoch when a worker reports it first."""
MAX_REPORTED = 64
"""Maximum number of dropped workers named in one heartbeat, which must stay small. The others are named after the first ones
have been evicted."""
MAX_OVERDUE = 4096
"""Maximum number of missing workers that a heartbeat names. If more are missing, it names none, and all workers stop at their
deadline."""
STALL_S = 4.0
"""Seconds for which a sum waits before the waiting members are sent the names of the missing ones."""


class DataServer:
    """The summation server of a process. It listens from construction on, so its address is known before it joins the job. It
    accepts workers after start()."""

    def __init__(self, bind: str, port: int, config: Config, coordinator: Coordinator | None = None) -> None:
        """`coordinator`: the coordinator in the same process, if any. gRPC streams then use the coordinator's port, otherwise a
        separate port."""
        kernels.choose(config.backend)
        kernels.threads(codec_threads(config, Launch()))
        self._config = config
        self._ready = threading.Event()
        self._refusal = ""
        """Why all workers are refused: the plan cannot be served, or the server is stopping; "" if they are not."""
        self._hello = Hello("", SERVER_BASE, version=messages.version())
        refusals = RefusalLog()
        keys = Keys(config.keys) if config.keys else None
        self._transport = StreamTransport(self._hello, self._admit, Settings(
            secret=config.token, user_timeout_s=unheard_s(config), keys=keys,
            refused=refusals.refused, resume=reconnect_window_s(config) > 0))
        self._transport.named = self._certificate_of
        self._server: SumServer | None = None
        self.journal = ServerJournal(config.journal, required=config.journal_required) if config.journal else None
        """Journal with the state that a crashed server left, and that this server records; None without a journal folder."""
        self._token, self._reported_s = "", 0.0
        self._ops: dict[int, CodecOps] = {}
        self._epoch: Epoch | None = None
        self._plan: Plan | None = None
        streams_port = port and port + (config.carrier != "grpc")
        if (former := None if self.journal is None else self.journal.recovered) is not None:  # where workers reconnect
            port = port or host_port(former.address)[1]
            streams_port = streams_port or (host_port(former.streams)[1] if former.streams else 0)
        self.streams = ""
        """Address for gRPC streams; "" if the server accepts none."""
        self._streams: GrpcPort | None = None
        self.address = "" if config.carrier == "grpc" else join_host(*self._transport.listen(bind, port))
        if config.carrier != "tcp":
            self._take_streams(bind, streams_port, keys, coordinator, refusals.refused)

    def _take_streams(self, bind: str, port: int, keys: Keys | None, coordinator: Coordinator | None, refused: Refusal) -> None:
        if coordinator is not None:
            coordinator.serve_streams(self._transport.take)
            self.streams = coordinator.address
        else:
            try:
                self._streams = open_stream_port(keys, bind, port, self._transport.take, refused)
            except (InvalidInput, OSError) as error:
                if not self.address:
                    raise
                log.warning("cannot accept gRPC streams, only TCP connections: %s", line_of(error))
            else:
                self.streams = join_host(bind, self._streams.number)
        self.address = self.address or self.streams

    def _admit(self, theirs: Hello) -> str:
        if not self._ready.wait(READY_S):
            return RetryLater("has no plan yet: the coordinator is waiting for other processes")
        if self._refusal:
            return self._refusal
        if theirs.rank not in self._members:
            return coded("E-RANK", f"is not a member of the job, which has {len(self._members)} workers")
        return same_job(self._hello)(theirs)

    def _certificate_of(self, rank: int) -> str:
        return "" if self._epoch is None else next((m.certificate for m in self._epoch.members if m.rank == rank), "")

    @property
    def _members(self) -> tuple[int, ...]:
        return () if self._epoch is None else tuple(m.rank for m in self._epoch.members)

    def start(
        self, epoch: Epoch, plan: bytes, server: int, token: str = "", await_epoch: AwaitEpoch | None = None,
    ) -> None:
        """Starts summing the plan's buckets of server number `server`, for the members of `epoch`. If the journal is of the
        same job and server, resumes from it. `token`: token of this server's registration. `await_epoch`: see
        Membership.await_epoch; None if members never change.

        Raises ValueError if the plan cannot be served. Every worker that connects is then refused with the same reason.
        """
        former = self._former(epoch, server)
        self._epoch = epoch = former.epoch if former else epoch
        self._token = token
        try:
            self._plan = decoded = _checked_plan(former.plan if former else plan, epoch, "")
            self._ops = ops_of(decoded, server, gradients=epoch.gradients)
            core = self._core(decoded, server, former.generation if former else epoch.generation)
            if former is not None and self.journal is not None:
                self._recall(core, self.journal)
            self._write_down(core, former.plan if former else plan, server, epoch)
            self._set_limits(decoded, server)
        except ValueError as error:
            self._refusal = str(error)
            self._ready.set()
            raise
        self._hello = msgspec.structs.replace(self._hello, job=decoded.job, rank=SERVER_BASE + server, plan=epoch.plan)
        self._transport.hello = self._hello
        self._server = SumServer(core, self._transport, self._members, stall_s=min(STALL_S, self._config.deadline_s / 4),
                                 recycle=self._transport.pool.give, replan=self._switch_plan, pace=self._transport.pace,
                                 regroup=functools.partial(self._regroup, await_epoch) if await_epoch is not None else None)
        self._ready.set()

    def _former(self, epoch: Epoch, server: int) -> ServerIdentity | None:
        """Returns what the journal records about an earlier process of this server in this job; None if there was none."""
        if self.journal is None or (former := self.journal.recovered) is None:
            return None
        if _is_same_job(former.epoch, epoch) and former.number == server:
            return former
        self.journal.ignore("it belongs to another job or to another server")
        return None

    def _recall(self, core: Summation, journal: ServerJournal) -> None:
        lost_buckets = []
        for bucket in core.cells:
            entry = journal.entries.get(bucket)
            try:
                if entry is None:
                    raise CorruptFrame("no intact entry")
                core.recall(bucket, *entry)
            except (CorruptFrame, ValueError, *MALFORMED) as error:
                lost_buckets.append(f"{bucket} ({without_code(error)})")
                core.forget(bucket)
        log.warning("journal: resumed in generation %d; %d of %d buckets are intact",
                    core.generation, len(core.cells) - len(lost_buckets), len(core.cells))
        if lost_buckets:
            log.warning("journal: the residuals of %d buckets are lost and restart at zero: %s", len(lost_buckets),
                        ", ".join(lost_buckets[:8]))

    def _write_down(self, core: Summation, plan: bytes, server: int, epoch: Epoch) -> None:
        """Starts journaling, if the server has a journal."""
        if self.journal is None:
            return
        about = ServerIdentity(self._token, server, self.address, epoch, plan, core.generation, self.streams)
        sizes = {b: ops.memory_nbytes + ops.bound + ENTRY_HEADER_NBYTES for b, ops in self._ops.items()}
        if not self.journal.replace(about, sizes, core.remember):
            core.remember(None)

    def _core(self, plan: Plan, server: int, generation: int) -> Summation:
        senders = {bucket: tuple(self._members[place] for place in places)
                   for bucket, places in senders_of(plan, len(self._members)).items()}
        return Summation(server, generation, dict(self._ops), senders)

    def _set_limits(self, plan: Plan, server: int) -> None:
        """Sets the limits on what workers send, by the plan."""
        self._transport.limit_kept(expected_nbytes(plan, server))
        self._transport.limits = self._limits()

    def _limits(self) -> Limits:
        """Returns what one worker may cause at this server, by the job's plan. Results are sent from the server's own memory,
        so only their number is limited."""
        former, ops = self._transport.limits.body_nbytes or {}, self._ops.values()
        # Messages of an earlier plan may still arrive.
        payload = max([former.get(Kind.PUSH, MOST_REASON_NBYTES), *(one.bound for one in ops)])
        state = max([former.get(Kind.STATE, 0), *(one.max_state_nbytes for one in ops)])
        body_nbytes: dict[int, int] = {
            Kind.PUSH: payload, Kind.STATE: state, Kind.PROBE: MAX_PROBE_NBYTES, Kind.PLAN: messages.MAX_PLAN_NBYTES}
        return Limits(body_nbytes, KEPT_STEPS * sum(one.rounds for one in ops) + MESSAGES_SLACK)

    def report(self) -> dict[str, Any]:
        """Returns the fields of a heartbeat that a summation server fills in."""
        since_s, self._reported_s = self._reported_s, time.monotonic()
        fields: dict[str, Any] = {"missed": self._transport.missed(), "heard": self._transport.heard(since_s)}
        if self._server is not None:
            dropped = list(self._server.dropped().items())[:MAX_REPORTED]
            fields |= {"dropped": tuple(messages.PeerExit(peer_name(member), why) for member, why in dropped),
                       "ended": self._server.ended(), "overdue": self._overdue(self._server)}
        return fields

    def _overdue(self, server: SumServer) -> messages.Overdue | None:
        if self._plan is None:
            return None
        # With local steps, slow workers may contribute later.
        limit_s = self._config.deadline_s * self._plan.local_steps
        overdue = server.overdue(limit_s)
        if overdue is None:
            return None
        step, missing = overdue
        return messages.Overdue(step, missing if len(missing) <= MAX_OVERDUE else (), limit_s)

    def _regroup(self, await_epoch: AwaitEpoch, change: EpochChange, generation: int, sender: int
                 ) -> Callable[[], Summation]:
        """Checks a change of members against the coordinator's newest epoch. Changes nothing, but returns a function that
        creates the new sums."""
        assert self._epoch is not None
        if generation == wire_generation(change.epoch) and change.epoch.generation <= self._epoch.generation:
            raise InvalidInput("E-EPOCH-ENDED",
                               f"epoch {change.epoch.generation} has ended: epoch {self._epoch.generation} is active")
        if why := change_problem(change, generation, sender, self._epoch):
            raise CorruptFrame(f"PLAN frame with a change of members is invalid: {why}", peer=peer_name(sender))
        # Checked now, because an error after the end of the previous sums could not be undone.
        expected_nbytes(_checked_plan(change.plan, change.epoch, self._hello.job), self._hello.rank - SERVER_BASE)
        known = await_epoch(change.epoch.generation, NOTICE_HEARTBEATS * self._config.heartbeat_s)
        if known.generation != change.epoch.generation:
            raise InvalidInput("E-EPOCH-ENDED", f"epoch {change.epoch.generation} is not the coordinator's newest, which is "
                                                f"{known.generation}")
        if known != change.epoch:
            raise CorruptFrame(f"PLAN frame with a change of members is invalid: its epoch {known.generation} differs from the "
                               "coordinator's", peer=peer_name(sender))
        return functools.partial(self._switch_members, change, generation)

    def _switch_members(self, change: EpochChange, generation: int) -> Summation:
        """Creates the new members' sums. Residuals are scaled, because the number of members in the mean has changed."""
        # The epoch is set first: from now on a worker with a new rank is checked against its certificate in that epoch.
        former, self._epoch = self._members, change.epoch
        return self._switch_plan(change.plan, generation, scale=len(self._members) / len(former))

    def _switch_plan(self, plan: bytes, generation: int, scale: float = 1.0) -> Summation:
        """Creates the sums of the plan that the workers switch to. Raises ValueError, and changes nothing, if the plan cannot
        be served."""
        assert self._epoch is not None
        epoch = self._epoch
        decoded = _checked_plan(plan, epoch, self._hello.job)
        server = self._hello.rank - SERVER_BASE
        before, self._ops = self._ops, ops_of(decoded, server, self._ops.values(), scale, gradients=epoch.gradients)
        try:
            core = self._core(decoded, server, generation)
            self._write_down(core, plan, server, epoch)
            self._set_limits(decoded, server)
        except Exception:
            self._ops = before
            raise
        self._plan = decoded
        return core

    @property
    def finished(self) -> bool:
        """Whether all workers have closed their connections in order."""
        return self._server is not None and len(self._server.ended()) == len(self._members)

    @property
    def alone(self) -> bool:
        """Whether no worker is connected."""
        return not self._transport.peers

    def close(self, reason: CommError | None = None, *, over: bool = True, flush_s: float | None = None) -> None:
        """Stops serving. `reason`: error that workers receive; None for an orderly end. `over`: True: the coordinator has ended
        the job. False: if there is a journal, workers keep reconnecting until a restarted server resumes. `flush_s`: seconds
        allowed for sending queued messages."""
        if self.journal is not None and not over:
            self._refusal = RetryLater("is restarting")
            reason = CommError("was stopped before the end of the job; its journal is kept")
        if self._server is not None:
            self._server.close(reason, flush_s)
        else:
            self._transport.close()
        if self._streams is not None:
            self._streams.close()
        if self.journal is not None:
            self.journal.close(over=over)


def _is_same_job(one: Epoch, other: Epoch) -> bool:
    """Returns whether both epochs are of one job, even if some of its workers have left."""
    return (one.servers, one.plan) == (other.servers, other.plan) and \
        bool({*one.members} & {*other.members})


def _checked_plan(plan: bytes, epoch: Epoch, job: str) -> Plan:
    """Decodes the plan and checks it for this job, before anything is made from it. `job`: digest of the job; "": the plan is
    the first one, and names it."""
    what = "plan of worker 0"
    try:
        decoded = records.decode(plan, Plan, what)
    except RecordError as error:
        raise RecordError("E-PLAN-REFUSED", error.what) from None
    problems = planner.verify_alone(decoded, len(epoch.members), epoch.tensors, epoch.elements)
    if job and decoded.job != job:
        problems.insert(0, f"it was made for another model: job {decoded.job}, but this is {job}")
    if decoded.servers > len(epoch.servers):
        problems.append(f"it is for {decoded.servers} servers, but the job has {len(epoch.servers)}: start more servers, or "
                        "create the plan again")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RecordError("E-PLAN-REFUSED", f"{what}: {problems[0]}{more}")
    return decoded

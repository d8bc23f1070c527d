"""The summation server of a process: its port, its plan and epoch, its journal, and the Summation that it serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from commlayer import planner, records
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.grpc_port import GrpcPort, open_stream_port
from commlayer.cluster.membership.coordinator import Coordinator
from commlayer.cluster.servers.bucket_sum import ENTRY_HEADER_NBYTES, KEPT_STEPS, MOST_REASON_NBYTES
from commlayer.cluster.servers.gather import ROW_BUCKET, GatherOps
from commlayer.cluster.servers.server_codecs import CodecOps, contributing_ranks, expected_nbytes, make_codec_ops
from commlayer.cluster.servers.server_journal import ServerIdentity, ServerJournal
from commlayer.cluster.servers.summation import Summation
from commlayer.cluster.servers.summation_server import MAX_PROBE_NBYTES, Joins, SumServer
from commlayer.compressors import kernels
from commlayer.config import Config, Launch, broken_after_s, codec_threads, host_port, join_host, notice_s, reconnect_window_s
from commlayer.errors import (
    CommError,
    CorruptFrame,
    InvalidInput,
    RecordError,
    append_code,
    error_line,
    without_code,
)
from commlayer.records import MALFORMED, Epoch, Plan, group_by_site
from commlayer.transport.connection import SizeLimits
from commlayer.transport.endpoint import Refusal, Settings, StreamTransport
from commlayer.transport.handshake import Hello, RefusalLog, RetryLater, same_job
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import (
    SERVER_BASE,
    Kind,
    peer_name,
)

log = logging.getLogger("commlayer")

BucketOps = CodecOps | GatherOps

MESSAGES_SLACK = 64
"""Number of messages from or to one worker, in addition to those of two steps, that may be on their way at once."""
READY_S = 9.0
"""Seconds for which a handshake waits until this server has its plan; less than the handshake's own deadline."""
MAX_REPORTED = 64
"""Maximum number of dropped workers named in one heartbeat, which must stay small. The others are named after the first ones
have been evicted."""
MAX_OVERDUE = 4096
"""Maximum number of missing workers that a heartbeat names. If more are missing, it names none, and all workers stop at their
deadline."""
STALL_S = 4.0
"""Seconds for which a sum waits before the waiting members are sent the names of the missing ones."""


AwaitEpoch = Callable[[int, float], Epoch]
"""Membership.await_epoch."""


class DataServer:
    """The summation server of a process. The server listens from construction on, so its address is known before it joins the
    job. The server accepts workers after start()."""

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
        self.transport = StreamTransport(self._hello, self._admit, Settings(
            secret=config.token, user_timeout_s=broken_after_s(config), keys=keys,
            refused=refusals.refused, resume=reconnect_window_s(config) > 0))
        self.transport.named = self._find_certificate
        self._server: SumServer | None = None
        self.journal = ServerJournal(config.journal, required=config.journal_required) if config.journal else None
        """Journal with the state that a crashed server left, and that this server records; None without a journal folder."""
        self._token, self._reported_s = "", 0.0
        self._ops: dict[int, BucketOps] = {}
        self._epoch: Epoch | None = None
        """The epoch with which this server began to serve the job."""
        self._newest: Epoch | None = None
        """The newest epoch that the coordinator has sent. Only its members may connect."""
        self._await_epoch: AwaitEpoch | None = None
        self._joined: list[int] = []
        """Workers that have joined since, in the order in which all members count them."""
        self._most_present = 0
        self._sites: dict[int, tuple[int, ...]] = {}
        """Maps the members of all epochs that this server has received, and workers that have joined, to the ranks of their
        sites. The site of a worker that was in no such epoch is unknown: that worker has left again."""
        self._changing = threading.Lock()
        self._plan: Plan | None = None
        streams_port = port and port + (config.carrier != "grpc")
        if (former := None if self.journal is None else self.journal.recovered) is not None:  # where workers reconnect
            port = port or host_port(former.address)[1]
            streams_port = streams_port or (host_port(former.streams)[1] if former.streams else 0)
        self.streams = ""
        """Address for gRPC streams; "" if the server accepts none."""
        self._streams: GrpcPort | None = None
        self.address = "" if config.carrier == "grpc" else join_host(*self.transport.listen(bind, port))
        if config.carrier != "tcp":
            self._take_streams(bind, streams_port, keys, coordinator, refusals.refused)

    def _take_streams(self, bind: str, port: int, keys: Keys | None, coordinator: Coordinator | None, refused: Refusal) -> None:
        if coordinator is not None:
            coordinator.serve_streams(self.transport.take)
            self.streams = coordinator.address
        else:
            try:
                self._streams = open_stream_port(keys, bind, port, self.transport.take, refused)
            except (InvalidInput, OSError) as error:
                if not self.address:
                    raise
                log.warning("cannot accept gRPC streams, only TCP connections: %s", error_line(error))
            else:
                self.streams = join_host(bind, self._streams.number)
        self.address = self.address or self.streams

    def _admit(self, theirs: Hello) -> str:
        if not self._ready.wait(READY_S):
            return RetryLater("has no plan yet: the coordinator is waiting for other processes")
        if self._refusal:
            return self._refusal
        if theirs.rank in self._present:
            return same_job(self._hello)(theirs)
        if theirs.rank in self._departed_workers:
            return append_code("E-EPOCH-ENDED", "is no longer a member of the job")
        if self._await_epoch is None or self._newest is None:
            return append_code("E-RANK", f"is not a member of the job, which has {len(self._present)} workers")
        self._adopt_epoch(self._await_epoch(self._newest.generation + 1, notice_s(self._config)))
        return same_job(self._hello)(theirs) if theirs.rank in self._present else RetryLater("is not a member of the job yet")

    def _find_certificate(self, rank: int) -> str:
        return "" if self._newest is None else next((m.certificate for m in self._newest.members if m.rank == rank), "")

    @property
    def _all_members(self) -> tuple[int, ...]:
        """All workers that are or were members, in order."""
        return () if self._epoch is None else (*(m.rank for m in self._epoch.members), *self._joined)

    @property
    def _present(self) -> set[int]:
        return set() if self._newest is None else {m.rank for m in self._newest.members}

    @property
    def _most_rows(self) -> int:
        """Largest number of rows in a sum of rows: that of workers that were members at the same time. A worker that has joined
        sends its first row after that sum."""
        self._most_present = max(self._most_present, len(self._present & {*self._all_members}))
        return self._most_present

    @property
    def _unseen(self) -> int:
        """Number of workers that the coordinator has admitted and removed again between two epochs that this server has
        received. The generation of an epoch counts all admissions and removals."""
        assert self._epoch is not None
        assert self._newest is not None
        first, newest = self._epoch, self._newest
        admitted = (newest.generation - first.generation + len(newest.members) - len(first.members)) // 2
        return admitted - len(self._sites) + len(first.members)

    @property
    def _departed_workers(self) -> set[int]:
        """Workers that have left the job, those that only followed it included."""
        return self._sites.keys() - self._present

    def start(
        self, epoch: Epoch, plan: bytes, server: int, token: str = "", await_epoch: AwaitEpoch | None = None,
    ) -> None:
        """Starts summing the plan's buckets of server number `server`, for the members of `epoch`. If the journal is of the
        same job and server, resumes from it. `token`: token of this server's registration. `await_epoch`: see
        Membership.await_epoch. None: the members never change. `change` must be called with each newer epoch.

        Raises ValueError if the plan cannot be served. Every worker that connects is then refused with the same reason.
        """
        former = self._former(epoch, server)
        self._newest, self._epoch, self._await_epoch = epoch, former.epoch if former else epoch, await_epoch
        self._joined = [*former.joined] if former else []
        self._most_present = len(self._epoch.members)
        self._note_sites(self._epoch)
        self._note_sites(epoch)
        self._sites = {member: (member,) for member in self._joined} | self._sites
        self._token = token
        try:
            self._plan = decoded = self._checked(former.plan if former else plan, "")
            self._ops = self._ops_for(decoded, server)
            core = self._core(decoded, server, former.generation if former else epoch.generation)
            if former is not None and self.journal is not None:
                self._restore_from_journal(core, self.journal)
            self._write_down(core, former.plan if former else plan, server)
            self.transport.limits = self._limits(decoded, server)
        except ValueError as error:
            self._refusal = str(error)
            self._ready.set()
            raise
        self._hello = msgspec.structs.replace(self._hello, job=decoded.job, rank=SERVER_BASE + server, plan=epoch.plan)
        self.transport.hello = self._hello
        present = [member for member in self._all_members if member not in self._departed_workers]
        self._server = SumServer(core, self.transport, present, stall_s=min(STALL_S, self._config.deadline_s / 4),
                                 recycle=self.transport.pool.give, replan=self._switch_plan, pace=self.transport.pace,
                                 admit=self._admit_worker if await_epoch is not None else None)
        self._ready.set()

    def _former(self, epoch: Epoch, server: int) -> ServerIdentity | None:
        """Returns what the journal records about an earlier process of this server in this job. Returns None if there was no
        such process."""
        if self.journal is None or (former := self.journal.recovered) is None:
            return None
        if _is_same_job(former.epoch, epoch) and former.number == server:
            return former
        self.journal.ignore("it belongs to another job or to another server")
        return None

    def _restore_from_journal(self, core: Summation, journal: ServerJournal) -> None:
        lost_buckets = []
        for bucket in core.cells:
            entry = journal.entries.get(bucket)
            try:
                if entry is None:
                    raise CorruptFrame("no intact entry")
                core.restore_from_journal(bucket, *entry)
            except RecordError:
                raise
            except (CorruptFrame, ValueError, *MALFORMED) as error:
                lost_buckets.append(f"{bucket} ({without_code(error)})")
                core.forget(bucket)
        log.warning("journal: resumed in generation %d; %d of %d buckets are intact",
                    core.generation, len(core.cells) - len(lost_buckets), len(core.cells))
        if lost_buckets:
            log.warning("journal: the residuals of %d buckets are lost and restart at zero: %s", len(lost_buckets),
                        ", ".join(lost_buckets[:8]))

    def _write_down(self, core: Summation, plan: bytes, server: int) -> None:
        """Starts a new journal, if the server has one."""
        if self.journal is None:
            return
        assert self._epoch is not None
        about = ServerIdentity(self._token, server, self.address, self._epoch, plan, core.generation, self.streams,
                               tuple(self._joined))
        sizes = {b: ops.most_journal_nbytes + ops.bound + ENTRY_HEADER_NBYTES for b, ops in self._ops.items()}
        with core.pause():
            if not self.journal.replace(about, sizes, core.journal_state):
                core.journal_state(None)

    def _core(self, plan: Plan, server: int, generation: int) -> Summation:
        assert self._epoch is not None
        members = tuple(m.rank for m in self._epoch.members)
        senders = contributing_ranks(plan, group_by_site(self._epoch.members))
        core = Summation(server, generation, dict(self._ops), senders | {ROW_BUCKET: members})
        for number, member in enumerate(self._joined, 1):
            core.add(number, member, self._buckets_from(plan, member))
        core.remove(self._departed_workers)
        return core

    def _buckets_from(self, plan: Plan, member: int) -> set[int]:
        """Returns the buckets to which a worker contributes."""
        site = self._sites[member]
        return {ROW_BUCKET, *(b.id for b in plan.buckets if b.owner_in(site) == member)}

    def _note_sites(self, epoch: Epoch) -> None:
        for site in group_by_site(epoch.members):
            for member in site:
                self._sites.setdefault(member, site)

    def _ops_for(self, plan: Plan, server: int) -> dict[int, BucketOps]:
        """Returns the codec operations of the plan's buckets, and of the bucket of rows on server 0. They inherit residuals."""
        assert self._epoch is not None
        before = [ops for ops in self._ops.values() if isinstance(ops, CodecOps)]
        rows: dict[int, BucketOps] = {ROW_BUCKET: GatherOps(self._most_rows)} if server == 0 else {}
        return rows | make_codec_ops(plan, server, before, gradients=self._epoch.gradients)

    def _limits(self, plan: Plan, server: int) -> SizeLimits:
        """Returns what one worker may cause at this server, by the job's plan. Results are sent from the server's own memory,
        so only their number is limited."""
        former, ops = self.transport.limits.body_nbytes or {}, self._ops.values()
        # Messages of an earlier plan may still arrive.
        payload = max([former.get(Kind.PUSH, MOST_REASON_NBYTES), *(one.bound for one in ops)])
        state = max([former.get(Kind.STATE, 0), *(one.max_state_nbytes for one in ops)])
        body_nbytes: dict[int, int] = {
            Kind.PUSH: payload, Kind.STATE: state, Kind.PROBE: MAX_PROBE_NBYTES, Kind.PLAN: messages.MAX_PLAN_NBYTES}
        return SizeLimits(body_nbytes, expected_nbytes(plan, server),
                          KEPT_STEPS * sum(one.rounds for one in ops) + MESSAGES_SLACK)

    def report(self) -> dict[str, Any]:
        """Returns the fields of a heartbeat that a summation server fills in."""
        since_s, self._reported_s = self._reported_s, time.monotonic()
        fields: dict[str, Any] = {"missed": self.transport.disconnected_peers(), "heard": self.transport.heard_since(since_s)}
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

    def change(self, epoch: Epoch) -> None:
        """Switches to the coordinator's newest epoch: sums do not wait for removed members any longer."""
        self._adopt_epoch(epoch)
        if self._server is not None and (gone := self._departed_workers):
            self._server.remove(gone)

    def _adopt_epoch(self, epoch: Epoch) -> None:
        with self._changing:
            if self._newest is None or epoch.generation > self._newest.generation:
                self._newest = epoch
                self._note_sites(epoch)

    def _admit_worker(self, joins: Joins, sender: int) -> None:
        """Adds a worker to the members and to the journal. Waits for the coordinator's word that it is one."""
        assert self._await_epoch is not None
        assert self._server is not None
        assert self._plan is not None
        wait_s = max(notice_s(self._config), reconnect_window_s(self._config))
        known = self._await_epoch(joins.generation, wait_s)
        self._adopt_epoch(known)
        with self._server.switching, self._changing:
            if 0 < joins.number <= len(self._joined) and self._joined[joins.number - 1] == joins.member:
                return  # another member has reported it
            problem = ""
            if joins.number != len(self._joined) + 1 or joins.member in self._all_members:
                problem = f"{len(self._joined)} workers have joined"
            elif known.generation < joins.generation:
                problem = f"the coordinator's newest epoch is {known.generation}, not {joins.generation}"
            elif joins.member not in self._sites and not self._unseen:
                problem = "the coordinator has not admitted it"
            if problem:
                raise CorruptFrame(f"reports that {peer_name(joins.member)} joins as number {joins.number}, but {problem}",
                                   peer=peer_name(sender))
            self._joined.append(joins.member)
            self._sites.setdefault(joins.member, (joins.member,))
            sizes = {}
            for bucket, ops in self._ops.items():
                if isinstance(ops, GatherOps):
                    ops.allow(self._most_rows)
                    sizes[bucket] = ops.bound + ENTRY_HEADER_NBYTES
            self._server.core.add(joins.number, joins.member, self._buckets_from(self._plan, joins.member))
            if self.journal is not None and not self.journal.write_joined(self._joined, sizes):
                self._write_down(self._server.core, records.encode(self._plan), self._hello.rank - SERVER_BASE)
            self.transport.limits = self._limits(self._plan, self._hello.rank - SERVER_BASE)
        if gone := self._departed_workers:
            self._server.remove(gone)  # `change` may not have been called with this epoch yet

    def _switch_plan(self, plan: bytes, generation: int) -> Summation:
        """Creates the sums of the plan that the workers switch to. Raises ValueError, and changes nothing, if the plan cannot
        be served."""
        decoded = self._checked(plan, self._hello.job)
        server = self._hello.rank - SERVER_BASE
        with self._changing:
            before, self._ops = self._ops, self._ops_for(decoded, server)
            try:
                core = self._core(decoded, server, generation)
                self._write_down(core, plan, server)
                self.transport.limits = self._limits(decoded, server)
            except Exception:
                self._ops = before
                raise
        self._plan = decoded
        return core

    def _checked(self, plan: bytes, job: str) -> Plan:
        assert self._epoch is not None
        return _checked_plan(plan, self._epoch, job, len(self._all_members))

    @property
    def sums(self) -> Summation | None:
        """The sums of the active plan; None before start()."""
        return None if self._server is None else self._server.core

    @property
    def finished(self) -> bool:
        """Whether all workers have closed their connections in order."""
        return self._server is not None and len(self._server.ended()) == len(self._present & {*self._all_members})

    @property
    def alone(self) -> bool:
        """Whether no worker is connected."""
        return not self.transport.peers

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
            self.transport.close()
        if self._streams is not None:
            self._streams.close()
        if self.journal is not None:
            self.journal.close(over=over)


def _is_same_job(one: Epoch, other: Epoch) -> bool:
    """Returns whether both epochs are of one job, even if its workers have left."""
    return (one.servers, one.plan, one.run) == (other.servers, other.plan, other.run) and \
        bool(one.run or {*one.members} & {*other.members})


def _checked_plan(plan: bytes, epoch: Epoch, job: str, workers: int) -> Plan:
    """Decodes the plan and checks it for this job, before anything is made from it. `job`: digest of the job; "": the plan is
    the first one, and names it. `workers`: largest number of workers for which the plan may be."""
    what = "plan of worker 0"
    try:
        decoded = records.decode(plan, Plan, what)
    except RecordError as error:
        raise RecordError("E-PLAN-REFUSED", error.what) from None
    problems = planner.verify_alone(decoded, workers, epoch.tensors, epoch.elements)
    if job and decoded.job != job:
        problems.insert(0, f"it was made for another model: job {decoded.job}, but this is {job}")
    if decoded.servers > len(epoch.servers):
        problems.append(f"it is for {decoded.servers} servers, but the job has {len(epoch.servers)}: start more servers, or "
                        "create the plan again")
    if problems:
        more = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise RecordError("E-PLAN-REFUSED", f"{what}: {problems[0]}{more}")
    return decoded

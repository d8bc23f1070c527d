"""The coordinator: a gRPC server that registers processes, detects failures and publishes epochs (members and servers).

membership.py, epoch_change.py and sites.py make the decisions; the Coordinator class adds the lock, the clock and the sockets.
Every call except KvRequest and Watch is answered at once, and a process that waits calls again. A call must prove that its
sender knows the job's secret before the call is parsed; until then its size is limited. Receiving a call occupies no thread, so
an incomplete call blocks nothing.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import threading
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Collection, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from commlayer import config as settings
from commlayer.cluster.calls import messages
from commlayer.cluster.calls.call_proofs import CHALLENGE, AuthenticationFailed, CallVerifier
from commlayer.cluster.calls.grpc_port import GrpcPort
from commlayer.cluster.calls.messages import (
    MAX_STATUS_NBYTES,
    PROTOCOL,
    PlanPart,
    StatusReply,
    version,
)
from commlayer.cluster.calls.rpc_server import Answer, Encode, RpcServer
from commlayer.cluster.calls.sanitize import sanitize
from commlayer.cluster.membership import epoch_change, membership
from commlayer.cluster.membership.coordinator_journal import (
    CoordinatorJournal,
    CoordinatorRecord,
    resumed_state,
)
from commlayer.cluster.membership.job_events import JobEvents, list_waits, log_of_job
from commlayer.cluster.membership.rendezvous_service import RendezvousService
from commlayer.cluster.membership.sites import AdmissionState, PendingWait
from commlayer.cluster.membership.uploaded_plans import UploadedPlans
from commlayer.config import Config
from commlayer.errors import MAX_PEER_TEXT_CHARS, CorruptFrame, InvalidInput, append_code, short_line, without_code
from commlayer.observe.event_log import EventLog
from commlayer.records import Epoch, Record, ServerInfo
from commlayer.transport import framing
from commlayer.transport.grpc.event_loop import event_loop
from commlayer.transport.grpc.stream_ends import AcceptStream
from commlayer.transport.handshake import RefusalLog
from commlayer.transport.keys.key_folder import Keys
from commlayer.transport.protocol import SERVER_BASE

log = logging.getLogger("commlayer")

TICK_S = 0.25
PROVE_S = 2.0
"""Seconds in which a connection whose call was refused may still make a call that proves the job's secret. After that the
refusal is logged."""
MAX_WORKERS = 64
"""Largest number of workers of a job with min_workers that is started without another number."""
Q = TypeVar("Q", bound=Record)


class Coordinator:
    """The coordinator of one job. The coordinator listens as soon as it is constructed.

    `over` is set when the job has begun, its last worker has left or died, and its sites have left. Sites use the key-value
    store until their scripts end.
    """

    def __init__(self, config: Config, *, workers: int = 0, servers: int = 0,
                 ended: threading.Event | None = None,
                 journal: CoordinatorJournal | None = None, embedded: bool = False, events: EventLog | None = None,
                 ca: str = "", invited: Sequence[str] = (), streams: bool = False) -> None:
        """Starts to listen, and starts a thread that detects failures.

        `workers`: number of workers to wait for; 0: the first worker's request decides. With the setting min_workers: the
        largest number of workers; 0: MAX_WORKERS. `ended`: an event to use as `over`.
        `journal`: records this job; a job that it already contains is resumed. `embedded`: True: a training process started
        this coordinator. All its members are in one cluster, so a silent process counts as dead at once. An embedded
        coordinator serves only one job; any other coordinator is replaced for the next job if its job failed. `events`: the log
        for the job's events. None: the coordinator creates a log. `ca`: folder of the job's CA, whose invitations this
        coordinator accepts; "": none. `invited`: names of the homes that should join. `streams`: True: a summation server in
        this process will call `serve_streams`, so peers that dial earlier are asked to try again.
        """
        least = 0 if embedded else config.min_workers
        if least and not workers:
            workers = max(MAX_WORKERS, least)
        if workers and config.min_workers > workers:
            raise InvalidInput("E-SETTING",
                               f"min_workers: got {config.min_workers}, allowed: at most the job's {workers} workers")
        for what, count in (("workers", workers), ("servers", servers)):
            if not 0 <= count <= SERVER_BASE:
                raise InvalidInput("E-SETTING", f"{what}: got {count}, allowed: 0 to {SERVER_BASE}")
        self.over, self._empty = ended or threading.Event(), threading.Event()
        self._journal, self._embedded = journal, embedded
        self.events = JobEvents(events or log_of_job())
        if journal is not None and journal.recovered is not None:
            self._state = resumed_state(journal.recovered, time.monotonic())
            log.warning("journal: resumed a running job of %d workers; to start another job, remove %s",
                        len(self._state.epoch.members) if self._state.epoch else self._state.workers, config.journal)
        else:
            self._state = membership.State(0 if least else workers, servers, min_workers=least,
                                           max_workers=workers if least else 0)
        self._lock = threading.Lock()
        self._config, self._hangs = config, StoreHangs()
        self._silent_s = settings.notice_s(config)
        """Seconds without a heartbeat after which a process counts as silent. A coordinator whose parent has ended runs for
        this long, so it can report the parent's death."""
        self._closing = threading.Event()
        self._revision = secrets.randbits(48)  # random, so it differs from that of a previous coordinator of this job
        self._watches: dict[str, asyncio.Event] = {}
        """Maps the token of a process whose Watch call waits to the event that ends the wait. Used on the event loop."""
        self._keys, self._refusals = Keys(config.keys) if config.keys else None, RefusalLog()
        self._plans = defaultdict[str, UploadedPlans](UploadedPlans)
        """Uploaded plans by the name of the certificate, so that no member replaces another's."""
        self._verifier = CallVerifier(config.token, self._keys)
        self._suspects: dict[str, tuple[str, str]] = {}
        """Maps a connection to its address and the name of a call that did not prove the job's secret. An entry is removed
        after PROVE_S seconds, or when a call proves the secret."""
        self._port = GrpcPort(self._keys, config.bind, config.port, self._refusals.refused)
        if streams:
            self._port.accept = lambda *_: False  # refuses streams for now
        if ca and self._keys is not None:
            # Imported late: it loads cryptography's certificate requests, which few coordinators need.
            from commlayer.cluster.keys.enrolment import EnrolmentServer

            self._port.enrolment = EnrolmentServer(Path(ca), self._keys, config.token)
        self._revoked: frozenset[int] = frozenset()
        self._rendezvous = RendezvousService(workers, config, self._lost, self._refusals, self._admission, journal, invited)
        if self._state.epoch is not None:
            self._rendezvous.begin()
            self.events.changed(membership.State(0, 0), self._state)
        self._port.start(RpcServer({
            CHALLENGE: self._challenge,
            "KvRequest": self._method("KvRequest", messages.KvRequest, self._rendezvous.handle),
            "PlanPart": self._method("PlanPart", messages.PlanPart, self._part),
            "Join": self._method("Join", messages.Join, self._join),
            "Heartbeat": self._method("Heartbeat", messages.Heartbeat, self._heartbeat),
            "Watch": self._method("Watch", messages.WatchRequest, self._watch),
            "Leave": self._method("Leave", messages.Leave, self._leave),
            "Status": self._method("Status", messages.StatusRequest, self._status_reply),
            "Events": self._method("Events", messages.EventsRequest, self._events),
        }, [self._port.streams()], self._protocol_error))
        self._ticker = threading.Thread(target=self._tick, name="commlayer-membership", daemon=True)
        self._ticker.start()

    @property
    def address(self) -> str:
        return settings.reachable_address(self._config.advertise, self._config.bind, self._port.number)

    @property
    def local_address(self) -> str:
        """The address for processes on this machine. A public address may be unreachable from here: few routers send a packet
        back to the network that it came from."""
        bind = self._config.bind
        return settings.join_host({"0.0.0.0": "127.0.0.1", "::": "::1"}.get(bind, bind), self._port.number)

    @property
    def _patience_s(self) -> float:
        return 0.0 if self._embedded else settings.reconnect_window_s(self._config)

    def close(self) -> None:
        """Stops listening. Idempotent.

        After the end of a job, first waits for servers to leave, at most dead_after_s plus one heartbeat interval.
        """
        with self._lock:
            over = membership.over(self._state)
            if over and self._journal is not None:
                self._journal.forget()
                self._journal = None  # servers that leave after this must not write the journal
        if over and not self._closing.is_set():
            self._empty.wait(self._config.dead_after_s + self._config.heartbeat_s)
        self._closing.set()
        event_loop().call_soon_threadsafe(self._end_watches)
        self._ticker.join(timeout=5.0)
        self._port.close()
        for peer in tuple(self._suspects):
            self._refuse(peer)

    def serve_streams(self, take: AcceptStream) -> None:
        """Passes data streams that arrive at this port to the summation server in this process, so the process needs only one
        port."""
        self._port.accept = take

    @property
    def state(self) -> membership.State:
        """The members and their registrations."""
        with self._lock:
            return self._state

    @property
    def failure(self) -> str:
        """Why the job failed; "" if it is running or all workers finished."""
        with self._lock:
            return membership.failure(self._state)

    def orphaned(self, pid: int) -> None:
        """Reports that process `pid` on this machine, the training process that started this coordinator, has exited. Its
        registrations are dead from now on. Then waits for the end of the job, at most until a process counts as silent."""
        with self._lock:
            self._set(membership.mark_exited(self._state, socket.gethostname(), pid))
        self.over.wait(self._silent_s)

    def _lost(self) -> dict[int, str]:
        """Returns the reason for each worker that died or left with an error, keyed by rank. Finished workers are not
        included, since they may still use the key-value store."""
        with self._lock:
            return {p.rank: p.dead or f"left the job: {p.left}" for p in self._state.registrations.values()
                    if p.join.kind == "worker" and (p.dead or p.left not in ("", messages.FINISHED))
                    and not membership.verdict_pending(self._state, p)}

    def _staying(self) -> bool:
        """Returns whether sites still use the coordinator. Call it with the lock held."""
        places = self._state.registrations.values()
        return self._rendezvous.staying({p.rank for p in places if p.join.kind == "worker" and p.dead})

    def _admission(self) -> AdmissionState:
        with self._lock:
            return epoch_change.admission(self._state, time.monotonic(), self._silent_s,
                                          max(self._patience_s, self._config.dead_after_s))

    def _register_site(self, request: messages.Join) -> messages.JoinReply:
        """Registers a site, or removes it. Evicts the workers of a site that has left before it has finished, and those of its
        previous process if it was restarted. Workers that finish leave by themselves, or servers report that they have closed
        their connections."""
        with self._lock:
            seen_s = {p.rank: p.seen_s for p in self._state.registrations.values() if p.join.kind == "worker" and p.present}
            still_s = membership.own_pause_s(self._state, time.monotonic())
        former = self._rendezvous.left
        self._rendezvous.replace_restarted_site(request, seen_s, still_s)
        self._evict_departed(former)  # before the site registers, which counts the workers that are left
        former = self._rendezvous.left
        reply = self._rendezvous.register(request)
        if request.leave != messages.FINISHED:
            self._evict_departed(former)
        return reply

    def _evict_departed(self, former: Collection[int]) -> None:
        """Evicts the workers of sites that have left, except for those that had left before (`former`)."""
        why = {rank: text for rank, text in self._rendezvous.left.items() if rank not in former}
        with self._lock:
            self._set(membership.evict_workers(self._state, why))

    def _challenge(self, nonce: bytes, peer: str) -> Encode:
        caller = self._port.caller(peer).certificate  # raises if TLS is required
        greeting = self._verifier.greeting(peer, nonce, caller.fingerprint if caller else b"")
        return lambda: greeting

    def _part(self, request: messages.PlanPart) -> Record:
        with self._lock:
            self._plans[request.certificate].add_part(request)
        return messages.HeartbeatReply()

    def _join(self, request: messages.Join) -> Record:
        if _revoked(request, self._revoked):  # revoked after the handshake: the connection will be closed soon
            return messages.JoinReply(append_code("E-CERTIFICATE-REVOKED",
                                                  f"the certificate of {request.certificate} was revoked"))
        if request.kind == "site":
            return self._register_site(request)
        with self._lock:
            if request.plan_digest and not request.plan:
                request = msgspec.structs.replace(request, plan=self._plans[request.certificate].whole(request.plan_digest))
            is_registered = request.token in self._state.registrations
            if not self._embedded and not is_registered and (why := membership.failure(self._state)):
                if request.kind == "worker" and request.rank >= self._state.workers > 0:  # it was to join the job that ended
                    return messages.JoinReply(append_code("E-JOB-ENDED", f"the job ended before this home joined "
                                                          f"({without_code(why)})"))
                return messages.JoinReply(missing=(f"the previous job has ended ({without_code(why)}); the coordinator is "
                                                   "starting the next one"))
            late = self._state.epoch is not None and not is_registered and request.kind == "worker"
            state, reply = (epoch_change.admit if late else membership.join)(self._state, request, time.monotonic())
            self._set(state)
        if reply.error:
            self._refusals.denied(reply.error)
        return reply

    def _heartbeat(self, request: messages.Heartbeat) -> Record:
        with self._lock:
            now = time.monotonic()
            state, _ = membership.heartbeat(self._state, request.token, now, request)
            self._set(epoch_change.record_overdue(state, request.token, request.overdue))
            self.events.received(request, self._state, now)
            return self._reply_to(request.token, request.generation)

    def _reply_to(self, token: str, generation: int = 0) -> messages.HeartbeatReply:
        """Returns what the process should know: see membership.reply_to. Call it with the lock held."""
        reply = epoch_change.explain_end(self._state, membership.reply_to(self._state, token, generation))
        return msgspec.structs.replace(reply, job_done=reply.job_done and not self._staying(), revision=self._revision)

    async def _watch(self, request: messages.WatchRequest) -> Record:
        """Waits until there is a newer revision than that of the request, and returns what the process should know."""
        if (former := self._watches.get(request.token)) is not None:
            former.set()
        with self._lock:
            reply = self._reply_to(request.token, request.generation)
        if reply.unknown_token or reply.revision != request.revision or self._closing.is_set():
            return reply
        changed = self._watches[request.token] = asyncio.Event()
        try:
            await changed.wait()
        finally:
            if self._watches.get(request.token) is changed:
                del self._watches[request.token]
        with self._lock:
            return self._reply_to(request.token, request.generation)

    def _end_watches(self) -> None:
        for changed in self._watches.values():
            changed.set()

    def _leave(self, request: messages.Leave) -> Record:
        with self._lock:
            self._set(membership.leave(self._state, request.token, request.reason, request.exchanges))
            return self._reply_to(request.token)  # a worker that has finished learns which peers have not

    def _status_reply(self, request: messages.StatusRequest) -> Record:
        with self._lock:
            state, epoch = self._state, self._state.epoch
        present = [place for place in state.registrations.values() if place.present]
        servers = tuple(ServerInfo(p.rank, p.join.address, colocated=p.join.colocated, streams=p.join.streams)
                        for p in present if p.join.kind == "server")
        reply = StatusReply(version(), PROTOCOL, framing.VERSION, time.time(), state.limit,
                            sum(p.join.kind == "worker" for p in present), servers, min_workers=state.min_workers,
                            caller=request.caller, port=self._port.number)
        if epoch is None:
            return msgspec.structs.replace(reply, data=bytes(max(0, min(request.wanted, MAX_STATUS_NBYTES))))
        admission, shut = self._admission(), self._rendezvous.closed_reason()
        return msgspec.structs.replace(reply, begun=True, plan=epoch.plan, closed_reason=shut, full=admission.full,
                                       free_seats=0 if shut else state.limit - admission.size)

    def _events(self, request: messages.EventsRequest) -> Record:
        log = self.events.log
        batch = log.since(request.cursor if request.log == log.id else 0, most=8192,
                          most_nbytes=messages.MAX_REPLY_EVENTS_NBYTES)
        return messages.EventsReply(log.id, batch.cursor, batch.lines, time.time())

    def _tick(self) -> None:
        begin = time.monotonic()
        while not self._closing.wait(TICK_S):
            with self._lock:
                ended_ranks = {p.rank for p in self._state.registrations.values() if p.join.kind == "worker" and not p.present}
                still_s = membership.own_pause_s(self._state, time.monotonic())
            self._rendezvous.tick(ended_ranks, still_s)
            with self._lock:
                before = self._state
                state = membership.tick(before, time.monotonic(), self._config.dead_after_s, self._patience_s, self._silent_s)
                for token, place in state.registrations.items():
                    if place.left and not before.registrations[token].left:
                        log.warning("%s: ended while no coordinator was running, according to its servers", place.peer)
                self._set(self._without_awaited(state))
                settled = epoch_change.settled_generation(self._state)
            event_loop().call_soon_threadsafe(self._rendezvous.forget, settled)
            try:
                self._drop_revoked()
                self._note_waits(begin)
            except Exception:  # without this thread no failure would be detected
                log.exception("failed to disconnect processes with revoked certificates, or to note waits; retrying in the "
                              "next tick")

    def _note_waits(self, begin: float) -> None:
        """Adds events about what the job waits for. `begin`: when this coordinator began to wait for processes."""
        with self._lock:
            state, now = self._state, time.monotonic()
        pending, dead_after_s = self._rendezvous.pending_waits(), self._config.dead_after_s
        self.events.waits(list_waits(state, pending, now, begin, self._silent_s, dead_after_s, self._patience_s), now)
        if state.epoch is None:
            self.events.homes(self._rendezvous.homes())

    def _without_awaited(self, state: membership.State) -> membership.State:
        """Evicts workers for which other workers have waited too long in the key-value store."""
        if not state.min_workers:
            return state
        late = self._hangs.find(state, self._rendezvous.pending_waits(), time.monotonic(), self._config, self._patience_s)
        return membership.evict_workers(state, late)

    def _drop_revoked(self) -> None:
        revoked = self._keys.revoked() if self._keys else self._revoked
        if revoked == self._revoked:
            return
        self._port.drop(revoked)
        with self._lock:
            state = self._state
            for token, place in state.registrations.items():
                if _revoked(place.join, revoked):
                    state = membership.evict(state, [token], f"its certificate ({place.join.certificate}) was revoked")
            self._set(state)
            self._revoked = revoked

    def _set(self, state: membership.State) -> None:
        """Replaces the coordinator's state by `state`. Starts a new epoch if enough workers are left, writes the journal,
        answers Watch calls, and logs what has changed. Call it with the lock held, so that no reply reports a change before the
        change is in the journal."""
        before = self._state
        if membership.has_news(before, state):
            self._change(before, epoch_change.next_epoch(state))
        else:  # nearly all heartbeats
            self._state = state
        if membership.over(self._state) and not self._staying():
            self.over.set()
        if membership.empty(self._state):
            self._empty.set()

    def _change(self, before: membership.State, state: membership.State) -> None:
        self._state, epoch, former = state, state.epoch, before.epoch
        if epoch is not None and former is None:
            self._rendezvous.begin()  # first, since a journal with registrations must also have the sites' values
        if epoch is not None:
            if self._journal is not None:
                self._journal.write(CoordinatorRecord(self.local_address, self._journal.token, state))
            self._revision += 1
            event_loop().call_soon_threadsafe(self._end_watches)
        for token, place in state.registrations.items():
            known = before.registrations.get(token)
            if known is not None and place.dead and not known.dead:
                log.warning("%s: %s", place.peer, short_line(place.dead, MAX_PEER_TEXT_CHARS))
        self.events.changed(before, state)
        if epoch is not None and (former is None or epoch.generation != former.generation):
            self._log_epoch(epoch, former)

    def _log_epoch(self, epoch: Epoch, former: Epoch | None) -> None:
        if former is None:
            log.info("all joined: workers: %d, servers: %d, plan %s", len(epoch.members), len(epoch.servers),
                     epoch.plan or "none")
            if self._state.min_workers and (unable := epoch_change.inelastic_workers(self._state)):
                log.warning("min_workers %d has no effect: %s cannot continue after other workers leave",
                            self._state.min_workers, ", ".join(unable))
            return
        departed = [f"worker {m.rank}" for m in former.members if m not in epoch.members]
        finished = {p.peer for p in self._state.registrations.values() if p.left == messages.FINISHED}
        names = ", ".join(name + " (finished)" * (name in finished) for name in departed)
        new = ", ".join(f"worker {m.rank}" for m in epoch.members if m not in former.members)
        log.info("continuing with %d workers%s%s", len(epoch.members), names and f"; left: {names}", new and f"; joined: {new}")

    def _method(self, name: str, kind: type[Q], act: Callable[[Q], Record | Awaitable[Record]]) -> Answer:
        """Wraps the handler `act` of a call: verifies and decodes the request, and calls `act`."""

        async def answer(data: bytes, peer: str) -> Encode:
            reply = act(self._opened(name, kind, data, peer))
            record = reply if isinstance(reply, Record) else await reply
            return lambda: self._verifier.sealed(data, messages.pack(record))

        return answer

    def _opened(self, name: str, kind: type[Q], data: bytes, peer: str) -> Q:
        """Verifies a call, and returns its decoded and sanitized request. Adds the caller's certificate or address to some."""
        address, _, caller = self._port.caller(peer)
        try:
            body = self._verifier.opened(peer, name, data, caller.fingerprint if caller else b"")
        except AuthenticationFailed:
            if peer not in self._suspects:
                self._suspects[peer] = self._port.where(peer), name
                event_loop().call_later(PROVE_S, self._refuse, peer)
            raise
        self._suspects.pop(peer, None)
        request = sanitize(messages.unpack(body, kind, peer))
        if isinstance(request, messages.StatusRequest):
            return msgspec.structs.replace(request, caller=address)
        if isinstance(request, PlanPart):
            return msgspec.structs.replace(request, certificate=caller.name if caller else "")
        if isinstance(request, messages.Join):
            certified = {"certificate": caller.name, "serial": f"{caller.serial:x}"} if caller else {}
            return msgspec.structs.replace(request, **{"certificate": "", "serial": "", **certified},
                                           dials_only=caller is not None and caller.dials_only)
        return request

    def _refuse(self, peer: str) -> None:
        """Logs that a connection was refused, if it has made no call that proves the job's secret since. The first calls of a
        member that reconnects use the challenge of its previous connection. Calls with an outdated challenge are refused, and
        the member repeats them with a new proof."""
        if (suspect := self._suspects.pop(peer, None)) is not None:
            where, name = suspect
            self._refusals.refused(where, f"its {name} call does not prove that the caller knows the job's secret")

    def _protocol_error(self, peer: str, error: CorruptFrame) -> str:
        """Returns the error for a caller that broke the protocol. The caller's connection is closed after the reply with the
        error."""
        where = self._port.where(peer)
        self._refusals.refused(where, error.what)
        self._port.distrust(peer)
        return append_code(error.code, f"{where}: {error.what}")


def _revoked(request: messages.Join, serials: frozenset[int]) -> bool:
    return bool(request.serial) and int(request.serial, 16) in serials


class StoreHangs:
    """Finds workers that hang: other workers wait in the key-value store for keys that the hung worker has to write."""

    def __init__(self) -> None:
        self.suspects: dict[int, float] = {}
        """Maps a rank to the time at which its worker was first found to hang."""
        self._waited: dict[int, float] = {}
        """Maps a rank to the time at which its worker was last waiting for other ranks."""

    def find(self, state: membership.State, pending: Sequence[PendingWait], now: float, config: Config, patience_s: float
             ) -> dict[int, str]:
        """Returns the reason for each worker that hangs, keyed by rank. A worker counts as hung only after one more heartbeat
        interval, because an unread message may show that the worker is active."""
        self._waited |= {rank: now for one in pending for rank in one.waited_s}
        ago_s = {rank: now - last for rank, last in self._waited.items()}
        late = epoch_change.hung_in_store(state, pending, config.deadline_s, ago_s, patience_s)
        self.suspects = {rank: self.suspects.get(rank, now) for rank in late}
        return {rank: why for rank, why in late.items() if now - self.suspects[rank] >= config.heartbeat_s}

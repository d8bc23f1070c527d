"""Runs a Summation over a transport: receives from all members, sends replies, reports which members a sum waits for.

The transport has one receive thread per member, and contributions are added on these threads. Buckets of different members are
therefore added in parallel. Sends on these threads only queue.
"""

from __future__ import annotations

import itertools
import logging
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable

import msgspec

from commlayer.cluster.calls import messages
from commlayer.cluster.servers.bucket_sum import Reply, Stall
from commlayer.cluster.servers.gather import ROW_BUCKET
from commlayer.cluster.servers.summation import Summation
from commlayer.errors import (
    MAX_PEER_TEXT_CHARS,
    CommError,
    CorruptFrame,
    Damaged,
    PeerEnded,
    PeerLost,
    append_code,
    short_line,
)
from commlayer.records import Record
from commlayer.transport.endpoint import StreamTransport
from commlayer.transport.protocol import (
    NUMBERED,
    Flag,
    Handle,
    Header,
    Kind,
    Message,
    peer_name,
)

log = logging.getLogger("commlayer")

TICK_S = 0.25
MOST_STEP = (1 << 32) - 1
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


def read_stalled(message: Message) -> Stalled:
    return messages.unpack(message.body, Stalled, peer_name(message.peer), "a STALLED frame")


class Joins(Record, frozen=True):
    """Body of a PLAN frame with the flag ABANDON: a worker joins the job."""

    number: int
    """The new number of workers that have joined."""
    member: int
    generation: int
    """Generation of a coordinator's epoch with this member."""


class SumServer:
    """Serves one Summation's members over a transport, from construction until close()."""

    def __init__(
        self, core: Summation, transport: StreamTransport, members: Iterable[int], *, stall_s: float,
        recycle: Callable[[memoryview], None] = lambda _: None, replan: Callable[[bytes, int], Summation] | None = None,
        pace: Callable[[float], None] = lambda _: None, admit: Callable[[Joins, int], None] | None = None,
    ) -> None:
        """Handles the transport's messages from now on. Workers that are no members yet may request results. `recycle`
        receives the bodies of messages that have been added, for reuse. `replan` creates the Summation of a new plan. `pace` is
        called with this machine's measured upload rate in bit/s. `admit` is called with each worker that joins, and the member
        that reports it; None if members never change."""
        self.core, self._transport, self._stall_s, self._recycle = core, transport, stall_s, recycle
        self._members = tuple(members)
        self._dropped: dict[int, str] = {}
        self._lock = threading.Lock()
        self._ended: set[str] = set()
        self._reported: dict[int, tuple[Stall, float]] = {}
        self._stalls: list[Stall] = []
        """Sums that waited for contributions at the last check."""
        self._last_numbers: dict[int, int] = {}
        """Maps a member to the sequence number of its last completed request. Requests arrive in order, some of them twice."""
        self._probes = Counter[int]()
        """Maps a member to the bytes of its pending probes."""
        self._replan, self._admit, self.switching = replan, admit, threading.Lock()
        self._pace = pace
        self._failed: CommError | None = None
        self._failed_s = 0.0
        self._closing = threading.Event()
        transport.arrived, transport.ended = self._take, self._note_end
        self._thread = threading.Thread(target=self._watch, name="commlayer-stalls", daemon=True)
        self._thread.start()

    def _note_end(self, worker: int, error: CommError) -> None:
        """Records the end of a connection; the heartbeats show whether the member is dead."""
        if isinstance(error, PeerEnded):
            self._ended.add(peer_name(worker))
        elif isinstance(error, CorruptFrame) and not isinstance(error, Damaged):
            self._drop(error)  # the member broke the frame format, so its connection has ended already

    def dropped(self) -> dict[int, str]:
        """Maps each member that was disconnected because it broke the protocol to the reason. Members that have left the job
        are not included."""
        with self._lock:
            return {m: why for m, why in self._dropped.items() if m in self._members}

    def overdue(self, limit_s: float) -> tuple[int, tuple[int, ...]] | None:
        """Returns the earliest step whose sums wait for contributions, and the members for which a sum of that step has waited
        `limit_s`. None if no sum waits.

        Members are blamed only if at least as many have contributed as are missing, because a small group of contributors may
        itself delay the others elsewhere. Dropped members are not listed, since `dropped` reports them.
        """
        # The bucket of rows counts rows instead of steps.
        stalls, now = [s._replace(step=MOST_STEP) if s.bucket == ROW_BUCKET else s for s in self._stalls], time.monotonic()
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

    def _take(self, message: Message) -> None:
        """Handles one message. After an error the transport still delivers the sender's later messages, so a faulty member is
        dropped by its number."""
        if self._failed is not None:
            return
        try:
            self._send(self._replies(message))
        except CorruptFrame as error:
            self._drop(error)
        except Exception as error:
            self._fail(message.header, error)

    def _replies(self, message: Message) -> list[Reply]:
        h = message.header
        if h.kind == Kind.PUSH:
            return self.core.push(message, time.monotonic(), self._release)
        if h.kind not in NUMBERED or not h.used:
            return self._handle(message)
        if h.used <= self._last_numbers.get(message.peer, 0):
            return self.core.reply_to_repeat(message) if h.kind != Kind.PLAN else self._handle(message)
        replies = self._handle(message)
        self._last_numbers[message.peer] = h.used
        return replies

    def _send(self, replies: Iterable[Reply]) -> None:
        """Sends replies. Members that get the same one get one frame."""
        for _, group in itertools.groupby(replies, key=lambda reply: (id(reply.header), id(reply.body))):
            same = [*group]
            self._transport.send_all([reply.peer for reply in same], same[0].header, same[0].body)

    def _release(self, added: Message) -> None:
        self._recycle(added.body)

    def _handle(self, message: Message) -> list[Reply]:
        match message.header.kind:
            case Kind.STATE_GET:
                return self.core.snapshot(message)
            case Kind.STATE:
                return self.core.restore(message)
            case Kind.FOLLOW:
                return self.core.follow(message)
            case Kind.AGAIN:
                return self.core.answer_reconnected(message)
            case Kind.UNDO:
                self.core.undo(message)
                return []
            case Kind.PROBE:
                self._echo(message)
                return []
            case Kind.PACE:
                self._pace(float(message.header.used))
                return []
            case Kind.PLAN if message.header.flags & Flag.ABANDON:
                if self._admit is None:
                    raise CorruptFrame("reports a worker that joins, but the members of this job cannot change (min_workers is "
                                       "not set)", peer=peer_name(message.peer))
                return [self._add(message, self._admit)]
            case Kind.PLAN if self._replan is not None:
                return [self._switch(message, self._replan)]
            case kind:
                raise CorruptFrame(f"sent a {Kind(kind).name} message, which a server does not accept",
                                   peer=peer_name(message.peer))

    def _echo(self, message: Message) -> None:
        """Answers a probe."""
        h, peer = message.header, message.peer
        nbytes = max(h.used, LEAST_PROBE_NBYTES)
        with self._lock:
            pending = self._probes[peer] + nbytes
            if pending > MAX_PROBE_NBYTES:
                raise CorruptFrame(f"requests probe replies of {pending} bytes at once, allowed {MAX_PROBE_NBYTES}",
                                   peer=peer_name(peer))
            self._probes[peer] = pending

        def sent(_: Handle) -> None:
            with self._lock:
                self._probes[peer] -= nbytes

        answer = h._replace(kind=Kind.PROBE_OK, sender=self.core.peer, used=0)
        self._transport.send(peer, answer, _ZEROS[: h.used]).on_done(sent)

    def _switch(self, message: Message, replan: Callable[[bytes, int], Summation]) -> Reply:
        """Switches to a new plan between two steps, when no sum is in progress. A plan that the server cannot apply changes
        nothing."""
        generation, problem, former = message.header.generation, "", self.core
        with self.switching:
            if generation == self.core.generation + 1 and not self.core.busy():
                try:
                    self.core = replan(bytes(message.body), generation)
                except Exception as error:  # nothing has changed, so one member's plan must not end the server
                    problem = _reason(error)
            elif generation != self.core.generation:
                problem = "a sum is in progress" if generation == self.core.generation + 1 else \
                    f"generation {generation} does not follow the server's generation {self.core.generation}"
        if former is not self.core:
            self._send(former.end_follows())
        return self._plan_ok_reply(message, problem)

    def _add(self, message: Message, admit: Callable[[Joins, int], None]) -> Reply:
        """Adds a worker to the members, at a step that has not begun. Every member reports it."""
        joins = messages.unpack(message.body, Joins, peer_name(message.peer), "a PLAN frame with a worker that joins")
        admit(joins, message.peer)  # may wait for the coordinator
        with self.switching:
            new = {joins.member} - self.core.gone
            self._members = (*self._members, *(new - {*self._members}))
        return self._plan_ok_reply(message, "")

    def remove(self, gone: Collection[int]) -> None:
        """Ends all waits for workers that have left the job, their requests, and their connections. Sends the results of sums
        that are complete without them."""
        with self.switching:
            core = self.core
            self._members = tuple(member for member in self._members if member not in gone)
        self._reported.clear()
        try:
            for found in core.remove(gone, self._release):
                if isinstance(found, CorruptFrame):
                    self._drop(found)
                else:
                    self._send([found])
        except Exception as error:
            self._fail(Header(Kind.PUSH), error)
        for member in gone:
            self._transport.abort(PeerLost("is no longer a member of the job", peer=peer_name(member), code="E-EPOCH-ENDED"),
                                  member)

    def _plan_ok_reply(self, message: Message, problem: str) -> Reply:
        self._reported.clear()
        return Reply(message.peer, message.header._replace(kind=Kind.PLAN_OK, sender=self.core.peer), problem.encode())

    def _drop(self, error: CorruptFrame) -> None:
        """Drops a member that broke the protocol. The coordinator is informed by the next heartbeat. The other members are
        informed by the stall report of the sum that waits for the dropped member."""
        member, why = int(error.peer.removeprefix("worker ")), short_line(append_code(error.code, error.what),
                                                                          MAX_PEER_TEXT_CHARS)
        with self._lock:
            if member in self._dropped:
                return
            self._dropped[member] = why
        log.warning("dropped %s", short_line(error, MAX_PEER_TEXT_CHARS))
        self._transport.abort(error, member)

    def _fail(self, h: Header, error: Exception) -> None:
        """Handles a failure of this server: no sum can be trusted, so all members are sent the reason and disconnected."""
        what = short_line(f"failed: {type(error).__name__}: {error}", MAX_PEER_TEXT_CHARS)
        with self._lock:
            if self._failed is not None or self._closing.is_set():
                return
            self._failed_s = time.monotonic()
            self._failed = CommError(what, peer=peer_name(self.core.peer), step=h.step, bucket=h.bucket)
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
        """Sends reports about sums that wait for contributions. Only this thread checks for such sums: sums are locked while
        they are journaled, and a disk may block."""
        self._stalls = self.core.stalled(math.inf)
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
        with self._lock:
            dropped = {m: self._dropped[m] for m in stall.missing if m in self._dropped}
        for member in stall.waiting:
            self._send_stalled(member, Stalled(stall.bucket, stall.step, stall.missing, dropped))

    def _send_stalled(self, member: int, what: Stalled) -> Handle:
        header = Header(Kind.STALLED, self.core.generation, sender=self.core.peer)
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

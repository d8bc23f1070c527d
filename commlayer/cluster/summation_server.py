"""Runs a Summation over a transport: receives from all members, sends replies, reports which members a sum waits for.

Contributions are added on the transport's receive threads, one per member, so that buckets of different members are added in
parallel. Sends on these threads only queue.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Iterable

import msgspec

from commlayer.cluster.summation import Summation
from commlayer.cluster.summation_cell import Reply, Stall
from commlayer.cluster.view_change import ViewChange, read_change
from commlayer.errors import CommError, CorruptFrame, Damaged, PeerEnded, PeerLost, coded, one_line, short_line
from commlayer.records import MALFORMED, Record
from commlayer.transport.protocol import NUMBERED, Flag, Handle, Header, Key, Kind, Message, Transport, key, peer_name

log = logging.getLogger("commlayer")

TICK_S = 0.25
REPEAT_S = 2.0
"""A stall report is repeated at this interval, since a missing member may have left in the meantime."""
MAX_PROBE_NBYTES = 16 << 20
"""Of all replies to probes that are being sent to one member."""
MAX_PROBES = 1024
"""Replies to probes that are being sent to one member. A member may probe again before this end notes that a reply is out."""
FAREWELL_S = 2.0
"""After a failure of the server: how long its reason may take to reach the members before their connections end."""
MOST_REASON = 300
"""Longest reason for a drop, in characters. Every heartbeat to the coordinator lists all dropped members."""


class Stalled(Record, frozen=True):
    """Body of a STALLED frame: the sum of this bucket and step waits for these peers."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    dropped: dict[int, str] = msgspec.field(default_factory=dict)
    """Of these peers, those that this server has dropped, and why. They will not contribute."""
    failed: str = ""
    """If not empty: the server itself has failed and will send no sums."""


def stalled_key(generation: int) -> Key:
    """All STALLED frames have this key, so that one posted receive takes them; the bucket and step are in the body."""
    return key(Header(Kind.STALLED, generation))


def follow_stalls(transport: Transport, server: int, generation: int, told: Callable[[Stalled], None]) -> None:
    """On a member: calls told() with each stall report of that server, on the transport's thread."""

    def arrived(handle: Handle) -> None:
        if handle.error() is None:
            try:
                told(read_stalled(handle.message()))
            finally:  # also after a malformed report; after told(), so that reports stay in order
                follow_stalls(transport, server, generation, told)

    transport.recv(server, stalled_key(generation)).on_done(arrived)


def read_stalled(message: Message) -> Stalled:
    try:
        return msgspec.msgpack.decode(message.body, type=Stalled)
    except MALFORMED as error:
        raise CorruptFrame(f"STALLED is malformed: {one_line(error)}", peer=peer_name(message.peer)) from None


Regroup = Callable[[ViewChange, int, int], Callable[[], Summation]]
"""Checks a view change, given with its generation and sender; may block. Returns a function that makes the new members'
Summation, to be called after the end of the former one. Raises CorruptFrame if the sender broke the protocol, ValueError if the
change cannot be served."""


class SumServer:
    """Serves until close()."""

    def __init__(
        self, core: Summation, transport: Transport, members: Iterable[int], *, stall_s: float,
        recycle: Callable[[memoryview], None] = lambda _: None, replan: Callable[[bytes, int], Summation] | None = None,
        pace: Callable[[float], None] = lambda _: None, regroup: Regroup | None = None,
        out: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        """`recycle` takes back the bodies of messages that have been added. `replan` makes the Summation of a new plan. `pace`
        is called with this machine's measured upload rate in bit/s. `regroup`: None if members never change. `out` is called
        for each dropped member, with the reason."""
        self._core, self._transport, self._stall_s, self._recycle = core, transport, stall_s, recycle
        self._members = tuple(members)
        self._numbers = {peer_name(m): m for m in self._members}
        self._dropped: dict[int, str] = {}
        self._out, self._dropping = out, threading.Lock()
        self._ended: set[str] = set()
        self._told: dict[int, tuple[Stall, float]] = {}
        self._stalls: list[Stall] = []
        """Sums that waited at the last check."""
        self._probes: dict[int, list[tuple[Handle, int]]] = {}
        """By member: its probe replies being sent, each with its size in bytes."""
        self._heard: dict[int, int] = {}
        """By member: the number of its last completed request. Requests arrive in order, some of them twice."""
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
        """Handles all messages that have arrived, then posts a receive."""
        while True:
            handle = self._transport.recv(member)
            if not handle.done():
                handle.on_done(self._arrived)
                return
            if (error := handle.error()) is not None or self._failed is not None:
                self._note_end(error)
                return  # the connection ended; heartbeats decide whether the member is dead
            self._take(handle.message())

    def _note_end(self, error: CommError | None) -> None:
        if isinstance(error, PeerEnded):
            self._ended.add(error.peer)
        elif isinstance(error, CorruptFrame) and not isinstance(error, Damaged):
            self._drop(error)  # it broke the frame format, so its connection has ended already

    def dropped(self) -> dict[int, str]:
        """Members that broke the protocol, and how."""
        with self._dropping:
            return {m: why for m, why in self._dropped.items() if m in self._members}

    def overdue(self, limit_s: float) -> tuple[int, tuple[int, ...]] | None:
        """The earliest step whose sums wait, and the members that kept a sum of it waiting for `limit_s`. None if none waits.

        Members are blamed only if at least as many have contributed as are missing: a small group may itself be what delays
        the others elsewhere. Dropped members are not listed here, since `dropped` reports them.
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
        """Members that have closed their connections in order."""
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
            for reply in self._answers(message):
                sent = self._transport.send(reply.peer, reply.header, reply.body)
                if reply.header.kind == Kind.PROBE_OK:
                    self._probes.setdefault(reply.peer, []).append((sent, len(reply.body)))
        except CorruptFrame as error:
            self._drop(error)
        except Exception as error:
            self._fail(message, error)

    def _answers(self, message: Message) -> list[Reply]:
        h = message.header
        if h.kind == Kind.PUSH:
            return self._core.push(message, time.monotonic(), self._release)
        if h.kind not in NUMBERED or not h.used:
            return self._done(message)
        if h.used <= self._heard.get(message.peer, 0):
            return self._core.repeated(message) if h.kind != Kind.PLAN else self._done(message)
        replies = self._done(message)
        self._heard[message.peer] = h.used
        return replies

    def _done(self, message: Message) -> list[Reply]:
        kind = message.header.kind
        if kind == Kind.STATE_GET:
            return self._core.snapshot(message)
        if kind == Kind.STATE:
            return self._core.restore(message)
        if kind == Kind.UNDO:
            self._core.undo(message)
            return []
        if kind == Kind.PROBE:
            return [self._echo(message)]
        if kind == Kind.PACE:
            self._pace(float(message.header.used))
            return []
        if kind == Kind.PLAN and message.header.flags & Flag.ABANDON:
            if self._regroup is None:
                raise CorruptFrame("PLAN of other members, in a job whose members stay", peer=peer_name(message.peer))
            return [self._move(message, self._regroup)]
        if kind == Kind.PLAN and self._replan is not None:
            return [self._switch(message)]
        raise CorruptFrame(f"{Kind(kind).name} is not for a server", peer=peer_name(message.peer))

    def _echo(self, message: Message) -> Reply:
        h = message.header
        under_way = [(handle, nbytes) for handle, nbytes in self._probes.get(message.peer, []) if not handle.done()]
        nbytes = h.used + sum(n for _, n in under_way)
        if nbytes > MAX_PROBE_NBYTES or len(under_way) >= MAX_PROBES:
            raise CorruptFrame(f"asks for probes of {nbytes} bytes with {len(under_way)} under way, allowed {MAX_PROBE_NBYTES} "
                               f"bytes and {MAX_PROBES}", peer=peer_name(message.peer))
        self._probes[message.peer] = under_way
        return Reply(message.peer, h._replace(kind=Kind.PROBE_OK, sender=self._core.peer, used=0), bytes(h.used))

    def _switch(self, message: Message) -> Reply:
        """Switches to a new plan between two steps, when no member has a sum under way. A plan that cannot be served changes
        nothing."""
        h = message.header
        problem = ""
        with self._switching:
            if h.generation != self._core.generation + 1:
                problem = "" if h.generation == self._core.generation else f"generation {h.generation} does not follow"
            elif self._core.busy():
                problem = "a sum is under way"
            else:
                assert self._replan is not None
                try:
                    self._core = self._replan(bytes(message.body), h.generation)
                except (ValueError, CommError) as error:
                    problem = str(error)
        self._told.clear()
        return Reply(message.peer, h._replace(kind=Kind.PLAN_OK, sender=self._core.peer), problem.encode())

    def _move(self, message: Message, regroup: Regroup) -> Reply:
        """Switches to other members in the middle of a step. The change is checked before any sum ends."""
        h, problem = message.header, ""
        change = read_change(message)
        if h.generation > self._core.generation:
            try:
                make = regroup(change, h.generation, message.peer)
            except ValueError as error:
                problem = str(error)
            else:
                self._give_way(change, h.generation, make)
        if not problem and h.generation < self._core.generation:
            problem = f"generation {h.generation} has ended"
        return Reply(message.peer, h._replace(kind=Kind.PLAN_OK, sender=self._core.peer), problem.encode())

    def _give_way(self, change: ViewChange, generation: int, make: Callable[[], Summation]) -> None:
        with self._switching:
            if generation > self._core.generation:
                self._core.end(change.step, change.undone)
                self._core = make()
                self._gather(tuple(m.rank for m in change.view.members))
        self._told.clear()

    def _gather(self, members: tuple[int, ...]) -> None:
        """Sets the members: disconnects those that are gone, and listens to new ones."""
        former, self._members = self._members, members
        for member in former:
            if member not in members:
                self._transport.abort(PeerLost("is no longer of the job", peer=peer_name(member)), member)
        for member in members:
            if member not in former:
                self._numbers[peer_name(member)] = member
                self._listen(member)

    def _release(self, message: Message) -> None:
        self._recycle(message.body)

    def _drop(self, error: CorruptFrame) -> None:
        """Drops a member that broke the protocol. The coordinator learns it by heartbeat, the other members by the stall
        report of the sum that waits for it."""
        member, why = self._numbers[error.peer], short_line(coded(error.code, error.what), MOST_REASON)
        with self._dropping:
            if member in self._dropped:
                return
            self._dropped[member] = why
        log.warning("dropped %s", error)
        self._out(member, why)
        self._transport.abort(error, member)

    def _fail(self, message: Message, error: Exception) -> None:
        """Handles a failure of this server: no sum can be trusted, so all members are sent the reason and disconnected."""
        h = message.header
        what = f"failed: {type(error).__name__}: {error}"
        with self._failing:
            if self._failed is not None or self._closing.is_set():
                return
            self._failed_s = time.monotonic()
            self._failed = CommError(what, peer=peer_name(self._core.peer), step=h.step, bucket=h.bucket)
        log.error("%s", self._failed, exc_info=error)
        for member in self._members:
            self._say(member, Stalled(h.bucket, h.step, (), failed=what))

    def _watch(self) -> None:
        while not self._closing.wait(TICK_S):
            if self._failed is not None:
                if time.monotonic() - self._failed_s >= FAREWELL_S:
                    self._transport.abort(self._failed)
                    return
                continue
            self._look()

    def _look(self) -> None:
        """Reports sums that wait. Only this thread checks them: sums are locked while they are journaled, and a disk may
        block."""
        self._stalls = self._core.stalled(math.inf)
        before = time.monotonic() - self._stall_s
        for stall in self._stalls:
            if stall.since <= before:
                self._tell(stall)

    def _tell(self, stall: Stall) -> None:
        now = time.monotonic()
        last, sent_s = self._told.get(stall.bucket, (None, 0.0))
        if last == stall and now - sent_s < REPEAT_S:
            return
        self._told[stall.bucket] = (stall, now)
        with self._dropping:
            dropped = {m: self._dropped[m] for m in stall.missing if m in self._dropped}
        for member in stall.waiting:
            self._say(member, Stalled(stall.bucket, stall.step, stall.missing, dropped))

    def _say(self, member: int, what: Stalled) -> Handle:
        header = Header(Kind.STALLED, self._core.generation, sender=self._core.peer)
        return self._transport.send(member, header, msgspec.msgpack.encode(what))

    def close(self, reason: CommError | None = None, flush_s: float | None = None) -> None:
        self._closing.set()
        self._thread.join(2.0)
        if reason is not None:
            self._transport.abort(reason)
        self._transport.close(flush_s)

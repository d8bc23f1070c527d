"""Runs a Summation over a transport: receives from every member, sends replies, says who is awaited. Knows no codec, no plan.

Contributions are taken on the carrier's receive threads, one per member, so buckets of different members are added in
parallel; a reply is only queued there.
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
from commlayer.errors import CommError, CorruptFrame, Damaged, PeerEnded, PeerLost, one_line
from commlayer.records import MALFORMED, Record
from commlayer.transport.protocol import NUMBERED, Flag, Handle, Header, Key, Kind, Message, Transport, key, peer_name

log = logging.getLogger("commlayer")

TICK_S = 0.25
REPEAT_S = 2.0
"""Whom a sum waits for is said again this often: who is missing may have left since."""
MAX_PROBE_NBYTES = 16 << 20
"""Of probes that a member has under way, together."""
MAX_PROBES = 1024
"""Answers under way to one member: it asks again when it has one, which may be before this end knows."""
FAREWELL_S = 2.0
"""After a failure of the server: how long its reason may take to the members before their connections end."""
MOST_REASON = 300
"""Characters of why somebody was dropped: with each heartbeat the coordinator hears of all who were."""


class Stalled(Record, frozen=True):
    """Body of a STALLED frame: the sum of this bucket and step waits for these peers."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    dropped: dict[int, str] = msgspec.field(default_factory=dict)
    """Who of them will not come, since this server has dropped it, and why."""
    failed: str = ""
    """Not empty: the server itself has failed, and no sum will come from it."""


def stalled_key(generation: int) -> Key:
    """STALLED frames all have this key, so that one posted receive takes them; what they are about is in the body."""
    return key(Header(Kind.STALLED, generation))


def follow_stalls(transport: Transport, server: int, generation: int, told: Callable[[Stalled], None]) -> None:
    """A member's side: calls told() with what that server says, from now on, on the carrier's thread."""

    def arrived(handle: Handle) -> None:
        if handle.error() is None:
            try:
                told(read_stalled(handle.message()))
            finally:  # also where that one was malformed; behind it, so that they are told in order
                follow_stalls(transport, server, generation, told)

    transport.recv(server, stalled_key(generation)).on_done(arrived)


def read_stalled(message: Message) -> Stalled:
    try:
        return msgspec.msgpack.decode(message.body, type=Stalled)
    except MALFORMED as error:
        raise CorruptFrame(f"STALLED is malformed: {one_line(error)}", peer=peer_name(message.peer)) from None


Regroup = Callable[[ViewChange, int, int], Callable[[], Summation]]
"""Judges a change, its generation and who sends it; it may wait. What it returns makes the Summation of the new members, behind
the end of the one before. CorruptFrame where the sender broke the protocol, ValueError where the change cannot be served."""


class SumServer:
    """Serves until close()."""

    def __init__(
        self, core: Summation, transport: Transport, members: Iterable[int], *, stall_s: float,
        recycle: Callable[[memoryview], None] = lambda _: None, replan: Callable[[bytes, int], Summation] | None = None,
        pace: Callable[[float], None] = lambda _: None, regroup: Regroup | None = None,
        out: Callable[[int, str], None] = lambda *_: None,
    ) -> None:
        """`recycle` takes back the bodies of messages that have been added. `replan` makes the Summation of a new plan. `pace`
        hears how many bit/s this machine's link carries out. `regroup`: None where members stay. `out` hears of each member
        that is dropped, and why."""
        self._core, self._transport, self._stall_s, self._recycle = core, transport, stall_s, recycle
        self._members = tuple(members)
        self._numbers = {peer_name(m): m for m in self._members}
        self._dropped: dict[int, str] = {}
        self._out, self._dropping = out, threading.Lock()
        self._ended: set[str] = set()
        self._told: dict[int, tuple[Stall, float]] = {}
        self._stalls: list[Stall] = []
        """Sums that waited when it last looked."""
        self._probes: dict[int, list[tuple[Handle, int]]] = {}
        """By member: its probes under way, and how many bytes they have asked for."""
        self._heard: dict[int, int] = {}
        """By member: the number of its last request that was done. Requests arrive in that order, some of them twice."""
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
        """Takes what has arrived, then leaves a receive behind."""
        while True:
            handle = self._transport.recv(member)
            if not handle.done():
                handle.on_done(self._arrived)
                return
            if (error := handle.error()) is not None or self._failed is not None:
                self._note_end(error)
                return  # this member is gone; heartbeats judge what that means
            self._take(handle.message())

    def _note_end(self, error: CommError | None) -> None:
        if isinstance(error, PeerEnded):
            self._ended.add(error.peer)
        elif isinstance(error, CorruptFrame) and not isinstance(error, Damaged):
            self._drop(error)  # it broke the format of frames, so its connection has ended already

    def dropped(self) -> dict[int, str]:
        """Members that broke the protocol, and how."""
        with self._dropping:
            return {m: why for m, why in self._dropped.items() if m in self._members}

    def overdue(self, limit_s: float) -> tuple[int, tuple[int, ...]] | None:
        """The earliest step whose sums wait here, and who has kept one of them waiting for so long. None if none waits.

        As many must have contributed as are missing: fewer may be what holds the others up elsewhere. Whom this server has
        dropped it tells of by that.
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
        """Members who have closed their ends in order."""
        return tuple(name for name in map(peer_name, self._members) if name in self._ended)

    def _arrived(self, handle: Handle) -> None:
        self._note_end(handle.error())
        if handle.error() is None and self._failed is None:
            message = handle.message()
            self._take(message)
            self._listen(message.peer)

    def _take(self, message: Message) -> None:
        """Whatever a message brings, the next ones of its sender are still taken: who must go is dropped by name."""
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
        asked = h.used + sum(nbytes for _, nbytes in under_way)
        if asked > MAX_PROBE_NBYTES or len(under_way) >= MAX_PROBES:
            raise CorruptFrame(f"asks for probes of {asked} bytes with {len(under_way)} under way, allowed {MAX_PROBE_NBYTES} "
                               f"bytes and {MAX_PROBES}", peer=peer_name(message.peer))
        self._probes[message.peer] = under_way
        return Reply(message.peer, h._replace(kind=Kind.PROBE_OK, sender=self._core.peer, used=0), bytes(h.used))

    def _switch(self, message: Message) -> Reply:
        """Between two steps, when no member has anything under way. A plan that cannot be served changes nothing."""
        h = message.header
        answer = ""
        with self._switching:
            if h.generation != self._core.generation + 1:
                answer = "" if h.generation == self._core.generation else f"generation {h.generation} does not follow"
            elif self._core.busy():
                answer = "a sum is under way"
            else:
                assert self._replan is not None
                try:
                    self._core = self._replan(bytes(message.body), h.generation)
                except (ValueError, CommError) as error:
                    answer = str(error)
        self._told.clear()
        return Reply(message.peer, h._replace(kind=Kind.PLAN_OK, sender=self._core.peer), answer.encode())

    def _move(self, message: Message, regroup: Regroup) -> Reply:
        """In the middle of a step: others are members from now on. Judged before anything ends."""
        h, answer = message.header, ""
        change = read_change(message)
        if h.generation > self._core.generation:
            try:
                make = regroup(change, h.generation, message.peer)
            except ValueError as error:
                answer = str(error)
            else:
                self._give_way(change, h.generation, make)
        if not answer and h.generation < self._core.generation:
            answer = f"generation {h.generation} has ended"
        return Reply(message.peer, h._replace(kind=Kind.PLAN_OK, sender=self._core.peer), answer.encode())

    def _give_way(self, change: ViewChange, generation: int, make: Callable[[], Summation]) -> None:
        with self._switching:
            if generation > self._core.generation:
                self._core.end(change.step, change.undone)
                self._core = make()
                self._gather(tuple(m.rank for m in change.view.members))
        self._told.clear()

    def _gather(self, members: tuple[int, ...]) -> None:
        """These are the members now."""
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
        """A member that breaks the protocol is out. The coordinator hears of it, and the others with the sum that waits for
        it."""
        member, why = self._numbers[error.peer], one_line(error.what)[:MOST_REASON]
        with self._dropping:
            if member in self._dropped:
                return
            self._dropped[member] = why
        log.warning("dropped %s", error)
        self._out(member, why)
        self._transport.abort(error, member)

    def _fail(self, message: Message, error: Exception) -> None:
        """This server's own failure: no sum can be trusted any more, so every member is told why and let go."""
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
        """On this thread alone: sums are locked while they are written down, and a disk may block."""
        self._stalls = self._core.stalled(math.inf)
        before = time.monotonic() - self._stall_s
        for stall in self._stalls:
            if stall.since <= before:
                self._tell(stall)

    def _tell(self, stall: Stall) -> None:
        now = time.monotonic()
        last, said_s = self._told.get(stall.bucket, (None, 0.0))
        if last == stall and now - said_s < REPEAT_S:
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

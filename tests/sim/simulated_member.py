"""A worker of a simulated job. It follows membership_change.py, but is a generator that yields where a thread would wait.

It yields whether it has done anything.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Generator, Sequence
from typing import Protocol, TypeVar

import msgspec

from commlayer.cluster.calls.messages import FINISHED, HeartbeatReply, KvReply, KvRequest, StoreKey
from commlayer.cluster.membership.epoch_change import EpochChange, wire_generation
from commlayer.engine.epochs import agreement
from commlayer.engine.epochs.agreement import AgreementOutcome, Claims, Vote, VoterState, key_of
from commlayer.records import Epoch
from commlayer.transport.inflight import InFlightRequests
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind
from tests.sim.simulated_coordinator import Desk, home_of
from tests.sim.simulated_server import Books, Part, body_of, number_of

T = TypeVar("T")
Doing = Generator[bool, None, T]
EVERYTHING = 1
"""The bit of a bucket's only slice."""


class Newer(Exception):
    """There is a newer epoch than the one to which this worker is switching."""


class Regroup(Exception):
    """The current step is abandoned."""


class Ends(Exception):
    """This worker ends; the message is the reason."""


class Lost(Ends):
    """A peer is gone, or the coordinator does not reply."""


class Job(Protocol):
    """The environment of a member; implemented in simulated_agreement.py."""

    counts: Counter[str]
    desk: Desk
    books: Books
    steps: int
    rounds: int
    buckets: range
    lazy: list[bool]
    """By step, whether its average is not applied."""
    meets: list[bool]
    """By step, whether all members meet in a collective of the script after it."""

    def server_of(self, bucket: int) -> int: ...

    def chance_of(self, part: float) -> bool:
        """Whether a fault with this probability happens now. Never after the calm has begun."""
        ...

    def loses(self) -> bool:
        """Whether a call or its reply is lost."""
        ...

    def late(self, request: KvRequest) -> None:
        """Delivers a lost request later."""
        ...

    def send(self, rank: int, server: int, header: Header, body: bytes) -> None: ...

    def reaches(self, rank: int, server: int) -> bool: ...

    def commits(self, member: Member) -> None: ...


class Member:
    def __init__(self, job: Job, rank: int, epoch: Epoch, servers: int) -> None:
        self._job, self.rank = job, rank
        self.epoch = self.newest = epoch
        self.step = 0
        self.phase = "computes"
        """The worker's current phase."""
        self.end = ""
        """Why the worker has ended; empty while it runs."""
        self.committed: list[dict[tuple[int, int], int]] = []
        """By step, the sum of each bucket and round."""
        self.inflight = [InFlightRequests(SERVER_BASE + s) for s in range(servers)]
        self.error: Exception | None = None
        self._results: dict[tuple[int, int], int] = {}
        self._totals = dict.fromkeys(job.buckets, 1.0)
        """Total weight that the next contribution assumes: at first 1, which is wrong, then that of the last result."""
        self._owes = False
        """Whether the servers do not yet know that the previous step was not applied."""
        self._answers: dict[tuple[int, int], str] = {}
        self._standing = VoterState()
        self._said: set[StoreKey] = set()
        self._agreed: tuple[Epoch, list[Vote]] | None = None
        self._left: dict[str, int] = {}
        self._verdict: Ends | None = None
        """The coordinator's final verdict on this worker, which is sent once."""
        self._beaten: tuple[int, int, int] = (-1, 0, 0)
        self._life, self._waiting = self._lives(), False

    # ---- called from outside

    def act(self) -> bool:
        """Advances the worker if it does not wait; returns whether it did anything."""
        if self.end:
            return False
        try:
            goes_on, self._waiting = not self._waiting, not next(self._life)
        except StopIteration:
            return True
        return goes_on or not self._waiting  # it may have done something before it began to wait

    def dies(self, why: str) -> None:
        self.end = why
        self._life.close()

    def beat(self) -> bool:
        """The work of the heartbeat thread."""
        generations = self.newest.generation, self.epoch.generation
        if self.end or self._beaten == (self._job.desk.version, *generations):
            return False
        if not self._job.loses():
            pulse, version = self._job.desk.beat(self.rank, *generations)
            if not self._job.loses():
                self._beaten = version, *generations
                self._pulse(pulse)
        return True

    def _pulse(self, pulse: HeartbeatReply) -> None:
        """Handles a heartbeat reply like client.py and worker_client.py."""
        self._left |= {gone.peer: gone.exchanges for gone in pulse.departed if gone.reason == FINISHED}
        if pulse.epoch is not None and pulse.epoch.generation > self.newest.generation:
            self.newest = pulse.epoch
        of = {f"worker {m.rank}" for m in self.newest.members}
        lost = [*pulse.failed, *(gone for gone in pulse.departed if gone.reason != FINISHED and gone.peer in of)]
        if pulse.dead:
            self._fails(Ends(f"declared dead: {pulse.dead}"))
        elif lost:
            self._fails(Lost(f"{lost[0].peer}: {lost[0].reason}"))

    def _fails(self, error: Ends) -> None:
        if self._verdict is None:
            self._verdict = error
            self._latch(error)

    def _latch(self, error: Exception) -> None:
        self.error = self.error or error

    def hear(self, server: int, header: Header, body: bytes) -> None:
        """Handles a message from a server."""
        if self.inflight[server].answer(header) is None:
            return
        if header.kind == Kind.PLAN_OK:
            self._answers[(server, header.generation)] = body.decode()
        elif header.generation == wire_generation(self.epoch):
            self._results[(header.bucket, header.round)] = number_of(body)
            if header.round + 1 < self._job.rounds:
                self._push(header.bucket, header.round + 1)
            else:
                self._totals[header.bucket] = header.weight

    # ---- a step

    def _lives(self) -> Doing[None]:
        try:
            while self.step < self._job.steps:
                yield from self._exchange()
                if self._job.meets[self.step - 1]:
                    yield from self._meets()
            self.phase = "leaves"
            yield True
            self._job.desk.leave(self.rank, FINISHED, self.step)
            self.end = FINISHED
        except Ends as error:
            self.end = str(error)
            if not self._job.loses():
                self._job.desk.leave(self.rank, str(error))

    def _exchange(self) -> Doing[None]:
        while True:
            try:
                for bucket in self._job.buckets:
                    self.phase = "pushes"
                    yield True
                    self._push(bucket, 0)
                yield from self._waits()
                break
            except Regroup:
                yield from self._goes()
        self.phase = "has all"
        yield True
        self.committed.append(dict(self._results))
        self._job.commits(self)
        self._owes = self._job.lazy[self.step]
        self.step += 1
        self._begins()

    def _begins(self) -> None:
        self._results.clear()

    def _push(self, bucket: int, r: int) -> None:
        """Sends a contribution."""
        generation = wire_generation(self.epoch)
        header = Header(Kind.PUSH, generation, self.step, bucket, round=r, codec=7, sender=self.rank, weight=1.0, used=1,
                        total=self._totals[bucket], undone=EVERYTHING * self._owes)
        body = self._job.books.coded(Part(self.rank, generation, self.step, bucket, r))
        self._asks(self._job.server_of(bucket), header, body)

    def _asks(self, server: int, header: Header, body: bytes) -> None:
        request = self.inflight[server].add(header, body)
        self._job.send(self.rank, server, request.header, body)

    def _here(self) -> bool:
        return len(self._results) == len(self._job.buckets) * self._job.rounds

    def _waits(self) -> Doing[None]:
        """Waits for the step's results, like Arrivals.wait and Worker.wait."""
        last_epoch: Epoch | None = None
        while not self._here() and self.error is None:
            self.phase = "waits"
            if last_epoch is self.newest:
                yield False
                continue
            last_epoch = self.newest
            try:
                yield from self._heeds()
            except (Ends, Regroup) as error:
                self._latch(error)
        if self.error is not None:
            raise self.error

    def _meets(self) -> Doing[None]:
        """A collective of the training script, which continues without members that are gone."""
        self.phase = "meets"
        name = f"script{self.epoch.generation}/{self.step}"
        want = tuple((name, m.rank) for m in self.epoch.members)
        request = KvRequest(home_of(self.rank), (((name, self.rank), b""),), want=want, without=True)
        while True:
            version = self._job.desk.version
            kept = yield from self._calls(request, for_ever=True)
            if None not in kept.values or kept.over:
                return
            while self._job.desk.version == version:
                yield False

    # ---- the agreement, as in membership_change.py

    def _finished(self) -> list[int]:
        return [self._left.get(f"worker {rank}", -1) for rank in agreement.departed_from(self.epoch, self.newest)]

    def _heeds(self) -> Doing[None]:
        if agreement.calls(self._standing, self.step, self.epoch, self.newest, self._finished(), lets_in=True):
            yield from self._agrees(self._here)

    def _goes(self) -> Doing[None]:
        while True:
            try:
                if self._agreed is None:
                    yield from self._agrees()
                    raise Ends("others have the step whole that was abandoned here")
                yield from self._goes_over()
                return
            except Newer:
                self._job.counts["goings over broken off"] += 1
            except Regroup:
                continue

    def _agrees(self, complete: Callable[[], bool] = lambda: False) -> Doing[None]:
        mine = Vote(self.step)
        while True:
            epoch = self.newest
            stay = agreement.staying(self.epoch, epoch)
            try:
                self.phase = "says where"
                words = yield from self._hears(epoch, agreement.first(self._standing, epoch, mine), stay, complete)
                self._standing, says = agreement.second(self._standing, epoch, mine, words, complete=complete())
                self.phase = "says for good"
                sure = (yield from self._hears(epoch, says, stay, complete)) if says is not None else []
            except Newer:
                self._job.counts["rounds broken off"] += 1
                continue
            self._standing, outcome = agreement.outcome(self._standing, epoch, self.step, words, sure, self._finished())
            self._job.counts[f"rounds {outcome.name.lower()}" if words else "rounds all here"] += 1
            if outcome is AgreementOutcome.WHOLE:
                return
            if outcome is AgreementOutcome.TOGETHER:
                self._agreed = epoch, words
                raise Regroup

    def _goes_over(self) -> Doing[None]:
        assert self._agreed is not None
        (epoch, words), self._agreed = self._agreed, None
        change = EpochChange(epoch, self.step, dict.fromkeys(self._job.buckets, EVERYTHING) if self._owes else {}, b"")
        for server in agreement.servers_to_notify(self.rank, self.epoch, epoch):
            self.phase = "tells servers"
            yield from self._tells(server.id, change)
        mine = words[[m.rank for m in epoch.members].index(self.rank)]
        self.phase = "is ready"
        yield from self._hears(epoch, Claims("ready", mine, False), [m.rank for m in epoch.members], lambda: False)
        self.epoch, self._owes = epoch, False
        self._follows()
        for unanswered in self.inflight:
            unanswered.end(wire_generation(epoch))
        self._standing = self._standing.entered()
        self._begins()
        self._totals = dict.fromkeys(self._job.buckets, 1.0)
        self._job.counts["gone over"] += 1
        self.phase = "has gone over"
        yield True

    def _follows(self) -> None:
        """The worker of a new epoch gets the coordinator's verdict, as from WorkerClient.subscribe."""
        self.error = self._verdict

    def _tells(self, server: int, change: EpochChange) -> Doing[None]:
        generation = wire_generation(change.epoch)
        header = Header(Kind.PLAN, generation, sender=self.rank, flags=Flag.ABANDON)
        self._asks(server, header, body_of(change))
        while (server, generation) not in self._answers and self._job.reaches(self.rank, server):
            yield False
        if answer := self._answers.pop((server, generation), "its connection has ended"):
            if not (yield from self._hears_of(change.epoch)):
                raise Ends(f"server {SERVER_BASE + server}: cannot go on with other members: {answer}")
            raise Newer

    def _hears(self, epoch: Epoch, says: Claims, among: Sequence[int], complete: Callable[[], bool]) -> Doing[list[Vote]]:
        """Like EpochMessages.tell and read."""
        want = tuple(key_of(epoch, says.what, rank) for rank in among)
        own = key_of(epoch, says.what, self.rank)
        put = () if own in self._said else ((own, msgspec.msgpack.encode(says.vote)),)
        while True:
            version, newer, is_here = self._job.desk.version, self.newest is not epoch, complete()
            try:
                kept = yield from self._calls(KvRequest(home_of(self.rank), put, want=want, generation=epoch.generation))
            except Lost:
                if self.newest is epoch and not (yield from self._hears_of(epoch)):
                    raise
                raise Newer from None
            put = ()
            rows = [row for row in kept.values if row is not None]
            if len(rows) == len(want) or (says.ends and complete()):
                self._said.add(own)
                return [Vote(*msgspec.msgpack.decode(row, type=tuple[int])) for row in rows] \
                    if len(rows) == len(want) else []
            if newer:
                raise Newer
            while (self._job.desk.version, self.newest is not epoch, complete()) == (version, newer, is_here):
                yield False

    def _hears_of(self, epoch: Epoch) -> Doing[bool]:
        """Whether there is a newer epoch. Waits until the worker has received it."""
        while self.newest is epoch:
            if self._job.chance_of(0.02):
                raise Ends("the coordinator did not answer in time")
            if self._job.desk.epoch.generation == epoch.generation:
                return False
            yield True
        return True

    def _calls(self, request: KvRequest, *, for_ever: bool = False) -> Doing[KvReply]:
        """Sends a request until a reply arrives. Lost requests are sent again, and some arrive late."""
        while True:
            yield True
            if self._job.loses():
                self._job.late(request)
            else:
                kept = self._job.desk.ask(request)
                yield True
                if not self._job.loses():
                    if kept.error:
                        raise Lost(f"{kept.lost}: {kept.error}")
                    return kept
            if not for_ever and self._job.chance_of(0.02):
                raise Ends("the coordinator did not answer")

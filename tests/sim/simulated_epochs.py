"""Simulates epochs: members, servers and a coordinator as state machines in a simulated network.

Members exchange buckets step by step, with the real Summation on each server. By seed, members die, hang and leave, workers
join, plans change, connections break, frames arrive late, twice or never, and servers are killed and resume from journals. The
coordinator's word that a member is gone arrives at each server at another time.
"""

from __future__ import annotations

import random
import struct
from collections import Counter
from collections.abc import Iterator
from typing import Any, NamedTuple

from commlayer.cluster.servers.summation import Summation
from commlayer.engine.epochs import schedule
from commlayer.engine.epochs.schedule import Change, Proposal
from commlayer.errors import CorruptFrame
from commlayer.transport.protocol import Flag, Header, Kind, Message

STEPS, MOST_EVENTS, ROWS = 9, 60_000, 0
"""ROWS: the bucket of rows, on server 0."""
_PART = struct.Struct("<iiiii")
"""Rank, step, bucket, round, number of the plan."""
_PROPOSAL = struct.Struct("<iii")


class Part(NamedTuple):
    """One member's contribution to one sum."""

    rank: int
    step: int
    bucket: int
    round: int
    plan: int


class Killed(Exception):
    """The server is killed in the middle of an operation."""


class RecordingOps:
    """Codec operations that record contributions. The result is the list of contributions, as of the codec "gather"."""

    codec, means, in_means, assumes_total = 7, False, True, True

    def __init__(self, world: World, rounds: int) -> None:
        self.rounds, self.bound, self._world = rounds, 4096, world

    def zeros(self, r: int) -> list[bytes]:
        return []

    def add(self, r: int, payload: memoryview, acc: list[bytes], first: bool) -> None:
        if first:
            acc.clear()
        acc.append(bytes(payload))

    def scale(self, acc: list[bytes], factor: float) -> None: ...

    def emit(self, r: int, acc: list[bytes], out: memoryview) -> int:
        data = b"".join(acc)
        out[: len(data)] = data
        return len(data)

    def undo(self, slices: int) -> bool:
        return False

    def skip(self) -> None: ...

    def begin_anew(self) -> None:
        self._world.problems.append("a residual was lost")

    def worth_giving_back(self, members: int) -> bool:
        return False

    def remember(self) -> bytes:
        return b""

    def recall(self, data: bytes, sent: memoryview) -> None: ...


class Frame(NamedTuple):
    """A message: a header with its body, or the record of a change, or the acknowledgement of one."""

    header: Header | None = None
    body: bytes = b""
    change: Change | None = None
    ack: int = 0

    @property
    def stream(self) -> object:
        """Frames of one stream stay in order; frames of different streams overtake each other."""
        return self.header.bucket if self.header is not None else "changes"


class Server:
    """One server process: the summation of the present plan and of the one before, and the changes it has heard of."""

    def __init__(self, world: World, number: int) -> None:
        self.world, self.number = world, number
        self.kept: dict[tuple[int, int], tuple[bytes, bytes]] = {}
        self.changes: dict[int, Change] = {}
        """Journaled, as the sums are."""
        self.plan = 1
        self.start()

    def start(self) -> None:
        """Starts the process, from the journal of the one before."""
        self.core, self.former = self._summation(self.plan), None
        journal = [change for change in self.changes.values() if change.joins >= 0]
        for change in sorted(journal, key=lambda change: change.generation):
            self._joins(change)
        for (plan, bucket), entry in self.kept.items():
            if plan == self.plan:
                self.core.recall(bucket, *entry)
        self._remember()

    def _remember(self) -> None:
        if self.world.journal:
            self._starting, plan = True, self.plan

            def keep(bucket: int, words: bytes, state: bytes) -> None:
                chance = 1.0 if self._starting else self.world.chance.random()
                if chance < self.world.kills:
                    raise Killed
                self.kept[(plan, bucket)] = words, bytes(state)
                if chance < 2 * self.world.kills:
                    raise Killed

            self.core.remember(keep)
            self._starting = False

    def _summation(self, plan: int) -> Summation:
        mine = [b for b in self.world.buckets_of(plan) if self.world.server_of(b) == self.number]
        ops = {b: RecordingOps(self.world, 1 if b == ROWS else self.world.rounds) for b in mine}
        return Summation(self.number, plan, dict(ops), dict.fromkeys(ops, self.world.first_members))

    def take(self, peer: int, frame: Frame) -> None:
        if frame.change is not None:
            self._schedule(frame.change)
            self.world.send_down(self.number, peer, Frame(ack=frame.change.generation))
            return
        assert frame.header is not None
        plan = frame.header.generation
        while plan > self.plan:  # a plan may have no buckets on this server
            self._switch(next(c for c in self.changes.values() if c.plan == self.plan + 1), frame.header.step)
        core = self.core if plan == self.plan else self.former
        if core is None or core.generation != plan:
            return
        for reply in core.push(Message(peer, frame.header, memoryview(frame.body)), 0.0):
            self._reply(reply)

    def _schedule(self, change: Change) -> None:
        before = self.changes.setdefault(change.generation, change)
        if before != change:
            self.world.problems.append(f"server {self.number}: members disagree: {before}, {change}")
        if change.joins >= 0 and before is change:
            self._joins(change)

    def _joins(self, change: Change) -> None:
        for reply in self.core.add(change.joins, self.core.cells, change.first):
            self._reply(reply)
        self.world.send_down(self.number, change.joins, Frame(change=change))

    def _switch(self, change: Change, step: int) -> None:
        if step < change.first or self.core.busy():
            self.world.problems.append(f"server {self.number}: step {step} begins plan {change.plan} during a sum")
        self.former, self.plan = self.core, change.plan
        joined = [c for c in self.changes.values() if c.joins >= 0]
        members = {*self.world.first_members, *(c.joins for c in joined if c.first <= step)}
        self.core = self._summation(self.plan)
        self.core.gone |= self.former.gone
        for cell in self.core.cells.values():
            cell.members = tuple(sorted(members - self.former.gone))
        for c in joined:
            if c.first > step:
                self.core.add(c.joins, self.core.cells, c.first)
        self._remember()

    def remove(self, gone: set[int]) -> None:
        for core in filter(None, (self.core, self.former)):
            for found in core.remove(gone):
                if isinstance(found, CorruptFrame):
                    raise found
                self._reply(found)

    def _reply(self, reply: Any) -> None:
        self.world.emitted(self.number, reply)
        self.world.send_down(self.number, reply.peer, Frame(reply.header, bytes(reply.body)))


class Member:
    """One worker: pushes all buckets of a step, waits for all results, and goes on."""

    def __init__(self, world: World, rank: int, first: int, change: Change | None = None) -> None:
        self.world, self.rank, self.step, self.first = world, rank, first, first
        self.generation, self.plan = (0, 1) if change is None else (change.generation, world.plan_at(change))
        self.changes: dict[int, Change] = {}
        self.acks: dict[int, set[int]] = {}
        self.totals: dict[int, float] = {}
        self.committed: dict[int, dict[int, bytes]] = {}
        self.results: dict[tuple[int, int, int], bytes] = {}
        self.inflight: dict[int, dict[object, Frame]] = {s: {} for s in range(world.servers)}
        self.alive, self.hung, self.running, self.done = True, False, False, False
        self.entered: set[int] = set()
        if change is None:
            self.totals = dict.fromkeys(world.buckets_of(1), float(len(world.first_members)))
            self.entered = set(range(world.servers))

    def go(self) -> None:
        """Begins the next step if everything that it needs is there."""
        if self.running or self.done or not self.alive or self.hung or len(self.entered) < self.world.servers:
            return
        due = [c for c in self.changes.values() if c.first <= self.step]
        if any(len(self.acks[c.generation]) < self.world.servers for c in due):
            return
        for change in sorted(due):
            if change.plan > self.plan:
                self.plan = change.plan
                self.totals = dict.fromkeys(self.world.buckets_of(self.plan), 1.0)
            del self.changes[change.generation]
        if self.step >= STEPS:
            self.done = True
            return
        buckets = self.world.buckets_of(self.plan)
        if any(b not in self.totals for b in buckets):
            return  # a joining worker that still waits for results of the step before
        self.running = True
        for bucket in buckets:
            self._push(bucket, 0)

    def _push(self, bucket: int, r: int) -> None:
        header = Header(Kind.PUSH, self.plan, self.step, bucket, round=r, codec=7, sender=self.rank, weight=1.0, used=1,
                        total=self.totals[bucket])
        body = _PART.pack(self.rank, self.step, bucket, r, self.plan)
        if bucket == ROWS:
            proposal = self.world.proposal(self) or Proposal(0)
            body += _PROPOSAL.pack(*proposal)
        self.request(self.world.server_of(bucket), bucket, Frame(header, body))

    def request(self, server: int, key: object, frame: Frame) -> None:
        self.inflight[server][key] = frame
        self.world.send_up(self.rank, server, frame)

    def take(self, server: int, frame: Frame) -> None:
        if not self.alive or self.hung:
            return
        if frame.ack:
            if self.inflight[server].pop(("change", frame.ack), None) is not None:
                self.acks[frame.ack].add(server)
        elif frame.change is not None:
            if frame.change.joins == self.rank:
                self.entered.add(server)
        elif (header := frame.header) is not None:
            self._result(server, header, frame.body)
        self.go()

    def _result(self, server: int, header: Header, body: bytes) -> None:
        if header.flags & Flag.ABANDON or header.generation > self.plan + 1:
            return
        last = header.round + 1 == (1 if header.bucket == ROWS else self.world.rounds)
        if header.step == self.first - 1 and not self.running and self.step == self.first and last:
            self._observe(header, body)
            return
        request = self.inflight[server].get(header.bucket)
        if request is None or request.header is None or not self.running:
            return
        if (request.header.step, request.header.round) != (header.step, header.round) or header.generation != self.plan:
            return
        del self.inflight[server][header.bucket]
        self.results[(header.step, header.bucket, header.round)] = body
        if not last:
            self._push(header.bucket, header.round + 1)
            return
        self.totals[header.bucket] = header.weight
        last_rounds = ((b, 0 if b == ROWS else self.world.rounds - 1) for b in self.world.buckets_of(self.plan))
        if all((self.step, b, r) in self.results for b, r in last_rounds):
            self._commit()

    def _commit(self) -> None:
        self.committed[self.step] = {b: self.results[(self.step, b, r)] for (s, b, r) in self.results if s == self.step}
        self.results.clear()
        self._decide(self.step, self.committed[self.step][ROWS])
        self.step, self.running = self.step + 1, False

    def _observe(self, header: Header, body: bytes) -> None:
        """Takes a result of the step before the first own step. Its rows may have decided on another change."""
        if header.bucket not in self.totals and header.bucket == ROWS:
            self._decide(header.step, body)
        self.totals[header.bucket] = header.weight

    def _decide(self, step: int, rows: bytes) -> None:
        proposals = [Proposal(*_PROPOSAL.unpack(row[_PART.size :])) for row in rows_of(rows)]
        change = schedule.decide(self.generation, step, [p if p.generation else None for p in proposals])
        if change is not None:
            self.generation = change.generation
            self.changes[change.generation], self.acks[change.generation] = change, set()
            self.world.decided(change)
            for server in range(self.world.servers):
                self.request(server, ("change", change.generation), Frame(change=change))


def rows_of(body: bytes) -> Iterator[bytes]:
    size = _PART.size + _PROPOSAL.size
    return (body[i : i + size] for i in range(0, len(body), size))


def parts_of(bucket: int, body: bytes) -> list[Part]:
    if bucket == ROWS:
        return [Part(*_PART.unpack(row[: _PART.size])) for row in rows_of(body)]
    return [Part(*_PART.unpack_from(body, i)) for i in range(0, len(body), _PART.size)]


class World:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = chance = random.Random(seed)
        self.problems: list[str] = []
        self.counts = Counter[str]()
        self.servers, self.rounds = chance.randint(1, 4), chance.choice((1, 1, 2))
        self.first_members = tuple(range(chance.randint(2, 6)))
        self.journal, self.kills = chance.random() < 0.7, chance.choice((0.0, 0.01))
        self.breaks, self.deaths = chance.choice((0.0, 0.01)), chance.choice((0.0, 0.004, 0.02))
        self._counts_of_buckets = [chance.randint(1, 6) for _ in range(8)]
        self.plans, self.joiners = 1, len(self.first_members)
        self.wanted: Proposal | None = None
        self.log: dict[int, Change] = {}
        self.gone: set[int] = set()
        self.told: list[set[int]] = [set() for _ in range(self.servers)]
        self.sums: dict[tuple[int, int, int, int], bytes] = {}
        self.up: dict[tuple[int, int], list[Frame]] = {}
        self.down: dict[tuple[int, int], list[Frame]] = {}
        self.members: dict[int, Member] = {}
        self.server = [Server(self, number) for number in range(self.servers)]
        for rank in self.first_members:
            self.members[rank] = Member(self, rank, 0)

    # What the plan says.

    def buckets_of(self, plan: int) -> range:
        return range(1 + self._counts_of_buckets[plan % 8])

    def server_of(self, bucket: int) -> int:
        return bucket % self.servers

    def plan_at(self, change: Change) -> int:
        """Returns the plan that is in force in a change's first step."""
        return max((c.plan for c in self.log.values() if c.first <= change.first), default=0) or 1

    # What members want.

    def proposal(self, member: Member) -> Proposal | None:
        if self.wanted is None and self.chance.random() < 0.15 and member.step < STEPS - 3:
            joins = self.chance.random() < 0.6
            if joins and self.joiners < 9:
                self.wanted = Proposal(0, self.joiners)
            elif not joins and self.plans < 4:
                self.wanted = Proposal(0, -1, self.plans + 1)
        if self.wanted is None or self.chance.random() < 0.3:
            return None  # the coordinator's word has not reached this member yet
        return self.wanted._replace(generation=member.generation + 1)

    def decided(self, change: Change) -> None:
        before = self.log.setdefault(change.generation, change)
        if before != change:
            self.problems.append(f"members decide otherwise: {before}, {change}")
        if before is not change:
            return
        if change.joins >= 0:
            self.counts["joins"] += 1
            if change.joins not in self.members:
                self.joiners += 1
                self.members[change.joins] = Member(self, change.joins, change.first, change)
        else:
            self.counts["plans"] += 1
            self.plans = max(self.plans, change.plan)
        self.wanted = None

    # The network.

    def send_up(self, rank: int, server: int, frame: Frame) -> None:
        self.up.setdefault((rank, server), []).append(frame)

    def send_down(self, server: int, rank: int, frame: Frame) -> None:
        self.down.setdefault((server, rank), []).append(frame)

    def emitted(self, server: int, reply: Any) -> None:
        h = reply.header
        key, body = (h.generation, h.step, h.bucket, h.round), bytes(reply.body)
        if self.journal and self.sums.setdefault(key, body) != body:
            self.problems.append(f"another result of {key} than before")

    def run(self) -> list[str]:
        for member in self.members.values():
            member.go()
        while not self.problems and self._unfinished():
            self.counts["events"] += 1
            if self.counts["events"] > MOST_EVENTS:
                self.problems.append("nobody gets any further: " + self._waiting())
                break
            self._event()
        self._check()
        return self.problems

    def _unfinished(self) -> list[Member]:
        """Returns the members that must still finish. A worker cannot join if nobody is left who has the job's state."""
        able = [m for m in self.members.values() if m.alive and not m.hung and m.rank not in self.gone]
        unknown = {m.rank for m in able if m.step == m.first and not m.running and not any(
            other is not m and other.step > m.first - schedule.LEAD for other in able)}
        return [m for m in able if not m.done and m.rank not in unknown]

    def _event(self) -> None:
        chance = self.chance
        if chance.random() < self.deaths / 10:
            self._fault()
        if chance.random() < 0.05:
            self._news()
        ways = [("up", key) for key, way in self.up.items() if way] + [("down", key) for key, way in self.down.items() if way]
        if not ways:
            if not self._news(late=True):
                for member in list(self.members.values()):
                    member.go()
                if not any(self.up.values()) and not any(self.down.values()):
                    self.counts["events"] = MOST_EVENTS  # nothing is under way, and somebody is not done
            return
        way, key = chance.choice(ways)
        if chance.random() < self.breaks:
            self._break(key if way == "up" else key[::-1])
            return
        frames = self.up[key] if way == "up" else self.down[key]
        stream = chance.choice(frames).stream
        place = next(i for i, frame in enumerate(frames) if frame.stream == stream)
        frame = frames[place] if chance.random() < 0.05 else frames.pop(place)
        if way == "up":
            self._to_server(key[0], key[1], frame)
        elif (member := self.members.get(key[1])) is not None:
            member.take(key[0], frame)

    def _to_server(self, rank: int, number: int, frame: Frame) -> None:
        try:
            self.server[number].take(rank, frame)
        except Killed:
            self._kill(number)
        except CorruptFrame as error:
            self.problems.append(f"a breach: {error}")

    def _kill(self, number: int) -> None:
        self.counts["servers killed"] += 1
        server = self.server[number]
        server.start()
        self.told[number] = set(self.gone)  # it registers with the coordinator before it serves
        server.core.gone |= self.gone
        server.remove(set(self.gone))
        for rank in self.members:
            self._break((rank, number))

    def _break(self, key: tuple[int, int]) -> None:
        """A connection breaks. Frames in flight are lost or not; the member sends all that is not answered again."""
        self.counts["connections broken"] += 1
        rank, server = key
        for frames in (self.up.get(key), self.down.get((server, rank))):
            if frames and self.chance.random() < 0.8:
                frames.clear()
        if (member := self.members.get(rank)) is not None and member.alive:
            for frame in member.inflight[server].values():
                self.send_up(rank, server, frame)
            joined = next((c for c in self.server[server].changes.values() if c.joins == rank), None)
            if joined is not None:  # the server greets a member that dials with its change and the last results
                self.send_down(server, rank, Frame(change=joined))
                core = self.server[server].core
                for cell in core.cells.values():
                    for (step, _), (header, body) in cell.results.items():
                        if step == joined.first - 1:
                            self.send_down(server, rank, Frame(header, bytes(body)))

    def _fault(self) -> None:
        able = [m for m in self.members.values() if m.alive and not m.hung and not m.done and m.rank not in self.gone]
        if len(able) < 2:
            return
        member = self.chance.choice(able)
        kind = self.chance.choice(("dies", "hangs", "is dropped by mistake", "leaves"))
        self.counts[kind] += 1
        if kind in ("dies", "leaves"):
            member.alive = False
        elif kind == "hangs":
            member.hung = True
        if self.chance.random() < 0.5:
            for (rank, _), frames in self.up.items():
                if rank == member.rank:
                    frames.clear()
        self.gone.add(member.rank)

    def _news(self, *, late: bool = False) -> bool:
        """The coordinator's word reaches a server. Returns True if there was any."""
        behind = [n for n in range(self.servers) if self.told[n] != self.gone]
        if not behind:
            return False
        number = self.chance.choice(behind)
        self.told[number] = set(self.gone)
        try:
            self.server[number].remove(set(self.gone))
        except Killed:
            self._kill(number)
        return True

    # What must hold.

    def _waiting(self) -> str:
        return ", ".join(f"worker {m.rank} in step {m.step} ({'runs' if m.running else 'idle'}, entered {sorted(m.entered)})"
                         for m in self._unfinished())

    def _check(self) -> None:
        ended = [m for m in self.members.values() if m.done and m.rank not in self.gone]
        for member in self.members.values():
            for step, results in member.committed.items():
                for bucket, body in results.items():
                    self._check_sum(member, step, bucket, body)
                for other in self.members.values():
                    if other.committed.get(step, results) != results:
                        self.problems.append(f"workers {member.rank} and {other.rank} have other results of step {step}")
        for member in ended:
            if sorted(member.committed) != list(range(member.first, STEPS)):
                self.problems.append(f"worker {member.rank} committed {sorted(member.committed)}")
        self.counts["steps"] += sum(len(m.committed) for m in ended)

    def _check_sum(self, member: Member, step: int, bucket: int, body: bytes) -> None:
        ranks = [part.rank for part in parts_of(bucket, body)]
        if any((p.step, p.bucket) != (step, bucket) for p in parts_of(bucket, body)):
            self.problems.append(f"step {step}, bucket {bucket}: a part of another sum")
        if len(ranks) != len(set(ranks)):
            self.problems.append(f"step {step}, bucket {bucket}: doubled parts of {ranks}")
        if ranks != sorted(ranks):
            self.problems.append(f"step {step}, bucket {bucket}: added in the order {ranks}")
        lost = {m.rank for m in self.members.values() if m.done and m.rank not in self.gone and m.first <= step} - set(ranks)
        if lost:
            self.problems.append(f"step {step}, bucket {bucket}: lost parts of {sorted(lost)}")

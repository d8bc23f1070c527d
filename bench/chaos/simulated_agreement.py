"""Those who are left when workers die go on: members' agreement, a coordinator's view of them and servers' sums, in one world.

Workers exchange steps, are killed at moments that are dealt out, or are held to be dead while they live; calls are lost or come
late; frames are lost, repeated and reordered, as a seed deals it out. Knows no sockets, threads or clock.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from bench.chaos.simulated_desk import Desk
from bench.chaos.simulated_member import Member
from bench.chaos.simulated_service import Books, Ledger, Service, Waits
from commlayer.cluster.epoch_change import wire_generation
from commlayer.cluster.messages import FINISHED, KvRequest
from commlayer.errors import CorruptFrame
from commlayer.records import View
from commlayer.transport.protocol import Header, Message

CALM, MOST_EVENTS = 1_000, 60_000
"""After so many events nothing breaks any more, and beyond so many nobody gets any further: a schedule takes some hundreds."""
PHASES = "pushes", "waits", "has all", "meets"
AGREEING = "says where", "says for good", "tells servers", "is ready", "has gone over"
GRACE = "declared dead", "the coordinator did not answer", "server"
"""How the ends begin that a worker may come to though enough are left: calls are lost for long, or it is held to be dead."""


class Death(NamedTuple):
    """Of who comes to that moment for the `nth` time in a schedule, of all members; or of another one then."""

    phase: str
    nth: int
    itself: bool
    falsely: bool
    """It lives, and is held to be dead."""


class Agreement:
    """One schedule."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.counts, self.problems = Counter[str](), list[str]()
        workers, servers = self.chance.choice((2, 3, 3, 4, 4)), self.chance.randint(1, 2)
        self.steps, self.rounds, self.buckets = self.chance.randint(2, 3), self.chance.randint(1, 2), range(2)
        self.lazy = [self.chance.random() < 0.3 for _ in range(self.steps)]
        self.meets = [self.chance.random() < 0.4 for _ in range(self.steps - 1)] + [False]
        self._loss, self._breaks = self.chance.choice((0.0, 0.05, 0.25)), self.chance.choice((0.0, 0.04))
        self.books = Books()
        self.desk = Desk(workers, servers, workers if self.chance.random() < 0.1 else self.chance.randint(1, workers - 1))
        self._views: dict[int, View] = {wire_generation(self.desk.view): self.desk.view}
        in_means = self.chance.random() < 0.5
        self.services = [Service(s, self.desk.view, {b: Ledger(self.books, self.rounds, in_means=in_means) for b in self.buckets
                                                     if self.server_of(b, servers) == s}) for s in range(servers)]
        self.members = [Member(self, rank, self.desk.view, servers) for rank in range(workers)]
        self._up: list[list[list[tuple[Header, bytes]]]] = [[[] for _ in range(servers)] for _ in range(workers)]
        self._down: list[list[list[tuple[Header, bytes]]]] = [[[] for _ in range(servers)] for _ in range(workers)]
        self._late: list[KvRequest] = []
        self._unjudged: list[int] = []
        self._came, self._phases = Counter[str](), [""] * workers
        self._deaths = [self._dealt(n) for n in range(self.chance.choice((0, 1, 1, 2, 2, 3)))]
        self._slow = {rank for rank in range(workers) if self.chance.random() < 0.2}
        """Who hears late what servers say."""
        self._sources = self._all_sources()
        self.chance.shuffle(self._sources)

    def _dealt(self, number: int) -> Death:
        """Behind the first one, members have something to agree about."""
        phases, most = (PHASES, 6) if number == 0 or self.chance.random() < 0.2 else (AGREEING, 4)
        return Death(self.chance.choice(phases), self.chance.randint(1, most), self.chance.random() < 0.6,
                     self.chance.random() < 0.15)

    def _all_sources(self) -> list[Callable[[], bool]]:
        """All that may happen next; each tells whether it has."""
        found: list[Callable[[], bool]] = [self._judges, self._comes_late, self._breaks_one]
        for rank, member in enumerate(self.members):
            found += [functools.partial(self._acts, member), member.beat]
            for s in range(len(self.services)):
                found += [functools.partial(self._arrives_up, rank, s), functools.partial(self._arrives_down, rank, s)]
        found += [functools.partial(self._server_hears, service) for service in self.services]
        return found

    # ---- what members have around them

    def server_of(self, bucket: int, servers: int = 0) -> int:
        return bucket % (servers or len(self.services))

    @property
    def _breaks_still(self) -> bool:
        return self.counts["events"] < CALM

    def chance_of(self, part: float) -> bool:
        return self._breaks_still and self.chance.random() < part

    def loses(self) -> bool:
        lost = self.chance_of(self._loss)
        self.counts["calls lost"] += lost
        return lost

    def late(self, asked: KvRequest) -> None:
        if self.chance.random() < 0.5:
            self._late.append(asked)

    def send(self, rank: int, server: int, header: Header, body: bytes) -> None:
        self._up[rank][server].append((header, body))

    def reaches(self, rank: int, server: int) -> bool:
        return self.services[server].knows(rank)

    def commits(self, member: Member) -> None:
        """No two of those who go on have another sum of a step, and each has the parts of all members of its view."""
        step, sums = len(member.committed) - 1, member.committed[-1]
        for other in [] if self._dead(member) else self.members:
            goes_on = other.end in ("", FINISHED) and not self._dead(other)
            if goes_on and other.committed[step:] and other.committed[step] != sums:
                self.problems.append(f"workers {member.rank} and {other.rank} have other sums of step {step}")
        ranks = tuple(m.rank for m in member.view.members)
        if member.view.generation > 1 and len(ranks) < self.desk.least:
            self.problems.append(f"{len(ranks)} go on, and {self.desk.least} are the least")
        for (bucket, r), number in sums.items():
            parts = self.books.sum_of(number)
            right = wire_generation(member.view), step, bucket, r
            odd = any((p.generation, p.step, p.bucket, p.round) != right for p in parts)
            if tuple(p.rank for p in parts) != ranks or odd or len({p.tries for p in parts}) > 1:
                self.problems.append(f"step {step}, bucket {bucket}: the sum of {ranks} has {parts}")
        self.counts["steps committed"] += 1

    def _dead(self, member: Member) -> bool:
        """Or held to be: what it does is nothing to those who go on without it."""
        return self.desk.holds_dead(member.rank)

    # ---- what happens

    def run(self) -> list[str]:
        sources, count = self._sources, len(self._sources)
        while not self.problems:
            self.counts["events"] += 1
            if self.counts["events"] > MOST_EVENTS:
                return [f"nobody gets any further after {MOST_EVENTS} events: {self._where()}"]
            begin = int(self.chance.random() * count)
            if not any(sources[n - count]() for n in range(begin, begin + count)):
                if not self._breaks_still:
                    break
                self.counts["events"] = CALM  # nothing is left to happen, so nothing breaks any more
        return self.problems or self._ends()

    def _acts(self, member: Member) -> bool:
        done = member.act()
        if member.phase != self._phases[member.rank] and not member.end:
            self._phases[member.rank] = member.phase
            self._came[member.phase] += 1
            self._strikes(member)
        elif done and member.end:
            self._ended(member)
        return done

    def _strikes(self, member: Member) -> None:
        for death in [d for d in self._deaths if d.phase == member.phase and d.nth <= self._came[d.phase]]:
            self._deaths.remove(death)
            others = [m for m in self.members if m is not member and not m.end]
            victim = member if death.itself or not others else self.chance.choice(others)
            if not self._breaks_still:
                continue
            self.counts["held to be dead" if death.falsely else "killed"] += 1
            self.counts[f"struck as one {death.phase}"] += 1
            if death.falsely:
                self.desk.judge(victim.rank)
            else:
                victim.dies("killed")
                self._unjudged.append(victim.rank)
                self._cut(victim.rank)

    def _cut(self, rank: int) -> None:
        """What it had sent may still arrive."""
        for s in range(len(self.services)):
            self._down[rank][s].clear()
            if self.chance.random() < 0.5:
                self._up[rank][s].clear()

    def _ended(self, member: Member) -> None:
        self.counts["finished" if member.end == FINISHED else "stopped"] += 1
        if member.end != FINISHED:
            self._unjudged.append(member.rank)  # it may not have been heard
            graced = member.end.startswith(GRACE) or f"worker {member.rank}: " in member.end  # held to be dead itself
            there = len(self.desk.there)
            if not graced and there >= self.desk.least:
                self.problems.append(f"worker {member.rank} stops, though {there} are left: {member.end}")
            if not graced and not any(f"worker {m.rank}: " in member.end for m in self.members if m.end or self._dead(m)):
                self.problems.append(f"worker {member.rank} stops, and names nobody who is gone: {member.end}")

    def _judges(self) -> bool:
        if not self._unjudged or self.chance.random() < 0.7:
            return bool(self._unjudged)
        self.desk.judge(self._unjudged.pop(0))
        return True

    def _comes_late(self) -> bool:
        if not self._late:
            return False
        self.desk.ask(self._late.pop(int(self.chance.random() * len(self._late))))
        return True

    def _server_hears(self, service: Service) -> bool:
        if service.newest.generation == self.desk.view.generation:
            return False
        if not self.loses():
            service.newest = self.desk.view
        return True

    def _breaks_one(self) -> bool:
        """A connection: what is on its way is lost, or some of it is not, and what has no answer is said again."""
        if not self.chance_of(self._breaks):
            return False
        rank, s = int(self.chance.random() * len(self.members)), int(self.chance.random() * len(self.services))
        if self.members[rank].end:
            return False
        self.counts["connections broken"] += 1
        for way in (self._up[rank][s], self._down[rank][s]):
            if self.chance.random() < 0.8:
                way.clear()
        self._up[rank][s] += [(r.header, bytes(r.body)) for r in self.members[rank].inflight[s].pending()]
        return True

    def _any_of(self, way: list[tuple[Header, bytes]]) -> tuple[int, bool]:
        """Which comes next, of several buckets, and whether it will come again."""
        bucket = way[int(self.chance.random() * len(way))][0].bucket
        return next(i for i, (header, _) in enumerate(way) if header.bucket == bucket), self.chance_of(0.05)

    def _arrives_up(self, rank: int, s: int) -> bool:
        way, service = self._up[rank][s], self.services[s]
        if not way:
            return False
        place, again = self._any_of(way)
        header, body = way[place]
        try:
            replies = service.take(Message(rank, header, memoryview(body)), lambda: self.chance_of(0.01))
        except Waits:
            return False
        except CorruptFrame as error:
            self.problems.append(f"server {s} drops {error.peer}: {error}")
            return True
        if not again:
            del way[place]
        for reply in replies:
            self._down[reply.peer][s].append((reply.header, bytes(reply.body)))
        return True

    def _arrives_down(self, rank: int, s: int) -> bool:
        way = self._down[rank][s]
        if not way or self.members[rank].end:
            return False
        if rank in self._slow and self.chance_of(0.9):
            return True
        place, again = self._any_of(way)
        header, body = way[place] if again else way.pop(place)
        self.members[rank].hear(s, header, body)
        return True

    # ---- what must be true in the end

    def _ends(self) -> list[str]:
        self.counts["views"] += self.desk.view.generation - 1
        found = []
        if any(not m.end for m in self.members):
            found.append(f"faults have ended, and nobody gets any further: {self._where()}")
        done = [m for m in self.members if m.end == FINISHED and not self._dead(m)]
        if any(m.committed != done[0].committed for m in done):
            found.append("those who have finished have other sums")
        if done:
            found += self._unpaid(done[0])
        return found

    def _unpaid(self, member: Member) -> list[str]:
        """Servers have paid out what was applied, each sum once, and have taken back all else."""
        found = []
        last = self.steps - 1
        for bucket in self.buckets:
            paid = self.services[self.server_of(bucket)].ledgers[bucket].paid
            wanted = [member.committed[step][(bucket, self.rounds - 1)] for step in range(self.steps)
                      if step == last or not self.lazy[step]]
            if paid != wanted:
                found.append(f"bucket {bucket}: paid {paid}, applied {wanted}")
        return found

    def _where(self) -> str:
        return "; ".join(f"worker {m.rank} {m.end or m.phase} (step {m.step}, view {m.view.generation})" for m in self.members)


"""Simulates how the remaining workers continue when others die: agreement, coordinator and servers in one simulated network.

Workers exchange steps. By seed, workers are killed at chosen moments or declared dead while they live; calls are lost or late;
frames are lost, repeated and reordered. There are no sockets, threads or clock.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from commlayer.cluster.calls.messages import FINISHED, KvRequest
from commlayer.cluster.membership.epoch_change import wire_generation
from commlayer.errors import CorruptFrame
from commlayer.records import Epoch
from commlayer.transport.protocol import Header, Message
from tests.sim.simulated_coordinator import Desk
from tests.sim.simulated_member import Member
from tests.sim.simulated_server import Books, Ledger, Service, Waits

CALM, MOST_EVENTS = 1_000, 60_000
"""After CALM events there are no more faults; beyond MOST_EVENTS a schedule is stuck. A schedule takes some hundred events."""
PHASES = "pushes", "waits", "has all", "meets"
AGREEING = "says where", "says for good", "tells servers", "is ready", "has gone over"
GRACE = "declared dead", "the coordinator did not answer", "server"
"""Errors with which a worker may end although enough are left: its calls were lost for long, or it was declared dead."""


class Death(NamedTuple):
    """A planned death at the `nth` time that any member reaches `phase`: of that member itself, or of another one."""

    phase: str
    nth: int
    itself: bool
    falsely: bool
    """The victim lives, but the coordinator declares it dead."""


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
        self._epochs: dict[int, Epoch] = {wire_generation(self.desk.epoch): self.desk.epoch}
        in_means = self.chance.random() < 0.5
        self.services = [
            Service(s, self.desk.epoch, {b: Ledger(self.books, self.rounds, in_means=in_means) for b in self.buckets
                                         if self.server_of(b, servers) == s}) for s in range(servers)]
        self.members = [Member(self, rank, self.desk.epoch, servers) for rank in range(workers)]
        self._up: list[list[list[tuple[Header, bytes]]]] = [[[] for _ in range(servers)] for _ in range(workers)]
        self._down: list[list[list[tuple[Header, bytes]]]] = [[[] for _ in range(servers)] for _ in range(workers)]
        self._late: list[KvRequest] = []
        self._unjudged: list[int] = []
        self._came, self._phases = Counter[str](), [""] * workers
        self._deaths = [self._dealt(n) for n in range(self.chance.choice((0, 1, 1, 2, 2, 3)))]
        self._slow = {rank for rank in range(workers) if self.chance.random() < 0.2}
        """Workers that receive servers' messages late."""
        self._sources = self._all_sources()
        self.chance.shuffle(self._sources)

    def _dealt(self, number: int) -> Death:
        """Draws a death. Later deaths mostly strike in the agreement, which there is only after a first one."""
        phases, most = (PHASES, 6) if number == 0 or self.chance.random() < 0.2 else (AGREEING, 4)
        return Death(self.chance.choice(phases), self.chance.randint(1, most), self.chance.random() < 0.6,
                     self.chance.random() < 0.15)

    def _all_sources(self) -> list[Callable[[], bool]]:
        """All possible events; each function returns whether its event has happened."""
        sources: list[Callable[[], bool]] = [self._judges, self._comes_late, self._breaks_one]
        for rank, member in enumerate(self.members):
            sources += [functools.partial(self._acts, member), member.beat]
            for s in range(len(self.services)):
                sources += [functools.partial(self._arrives_up, rank, s), functools.partial(self._arrives_down, rank, s)]
        sources += [functools.partial(self._server_hears, service) for service in self.services]
        return sources

    # ---- the members' environment

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

    def late(self, request: KvRequest) -> None:
        if self.chance.random() < 0.5:
            self._late.append(request)

    def send(self, rank: int, server: int, header: Header, body: bytes) -> None:
        self._up[rank][server].append((header, body))

    def reaches(self, rank: int, server: int) -> bool:
        return self.services[server].knows(rank)

    def commits(self, member: Member) -> None:
        """Checks a committed step: continuing members have equal sums, with the contributions of all members of its epoch."""
        step, sums = len(member.committed) - 1, member.committed[-1]
        for other in [] if self._dead(member) else self.members:
            goes_on = other.end in ("", FINISHED) and not self._dead(other)
            if goes_on and other.committed[step:] and other.committed[step] != sums:
                self.problems.append(f"workers {member.rank} and {other.rank} have other sums of step {step}")
        ranks = tuple(m.rank for m in member.epoch.members)
        if member.epoch.generation > 1 and len(ranks) < self.desk.least:
            self.problems.append(f"{len(ranks)} go on, and {self.desk.least} are the least")
        for (bucket, r), number in sums.items():
            parts = self.books.sum_of(number)
            right = wire_generation(member.epoch), step, bucket, r
            odd = any((p.generation, p.step, p.bucket, p.round) != right for p in parts)
            if tuple(p.rank for p in parts) != ranks or odd:
                self.problems.append(f"step {step}, bucket {bucket}: the sum of {ranks} has {parts}")
        self.counts["steps committed"] += 1

    def _dead(self, member: Member) -> bool:
        """Whether the worker is dead or declared dead: its actions do not matter to those that continue without it."""
        return self.desk.holds_dead(member.rank)

    # ---- events

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
                self.counts["events"] = CALM  # nothing is left to happen, so faults end
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
        """Ends a worker's connections; what it has sent may still arrive."""
        for s in range(len(self.services)):
            self._down[rank][s].clear()
            if self.chance.random() < 0.5:
                self._up[rank][s].clear()

    def _ended(self, member: Member) -> None:
        self.counts["finished" if member.end == FINISHED else "stopped"] += 1
        if member.end != FINISHED:
            self._unjudged.append(member.rank)  # the coordinator may not have received the end
            graced = member.end.startswith(GRACE) or f"worker {member.rank}: " in member.end  # it was declared dead itself
            present = len(self.desk.there)
            if not graced and present >= self.desk.least:
                self.problems.append(f"worker {member.rank} stops, though {present} are left: {member.end}")
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
        if service.newest.generation == self.desk.epoch.generation:
            return False
        if not self.loses():
            service.newest = self.desk.epoch
        return True

    def _breaks_one(self) -> bool:
        """Breaks a connection. Frames in flight may be lost or not, and unanswered requests are sent again."""
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
        """Index of the next frame, and whether it will arrive again. Frames of different buckets overtake each other."""
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

    # ---- invariants at the end

    def _ends(self) -> list[str]:
        self.counts["epochs"] += self.desk.epoch.generation - 1
        problems = []
        if any(not m.end for m in self.members):
            problems.append(f"faults have ended, and nobody gets any further: {self._where()}")
        done = [m for m in self.members if m.end == FINISHED and not self._dead(m)]
        if any(m.committed != done[0].committed for m in done):
            problems.append("those who have finished have other sums")
        if done:
            problems += self._unpaid(done[0])
        return problems

    def _unpaid(self, member: Member) -> list[str]:
        """Servers must have kept the sums that were applied, each once, and rolled back all others."""
        problems = []
        last = self.steps - 1
        for bucket in self.buckets:
            paid = self.services[self.server_of(bucket)].ledgers[bucket].paid
            wanted = [member.committed[step][(bucket, self.rounds - 1)] for step in range(self.steps)
                      if step == last or not self.lazy[step]]
            if paid != wanted:
                problems.append(f"bucket {bucket}: paid {paid}, applied {wanted}")
        return problems

    def _where(self) -> str:
        return "; ".join(f"worker {m.rank} {m.end or m.phase} (step {m.step}, epoch {m.epoch.generation})"
                         for m in self.members)


"""Simulates the exchange of sums: state machines of workers and a server in a simulated network.

By seed, frames are lost, repeated and reordered, and the server is killed and restarted with its journal. There are no sockets,
threads or clock.
"""

from __future__ import annotations

import random
import struct
from collections import Counter

from commlayer.cluster.servers.bucket_sum import Reply
from commlayer.cluster.servers.summation import Summation
from commlayer.transport.inflight import InFlightRequests
from commlayer.transport.protocol import SERVER_BASE, Header, Kind, Message

WORLD, BUCKETS, STEPS = 3, 2, 3
BREAKS, KILLS = 0.08, 0.02
"""BREAKS: probability that an event breaks a connection. KILLS: that the server is killed before, or after, a journal write."""
MOST_EVENTS = 20_000
"""A schedule takes a few hundred events; beyond this limit it is stuck."""
Contribution = tuple[int, int, int]
"""Bucket, round, value."""
_VALUE = struct.Struct("<d")


class Killed(Exception):
    """The server is killed in the middle of an operation."""


class Sums:
    """Codec operations on one double per payload that record the contributions in each result."""

    codec, bound, means, assumes_total, leavers = 7, 8, False, True, ()

    def __init__(self, rounds: int, *, in_means: bool, bucket: int) -> None:
        self.rounds, self.in_means, self._bucket = rounds, in_means, bucket
        self._under_way: list[Contribution] = []
        self.emitted: list[Contribution] = []
        """Contributions in results that are not yet journaled."""
        self.lost = False

    def new_accumulator(self, r: int) -> list[float]:
        return [0.0]

    def place(self, acc: list[float], out: memoryview) -> bool:
        return False

    def add(self, r: int, payload: memoryview, acc: list[float], first: bool) -> None:
        (value,) = _VALUE.unpack(payload)
        acc[0] = value if first else acc[0] + value
        if first:
            self._under_way.clear()
        self._under_way.append((self._bucket, r, int(value)))

    def scale(self, acc: list[float], factor: float) -> None:
        acc[0] *= factor

    def emit(self, r: int, acc: list[float], out: memoryview) -> int:
        self.emitted += self._under_way
        self._under_way = []
        _VALUE.pack_into(out, 0, acc[0])
        return 8

    def undo(self, slices: int) -> None: ...

    def skip(self) -> None: ...

    def keeps_payloads(self, members: int) -> bool:
        return False

    def snapshot(self) -> bytes:
        return b""

    def restore(self, data: bytes | memoryview) -> None: ...

    def journal_state(self) -> bytes:
        return b""

    def restore_from_journal(self, data: bytes, sent: memoryview) -> None: ...

    def begin_anew(self) -> None:
        self.lost = True

    def norm(self, r: int, payload: memoryview) -> float:
        return 0.0


def value_of(rank: int, number: int, r: int) -> float:
    """A value that is unique to the contribution."""
    return float((number * 8 + r) * 8 + rank)


class Bucket:
    """A worker's side of a bucket: one step and round at a time."""

    def __init__(self, rank: int, number: int, rounds: int) -> None:
        self.rank, self.number, self.rounds = rank, number, rounds
        self.step = self.round = 0
        self.total = 1.0
        self.results: list[tuple[int, int, bytes]] = []

    def request(self) -> tuple[Header, bytes]:
        header = Header(Kind.PUSH, 1, self.step, self.number, round=self.round, codec=7, sender=self.rank, weight=1.0, used=1,
                        total=self.total)
        return header, _VALUE.pack(value_of(self.rank, self.step, self.round))

    def hear(self, header: Header, body: bytes) -> bool:
        """Handles a result; returns whether another request follows."""
        self.results.append((header.step, header.round, body))
        self.round += 1
        if self.round == self.rounds:
            self.step, self.round, self.total = self.step + 1, 0, header.weight
        return self.step < STEPS


class World:
    """One schedule: workers, a server, and the messages in flight."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rounds, self.in_means = self.chance.randint(1, 3), self.chance.random() < 0.5
        self.journal = self.chance.random() < 0.5
        self.added: Counter[Contribution] = Counter()
        self.counts, self._open = Counter[str](), 0
        self.ops: dict[int, Sums] = {}
        self._kept: dict[int, tuple[bytes, bytes]] = {}
        self.server = self._started()
        self.inflight = [InFlightRequests(SERVER_BASE) for _ in range(WORLD)]
        self.buckets = [[Bucket(rank, b, self.rounds) for b in range(BUCKETS)] for rank in range(WORLD)]
        self.up: list[list[tuple[Header, bytes]]] = [[] for _ in range(WORLD)]
        self.down: list[list[tuple[Header, bytes]]] = [[] for _ in range(WORLD)]
        for row in self.buckets:
            for bucket in row:
                self.ask(bucket)

    # ---- the server

    def _started(self) -> Summation:
        """Starts a server process that reads the journal of the one before."""
        self.ops = {b: Sums(self.rounds, in_means=self.in_means, bucket=b) for b in range(BUCKETS)}
        server = Summation(0, 1, dict(self.ops), dict.fromkeys(self.ops, tuple(range(WORLD))))
        for bucket, entry in self._kept.items():
            server.restore_from_journal(bucket, *entry)
        if self.journal:
            self._starting = True
            server.journal_state(self._keep)
            self._starting = False
        return server

    def _keep(self, bucket: int, words: bytes, state: bytes) -> None:
        chance = 1.0 if self._starting else self.chance.random()
        if chance < KILLS:
            raise Killed  # killed before the write
        self._kept[bucket] = words, bytes(state)
        self._count(bucket)
        if chance < 2 * KILLS:
            raise Killed  # killed after the write, before any reply

    def _count(self, bucket: int) -> None:
        ops = self.ops[bucket]
        self.added.update(ops.emitted)
        ops.emitted.clear()

    def _killed(self) -> None:
        """Kills and restarts the server. Its connections end, but frames that it has sent may still arrive."""
        self.counts["servers killed"] += 1
        self.server = self._started()
        for rank in range(WORLD):
            self.up[rank].clear()
            if self.chance.random() < 0.5:
                self.down[rank].clear()
            self._ask_again(rank)

    # ---- the network

    def ask(self, bucket: Bucket) -> None:
        self._open += 1
        request = self.inflight[bucket.rank].add(*bucket.request())
        self.up[bucket.rank].append((request.header, bytes(request.body)))

    def run(self) -> list[str]:
        """Runs the schedule and returns the violations, one line each."""
        chance, up, down = self.chance.random, self.up, self.down
        while self._open:
            self.counts["events"] += 1
            if self.counts["events"] > MOST_EVENTS:
                return [f"nobody gets any further after {MOST_EVENTS} events"]
            rank, what = int(chance() * WORLD), chance()
            if what < BREAKS:
                self._break(rank)
            elif what < (1 + BREAKS) / 2 and up[rank]:
                self._arrive_at_server(rank)
            elif down[rank]:
                self._arrive_at_worker(rank)
            elif up[rank]:
                self._arrive_at_server(rank)
        self.counts["contributions"] += sum(self.added.values())
        return self.problems()

    def _break(self, rank: int) -> None:
        """Breaks a connection. Frames in flight may be lost or not: the server may have taken a request, and its reply then
        arrives over the new connection."""
        self.counts["connections broken"] += 1
        for way in (self.up[rank], self.down[rank]):
            if self.chance.random() < 0.8:
                way.clear()
        self._ask_again(rank)

    def _ask_again(self, rank: int) -> None:
        self.up[rank] += [(r.header, bytes(r.body)) for r in self.inflight[rank].pending()]

    def _any_of(self, way: list[tuple[Header, bytes]]) -> tuple[Header, bytes]:
        """The next frame. Frames of different buckets overtake each other; some arrive twice."""
        bucket = way[int(self.chance.random() * len(way))][0].bucket
        place = next(i for i, (header, _) in enumerate(way) if header.bucket == bucket)
        return way[place] if self.chance.random() < 0.1 else way.pop(place)

    def _arrive_at_server(self, rank: int) -> None:
        header, body = self._any_of(self.up[rank])
        try:
            replies = self.server.push(Message(rank, header, memoryview(body)), 0.0)
        except Killed:
            self._killed()
            return
        for reply in replies:
            self._answer(reply)
        if not self.journal:
            self._count(header.bucket)

    def _answer(self, reply: Reply) -> None:
        self.down[reply.peer].append((reply.header, bytes(reply.body)))

    def _arrive_at_worker(self, rank: int) -> None:
        header, body = self._any_of(self.down[rank])
        if self.inflight[rank].answer(header) is None:
            return
        self._open -= 1
        bucket = self.buckets[rank][header.bucket]
        if bucket.hear(header, body):
            self.ask(bucket)

    # ---- invariants

    def problems(self) -> list[str]:
        problems = []
        for b in range(BUCKETS):
            finals = [row[b].results for row in self.buckets]
            if finals[0] != finals[1] or finals[1] != finals[2]:
                problems.append(f"bucket {b}: workers were told different sums")
            if len(finals[0]) != STEPS * self.rounds:
                problems.append(f"bucket {b}: {len(finals[0])} sums, allowed: {STEPS * self.rounds}")
            if self.ops[b].lost:
                problems.append(f"bucket {b}: its residual was lost")
        wanted = self.expected()
        lost, doubled = wanted - self.added.keys(), [c for c, count in self.added.items() if count != 1]
        if lost or doubled or len(self.added) != len(wanted):
            problems.append(
                f"contributions lost {len(lost)}, doubled {len(doubled)}, strange {len(self.added.keys() - wanted)}")
        return problems

    def expected(self) -> set[Contribution]:
        """The contributions that results must contain."""
        return {(b, r, int(value_of(rank, step, r)))
                for b in range(BUCKETS) for r in range(self.rounds) for step in range(STEPS) for rank in range(WORLD)}

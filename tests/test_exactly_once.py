"""What a worker keeps and what a server takes, as state machines under random loss, repetition and reordering."""

from __future__ import annotations

import random
import struct
import time
from collections import Counter

from commlayer.transport.protocol import Flag, Header, Kind, Message
from commlayer.transport.summation import Summation
from commlayer.transport.summation_cell import Reply
from commlayer.transport.unanswered import Unanswered

WORLD, BUCKETS, STEPS = 3, 2, 3
LONG_S, LEAST = 6.0, 300


class Sums:
    """Ops over one double per payload, which count what they add."""

    codec, bound = 7, 8

    def __init__(self, rounds: int, *, in_means: bool, added: Counter[tuple[int, ...]], bucket: int) -> None:
        self.rounds, self.in_means, self._added, self._bucket = rounds, in_means, added, bucket
        self.emitted = 0

    def zeros(self, r: int) -> list[float]:
        return [0.0]

    def add(self, r: int, payload: memoryview, acc: list[float], first: bool) -> None:
        (value,) = struct.unpack("<d", payload)
        acc[0] = value if first else acc[0] + value
        self._added[self._bucket, r, int(value)] += 1

    def emit(self, r: int, acc: list[float], out: memoryview) -> int:
        self.emitted += 1
        out[:8] = struct.pack("<d", acc[0])
        return 8

    def undo(self, slices: int) -> None: ...

    def skip(self) -> None: ...

    def snapshot(self) -> bytes:
        return b""

    def restore(self, data: bytes | memoryview) -> None: ...


def value_of(rank: int, number: int, r: int, tries: int) -> float:
    """No two contributions are alike."""
    return float(((number * 8 + r) * 8 + tries) * 8 + rank)


class Bucket:
    """A worker's side of one: a step and round at a time, coded again when it is told to."""

    def __init__(self, rank: int, number: int, rounds: int) -> None:
        self.rank, self.number, self.rounds = rank, number, rounds
        self.step = self.round = self.tries = 0
        self.total = 1.0  # taken for granted, wrongly
        self.results: list[tuple[int, int, bytes]] = []

    def request(self) -> tuple[Header, bytes]:
        header = Header(Kind.PUSH, 1, self.step, self.number, round=self.round, codec=7, sender=self.rank, weight=1.0, used=1,
                        total=self.total, flags=Flag.AGAIN if self.tries else Flag.NONE)
        return header, struct.pack("<d", value_of(self.rank, self.step, self.round, self.tries))

    def hear(self, header: Header, body: bytes) -> bool:
        """Whether there is another request."""
        if header.flags & Flag.AGAIN:
            self.tries, self.total = self.tries + 1, header.weight
            return True
        self.results.append((header.step, header.round, body))
        self.round, self.tries, self.total = self.round + 1, 0, 1.0
        if self.round == self.rounds:
            self.step, self.round = self.step + 1, 0
        return self.step < STEPS


class World:
    """Workers, a server, and what is on its way between them."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.rounds, in_means = self.chance.randint(1, 3), self.chance.random() < 0.5
        self.added: Counter[tuple[int, ...]] = Counter()
        self.ops = {b: Sums(self.rounds, in_means=in_means, added=self.added, bucket=b) for b in range(BUCKETS)}
        self.server = Summation(0, 1, dict(self.ops), dict.fromkeys(self.ops, tuple(range(WORLD))))
        self.unanswered: list[Unanswered[None]] = [Unanswered() for _ in range(WORLD)]
        self.buckets = [[Bucket(rank, b, self.rounds) for b in range(BUCKETS)] for rank in range(WORLD)]
        self.up: list[list[tuple[Header, bytes]]] = [[] for _ in range(WORLD)]
        self.down: list[list[tuple[Header, bytes]]] = [[] for _ in range(WORLD)]
        self.breaks = 0
        for row in self.buckets:
            for bucket in row:
                self.ask(bucket)

    def ask(self, bucket: Bucket) -> None:
        request = self.unanswered[bucket.rank].ask(*bucket.request(), None)
        self.up[bucket.rank].append((request.header, bytes(request.body)))

    def run(self) -> None:
        while any(self.unanswered):
            rank = self.chance.randrange(WORLD)
            if self.chance.random() < 0.08:
                self.break_(rank)
            elif self.up[rank] and self.chance.random() < 0.5:
                self.arrive_at_server(rank)
            elif self.down[rank]:
                self.arrive_at_worker(rank)

    def break_(self, rank: int) -> None:
        """What was on its way is lost, or some of it is not: the server may have taken it, and its answer finds the new way."""
        self.breaks += 1
        lost = [way for way in (self.up[rank], self.down[rank]) if self.chance.random() < 0.8]
        for way in lost:
            way.clear()
        self.up[rank] += [(r.header, bytes(r.body)) for r in self.unanswered[rank].again()]

    def any_of(self, way: list[tuple[Header, bytes]]) -> tuple[Header, bytes]:
        """Frames of several buckets overtake one another; some arrive twice."""
        bucket = self.chance.choice(way)[0].bucket
        place = next(i for i, (header, _) in enumerate(way) if header.bucket == bucket)
        return way[place] if self.chance.random() < 0.1 else way.pop(place)

    def arrive_at_server(self, rank: int) -> None:
        header, body = self.any_of(self.up[rank])
        for reply in self.server.push(Message(rank, header, memoryview(body)), 0.0):
            self.answer(reply)

    def answer(self, reply: Reply) -> None:
        self.down[reply.peer].append((reply.header, bytes(reply.body)))

    def arrive_at_worker(self, rank: int) -> None:
        header, body = self.any_of(self.down[rank])
        if self.unanswered[rank].answer(header) is None:
            return
        bucket = self.buckets[rank][header.bucket]
        if bucket.hear(header, body):
            self.ask(bucket)

    def expected(self, bucket: int) -> set[tuple[int, ...]]:
        again = int(self.ops[bucket].in_means)
        tries = [(r, t) for r in range(self.rounds) for t in range(1 + (again if r == 0 else 0))]
        return {(bucket, r, int(value_of(rank, step, r, t)))
                for r, t in tries for step in range(STEPS) for rank in range(WORLD)}


def test_every_contribution_counts_once_whatever_becomes_of_frames() -> None:
    begin, seed, breaks = time.monotonic(), 0, 0
    while seed < LEAST or time.monotonic() - begin < LONG_S:
        world = World(seed)
        world.run()
        for bucket, ops in world.ops.items():
            assert {found for found in world.added if found[0] == bucket} == world.expected(bucket), seed
            finals = [row[bucket].results for row in world.buckets]
            assert finals[0] == finals[1] == finals[2], seed
            assert len(finals[0]) == STEPS * world.rounds, seed
            assert ops.emitted == STEPS * world.rounds, seed
        assert set(world.added.values()) == {1}, (seed, world.added.most_common(3))
        breaks += world.breaks
        seed += 1
    assert breaks > seed, "hardly anything broke"

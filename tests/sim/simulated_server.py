"""A server of a simulated job that switches to new epochs in the middle of a step."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from commlayer.cluster.membership.epoch_change import EpochChange, change_problem, read_change, wire_generation
from commlayer.cluster.servers.bucket_sum import EVERY_SLICE, Reply
from commlayer.cluster.servers.summation import Summation
from commlayer.errors import CorruptFrame
from commlayer.records import Epoch
from commlayer.transport.protocol import Flag, Kind, Message, peer_name

_NUMBER = struct.Struct("<q")


class Part(NamedTuple):
    """One member's contribution to one sum."""

    rank: int
    generation: int
    step: int
    bucket: int
    round: int


class Books:
    """All contributions that were ever coded and all sums that were ever emitted. Payloads are indexes into them."""

    def __init__(self) -> None:
        self._parts: list[Part] = []
        self._sums: list[tuple[Part, ...]] = []

    def coded(self, part: Part) -> bytes:
        self._parts.append(part)
        return _NUMBER.pack(len(self._parts) - 1)

    def part(self, payload: memoryview) -> Part:
        return self._parts[number_of(payload)]

    def summed(self, parts: Iterable[Part], out: memoryview) -> int:
        self._sums.append(tuple(parts))
        _NUMBER.pack_into(out, 0, len(self._sums) - 1)
        return len(self._sums) - 1

    def sum_of(self, number: int) -> tuple[Part, ...]:
        return self._sums[number]


def number_of(body: bytes | memoryview) -> int:
    return int(_NUMBER.unpack(body)[0])


class Ledger:
    """Codec operations of one bucket that record the emitted sums that were not rolled back."""

    codec, bound, means, assumes_total = 7, 8, False, True

    def __init__(self, books: Books, rounds: int, *, in_means: bool, paid: Iterable[int] = ()) -> None:
        self.rounds, self.in_means, self._books = rounds, in_means, books
        self.paid = list(paid)
        self._can_undo = False

    def after(self) -> Ledger:
        """The ledger of the next epoch: the last sum can no longer be rolled back."""
        return Ledger(self._books, self.rounds, in_means=self.in_means, paid=self.paid)

    def zeros(self, r: int) -> list[Part]:
        return []

    def add(self, r: int, payload: memoryview, acc: list[Part], first: bool) -> None:
        if first:
            acc.clear()
        acc.append(self._books.part(payload))

    def scale(self, acc: list[Part], factor: float) -> None: ...

    def emit(self, r: int, acc: list[Part], out: memoryview) -> int:
        number = self._books.summed(acc, out)
        if r + 1 == self.rounds:
            self.paid.append(number)
            self._can_undo = True
        return 8

    def undo(self, slices: int) -> None:
        """Like CodecOps: a repeated request rolls back only once."""
        if slices & EVERY_SLICE and self._can_undo:
            self.paid.pop()
            self._can_undo = False

    def skip(self) -> None: ...

    def worth_giving_back(self, members: int) -> bool:
        return False

    def weigh(self, payload: memoryview, weight: float, first: bool) -> None: ...

    def norm(self, r: int, payload: memoryview) -> float:
        return 0.0

    def snapshot(self) -> bytes:
        return b""

    def restore(self, data: bytes | memoryview) -> None: ...

    memory_nbytes = 0

    def remember(self) -> bytes:
        return b""

    def recall(self, data: bytes, sent: memoryview) -> None: ...

    def begin_anew(self) -> None: ...


class Waits(Exception):
    """The server must first receive the epoch that a member has named."""


class Service:
    """The message handling of the summation server, without waiting."""

    def __init__(self, number: int, epoch: Epoch, ledgers: dict[int, Ledger]) -> None:
        self.number, self.epoch, self.newest = number, epoch, epoch
        self.ledgers = ledgers
        self._core = self._sums(wire_generation(epoch))

    def _sums(self, generation: int) -> Summation:
        members = tuple(m.rank for m in self.epoch.members)
        return Summation(self.number, generation, dict(self.ledgers), dict.fromkeys(self.ledgers, members))

    def knows(self, rank: int) -> bool:
        """Whether the rank is a member. If not, its connection has ended, and it is refused another one."""
        return any(m.rank == rank for m in self.epoch.members)

    def take(self, message: Message, hurries: Callable[[], bool]) -> list[Reply]:
        """`hurries`: whether the server gives up waiting for an epoch."""
        if not self.knows(message.peer):
            return []
        if message.header.kind == Kind.PUSH:
            return self._core.push(message, 0.0)
        if message.header.kind == Kind.PLAN and message.header.flags & Flag.ABANDON:
            return [self._move(message, hurries)]
        raise CorruptFrame(f"{Kind(message.header.kind).name} was not sent", peer=peer_name(message.peer))

    def _move(self, message: Message, hurries: Callable[[], bool]) -> Reply:
        h, answer = message.header, ""
        change = read_change(message)
        if h.generation > self._core.generation:
            answer = self._refused(change, h.generation, message.peer, hurries)
            if not answer:
                self._gives_way(change, h.generation)
        if not answer and h.generation < self._core.generation:
            answer = f"generation {h.generation} has ended"
        return Reply(message.peer, h._replace(kind=Kind.PLAN_OK, sender=self._core.peer), answer.encode())

    def _refused(self, change: EpochChange, generation: int, sender: int, hurries: Callable[[], bool]) -> str:
        if generation == wire_generation(change.epoch) and change.epoch.generation <= self.epoch.generation:
            return f"epoch {change.epoch.generation} has ended"
        if why := change_problem(change, generation, sender, self.epoch):
            raise CorruptFrame(f"PLAN frame with a change of members is invalid: {why}", peer=peer_name(sender))
        if self.newest.generation < change.epoch.generation and not hurries():
            raise Waits
        if self.newest.generation == change.epoch.generation and self.newest != change.epoch:
            raise CorruptFrame("PLAN frame with a change of members is invalid: its epoch differs from the coordinator's",
                               peer=peer_name(sender))
        return "" if self.newest == change.epoch else f"epoch {change.epoch.generation} is not the coordinator's newest"

    def _gives_way(self, change: EpochChange, generation: int) -> None:
        self._core.end(change.step, change.undone)
        self.epoch = change.epoch
        self.ledgers = {bucket: ledger.after() for bucket, ledger in self.ledgers.items()}
        self._core = self._sums(generation)


def body_of(change: EpochChange) -> bytes:
    return msgspec.msgpack.encode(change)

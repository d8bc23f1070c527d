"""The summation service as a state machine: contributions in, replies out. Knows buckets, members and bytes.

It does no input or output, reads no clock and does not know how payloads are coded: the codec side is handed in as `Ops`.
Contributions of one (step, round) are added in member order, whatever their order of arrival, so that runs repeat bit for bit;
one that comes early waits encoded. Each is applied at most once. Results of the last two steps are kept and served again.

Every message is judged before anything changes. CorruptFrame means that its sender broke the protocol or its format; any other
error is this server's own, and what it was summing is lost.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from commlayer.errors import CorruptFrame
from commlayer.transport.ops import Ops
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, peer_name
from commlayer.transport.quarantine import Quarantine, Watch

KEPT_STEPS = 2
REPEATS = 16
"""So often may a member say its part of a step again: connections break, and parts are coded again."""
OVERHEAD_NBYTES = 512
"""What a message costs beside its body."""
MOST_REASON_NBYTES = 256
"""Of a word on why a step was broken off."""


class Reply(NamedTuple):
    peer: int
    header: Header
    body: memoryview | bytes


class Stall(NamedTuple):
    """A sum that waits: what for, since when, for whom, and who waits."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    since: float


class _Cell:
    """One bucket: the sum under way, or the step last finished, and the results kept."""

    def __init__(self, bucket: int, ops: Ops, members: tuple[int, ...], watch: Watch | None) -> None:
        self.bucket, self.ops, self.members, self.watch = bucket, ops, members, watch
        self.lock = threading.Lock()
        self.accs: list[Any] = [None] * ops.rounds
        # One buffer per kept step and round; a result stays whole until its step leaves the window.
        self.outs: dict[tuple[int, int], memoryview] = {}
        self.results: dict[tuple[int, int], tuple[Header, memoryview]] = {}
        self.refused: dict[tuple[int, int], frozenset[int]] = {}
        """Whose contributions those are without."""
        self.idle(None)

    def idle(self, step: int | None) -> None:
        """Between sums. `step` is the one that comes next; None takes the first one that a contribution names."""
        self.begin(step or 0, 0)
        self.open, self.awaited = False, step
        self.taken: dict[int, int] = {}
        """Bytes from each member since then."""

    def begin(self, step: int, r: int) -> None:
        self.open = True
        self.first: int | None = None  # who contributed first
        self.step, self.round, self.next = step, r, 0
        self.early: dict[int, Message] = {}
        self.weight, self.used, self.order, self.undone, self.since = 0.0, 0, 0, 0, 0.0
        self.totals: set[float] = set()
        self.expected = 0.0
        """What all weigh, once they have been told."""
        self.abandoned = b""
        """Who broke the step off, and why."""
        self.summed = 0
        if self.watch is not None:
            self.watch.begin(r)

    def here(self) -> set[int]:
        return {*self.members[: self.next], *self.early} if self.open else set()

    def out(self, step: int, r: int) -> memoryview:
        slot = (step % KEPT_STEPS, r)
        if slot not in self.outs:
            self.outs[slot] = memoryview(bytearray(self.ops.bound))
        return self.outs[slot]


class Summation:
    """All buckets of one server. `push` may be called from any number of threads."""

    def __init__(self, server: int, generation: int, ops: dict[int, Ops], senders: dict[int, tuple[int, ...]],
                 quarantine: Quarantine | None = None) -> None:
        """`senders[bucket]` are the members that contribute to it, in the order in which they are added."""
        self.quarantine = quarantine
        self.peer = SERVER_BASE + server
        self.generation = generation
        self.cells = {bucket: _Cell(bucket, o, senders[bucket], quarantine.watch(o.rounds, o.norm) if quarantine else None)
                      for bucket, o in ops.items()}

    def push(self, message: Message, now: float, release: Callable[[Message], None] = lambda _: None) -> list[Reply]:
        """Takes one contribution. CorruptFrame may name another member, whose contribution this one uncovered.

        `release` is called with each message whose body is no longer needed.
        """
        h = message.header
        cell = self._cell(message)
        with cell.lock:
            if h.generation < self.generation:
                release(message)
                return []  # of a view that has ended; its sender will push again
            self._fits(cell, message)
            kept = cell.results.get((h.step, h.round))
            if kept is not None:
                release(message)
                return [_told(message.peer, *kept, cell.refused.get((h.step, h.round)))]
            self._admit(cell, message)
            here = cell.here()
            if message.peer in here:
                release(message)
                return []  # a repeat of what is here already
            if not here:
                cell.since, cell.first = now, message.peer
            cell.early[message.peer] = message
            return self._advance(cell, release)

    def _cell(self, message: Message) -> _Cell:
        """What every message must get right: who sends it, for which bucket, in which view."""
        h = message.header
        cell = self.cells.get(h.bucket)
        if cell is None:
            raise CorruptFrame(f"bucket {h.bucket} is not of this server", peer=peer_name(message.peer), step=h.step)
        if h.sender != message.peer:
            raise _breach(message, f"says it is {peer_name(h.sender)}")
        if h.generation > self.generation:
            raise _breach(message, f"generation {h.generation}, here {self.generation}")
        return cell

    def _fits(self, cell: _Cell, message: Message) -> None:
        h, ops = message.header, cell.ops
        if message.peer not in cell.members:
            raise _breach(message, "is no member of this bucket's sum")
        if h.round >= ops.rounds or h.parts != 1 or h.part != 0:
            raise _breach(message, f"round {h.round}, part {h.part} of {h.parts}")
        if h.codec != ops.codec or not 0.0 <= h.weight < float("inf") or not 0.0 <= h.total < float("inf"):
            raise _breach(message, f"codec {h.codec} with weight {h.weight} of {h.total}")
        allowed = (1 + REPEATS) * ops.rounds * (ops.bound + OVERHEAD_NBYTES)
        taken = cell.taken[message.peer] = cell.taken.get(message.peer, 0) + len(message.body) + OVERHEAD_NBYTES
        if taken > allowed:
            raise _breach(message, f"sent {taken} bytes within a step, the plan allows {allowed}")
        bound = MOST_REASON_NBYTES if h.flags & Flag.ABANDON else ops.bound
        if len(message.body) > bound:
            raise _breach(message, f"{len(message.body)} bytes, at most {bound} for this bucket")

    def _admit(self, cell: _Cell, message: Message) -> None:
        """A contribution belongs to the sum under way, or between steps begins the next one."""
        h = message.header
        if not cell.open and h.round == 0 and cell.awaited in (None, h.step):
            cell.begin(h.step, 0)
        if cell.open and (h.step, h.round) == (cell.step, cell.round):
            return
        if cell.first is not None:
            state = f"{peer_name(cell.first)} is in round {cell.round} of step {cell.step}"
        else:
            begun = cell.open or cell.awaited is not None
            state = f"round {cell.round} of step {cell.step} is next" if begun else "no step has begun"
        raise _breach(message, f"contribution out of order: round {h.round} of step {h.step}, while {state}")

    def _advance(self, cell: _Cell, release: Callable[[Message], None]) -> list[Reply]:
        """Adds what is next in member order; when all are in, emits the result to all."""
        ops, r = cell.ops, cell.round
        if cell.accs[r] is None:
            cell.accs[r] = ops.zeros(r)
        while cell.next < len(cell.members) and cell.members[cell.next] in cell.early:
            message = cell.early.pop(cell.members[cell.next])
            h, added = message.header, True
            first = cell.next == 0
            if not first and h.undone != cell.undone:
                raise _breach(message, f"{_applied(h.undone)} of the step before, {peer_name(cell.members[0])} "
                                       f"{_applied(cell.undone)}: all workers must step, skip and clear gradients alike")
            if first and h.undone and r == 0:
                ops.undo(h.undone)  # before `add`, which overwrites what was summed in that step
            if cell.expected and h.total != cell.expected and not h.flags & Flag.ABANDON:
                raise _breach(message, f"codes a part of {h.total:g}, though it was told that all weigh {cell.expected:g}")
            if h.flags & Flag.ABANDON:
                cell.abandoned = cell.abandoned or bytes(message.body)
            else:
                added = self._add(cell, message)
            cell.next += 1
            cell.order, cell.undone = h.order, h.undone
            if added:
                release(message)
        if cell.next < len(cell.members):
            return []
        if cell.watch is not None:
            self._decide(cell, cell.watch, release)
        if cell.abandoned:
            return self._abandon(cell)
        return self._again(cell) if self._misjudged(cell) else self._emit(cell)

    def _add(self, cell: _Cell, message: Message, *, judged: bool = False) -> bool:
        """Whether it is added; else it is too odd, and held back until all are in."""
        h = message.header
        try:
            if cell.watch is not None and not judged and cell.watch.holds(message, cell.round):
                return False
            cell.ops.add(cell.round, message.body, cell.accs[cell.round], cell.summed == 0)
        except (CorruptFrame, ValueError) as error:
            raise _breach(message, str(error)) from None
        cell.summed += 1
        cell.totals.add(h.total)
        cell.weight += h.weight
        cell.used |= h.used
        return True

    def _decide(self, cell: _Cell, watch: Watch, release: Callable[[Message], None]) -> None:
        """All are in: what is held back is added after all, where it is most of them, or it is refused for good."""
        for message, why in watch.decided(len(cell.members)):
            if why:
                watch.note(message.peer, cell.step, cell.bucket, why)
            else:
                self._add(cell, message, judged=True)
            release(message)

    def _abandon(self, cell: _Cell) -> list[Reply]:
        cell.ops.skip()
        replies = self._reply(cell, Flag.ABANDON, memoryview(cell.abandoned))
        cell.idle(cell.step + 1)
        return replies

    def _misjudged(self, cell: _Cell) -> bool:
        """Whether some member coded its part of another weight than that of all: then old debts would be paid twice or half."""
        total = as_float32(cell.weight)
        return cell.round == 0 and cell.ops.in_means and total > 0 and cell.totals != {total}

    def _again(self, cell: _Cell) -> list[Reply]:
        """Nothing has been emitted, so all can code the same step again, now that the weight of all is known."""
        header = self._header(cell, Flag.AGAIN)
        expected = as_float32(cell.weight)
        cell.begin(cell.step, 0)
        cell.expected = expected
        return [Reply(member, header, b"") for member in cell.members]

    def _emit(self, cell: _Cell) -> list[Reply]:
        ops, step, r = cell.ops, cell.step, cell.round
        out = cell.out(step, r)
        refused = cell.watch.settle(r) if cell.watch is not None else frozenset()
        flags = Flag.PARTIAL if refused else Flag.NONE
        replies = self._reply(cell, flags, out[: ops.emit(r, cell.accs[r], out)].toreadonly(), refused)
        if r + 1 < ops.rounds:
            cell.begin(step, r + 1)
        else:
            cell.idle(step + 1)
        return replies

    def _reply(self, cell: _Cell, flags: Flag, body: memoryview, refused: frozenset[int] = frozenset()) -> list[Reply]:
        """To all members, and kept for whoever asks again."""
        header = self._header(cell, flags)
        cell.results[(cell.step, cell.round)], cell.refused[(cell.step, cell.round)] = (header, body), refused
        for old in [k for k in cell.results if k[0] <= cell.step - KEPT_STEPS]:
            del cell.results[old]
            cell.refused.pop(old, None)
        return [_told(member, header, body, refused) for member in cell.members]

    def _header(self, cell: _Cell, flags: Flag) -> Header:
        return Header(Kind.RESULT, self.generation, cell.step, cell.bucket, round=cell.round, codec=cell.ops.codec,
                      sender=self.peer, order=cell.order, flags=flags, weight=cell.weight, used=cell.used)

    def undo(self, message: Message) -> None:
        """No PUSH will say what of the last step was not applied."""
        cell, h = self._cell(message), message.header
        with cell.lock:
            if h.generation == self.generation:
                self._between(cell, message)
                cell.ops.undo(h.undone)

    def busy(self) -> bool:
        """Whether a contribution waits for others."""
        return any(cell.here() for cell in self.cells.values())

    def stalled(self, before: float) -> list[Stall]:
        """Sums that have waited since before that time, each with who is missing."""
        found = []
        for cell in self.cells.values():
            with cell.lock:
                here = cell.here()
                if here and cell.since <= before:
                    missing = tuple(m for m in cell.members if m not in here)
                    found.append(Stall(cell.bucket, cell.step, missing, tuple(sorted(here)), cell.since))
        return found

    def snapshot(self, message: Message) -> list[Reply]:
        """The codec state between two steps, without what of the last one was not applied."""
        cell, h = self._cell(message), message.header
        with cell.lock:
            if h.generation < self.generation:
                return []
            self._between(cell, message)
            if h.undone:
                cell.ops.undo(h.undone)
            state = cell.ops.snapshot()
        return [Reply(message.peer, h._replace(kind=Kind.STATE, undone=0, sender=self.peer), state)]

    def restore(self, message: Message) -> list[Reply]:
        """Takes up saved state, whole or not at all. The next contribution is of the message's step; results are forgotten."""
        cell, h = self._cell(message), message.header
        with cell.lock:
            if h.generation < self.generation:
                return []
            self._between(cell, message)
            try:
                cell.ops.restore(message.body)
            except (CorruptFrame, ValueError) as error:
                raise _breach(message, f"sent a state that does not fit: {error}") from None
            cell.results.clear()
            cell.idle(h.step)
        return [Reply(message.peer, h._replace(kind=Kind.STATE_OK, sender=self.peer), b"")]

    def _between(self, cell: _Cell, message: Message) -> None:
        if cell.open:
            raise _breach(message, f"{Kind(message.header.kind).name} while step {cell.step} is being summed")


def _told(member: int, header: Header, body: memoryview, refused: frozenset[int] | None) -> Reply:
    mine = refused is not None and member in refused
    return Reply(member, header._replace(flags=header.flags | Flag.REFUSED) if mine else header, body)


def _applied(undone: int) -> str:
    return "did not apply some averages" if undone else "applied all"


def as_float32(weight: float) -> float:
    """As it is in a header, so that both ends compare the same number."""
    return struct.unpack("<f", struct.pack("<f", weight))[0]  # type: ignore[no-any-return]


def _breach(message: Message, what: str) -> CorruptFrame:
    return CorruptFrame(what, peer=peer_name(message.peer), step=message.header.step, bucket=message.header.bucket)

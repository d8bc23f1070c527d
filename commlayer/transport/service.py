"""The summation service as a state machine: contributions in, replies out. Knows buckets, members and bytes.

It does no input or output, reads no clock and does not know how payloads are coded: the codec side is handed in as `Ops`.
Contributions of one (step, round) are added in member order, whatever their order of arrival, so that runs repeat bit for bit;
one that comes early waits encoded. Each is applied at most once. Results of the last two steps are kept and served again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from commlayer.errors import CorruptFrame
from commlayer.transport.protocol import SERVER_BASE, Flag, Header, Kind, Message, peer_name

KEPT_STEPS = 2


class Ops(Protocol):
    """What the codec side does for one bucket. One instance belongs to one bucket and holds its server state."""

    @property
    def rounds(self) -> int: ...

    @property
    def codec(self) -> int: ...

    @property
    def bound(self) -> int: ...

    def zeros(self, r: int) -> Any: ...

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None: ...

    def emit(self, r: int, acc: Any, out: memoryview) -> int: ...

    def undo(self) -> None: ...

    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes | memoryview) -> None: ...


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

    def __init__(self, bucket: int, ops: Ops, members: tuple[int, ...]) -> None:
        self.bucket, self.ops, self.members = bucket, ops, members
        self.lock = threading.Lock()
        self.accs: list[Any] = [None] * ops.rounds
        # One buffer per kept step and round; a result stays whole until its step leaves the window.
        self.outs: dict[tuple[int, int], memoryview] = {}
        self.results: dict[tuple[int, int], tuple[Header, memoryview]] = {}
        self.begin(step=-1, r=0)
        self.open = False

    def begin(self, step: int, r: int) -> None:
        self.open = True
        self.step, self.round, self.next = step, r, 0
        self.early: dict[int, Message] = {}
        self.weight, self.used, self.order, self.undo, self.since = 0.0, 0, 0, 0, 0.0

    def here(self) -> set[int]:
        return {*self.members[: self.next], *self.early} if self.open else set()

    def out(self, step: int, r: int) -> memoryview:
        slot = (step % KEPT_STEPS, r)
        if slot not in self.outs:
            self.outs[slot] = memoryview(bytearray(self.ops.bound))
        return self.outs[slot]


class Summation:
    """All buckets of one server. `push` may be called from any number of threads."""

    def __init__(self, server: int, generation: int, ops: dict[int, Ops], senders: dict[int, tuple[int, ...]]) -> None:
        """`senders[bucket]` are the members that contribute to it, in the order in which they are added."""
        self.peer = SERVER_BASE + server
        self.generation = generation
        self.cells = {bucket: _Cell(bucket, o, senders[bucket]) for bucket, o in ops.items()}

    def push(self, message: Message, now: float, release: Callable[[Message], None] = lambda _: None) -> list[Reply]:
        """Takes one contribution. Raises CorruptFrame, having changed nothing, if it breaks the protocol or its format.

        `release` is called with each message whose body is no longer needed.
        """
        h = message.header
        cell = self._cell(message)
        with cell.lock:
            if h.generation < self.generation:
                release(message)
                return []  # of a view that has ended; its sender will push again
            kept = cell.results.get((h.step, h.round))
            if kept is not None:
                release(message)
                return [Reply(message.peer, *kept)]
            self._admit(cell, message)
            here = cell.here()
            if message.peer in here:
                release(message)
                return []  # a repeat of what is here already
            if not here:
                cell.since = now
            cell.early[message.peer] = message
            return self._advance(cell, release)

    def _cell(self, message: Message) -> _Cell:
        h = message.header
        who = peer_name(message.peer)
        cell = self.cells.get(h.bucket)
        if cell is None:
            raise CorruptFrame(f"bucket {h.bucket} is not of this server", peer=who, step=h.step)
        if h.sender != message.peer or message.peer not in cell.members:
            raise CorruptFrame(f"says it is {peer_name(h.sender)}", peer=who, step=h.step, bucket=h.bucket)
        if h.generation > self.generation:
            raise CorruptFrame(f"generation {h.generation}, here {self.generation}", peer=who, step=h.step, bucket=h.bucket)
        if h.round >= cell.ops.rounds or h.parts != 1 or h.part != 0:
            raise CorruptFrame(f"round {h.round}, part {h.part} of {h.parts}", peer=who, step=h.step, bucket=h.bucket)
        if h.codec != cell.ops.codec or not 0.0 <= h.weight < float("inf"):
            raise CorruptFrame(f"codec {h.codec} with weight {h.weight}", peer=who, step=h.step, bucket=h.bucket)
        return cell

    def _admit(self, cell: _Cell, message: Message) -> None:
        """A contribution belongs to the sum under way, or between steps begins a later one."""
        h = message.header
        if not cell.open and h.round == 0 and h.step > cell.step:
            cell.begin(h.step, 0)
        if not cell.open or (h.step, h.round) != (cell.step, cell.round):
            state = f"in round {cell.round} of step {cell.step}" if cell.open else f"after step {cell.step}"
            raise CorruptFrame(f"contribution out of order: round {h.round}, while the sum is {state}",
                               peer=peer_name(message.peer), step=h.step, bucket=h.bucket)

    def _advance(self, cell: _Cell, release: Callable[[Message], None]) -> list[Reply]:
        """Adds what is next in member order; when all are in, emits the result to all."""
        ops, r = cell.ops, cell.round
        if cell.accs[r] is None:
            cell.accs[r] = ops.zeros(r)
        while cell.next < len(cell.members) and cell.members[cell.next] in cell.early:
            message = cell.early.pop(cell.members[cell.next])
            h = message.header
            first, undo = cell.next == 0, h.flags & Flag.UNDO
            try:
                if not first and undo != cell.undo:
                    raise CorruptFrame("disagrees on whether the step before was abandoned")
                if first and undo and r == 0:
                    ops.undo()  # before `add`, which overwrites what was summed in that step
                ops.add(r, message.body, cell.accs[r], first)
            except CorruptFrame as error:
                raise CorruptFrame(error.what, peer=peer_name(message.peer), step=h.step, bucket=h.bucket) from None
            cell.next += 1
            cell.weight += h.weight
            cell.used |= h.used
            cell.order, cell.undo = h.order, undo
            release(message)
        return self._emit(cell) if cell.next == len(cell.members) else []

    def _emit(self, cell: _Cell) -> list[Reply]:
        ops, step, r = cell.ops, cell.step, cell.round
        out = cell.out(step, r)
        body = out[: ops.emit(r, cell.accs[r], out)].toreadonly()
        header = Header(Kind.RESULT, self.generation, step, cell.bucket, round=r, codec=ops.codec, sender=self.peer,
                        order=cell.order, weight=cell.weight, used=cell.used)
        cell.results[(step, r)] = (header, body)
        for old in [k for k in cell.results if k[0] <= step - KEPT_STEPS]:
            del cell.results[old]
        if r + 1 < ops.rounds:
            cell.begin(step, r + 1)
        else:
            cell.open = False
        return [Reply(member, header, body) for member in cell.members]

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

    def snapshot(self, bucket: int, *, undo: bool) -> bytes:
        """The codec state between two steps; `undo` first gives the last result back, as a PUSH with that flag would."""
        cell = self.cells[bucket]
        with cell.lock:
            if undo:
                cell.ops.undo()
            return cell.ops.snapshot()

    def restore(self, bucket: int, step: int, data: bytes | memoryview) -> None:
        """Takes up saved state: the next contribution is of a step after `step`; results kept so far are forgotten."""
        cell = self.cells[bucket]
        with cell.lock:
            cell.ops.restore(data)
            cell.results.clear()
            cell.begin(step, 0)
            cell.open = False


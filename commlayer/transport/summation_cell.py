"""One bucket's sum on a server: what is handed in for it, and what it holds from step to step. Decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from commlayer.transport.protocol import Header, Message

KEPT_STEPS = 2
MOST_REASON_NBYTES = 256
"""Of a word on why a step was broken off."""
Keep = Callable[[int, bytes, bytes], None]
"""Writes down the words and the state of a bucket's sum, for good when it returns."""


class Ops(Protocol):
    """What the codec side does for one bucket. One instance belongs to one bucket and holds its server state."""

    @property
    def rounds(self) -> int: ...

    @property
    def codec(self) -> int: ...

    @property
    def bound(self) -> int: ...

    @property
    def in_means(self) -> bool:
        """Whether payloads must be coded as parts of all workers' weight: see `Header.total`."""
        ...

    def zeros(self, r: int) -> Any: ...

    def add(self, r: int, payload: memoryview, acc: Any, first: bool) -> None: ...

    def emit(self, r: int, acc: Any, out: memoryview) -> int: ...

    def undo(self, slices: int) -> None: ...

    def skip(self) -> None: ...

    def snapshot(self) -> bytes: ...

    def restore(self, data: bytes | memoryview) -> None: ...


class Lasting(Ops, Protocol):
    """Ops whose state outlasts the process."""

    @property
    def memory_nbytes(self) -> int: ...

    def remember(self) -> bytes: ...

    def recall(self, data: bytes, sent: memoryview) -> None: ...

    def begin_anew(self) -> None: ...


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


class Cell:
    """One bucket: the sum under way, or the step last finished, and the results kept."""

    def __init__(self, bucket: int, ops: Lasting, members: tuple[int, ...]) -> None:
        self.bucket, self.ops, self.members = bucket, ops, members
        self.lock = threading.Lock()
        self.accs: list[Any] = [None] * ops.rounds
        # One buffer per kept step and round; a result stays whole until its step leaves the window.
        self.outs: dict[tuple[int, int], memoryview] = {}
        self.results: dict[tuple[int, int], tuple[Header, memoryview]] = {}
        self.idle(None)

    def idle(self, step: int | None) -> None:
        """Between sums. `step` is the one that comes next; None takes the first one that a contribution names."""
        self.begin(step or 0, 0)
        self.open, self.awaited = False, step

    def begin(self, step: int, r: int) -> None:
        self.open = True
        self.first: int | None = None  # who contributed first
        self.step, self.round, self.next = step, r, 0
        self.early: dict[int, Message] = {}
        self.weight, self.used, self.order, self.undone, self.since = 0.0, 0, 0, 0, 0.0
        self.totals: set[float] = set()
        self.expected = 0.0
        """What all weigh, once they have been told,"""
        self.told: Header | None = None
        """which is how."""
        self.abandoned = b""
        """Who broke the step off, and why."""
        self.summed = 0
        self.recalled = False
        """Whether a former process summed this, and nobody has contributed since."""

    def here(self) -> set[int]:
        return {*self.members[: self.next], *self.early} if self.open else set()

    def out(self, step: int, r: int) -> memoryview:
        slot = (step % KEPT_STEPS, r)
        if slot not in self.outs:
            self.outs[slot] = memoryview(bytearray(self.ops.bound))
        return self.outs[slot]

"""State of one bucket's sum on a server, from step to step. Summation makes the decisions."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from commlayer.cluster.summation_ops import GivesBack, Lasting
from commlayer.transport.protocol import Header, Message

KEPT_STEPS = 2
EVERY_SLICE = (1 << 64) - 1
REPEATS = 16
"""A member may repeat its part of a step this often, for example after a reconnect or when parts are coded again."""
REPEAT_EVERY_S = 1.0
"""One more repeat is allowed per this time, since a step may wait long for one member while others reconnect repeatedly."""
OVERHEAD_NBYTES = 512
"""Cost of a message in addition to its body."""
MOST_REASON_NBYTES = 256
"""Longest reason for aborting a step."""
Keep = Callable[[int, bytes, bytes], None]
"""Writes the metadata and state of a bucket's sum; both are durable when it returns."""


class Reply(NamedTuple):
    peer: int
    header: Header
    body: memoryview | bytes


class Stall(NamedTuple):
    """A sum that waits: for which members, since when, and which members have contributed."""

    bucket: int
    step: int
    missing: tuple[int, ...]
    waiting: tuple[int, ...]
    since: float


class Cell:
    """One bucket: the sum under way or the last finished step, and the results that are kept."""

    def __init__(self, bucket: int, ops: Lasting, members: tuple[int, ...]) -> None:
        self.bucket, self.ops, self.members = bucket, ops, members
        self.lock = threading.Lock()
        self.accs: list[Any] = [None] * ops.rounds
        # One buffer per kept step and round; a result stays valid until its step leaves the window.
        self.outs: dict[tuple[int, int], memoryview] = {}
        self.results: dict[tuple[int, int], tuple[Header, memoryview]] = {}
        self.lean: GivesBack | None = None
        """Set to `ops` if payloads are kept between steps instead of their sum, to save memory."""
        if isinstance(ops, GivesBack) and ops.worth_giving_back(len(members)):
            self.lean = ops
        self.held: list[Message] = []
        """The payloads of the last result, in the order in which they were added, if the sum's memory was given back."""
        self.over = False
        """The view has ended: nothing more is added."""
        self.idle(None)

    def idle(self, step: int | None) -> None:
        """Enters the state between sums. `step` is the next one; None: the first contribution names it."""
        self.begin(step or 0, 0)
        self.open, self.awaited = False, step
        self.taken: dict[int, int] = {}
        """Bytes from each member since then."""
        self.taking_since = 0.0
        """When the first of these bytes came."""

    def begin(self, step: int, r: int) -> None:
        self.open = True
        self.first: int | None = None  # the member that contributed first
        self.step, self.round, self.next = step, r, 0
        self.early: dict[int, Message] = {}
        self.weight, self.used, self.order, self.undone, self.since = 0.0, 0, 0, 0, 0.0
        self.totals: set[float] = set()
        self.expected = 0.0
        """Total weight of all members, after they were asked to code the step again."""
        self.told: Header | None = None
        """The AGAIN header that gave them this weight."""
        self.abandoned = b""
        """Which member aborted the step, and why."""
        self.summed = 0
        self.recalled = False
        """The state comes from the journal, and no contribution has come since."""

    def end(self, step: int, undone: int) -> None:
        """The view ends in that step, which all workers roll back. `undone`: what they did not apply of the step before."""
        self.over = True
        rounds = range(self.ops.rounds)
        if (step, rounds[-1]) in self.results:
            self.undo(EVERY_SLICE)
        elif undone and (step - 1, rounds[-1]) in self.results and not any((step, r) in self.results for r in rounds):
            self.undo(undone)  # idempotent: a PUSH may have reported it already

    def undo(self, slices: int) -> None:
        """Rolls back what the workers did not apply of the last result."""
        self.sum_again()
        self.ops.undo(slices)

    def sum_again(self) -> None:
        """Restores the last result's sum, equal bit for bit, from its payloads."""
        for number, message in enumerate(self.held):
            self.ops.add(0, message.body, self.accs[0], number == 0)
        self.held.clear()

    def takes(self, member: int, nbytes: int, now: float) -> tuple[int, int]:
        """Counts the bytes of a new message. Returns how many the member has sent within the step, and how many it may."""
        if not self.taken:
            self.taking_since = now
        repeats = REPEATS + int((now - self.taking_since) / REPEAT_EVERY_S)
        taken = self.taken[member] = self.taken.get(member, 0) + nbytes + OVERHEAD_NBYTES
        return taken, (1 + repeats) * self.ops.rounds * (self.ops.bound + OVERHEAD_NBYTES)

    def forget_results(self) -> None:
        self.results.clear()
        self.held.clear()

    def here(self) -> set[int]:
        return {*self.members[: self.next], *self.early} if self.open else set()

    def out(self, step: int, r: int) -> memoryview:
        slot = (step % KEPT_STEPS, r)
        if slot not in self.outs:
            self.outs[slot] = memoryview(bytearray(self.ops.bound))
        return self.outs[slot]

"""One bucket's sum on a server: what is handed in for it, and what it holds from step to step. Decides nothing."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, NamedTuple

from commlayer.cluster.summation_ops import GivesBack, Lasting
from commlayer.transport.protocol import Header, Message

KEPT_STEPS = 2
EVERY_SLICE = (1 << 64) - 1
REPEATS = 16
"""So often may a member say its part of a step again: connections break, and parts are coded again,"""
REPEAT_EVERY_S = 1.0
"""and once more in each such time: a step may wait long for one, while connections of the others break and are made anew."""
OVERHEAD_NBYTES = 512
"""What a message costs beside its body."""
MOST_REASON_NBYTES = 256
"""Of a word on why a step was broken off."""
Keep = Callable[[int, bytes, bytes], None]
"""Writes down the words and the state of a bucket's sum, for good when it returns."""


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
        self.lean: GivesBack | None = None
        """Its ops, where the payloads are held from step to step, and not their sum."""
        if isinstance(ops, GivesBack) and ops.worth_giving_back(len(members)):
            self.lean = ops
        self.held: list[Message] = []
        """What the last result is the sum of, in the order in which it was added, where the sum itself was given back."""
        self.over = False
        """Its view has ended: nothing is added any more."""
        self.idle(None)

    def idle(self, step: int | None) -> None:
        """Between sums. `step` is the one that comes next; None takes the first one that a contribution names."""
        self.begin(step or 0, 0)
        self.open, self.awaited = False, step
        self.taken: dict[int, int] = {}
        """Bytes from each member since then,"""
        self.taking_since = 0.0
        """the first of which came at that time."""

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

    def end(self, step: int, undone: int) -> None:
        """The view ends in that step, which all workers take back. `undone`: what they had not applied of the one before."""
        self.over = True
        rounds = range(self.ops.rounds)
        if (step, rounds[-1]) in self.results:
            self.undo(EVERY_SLICE)
        elif undone and (step - 1, rounds[-1]) in self.results and not any((step, r) in self.results for r in rounds):
            self.undo(undone)  # where a PUSH has said so already, that changes nothing

    def undo(self, slices: int) -> None:
        """Takes back what of the last result was not applied."""
        self.sum_again()
        self.ops.undo(slices)

    def sum_again(self) -> None:
        """The last result's sum is there again, to the bit."""
        for number, message in enumerate(self.held):
            self.ops.add(0, message.body, self.accs[0], number == 0)
        self.held.clear()

    def takes(self, member: int, nbytes: int, now: float) -> tuple[int, int]:
        """A body of that size has come: how many bytes that member has sent within the step, and how many it may."""
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

"""Whose contribution to a sum is too odd to be added: by its norm beside the others' recent ones. Knows no codec and no socket.

A norm is of what a contribution adds, by its weight: the median of what the other members sent lately says what is usual, and
what is many times that is refused. Norms that rise everywhere at once are the training's own: where more than half are odd,
none is refused. What is not finite is refused only where that is asked for, since a GradScaler lives by seeing it.
"""

from __future__ import annotations

import math
import threading
from collections import deque
from collections.abc import Callable, Iterable
from statistics import median

from commlayer.transport.protocol import Message

FACTOR = 100.0
"""So many times the median. Ranks' norms differ by a few times, and one with spikes by ten."""
WINDOW = 16
"""Steps whose norms are kept of each member."""
LEAST = 8
"""So many norms of others tell what is usual; with fewer nothing is refused for its size."""
OFTEN, WITHIN = 3, 100
"""Who was refused in so many steps of so many is dropped."""

Norm = Callable[[int, memoryview], float]
"""Of a payload of that round, infinite if it is not finite."""
Note = Callable[[int, int, int, str], None]
"""Member, step, bucket, and why its contribution was refused."""


class Watch:
    """The contributions to one bucket, and who hears of refusals."""

    def __init__(self, rounds: int, norm: Norm, note: Note, *, finite_only: bool) -> None:
        """`finite_only`: what is not finite is refused, too."""
        self.note, self._norm, self._finite_only = note, norm, finite_only
        self._recent: list[dict[int, deque[float]]] = [{} for _ in range(rounds)]
        self._now: dict[int, float] = {}
        self._odd: dict[int, str] = {}
        """In the step under way, and why."""
        self._held: list[Message] = []

    def begin(self, r: int) -> None:
        """Who was refused in a round of a step is so in those after it."""
        self._now, self._held = {}, []
        if r == 0:
            self._odd = {}

    def recall(self, members: Iterable[int]) -> None:
        """Who was refused in an earlier round of the step under way, ahead of a restart."""
        self._odd = dict.fromkeys(members, "it was refused in an earlier round")

    def holds(self, message: Message, r: int) -> bool:
        """Whether it is odd, as far as can be told before all are in. Errors of the codec are the payload's."""
        member = message.peer
        if member not in self._odd:
            norm = self._norm(r, message.body) / (message.header.weight or 1.0)
            why = self._judged(member, r, norm)
            if not why:
                self._now[member] = norm
                return False
            self._odd[member] = why
        self._held.append(message)
        return True

    def _judged(self, member: int, r: int, norm: float) -> str:
        if not math.isfinite(norm):
            return "it is not finite" if self._finite_only else ""
        others = [known for other, recent in self._recent[r].items() if other != member for known in recent]
        usual = median(others) if len(others) >= LEAST else 0.0
        if usual and norm > FACTOR * usual:
            return f"its norm is {norm:.3g}, the median of the others' last ones {usual:.3g}"
        return ""

    def decided(self, members: int) -> list[tuple[Message, str]]:
        """All that was held, and why it is refused. Where that is more than half of them the cause is not theirs: none is."""
        if 2 * len(self._odd) > members:
            self._odd = {}
        held, self._held = self._held, []
        return [(message, self._odd.get(message.peer, "")) for message in held]

    def settle(self, r: int) -> frozenset[int]:
        """The sum of that round is out: its norms are what is usual from now on. Whose contributions were refused."""
        for member, norm in self._now.items():
            if math.isfinite(norm):
                self._recent[r].setdefault(member, deque(maxlen=WINDOW)).append(norm)
        self._now = {}
        return frozenset(self._odd)


class Offences:
    """Of all buckets of a server: who was refused in which steps. Any number of threads may call it."""

    def __init__(self, told: Note) -> None:
        """`told`: hears once for each member and step, with the bucket and why."""
        self._told, self._lock = told, threading.Lock()
        self._steps: dict[int, deque[int]] = {}
        self._over: set[int] = set()

    def note(self, member: int, step: int, bucket: int, why: str) -> None:
        with self._lock:
            steps = self._steps.setdefault(member, deque(maxlen=OFTEN))
            if step in steps:
                return
            steps.append(step)
            if len(steps) == OFTEN and max(steps) - min(steps) < WITHIN:
                self._over.add(member)
        self._told(member, step, bucket, why)

    def over(self) -> Iterable[int]:
        """Who is to be dropped, each once."""
        with self._lock:
            found, self._over = self._over, set()
        return found


class Quarantine:
    """Of one server: how its buckets are watched, and who was refused."""

    def __init__(self, told: Note, *, finite_only: bool) -> None:
        """See Watch and Offences."""
        self.offences, self._finite_only = Offences(told), finite_only

    def watch(self, rounds: int, norm: Norm) -> Watch:
        return Watch(rounds, norm, self.offences.note, finite_only=self._finite_only)

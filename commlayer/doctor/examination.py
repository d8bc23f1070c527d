"""Looks at several things at once, each with its own deadline, so that nothing that hangs holds up the rest. Knows no check."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from commlayer.doctor.finding import Finding, fail, of_error
from commlayer.errors import line_of


class Look(NamedTuple):
    """`look` gathers and judges. `remedy` is for one that has not come back in time."""

    check: str
    look: Callable[[], Iterable[Finding]]
    deadline_s: float
    remedy: str


def examine(looks: Sequence[Look]) -> Iterator[Finding]:
    """What each found, in their order, as soon as it is known. What is late is a finding of its own, and is left behind."""
    begin = time.monotonic()
    answers: list[queue.SimpleQueue[list[Finding]]] = [queue.SimpleQueue() for _ in looks]

    def run(one: Look, answer: queue.SimpleQueue[list[Finding]]) -> None:
        try:
            answer.put([*one.look()])
        except Exception as error:  # whatever is odd on a machine, the other checks are worth having
            answer.put([of_error(one.check, f"{line_of(error) or type(error).__name__}")])

    for one, answer in zip(looks, answers, strict=True):
        threading.Thread(target=run, args=(one, answer), name=f"doctor {one.check}", daemon=True).start()
    for one, answer in zip(looks, answers, strict=True):
        try:
            yield from answer.get(timeout=max(0.0, begin + one.deadline_s - time.monotonic()))
        except queue.Empty:
            yield fail(one.check, f"no answer within {one.deadline_s:g} s", one.remedy)

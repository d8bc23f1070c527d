"""Runs checks concurrently, each with its own deadline, so that a check that hangs does not delay the others."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

from commlayer.doctor.finding import Finding, fail, of_error
from commlayer.errors import line_of


class Look(NamedTuple):
    """One check: `look` gathers facts and judges them. `remedy` is for a check that exceeds its deadline."""

    check: str
    look: Callable[[], Iterable[Finding]]
    deadline_s: float
    remedy: str


def examine(looks: Sequence[Look]) -> Iterator[Finding]:
    """Yields the findings in the order of the checks, as soon as they are known. A check past its deadline yields a failure."""
    begin = time.monotonic()
    answers: list[queue.SimpleQueue[list[Finding]]] = [queue.SimpleQueue() for _ in looks]

    def run(one: Look, answer: queue.SimpleQueue[list[Finding]]) -> None:
        try:
            answer.put([*one.look()])
        except Exception as error:  # whatever fails on this machine, the other checks are still useful
            answer.put([of_error(one.check, f"{line_of(error) or type(error).__name__}")])

    for one, answer in zip(looks, answers, strict=True):
        threading.Thread(target=run, args=(one, answer), name=f"doctor {one.check}", daemon=True).start()
    for one, answer in zip(looks, answers, strict=True):
        try:
            yield from answer.get(timeout=max(0.0, begin + one.deadline_s - time.monotonic()))
        except queue.Empty:
            yield fail(one.check, f"no answer within {one.deadline_s:g} s", one.remedy)

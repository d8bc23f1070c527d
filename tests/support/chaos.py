"""Evidence of a run that went on after a fault, to be changed by tests of the verdict."""

from __future__ import annotations

from typing import Any

from bench.chaos import verdict
from bench.chaos.cluster import Evidence
from bench.chaos.reports import Ended, Stepped
from bench.chaos.trials import STEPS, Setting

SETTING = Setting("identity()")


def evidence(**changes: Any) -> Evidence:
    """Of a run that went on: two workers with 1 and 4 of the samples of each step."""
    def samples(rank: int, step: int) -> tuple[int, ...]:
        first = 5 * (step % verdict.STEPS_PER_EPOCH)
        return (first,) if rank == 0 else tuple(range(first + 1, first + 5))

    stepped = [[Stepped(n + 1, f"digest {n}", samples(rank, n), float(n)) for n in range(STEPS)] for rank in range(2)]
    ended: list[Ended | None] = [Ended(STEPS, STEPS), Ended(STEPS, STEPS)]
    result = Evidence(stepped, ended, 1, 5.5, 42.0, (), 400, 0, (), (), 1e-7, "a line")
    return result._replace(**changes)

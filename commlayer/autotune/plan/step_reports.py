"""Exchanges rows about steps between all ranks, and says when the next are due. Knows rows of numbers; decides nothing.

A row is sent after a step and read after the next one, so that nobody waits for it. Where a step was slow on every rank they
wait for each other's rows at once: beside such a step that is nothing, and the next one may be as slow. All ranks get the same
rows to act upon after the same step.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean

from commlayer.autotune.plan.facts import StepReport
from commlayer.cluster.rank_rows import Rows
from commlayer.engine.spacing import row_spacing
from commlayer.observe import Direction, InterfaceCounters


class StepReports:
    """All ranks make one together and call it after the same steps: `step`, `heard`, then `tell` if it is `due`."""

    def __init__(self, rows: Rows, meter: InterfaceCounters | None = None) -> None:
        """`meter` on the rank that reads its node's counters."""
        self._rows, self._meter = rows, meter
        self._since: list[tuple[float, float]] = []
        self._held: list[StepReport] = []
        self._every, self._left = 1, 1
        self._costs_s: deque[float] = deque(maxlen=5)
        self._cost_s = 0.0

    def heard(self) -> list[StepReport]:
        """What was told after an earlier step and has not been acted upon; nothing, if there is none."""
        begin = time.perf_counter()
        if self._rows.under_way:
            self._held = self._read()
            self._cost_s += time.perf_counter() - begin
        rows, self._held = self._held, []
        return rows

    def step(self, seconds: float, waited_s: float) -> None:
        """A step is over, and took so long; so much of it this rank waited for communication."""
        self._since.append((seconds, waited_s))
        self._left -= 1

    def afresh(self) -> None:
        """What was seen so far says nothing of the steps to come."""
        self._since.clear()
        if self._meter is not None:
            self._meter.look()

    @property
    def due(self) -> bool:
        """Whether it is time to tell."""
        return self._left <= 0 and bool(self._since)

    def tell(self, word: int, plan_s: float, slow_s: float) -> list[StepReport]:
        """What all have told, if all wait for it, as ranks do whose step took longer than `slow_s`."""
        begin = time.perf_counter()
        self._costs_s.append(self._cost_s)
        step_s, waited_s = map(fmean, zip(*self._since, strict=True))
        self._since = []
        up, down = (Direction(), Direction()) if self._meter is None else self._meter.look()
        cost_s = min(self._costs_s)  # what else the machine does only adds
        row = StepReport(word, plan_s, step_s > slow_s, step_s, cost_s, waited_s, *up, *down)
        self._rows.start(*row)
        self._cost_s = time.perf_counter() - begin
        self._left = self._every
        if not row.at_once:
            return []
        rows = self._read()
        if not all(row.at_once for row in rows):
            self._held = rows  # the others hear it after the next step
            return []
        return rows

    def _read(self) -> list[StepReport]:
        rows = [StepReport(*row) for row in self._rows.read()]
        self._every = row_spacing(max(row.cost_s for row in rows), max(row.step_s for row in rows))
        return rows

"""Exchange of rows about steps between all ranks.

A row is sent after a step and read after the next one, so that no rank waits. If a step was slow on every rank, all wait for
the rows at once: that costs little then, and the next step may be as slow. All ranks act on the same rows after the same step.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean

from commlayer.autotune.plan.facts import StepReport
from commlayer.cluster.collectives import Rows
from commlayer.engine.observers import row_spacing
from commlayer.observe import Direction, InterfaceCounters


class StepReports:
    """All ranks create one together and call it after the same steps: `step`, `heard`, then `tell` if it is `due`."""

    def __init__(self, rows: Rows, meter: InterfaceCounters | None = None) -> None:
        """`meter` is set on the rank that reads its node's counters."""
        self._rows, self._meter = rows, meter
        self._since: list[tuple[float, float]] = []
        self._held: list[StepReport] = []
        self._every, self._left = 1, 1
        self._costs_s: deque[float] = deque(maxlen=5)
        self._cost_s = 0.0

    def heard(self) -> list[StepReport]:
        """Rows of an earlier step that have not been returned yet; may be empty."""
        begin = time.perf_counter()
        if self._rows.under_way:
            self._held = self._read()
            self._cost_s += time.perf_counter() - begin
        rows, self._held = self._held, []
        return rows

    def step(self, seconds: float, waited_s: float) -> None:
        """Records a step: its time, and this rank's wait for communication in it."""
        self._since.append((seconds, waited_s))
        self._left -= 1

    def afresh(self) -> None:
        """Discards observations that do not apply to the next steps."""
        self._since.clear()
        if self._meter is not None:
            self._meter.look()

    @property
    def due(self) -> bool:
        """Whether the next row must be sent now."""
        return self._left <= 0 and bool(self._since)

    def tell(self, word: int, plan_s: float, slow_s: float) -> list[StepReport]:
        """Sends this rank's row. Returns all rows if all ranks wait for them, as after a step longer than `slow_s`."""
        begin = time.perf_counter()
        self._costs_s.append(self._cost_s)
        step_s, waited_s = map(fmean, zip(*self._since, strict=True))
        self._since = []
        up, down = (Direction(), Direction()) if self._meter is None else self._meter.look()
        cost_s = min(self._costs_s)  # other load on the machine can only increase the cost
        row = StepReport(word, plan_s, step_s > slow_s, step_s, cost_s, waited_s, *up, *down)
        self._rows.start(*row)
        self._cost_s = time.perf_counter() - begin
        self._left = self._every
        if not row.at_once:
            return []
        rows = self._read()
        if not all(row.at_once for row in rows):
            self._held = rows  # returned by `heard` after the next step, as on the other ranks
            return []
        return rows

    def _read(self) -> list[StepReport]:
        rows = [StepReport(*row) for row in self._rows.read()]
        self._every = row_spacing(max(row.cost_s for row in rows), max(row.step_s for row in rows))
        return rows

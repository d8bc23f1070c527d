"""The report that each rank sends to all ranks, as a section of the step's row.

A report is sent after a step and read after the next one, so no rank waits. If a step was slow on every rank and can decide
that a link is slower, all ranks wait for the reports at once. All ranks act on the same reports after the same step.
"""

from __future__ import annotations

import time
from collections import deque
from statistics import fmean
from typing import TYPE_CHECKING, Any

from msgspec import structs

from commlayer.autotune.quality import GradientError
from commlayer.autotune.shares.policy import WorkerTime
from commlayer.engine.observers.spacing import row_spacing
from commlayer.observe.link_monitor import Direction, InterfaceCounters, Throughput
from commlayer.records import Record

if TYPE_CHECKING:
    from commlayer.cluster.processes.rows import Section


class Report(Record, frozen=True):
    """One rank's report about its steps since the previous report. Numbers only, because ranks exchange them as tensors."""

    step_s: float
    """Mean step time in seconds."""
    waited_s: float = 0.0
    """Seconds of step_s in which the training thread waited for communication."""
    request: float = 0.0
    """Rank 0's request to all ranks, the number of a `TuningRequest`."""
    at_once: float = 0.0
    """1: the rank waits for the other reports at once, because its step can decide that a link is slower; else 0."""
    cost_s: float = 0.0
    """Seconds of the training thread that one report costs."""
    up_bps: float = 0.0
    up_share: float = 0.0
    down_bps: float = 0.0
    down_share: float = 0.0
    compared: float = 0.0
    """1: `error` is a new comparison with the exact gradients; otherwise 0."""
    failed: float = 0.0
    """1: an error has ended the rank's decisions, so no rank changes anything from now on; otherwise 0."""
    over_alone: float = 0.0
    forecast: float = 0.0
    auto_times: float = 0.0
    """`over_alone`, `forecast`, `auto_times`: rank 0's knowledge, as in observe/events.AloneEvent; 0: unknown."""
    error: GradientError = GradientError()
    time: WorkerTime = WorkerTime()

    @property
    def carried(self) -> Throughput:
        return Throughput(Direction(self.up_bps, self.up_share), Direction(self.down_bps, self.down_share))

    def numbers(self) -> list[float]:
        return [*structs.astuple(self)[:-2], *self.time, *self.error.numbers()]

    @classmethod
    def of(cls, numbers: list[float]) -> Report:
        """Creates a Report from the list that `numbers` returned."""
        first, second = (own := len(cls.__struct_fields__) - 2), own + len(WorkerTime._fields)
        fields: Any = (*numbers[:first], GradientError.of(numbers[second:]), WorkerTime(*numbers[first:second]))
        return cls(*fields)


NOT_KNOWN = (0.0, 0.0, 0.0)
NO_TRAFFIC = Throughput(Direction(), Direction())
"""On ranks that do not report their node's traffic."""


class Reports:
    """Exchanges the reports of all ranks. All ranks create one together and call it after the same steps: `step`, `read`, then
    `send` if it is `due`."""

    def __init__(self, rows: Section) -> None:
        self._rows = rows
        self.meter: InterfaceCounters | None = None
        """Reader of the node's interface counters; None on ranks that do not report the node's traffic."""
        self._steps: list[tuple[float, float]] = []
        self._held: list[Report] = []
        self._every, self._left = 1, 1
        self._costs_s: deque[float] = deque(maxlen=5)
        self._cost_s = 0.0

    def step(self, seconds: float, waited_s: float) -> None:
        """Records a step: its seconds, and this rank's wait for communication in that step."""
        self._steps.append((seconds, waited_s))
        self._left -= 1

    def reset(self) -> None:
        """Drops the observations so far, which do not apply to the next steps."""
        self._steps.clear()
        self.traffic()

    @property
    def due(self) -> bool:
        """True: the next report must be sent now."""
        return self._left <= 0 and bool(self._steps)

    def read(self) -> list[Report]:
        """Returns the reports of all ranks that were sent after an earlier step, once; an empty list if there are none."""
        begin = time.perf_counter()
        if self._rows.under_way:
            self._held = self._read()
            self._cost_s += time.perf_counter() - begin
        rows, self._held = self._held, []
        return rows

    def send(
        self, request: int = 0, decisive_s: float = float("inf"), error: GradientError | None = None,
        own_time: WorkerTime = WorkerTime(), traffic: Throughput = NO_TRAFFIC,
        alone: tuple[float, float, float] = NOT_KNOWN, *, failed: bool = False,
    ) -> list[Report]:
        """Sends this rank's report. Returns the reports of all ranks if all ranks wait for them, as after steps longer than
        `decisive_s`; otherwise an empty list. `traffic`: of the node's link since the previous report. `alone`: see
        Report.over_alone."""
        begin = time.perf_counter()
        self._costs_s.append(self._cost_s)
        step_s, waited_s = map(fmean, zip(*self._steps, strict=True)) if self._steps else (0.0, 0.0)
        self._steps = []
        cost_s = min(self._costs_s)  # other load on the machine can only increase the cost
        row = Report(step_s, waited_s, request, step_s > decisive_s, cost_s, *traffic.up, *traffic.down,
                     error is not None, failed, *alone, error or GradientError(), own_time)
        self._rows.start(*row.numbers())
        self._cost_s = time.perf_counter() - begin
        self._left = self._every
        if not row.at_once:
            return []
        rows = self._read()
        if not all(row.at_once for row in rows):
            self._held = rows  # returned by `read` after the next step, as on the other ranks
            return []
        return rows

    def confirm(self, *, failed: bool) -> bool:
        """Returns whether no rank has failed, after reports for which all ranks have waited. All ranks wait for each other."""
        self._rows.start(float(failed))
        return not any(row[0] for row in self._rows.read())

    def traffic(self) -> Throughput:
        """Returns the traffic of the node's link since the previous call."""
        return NO_TRAFFIC if self.meter is None else self.meter.look()

    def _read(self) -> list[Report]:
        rows = [Report.of(row) for row in self._rows.read()]
        self._every = row_spacing(max(row.cost_s for row in rows), max(row.step_s for row in rows))
        return rows

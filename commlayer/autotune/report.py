"""The report that each rank sends to all ranks, as a section of the step's row.

A report is sent after a step and read after the next one, so no rank waits. If a step was slow on every rank and can decide
that a link is slower, all ranks wait for the reports at once. All ranks act on the same reports after the same step.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Iterator
from statistics import fmean
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from commlayer.autotune.quality.policy import GradientError
from commlayer.autotune.shares.policy import WorkerTime
from commlayer.engine.observers.spacing import row_spacing
from commlayer.observe.interface_counters import Direction, InterfaceCounters, Throughput

if TYPE_CHECKING:
    from commlayer.cluster.processes.rows import Section


class AloneSpeed(NamedTuple):
    """The job's speed compared with its fastest machine alone: see observe/events.AloneEvent. 0: unknown."""

    over_alone: float = 0.0
    forecast: float = 0.0
    auto_times: float = 0.0


NO_TRAFFIC = Throughput(Direction(), Direction())
"""On ranks that do not report their node's traffic."""


class TuningReport(NamedTuple):
    """One rank's report about its steps since the previous report. Numbers only, because it is a part of the step's row."""

    step_s: float = 0.0
    """Mean step time in seconds."""
    waited_s: float = 0.0
    """Seconds of step_s in which the training thread waited for communication."""
    request: float = 0.0
    """Rank 0's request to all ranks, the number of a `TuningRequest`."""
    at_once: float = 0.0
    """1: the rank waits for the other reports at once, because its step can decide that a link is slower; else 0."""
    cost_s: float = 0.0
    """Seconds of the training thread that one report costs."""
    carried: Throughput = NO_TRAFFIC
    """Traffic of the node's link since the previous report."""
    compared: float = 0.0
    """1: `error` is a new comparison with the exact gradients; otherwise 0."""
    failed: float = 0.0
    """1: an error has ended the rank's decisions, so no rank changes anything from now on; otherwise 0."""
    alone: AloneSpeed = AloneSpeed()
    """The speed of the job compared with its fastest machine alone. Only rank 0 knows this speed."""
    allowed_bps: float = 0.0
    """Rate at which the rank's home may send by its caps, in bit/s; 0: it has none."""
    time: WorkerTime = WorkerTime()
    error: GradientError = GradientError()


T = TypeVar("T", bound=tuple[Any, ...])


def flatten_numbers(record: tuple[Any, ...]) -> list[float]:
    """Returns the numbers of a named tuple and of those in it, in order."""
    return [number for value in record for number in (flatten_numbers(value) if isinstance(value, tuple) else [value])]


def unflatten_numbers(like: T, numbers: Iterator[float]) -> T:
    """Returns a named tuple of the same form as `like` with the next of these numbers. The reverse of flatten_numbers."""
    values: Any = [unflatten_numbers(value, numbers) if isinstance(value, tuple) else next(numbers) for value in like]
    return type(like)(*values)


class Reports:
    """Exchanges the reports of all ranks. All ranks create one together and call it after the same steps: `step`, `read`, then
    `send` if it is `due`."""

    def __init__(self, rows: Section) -> None:
        self._rows = rows
        self.meter: InterfaceCounters | None = None
        """Reader of the node's interface counters; None on ranks that do not report the node's traffic."""
        self._steps: list[tuple[float, float]] = []
        self._held: list[TuningReport] = []
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

    def read(self) -> list[TuningReport]:
        """Returns the reports of all ranks that were sent after an earlier step, once; an empty list if there are none."""
        begin = time.perf_counter()
        if self._rows.under_way:
            self._held = self._read()
            self._cost_s += time.perf_counter() - begin
        rows, self._held = self._held, []
        return rows

    def send(self, own: TuningReport, decisive_s: float = float("inf")) -> list[TuningReport]:
        """Sends this rank's report with the measured step times and the cost of reports. Returns the reports of all ranks if
        all ranks wait for them, as after steps longer than `decisive_s`; otherwise an empty list."""
        begin = time.perf_counter()
        self._costs_s.append(self._cost_s)
        step_s, waited_s = map(fmean, zip(*self._steps, strict=True)) if self._steps else (0.0, 0.0)
        self._steps = []
        cost_s = min(self._costs_s)  # other load on the machine can only increase the cost
        row = own._replace(step_s=step_s, waited_s=waited_s, at_once=float(step_s > decisive_s), cost_s=cost_s)
        self._rows.start(*flatten_numbers(row))
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

    def _read(self) -> list[TuningReport]:
        rows = [unflatten_numbers(TuningReport(), iter(row)) for row in self._rows.read()]
        self._every = row_spacing(max(row.cost_s for row in rows), max(row.step_s for row in rows))
        return rows

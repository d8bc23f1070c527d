"""The page about a job: what the page shows as JSON, and the HTML file, which is complete in itself.

`commlayer serve --page` sends the JSON while the job runs (job_feed.py), and `commlayer report` writes it into the file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import msgspec
from msgspec import structs

from commlayer.observe.events import Event, JobEvent, LogEvent, MemberEvent, StepEvent, clean
from commlayer.observe.job_view import JobView, WorkerView

FOLDER = Path(__file__).parent
MOST_POINTS = 1000
"""Number of points of a curve from which neighbours are merged."""
MOST_ROWS = 5000
"""Number of notable events that a page shows."""
MOST_FRAMES = 120
"""Number of moments of a finished run that a report can show."""

Number = float | None
Point = list[Number]
"""Time, step time of all workers (median, slowest, planned), exposed fraction of a step (median, largest), loss, and payload
of all workers in bytes per second (sent, received). None: unknown."""
Notable = tuple[float, str, str]
"""Time, kind and words of an event that a person would want to read."""


class WorkerState(msgspec.Struct):
    """One worker, as the page shows it. Unknown numbers are 0."""

    number: int
    name: str
    state: str
    note: str
    """Why the worker left, or which members it waits for."""
    returns: int
    """How often its machine has joined again."""
    step: int
    steps: int
    computed_s: float
    waited_s: float
    sent: int
    received: int
    """Sums since the job began, with those of workers that had left before this one joined in their place."""
    step_s: float
    compute_s: float
    exposed_s: float
    hidden_s: float
    up: float
    up_planned: float
    down: float
    down_planned: float
    """Bytes per second."""
    share: float
    loss: Number


class PageState(msgspec.Struct):
    """A job at one moment."""

    time: float
    begun: float
    run: str
    name: str
    version: str
    world: int
    present: int
    over: bool
    step: int
    step_s: float
    planned_s: float
    plan: str
    loss: Number
    samples_per_s: float
    total: int
    """Number of steps that the script will take; 0: unknown."""
    left_s: float
    """Seconds until the last of them."""
    sent: int
    received: int
    """Payload bytes of all workers since the job began."""
    gain: float
    """How many times as fast as its fastest machine alone the job reaches a loss; 0: unknown."""
    checkpoint: int
    checkpoint_time: float
    """Step and time of the last checkpoint; 0: none."""
    noise_scale: float
    failures: list[str]
    """Of a job that is over: the workers that did not finish, with reasons."""
    waits: list[str]
    others: list[str]
    """Servers, and homes before the job begins, with their states."""
    workers: list[WorkerState]


class Update(msgspec.Struct):
    """What the page gets: the state, and the points and notable events that it does not have yet. `whole`: the page must drop
    those that it has."""

    states: list[PageState]
    points: list[Point]
    events: list[Notable]
    whole: bool = True


def state_of(view: JobView, now: float) -> PageState:
    """The job at the time `now`, in the clock of the events."""
    plan, saved = view.plan, view.checkpoint
    return PageState(
        now, view.begun, view.job.run, view.job.name, view.job.version, view.job.world, len(view.present), view.over, view.step,
        _short(view.step_s), _short(plan.step_s), f"{plan.digest[:8]} ({plan.reason}): {plan.summary}" if plan.digest else "",
        _short(view.loss), _short(view.samples_per_s), view.total_steps, _short(view.left_s), view.sent_bytes,
        view.received_bytes, _short(view.alone.over_alone), saved.step, saved.time, _short(view.noise_scale.batches),
        view.failures, view.notices(now), [view.words(other) for other in view.others.values()],
        [_worker(view, worker, now) for worker in view.rows])


def _worker(view: JobView, worker: WorkerView, now: float) -> WorkerState:
    step, link, state = worker.step, worker.link, view.status(worker, now)
    totals = view.totals(worker)
    names = [name for (rank, _), wait in view.waits.items() if rank == worker.number for name in wait.names]
    note = worker.reason or (f"for {', '.join(map(view.display, names))}" if state == "waits" and names else "")
    return WorkerState(
        worker.number, view.display(f"worker {worker.number}"), state, note, worker.returns, step.step, totals.steps,
        _short(totals.compute_s), _short(totals.exposed_s), totals.sent_bytes, totals.received_bytes, *map(_short, (
            step.step_s, step.compute_s, step.exposed_s, step.hidden_s, worker.up_bytes_per_s, link.planned_up_bytes_per_s,
            worker.down_bytes_per_s, link.planned_down_bytes_per_s, step.share, step.loss)))


def _short(number: Any) -> Any:
    """Four digits are enough for a person.

    >>> _short(0.123456), _short(None)
    (0.1235, None)
    """
    return None if number is None else float(f"{number:.4g}")


# ---- curves

class RunCurves:
    """Points of a job's curves over time, at most one a second. When there are MOST_POINTS, neighbours are merged, so that the
    curves of a long run keep their extremes."""

    def __init__(self) -> None:
        self.points: list[Point] = []
        self._every_s, self._next, self._present = 1.0, 0.0, 0

    def add(self, view: JobView, *, last: bool = False) -> None:
        """Adds a point, unless the previous one is less than a second old. `last`: a worker is about to leave. If it is the
        first one since the previous point, this is the last moment with all workers."""
        if len(view.present) != self._present if last else view.time < self._next:
            return
        stepping = [worker.step for worker in view.present if worker.step.steps * worker.step.step_s > 0]
        if not stepping:
            return
        self._next, self._present = view.time + self._every_s, len(view.present)
        exposed = [step.exposed_s / step.step_s for step in stepping]
        times_s = [step.step_s for step in stepping]
        sent = sum(step.sent_bytes / (step.steps * step.step_s) for step in stepping)
        received = sum(step.received_bytes / (step.steps * step.step_s) for step in stepping)
        self.points.append([round(view.time, 2), *map(_short, (
            median(times_s), max(times_s), view.plan.step_s or None, median(exposed), max(exposed), view.loss, sent,
            received))])
        if len(self.points) >= MOST_POINTS:
            self.points = [_merged(pair) for pair in zip(self.points[::2], self.points[1::2], strict=False)]
            self._every_s *= 2


def _merged(pair: Sequence[Point]) -> Point:
    """
    >>> _merged([[1.0, 2.0, 3.0, None, 0.5, 0.5, 4.0, 8.0, 8.0], [2.0, 4.0, 9.0, 1.0, 0.5, 0.7, None, 8.0, 8.0]])
    [2.0, 3.0, 9.0, 1.0, 0.5, 0.7, 4.0, 8.0, 8.0]
    """
    joins: list[Callable[[list[float]], float]] = [max, fmean, max, max, fmean, max, fmean, fmean, fmean]
    known = [[number for number in numbers if number is not None] for numbers in zip(*pair, strict=True)]
    return [join(numbers) if numbers else None for join, numbers in zip(joins, known, strict=True)]


class RunRecord:
    """A job's view with what happened before: curves, and notable events in words."""

    def __init__(self) -> None:
        self.view, self.curves = JobView(), RunCurves()
        self.events: deque[Notable] = deque(maxlen=MOST_ROWS)
        self.notable = 0
        """Number of notable events so far, with those that were dropped."""

    def apply(self, event: Event) -> None:
        run = self.view.job.run
        if isinstance(event, MemberEvent) and event.state in ("left", "dead"):
            self.curves.add(self.view, last=True)
        self.view.apply(event)
        if self.view.job.run != run:
            self.curves = RunCurves()
        if isinstance(event, StepEvent):
            self.curves.add(self.view)
        if self.view.recent and self.view.recent[-1] is event:
            self.events.append((round(event.time, 2), _kind(event), self.view.words(event)))
            self.notable += 1


def _kind(event: Event) -> str:
    match event:
        case LogEvent():
            return event.level
        case MemberEvent(state=state):
            return state
    return str(event.__struct_config__.tag)


def report(events: Sequence[Event]) -> bytes:
    """The file about a finished run, from its events in order of time. Of several runs it shows the last one."""
    events = _last_run(events)
    record, states = RunRecord(), list[PageState]()
    begin, end = events[0].time, events[-1].time
    every_s = max(1.0, (end - begin) / MOST_FRAMES)
    due = begin + every_s
    for event in events:
        while due < min(event.time, end):
            states.append(state_of(record.view, due))
            due += every_s
        record.apply(clean(event))
    states.append(_last_state(record.view, end))
    return document(msgspec.json.encode(Update(states, record.curves.points, list(record.events))))[0]


def _last_state(view: JobView, end: float) -> PageState:
    """The state at the end of the events. Workers whose end is missing were killed, or still train."""
    state = state_of(view, end)
    if view.over or not view.workers:
        return state
    names = ", ".join(view.display(f"worker {worker.number}") for worker in view.present)
    return structs.replace(state, over=True, waits=[], failures=[f"the events end here, and {names} had not left the job"])


def _last_run(events: Sequence[Event]) -> Sequence[Event]:
    """Members that wait for the first run belong to it."""
    run, begin = "", 0
    for place, event in enumerate(events):
        if isinstance(event, JobEvent) and event.run != run:
            run, begin = event.run, place if run else 0
    return events[begin:]


# ---- the file

_INLINE = re.compile(rb"<(script|style)>(.*?)</\1>", re.DOTALL)


def document(data: bytes = b"") -> tuple[bytes, str]:
    """Returns the page as one file, and the Content-Security-Policy that permits the file's own scripts and styles only.
    `data`: JSON of an Update, for a page that gets no others."""
    vendor = FOLDER / "vendor"
    page = (FOLDER / "page.html").read_bytes()
    page = page.replace(b"<!--uplot.css-->", b"<style>%b</style>" % (vendor / "uPlot.min.css").read_bytes())
    page = page.replace(b"<!--uplot.js-->", b"<script>%b</script>" % (vendor / "uPlot.iife.min.js").read_bytes())
    hashes: dict[bytes, str] = {b"script": "", b"style": ""}
    for kind, text in _INLINE.findall(page):
        hashes[kind] += f" 'sha256-{base64.b64encode(hashlib.sha256(text).digest()).decode()}'"
    source = "'none'" if data else "'self'"
    policy = (f"default-src 'none'; script-src{hashes[b'script']}; style-src{hashes[b'style']}; "
              f"connect-src {source}; base-uri 'none'; form-action 'none'")
    page = page.replace(b"<!--policy-->", b'<meta http-equiv="Content-Security-Policy" content="%b">' % policy.encode())
    return page.replace(b"<!--data-->", data.replace(b"<", b"\\u003c")), policy

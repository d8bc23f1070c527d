"""The page about a job: what the page shows as JSON, and the HTML file, which is complete in itself.

`commlayer serve --page` sends the JSON while the job runs (job_feed.py), and `commlayer report` writes it into the file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec import structs

from commlayer.observe.events import Event, JobEvent, clean
from commlayer.observe.job_view import JobView, WorkerRow
from commlayer.observe.pages.run_record import Notable, Number, Point, RunRecord, rounded

FOLDER = Path(__file__).parent
MOST_FRAMES = 120
"""Number of moments of a finished run that a report can show."""


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
    workers: list[WorkerRow]


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
    state = PageState(
        now, view.begun, view.job.run, view.job.name, view.job.version, view.job.world, len(view.present), view.over, view.step,
        view.step_s, plan.step_s, f"{plan.digest[:8]} ({plan.reason}): {plan.summary}" if plan.digest else "", view.loss,
        view.samples_per_s, view.total_steps, view.left_s, view.sent_bytes, view.received_bytes, view.alone.over_alone,
        saved.step, saved.time, view.noise_scale.batches, view.failures, view.notices(now),
        [view.words(other) for other in view.others.values()], [_rounded(view.row(worker, now)) for worker in view.rows])
    return _rounded(state, but=("time", "begun", "checkpoint_time"))


S = TypeVar("S", bound=msgspec.Struct)


def _rounded(record: S, but: Sequence[str] = ()) -> S:
    """The record with its numbers rounded, except for the fields `but`."""
    numbers = {name: getattr(record, name) for name in record.__struct_fields__ if name not in but}
    return structs.replace(record, **{name: rounded(value) for name, value in numbers.items() if isinstance(value, float)})


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

"""The page about a job: what the page shows as JSON, and the HTML file, which is complete in itself.

`commlayer serve --page` sends the JSON while the job runs (job_feed.py), and `commlayer report` writes it into the file.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs

from commlayer.observe.events import Event, JobEvent, clean
from commlayer.observe.job.answers import answers
from commlayer.observe.job.job_view import JobView
from commlayer.observe.pages.run_record import Notable, Point, RunRecord, rounded

FOLDER = Path(__file__).parent
MOST_FRAMES = 120
"""Number of moments of a finished run that a report can show."""


PageState = dict[str, Any]
"""A job at one moment, by the names that page.html reads: see page_state."""


class Update(msgspec.Struct):
    """The data that the page gets: the state, and the points and notable events that the page does not have yet. `whole`: True:
    the page must drop its points and events."""

    states: list[PageState]
    points: list[Point]
    events: list[Notable]
    whole: bool = True


def page_state(view: JobView, now: float) -> PageState:
    """The job at the time `now`, in the clock of the events. Numbers are rounded, except times."""
    plan, saved = view.plan, view.checkpoint
    times = {"time": now, "begun": view.begun, "checkpoint_time": saved.time}  # of the last checkpoint, 0: none
    return times | _rounded({
        "run": view.job.run, "name": view.job.name, "version": view.job.version,
        "world": view.job.world, "present": len(view.present), "over": view.over,
        "step": view.step, "step_s": view.step_s, "planned_s": plan.step_s,
        "plan": view.words(plan).removeprefix("plan ") if plan.digest else "",
        "loss": view.loss, "samples_per_s": view.samples_per_s,
        "answers": [answer._asdict() for answer in answers(view, now)],
        "total": view.total_steps, "sent": view.sent_bytes, "received": view.received_bytes,
        "checkpoint": saved.step, "noise_scale": view.noise_scale.batches,
        "failed": view.failed, "failures": view.failures, "waits": view.notices(now),
        "others": [view.words(other) for other in view.others.values() if not (view.over and other.state == "waiting")],
        "workers": [_rounded(structs.asdict(view.row(worker, now))) for worker in view.rows],
    })


def _rounded(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: rounded(value) if isinstance(value, float) else value for name, value in fields.items()}


def report(events: Sequence[Event]) -> bytes:
    """The file about a finished run, from its events in order of time. Of several runs it shows the last one."""
    events = _last_run(events)
    record, states = RunRecord(), list[PageState]()
    begin, end = events[0].time, events[-1].time
    every_s = max(1.0, (end - begin) / MOST_FRAMES)
    due = begin + every_s
    for event in events:
        while due < min(event.time, end):
            states.append(page_state(record.view, due))
            due += every_s
        record.apply(clean(event))
    states.append(_last_state(record.view, end))
    return document(msgspec.json.encode(Update(states, record.curves.points, list(record.events))))[0]


def _last_state(view: JobView, end: float) -> PageState:
    """The state at the end of the events. Workers whose end is missing were killed, or still train."""
    state = page_state(view, end)
    if view.over or not view.workers:
        return state
    names = ", ".join(view.display(f"worker {worker.number}") for worker in view.present)
    for worker in state["workers"]:
        worker |= {"state": "no end", "note": ""} if worker["state"] in ("waits", "silent") else {}
    others = [view.words(other) for other in view.others.values() if other.state != "waiting"]
    return state | {"over": True, "failed": True, "waits": [], "others": others,
                    "failures": [f"the events end here, and {names} had not left the job"]}


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

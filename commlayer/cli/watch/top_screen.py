"""Shows a JobView in `commlayer top`: as a screen on terminals, as lines in pipes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from operator import attrgetter

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from commlayer.observe.events import Event
from commlayer.observe.job.answers import UNKNOWN, amount, answers, span
from commlayer.observe.job.job_view import JobView, WorkerRow
from commlayer.observe.link_monitor import megabits

BAR = 8
"""Width of the bar of a step's time, in characters."""
FEWEST_ROWS, RECENT_ROWS = 4, 6
"""Smallest number of workers on a screen, and largest number of latest events."""
FEW = 8
"""Number of workers up to which a screen has space for all latest events."""
WIDE = 100
"""Width of a screen from which it has space for longer names and for losses."""
LOW = 20
"""Height of a screen below which it has no space for answers that are not known."""
GAP = "   "
STYLES = {"dead": "red", "silent": "red", "waits": "yellow", "left": "dim"}
CALM = {"trains": 1, "left": 2}
"""Order of workers by status if not all fit: those that need attention first."""


def screen(view: JobView, now: float, *, width: int = 80, height: int = 24, note: str = "") -> RenderableType:
    """The job at the time `now`, in the clock of the events. `note`: a line about the screen itself, shown last."""
    plan = [Text(view.words(view.plan))] if view.plan.digest else []
    head = [_title(view, now), *_flow(answer_lines(view, now, known=height < LOW), width), *plan, *_flow(numbers(view), width)]
    waits = [Text(line, style="bold red") for line in view.failures[:3]]
    waits += [Text(line, style="bold yellow") for line in view.notices(now)[:3]]
    latest = list(view.recent)[-min(RECENT_ROWS if len(view.workers) <= FEW else FEWEST_ROWS, height // 4):]
    recent = [Text.assemble((f"{clock(event.time)} ", "dim"), view.words(event)) for event in latest]
    left = height - len(head) - len(waits) - len(recent) - 6 - bool(note)
    parts: list[RenderableType] = [*head, *waits, _workers(view, now, width, max(FEWEST_ROWS, left))]
    parts += [Text("latest events", style="bold"), *recent] if recent else []
    parts += [Text(note, style="dim")] if note else []
    for part in parts:
        if isinstance(part, Text):
            part.no_wrap, part.overflow = True, "ellipsis"
    return Group(*parts)


def _title(view: JobView, now: float) -> Text:
    job, present = view.job, len(view.present)
    name = job.name or "a job"
    running = span((view.time if view.over else now) - view.begun) if view.begun else "not begun"
    state = outcome(view) or f"{present} of {max(job.world, present)} workers"
    return Text.assemble(("commlayer top ", "bold"), f"{name}, run {job.run[:8] or '-'}, {state}, {running}")


def outcome(view: JobView) -> str:
    """How the job ended; empty while it runs."""
    return ("failed" if view.failed else "finished") if view.over else ""


def _flow(parts: Iterable[str], width: int) -> Iterator[Text]:
    """As many lines as these parts need."""
    line = ""
    for part in parts:
        if line and len(line) + len(GAP) + len(part) > width:
            yield Text(line)
            line = ""
        line = f"{line}{GAP}{part}" if line else part
    if line:
        yield Text(line)


def answer_lines(view: JobView, now: float, *, known: bool = False) -> Iterator[str]:
    """The answers to what a person asks first. `known`: only those that are known."""
    for name, text, more, at in answers(view, now):
        if text != UNKNOWN or not known:
            yield f"{name}: {text}" + (f" ({more.replace('{at}', clock(at)[:5])})" if more and text != UNKNOWN else "")


def numbers(view: JobView) -> Iterator[str]:
    """The numbers of the whole job, as short texts; only those that are known."""
    if view.step:
        yield f"step {view.step:,}" + (f" of {view.total_steps:,}" if view.total_steps else "")
    if view.step_s:
        yield f"{duration(view.step_s)} a step" + (f" ({duration(view.plan.step_s)} planned)" if view.plan.step_s else "")
    if view.loss is not None:
        yield f"loss {view.loss:.4g}"
    if view.samples_per_s:
        yield f"{view.samples_per_s:,.0f} samples/s"
    if view.sent_bytes:
        yield f"sent {amount(view.sent_bytes)}, received {amount(view.received_bytes)}"
    if view.checkpoint.step:
        yield f"checkpoint at step {view.checkpoint.step:,}"
    if view.noise_scale.batches:
        yield f"noise scale {view.noise_scale.batches:.3g} batches"


def _workers(view: JobView, now: float, width: int, most: int) -> Table:
    wide = width >= WIDE
    grid = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0), expand=False)
    grid.add_column("worker", no_wrap=True, overflow="ellipsis", max_width=24 if wide else 14)
    grid.add_column("state", no_wrap=True)
    for name in ("step", "time"):
        grid.add_column(name, justify="right", no_wrap=True)
    grid.add_column("exposed", no_wrap=True)
    grid.add_column("hidden", justify="right", no_wrap=True)
    for name in ("up Mb/s", "down", "share", *(["loss"] if wide else [])):
        grid.add_column(name, justify="right", no_wrap=True)
    rows = [view.row(worker, now) for worker in view.rows]
    if len(rows) > most:
        urgent = sorted(rows, key=lambda row: (CALM.get(row.state, 0), -row.step_s))
        rows = sorted(urgent[:most - 1], key=attrgetter("number"))
    for row in rows:
        grid.add_row(*_cells(row, wide=wide))
    if hidden := len(view.rows) - len(rows):
        grid.add_row(f"{hidden} more", style="dim")
    return grid


def _cells(row: WorkerRow, *, wide: bool) -> Iterator[RenderableType]:
    yield row.name
    yield Text(row.state, style=STYLES.get(row.state, ""))
    yield f"{row.step:,}" if row.step else "-"
    yield duration(row.step_s) if row.step_s else "-"
    yield bar(row.exposed_s / row.step_s) if row.step_s else Text("-")
    yield f"{row.hidden_s / row.step_s:.0%}" if row.step_s else "-"
    for measured, planned in ((row.up, row.up_planned), (row.down, row.down_planned)):
        yield format_bytes_rate(measured) + (f"/{format_bytes_rate(planned)}" if planned else "")
    yield f"{row.share:.0%}" if row.share else "-"
    if wide:
        yield "-" if row.loss is None else f"{row.loss:.4g}"


def bar(exposed: float) -> Text:
    """The parts of a step's time: computing, and waiting for communication.

    >>> bar(0.25).plain
    '██████░░ 25%'
    """
    waits = round(BAR * min(1.0, max(0.0, exposed)))
    return Text.assemble(("█" * (BAR - waits), "green"), ("░" * waits, "yellow"), f" {exposed:.0%}")


def format_bytes_rate(bytes_per_s: float) -> str:
    return megabits(8 * bytes_per_s) if bytes_per_s else "-"


def duration(seconds: float) -> str:
    """
    >>> duration(0.0123), duration(2.5)
    ('12.3 ms', '2.5 s')
    """
    return f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.3g} s"


def clock(at: float) -> str:
    try:
        return time.strftime("%H:%M:%S", time.localtime(at))
    except (OverflowError, ValueError, OSError):  # of a damaged file
        return "--:--:--"


def summary(view: JobView, now: float) -> str:
    """The job in one line."""
    exposed = [worker.step.exposed_s / worker.step.step_s for worker in view.present if worker.step.step_s]
    parts = [*numbers(view), *answer_lines(view, now, known=True), *([f"{max(exposed):.0%} exposed"] if exposed else []),
             outcome(view) or f"{len(view.present)} of {max(view.job.world, len(view.present))} workers",
             *view.waiting(now)]
    return f"{clock(now)} {', '.join(parts)}"


def worker_lines(view: JobView, now: float) -> Iterator[str]:
    """Shows each worker in one line."""
    for row in (view.row(worker, now) for worker in view.rows):
        parts = [f"{row.name}: {row.state}", f"step {row.step:,}", *([row.note] if row.note else [])]
        if row.step_s:
            parts.append(f"{duration(row.step_s)} a step ({row.exposed_s / row.step_s:.0%} exposed, "
                         f"{row.hidden_s / row.step_s:.0%} hidden)")
        for way, measured, planned in (("up", row.up, row.up_planned), ("down", row.down, row.down_planned)):
            if measured:
                parts.append(f"{way} "
                             f"{format_bytes_rate(measured)}{f' of {format_bytes_rate(planned)} planned' if planned else ''} "
                             "Mb/s")
        parts += [f"{row.share:.0%} of the batch"] if row.share else []
        yield ", ".join(parts)


def event_line(view: JobView, event: Event) -> str:
    """Returns a line about an event that `view` has just applied, if readers of a pipe should see it; otherwise ""."""
    shown = bool(view.recent) and view.recent[-1] is event
    return f"{clock(event.time)} {view.words(event)}" if shown else ""

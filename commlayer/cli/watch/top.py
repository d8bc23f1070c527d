"""`commlayer top`: shows a running job, or replays a finished one."""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from commlayer.cli.options import Insecure, Keys, config_with_secret, stored_keys
from commlayer.errors import CommError, InvalidInput

if TYPE_CHECKING:
    from commlayer.cluster.calls.event_client import EventClient
    from commlayer.observe.event_files import EventFiles
    from commlayer.observe.events import Event
    from commlayer.observe.job.job_view import JobView

LOOK_S, FRAME_S = 1.0, 0.25
"""Seconds between two looks at a running job, and between two frames of a replay."""
LINE_S = 10.0
"""Seconds between two lines about a running job, if output is not a terminal."""
REPLAY_S = 60.0
"""Seconds that a replay takes, unless the run itself was shorter."""


def top(
    job: Annotated[str, typer.Argument(help="host:port of `commlayer serve`, NAME@HOST:PORT of a home, or a folder of events.",
                                       metavar="JOB")] = "",
    keys: Keys = "", insecure: Insecure = False,
    replay: Annotated[Path | None, typer.Option(help="Show a finished run: its folder or file of events.",
                                                metavar="RUN")] = None,
    at: Annotated[float, typer.Option(help="With --replay: begin this many seconds after the start.", metavar="SECONDS",
                                      min=0.0)] = 0.0,
    once: Annotated[bool, typer.Option("--once", help="Show one state, the present one or that of --at, and end.")] = False,
    page: Annotated[int, typer.Option(help="Instead serve a page on this port of this machine, with a button that pauses its "
                                           "homes.", metavar="PORT", min=0, max=65535)] = 0,
) -> None:
    """Watch a job: members, steps, links, plan, and what it waits for. Ctrl-C ends the view, not the job."""
    from commlayer.observe.event_files import WHERE

    if bool(job) == (replay is not None):
        raise InvalidInput("E-CLI-OPTION", f"got {'JOB and --replay' if job else 'neither JOB nor --replay'}: give host:port "
                                           "of `commlayer serve`, or a folder of events, or --replay RUN")
    if page and (replay is not None or once):
        raise InvalidInput("E-CLI-OPTION", f"--page {page} shows a running job: leave out --{'once' if once else 'replay'}")
    with contextlib.suppress(KeyboardInterrupt):
        if replay is not None:
            _replay(replay, at, once=once)
        else:
            with open_event_source(job, keys, insecure=insecure) as source:
                events = source.read()
                if not events and (":" not in job or Path(job).exists()):
                    raise InvalidInput("E-EVENTS", f"{job}: has no events yet: start the job first, or {WHERE}")
                _serve_page(source, events, page) if page else _watch(source, events, once=once)


@contextlib.contextmanager
def open_event_source(job: str, keys: str, *, insecure: bool) -> Iterator[EventClient | EventFiles]:
    """Where the events of a job are: at its coordinator, or in a folder."""
    if ":" not in job or Path(job).exists():
        from commlayer.observe.event_files import EventFiles

        yield EventFiles(Path(job))
        return
    address, keys = stored_keys(job, keys, insecure=insecure)
    config = config_with_secret("watching", join=address, insecure=insecure, keys=keys)
    # Imported late: it loads grpc, which --help does not need.
    from commlayer.cluster.calls.event_client import EventClient

    with contextlib.closing(EventClient(config)) as client:
        yield client


def _watch(source: EventClient | EventFiles, events: list[Event], *, once: bool) -> None:
    """Shows the job until its last worker has left. `events`: what `source` has returned already. A coordinator that stops
    answering is shown, and asked again."""
    from commlayer.observe.job.job_view import JobView

    view = JobView()
    with _output(view) as show:
        while True:
            for event in events:
                view.apply(event)
                if not once:
                    show.event(event)
            show.state(time.time() + source.ahead_s, last=once or view.over)
            if once or view.over:
                return
            time.sleep(LOOK_S)
            try:
                events, show.note = source.read(), ""
            except CommError as error:
                events, show.note = [], str(error)


def _serve_page(source: EventClient | EventFiles, events: list[Event], port: int) -> None:
    """Serves the page until Ctrl-C: a home that pauses may be the last one, and its owner resumes it there."""
    from commlayer.cli.pauses import pause_homes, paused_mark, resume_homes
    from commlayer.observe.event_log import EventLog
    from commlayer.observe.pages.job_feed import JobFeed
    from commlayer.observe.pages.web import WebServer

    log, token = EventLog(retains=True), secrets.token_hex(16)
    with contextlib.closing(JobFeed(log, paused_mark().exists)) as feed, contextlib.closing(WebServer(
            "127.0.0.1", port, lambda: token, feed.pages, actions={"/pause": pause_homes, "/resume": resume_homes})) as server:
        print(f"commlayer top: page: http://{server.address}/?token={token}", flush=True)
        while True:
            for event in events:
                log.append(event)
            time.sleep(LOOK_S)
            try:
                events, feed.note, feed.ahead_s = source.read(), "", source.ahead_s
            except CommError as error:
                events, feed.note = [], str(error)


def _replay(path: Path, at: float, *, once: bool) -> None:
    from commlayer.observe.event_files import read_run
    from commlayer.observe.job.job_view import JobView

    events, view = read_run(path), JobView()
    start, end = events[0].time, events[-1].time
    now = start + at
    if now > end:
        raise InvalidInput("E-CLI-OPTION", f"--at {at:g}: the run has {end - start:.0f} s; give fewer seconds")
    place, frame_s = 0, FRAME_S * max(1.0, (end - now) / REPLAY_S)
    with _output(view) as show:
        while True:
            while place < len(events) and events[place].time <= now:
                view.apply(events[place])
                if events[place].time >= start + at:
                    show.event(events[place])
                place += 1
            show.note = f"replay: {now - start:.0f} of {end - start:.0f} s"
            if once or now >= end:
                break
            show.state(now)
            if show.paced:
                time.sleep(FRAME_S)
            now = min(end, now + frame_s) if show.paced else end
        show.state(now, last=True)


class _Screen:
    """Draws the view in a terminal."""

    paced = True

    def __init__(self, view: JobView, console: Any, live: Any) -> None:
        self._view, self._console, self._live, self.note = view, console, live, ""

    def event(self, event: Event) -> None:
        """Does nothing: the screen lists the latest events."""

    def state(self, now: float, *, last: bool = False) -> None:
        from commlayer.cli.watch.top_screen import screen

        size = self._console.size
        self._live.update(screen(self._view, now, width=size.width, height=size.height, note=self.note), refresh=True)


class _Lines:
    """Writes lines of text: one for each event of interest, and one about the state of the job every LINE_S."""

    paced = False

    def __init__(self, view: JobView) -> None:
        self._view, self.note, self._next = view, "", 0.0

    def event(self, event: Event) -> None:
        from commlayer.cli.watch.top_screen import event_line

        if line := event_line(self._view, event):
            print(line)

    def state(self, now: float, *, last: bool = False) -> None:
        from commlayer.cli.watch.top_screen import summary, worker_lines

        if last or now >= self._next:
            self._next = now + LINE_S
            print(summary(self._view, now) + (f" ({self.note})" if self.note else ""), flush=True)
            for line in worker_lines(self._view, now) if last else ():
                print(line)


@contextlib.contextmanager
def quiet_pipe() -> Iterator[None]:
    """Ends what is inside if the reader of the pipe has ended; Python would report that again at its exit."""
    try:
        yield
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


@contextlib.contextmanager
def _output(view: JobView) -> Iterator[_Screen | _Lines]:
    from rich.console import Console
    from rich.live import Live

    console = Console(highlight=False, markup=False)
    if not console.is_terminal:
        with quiet_pipe():
            yield _Lines(view)
        return
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        yield _Screen(view, console, live)

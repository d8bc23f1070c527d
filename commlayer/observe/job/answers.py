"""Answers the questions that a person asks about a running job. `commlayer top`, the page and the report show these answers
first."""

from __future__ import annotations

from collections.abc import Iterator
from operator import attrgetter
from typing import NamedTuple

from commlayer.errors import short_line
from commlayer.observe.job.job_view import JobView, pause_reason

UNKNOWN = "unknown"
HELPS = 1.05
"""From this speed on, relative to the job as it is, a change is named as a help."""
WHY_CHARS = 60
"""Maximum length of why a home is missing."""


class StatusAnswer(NamedTuple):
    name: str
    text: str
    more: str = ""
    """Where the answer comes from, or what would make it known. `{at}` stands for the time `at` on the reader's clock."""
    at: float = 0.0


def answers(view: JobView, now: float) -> list[StatusAnswer]:
    """The answers to the six questions at the time `now`, in the clock of the events. A question that cannot be answered has
    the answer `unknown`."""
    return [_faster(view), _done(view, now), _sent(view), _energy(view), _missing(view, now), _help(view)]


def _faster(view: JobView) -> StatusAnswer:
    times = view.alone.over_alone
    if not times:
        return StatusAnswer("speed against one machine alone", UNKNOWN, "measured after the first plan search")
    return StatusAnswer("speed against one machine alone", f"{times:.3g} x",
                        "to a loss, measured" if times >= 1 else "measured: one machine alone is faster")


def _done(view: JobView, now: float) -> StatusAnswer:
    if view.over:
        return StatusAnswer("time left", "failed" if view.failed else "finished", "at {at}", view.time)
    if not view.total_steps:
        return StatusAnswer("time left", UNKNOWN, "attach(steps=N) tells it")
    if not view.left_s:
        return StatusAnswer("time left", UNKNOWN if view.step < view.total_steps else span(0))
    return StatusAnswer("time left", span(view.left_s), "done at {at}", now + view.left_s)


def _sent(view: JobView) -> StatusAnswer:
    costs = view.costs
    if not costs.month:
        return StatusAnswer("sent this month", UNKNOWN, "commlayer serve counts it")
    return StatusAnswer("sent this month", amount(costs.sent_bytes),
                        f"{costs.busiest} both ways: {amount(costs.busiest_bytes)}")


def _energy(view: JobView) -> StatusAnswer:
    kwh, price = view.costs.kwh, view.costs.kwh_price
    if not kwh:
        return StatusAnswer("energy of this run", UNKNOWN, "serve --watts W tells it")
    return StatusAnswer("energy of this run", f"{short(kwh)} kWh",
                        f"costs {short(kwh * price)} at {price:g} per kWh" if price else "serve --kwh-price P prices it")


def _missing(view: JobView, now: float) -> StatusAnswer:
    missing = view.missing(now)
    if not view.rows:
        return StatusAnswer("missing", UNKNOWN, "no home has joined")
    if not missing:
        return StatusAnswer("missing", "none")
    first = min(missing, key=attrgetter("since"))
    why = pause_reason(first.why) or first.why.partition(": ")[0]
    return StatusAnswer("missing", ", ".join(each.name for each in missing),
                        "since {at}" + (f": {short_line(why, WHY_CHARS)}" if why else ""), first.since)


def _help(view: JobView) -> StatusAnswer:
    best = max(_changes(view), default=None)
    if best is None:
        return StatusAnswer("would help most", UNKNOWN, "predicted from measured times and links")
    times, what = best
    if times < HELPS:
        return StatusAnswer("would help most", "nothing", "of another home, faster uplinks, more local steps")
    return StatusAnswer("would help most", what, f"predicted: {times:.3g} x as fast")


def _changes(view: JobView) -> Iterator[tuple[float, str]]:
    """Yields possible changes, each with the speed to a loss relative to the current job."""
    known = view.what_if
    if known.home_times:
        yield known.home_times, "one more home"
    if known.uplink_times:
        yield known.uplink_times, f"twice the uplink of {', '.join(map(view.display, known.names))}"
    if view.alone.auto_times:
        yield view.alone.auto_times, "local steps: sync='auto'"


def span(seconds: float) -> str:
    """
    >>> span(75), span(-1)
    ('0:01:15', '0:00:00')
    """
    count = max(0, int(seconds))
    return f"{count // 3600}:{count // 60 % 60:02}:{count % 60:02}"


def short(number: float) -> str:
    """
    >>> short(12.345), short(0.00001)
    ('12.3', 'below 0.01')
    """
    return f"{number:.3g}" if number >= 0.01 else "below 0.01"


def amount(nbytes: float) -> str:
    """
    >>> amount(2_345_678_901), amount(3_456_000), amount(12), amount(5e12)
    ('2.35 GB', '3.46 MB', '12 B', '5,000 GB')
    """
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.3g} {unit}" if nbytes < 999.5 * size else f"{nbytes / size:,.0f} {unit}"
    return f"{nbytes:.0f} B"

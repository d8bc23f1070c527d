"""Formats the balancer's decisions as lines of a table for a terminal.

A decision's line shows the expected iteration time before and after it; its outcome's line shows the measured time.
"""

from __future__ import annotations

import math

from commlayer.balance.events import Decision, Event, Outcome

HEADINGS = f"{'decided':>7} {'from':>5}  {{shares}}  {'SE':>5}  {'ms a step':>16}  why"


def heading(workers: int) -> str:
    """The table's heading.

    >>> heading(3)
    'decided  from  share of each     SE         ms a step  why'
    """
    return HEADINGS.format(shares=f"{'share of each':<{_width(workers)}}")


def line(event: Event, workers: int) -> str:
    """Empty for events that changed no shares.

    >>> line(Decision(7, 9, (0, 1, 2), (20, 8, 4), (1, 1, 1), "the times moved apart", 0.08, 0.0321, 0.96), 3)
    '      7     9   20   8   4     0.96     80.0 ->  32.1  the times moved apart'
    """
    if isinstance(event, Decision):
        shares = event.by_worker
        named = "".join(f"{shares.get(worker, 0):4d}" for worker in range(workers))
        before = f"{event.before_s * 1e3:.1f}" if event.before_s < math.inf else "?"
        moved = f"{before:>7} -> {event.after_s * 1e3:5.1f}"
        steps = f"{event.step:7d} {event.from_step:5d}"
        return f"{steps} {named:<{_width(workers)}}   {event.effect:5.2f}  {moved:>16}  {event.reason}"
    if isinstance(event, Outcome):
        came = f"{event.measured_s * 1e3:.1f}"
        space = " " * (_width(workers) + 3)
        whole = f"; {event.whole_s * 1e3:.1f} ms with communication" if event.whole_s else ""
        return f"{'':7} {'':5} {space}{event.effect:5.2f}  {came:>16}  measured, {event.error:+.0%} against expected{whole}"
    return ""


def _width(workers: int) -> int:
    return max(4 * workers, len("share of each"))

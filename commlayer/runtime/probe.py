"""How fast this machine's link is, each way: a few timed transfers to a server. Knows a way to ask for them; no sockets."""

from __future__ import annotations

import time
from collections.abc import Callable

from commlayer.planner.model import Link

FIRST_NBYTES = 16 << 10
LAST_NBYTES = 16 << 20
PINGS = 4
ENOUGH = 10.0
"""A transfer that takes so many round trips tells the rate: what came before it opened the connection's window."""
TELLING = 0.5
"""Round trips, besides the one it waits for anyway, from which a transfer tells a rate at all."""

Ask = Callable[[int, int, float], float]
"""(bytes up, bytes down, deadline in seconds) -> seconds."""


def link(ask: Ask, budget_s: float, between: Callable[[], object] = lambda: None) -> Link:
    """Both rates and the latency to the core of the network, in about that time; a transfer may take some times as long.

    `between` the two ways: where many probe at the same time, one's answers must not go beside another's questions.
    """
    begin = time.perf_counter()
    patience_s = 10.0 * budget_s + 10.0
    round_trip_s = min(ask(1, 1, patience_s) for _ in range(PINGS))
    up_bps = _rate(lambda n: ask(n, 1, patience_s), round_trip_s, begin + budget_s / 2)
    between()
    down_bps = _rate(lambda n: ask(1, n, patience_s), round_trip_s, begin + budget_s)
    # To the server and back, and from each machine to the network between them: four ways of about equal length.
    return Link(up_bps, down_bps, round_trip_s / 4)


def _rate(transfer: Callable[[int], float], round_trip_s: float, deadline: float) -> float:
    """bits per second, the best of transfers that grow as far as the time goes, by what the last one lets expect.

    A large one may have overrun a queue on the way and waited for what was dropped; a small one may be over before it can be
    told from the way there and back.
    """
    nbytes, best_bps = FIRST_NBYTES, 0.0
    while True:
        seconds = transfer(nbytes)
        moved_s = max(seconds - round_trip_s, 1e-6)
        left_s = deadline - time.perf_counter()
        grown = min(4 * nbytes, LAST_NBYTES)
        if moved_s >= TELLING * round_trip_s:
            best_bps = max(best_bps, 8 * nbytes / moved_s)
        if seconds > ENOUGH * round_trip_s + 0.01 or grown == nbytes or round_trip_s + grown / nbytes * moved_s > left_s:
            return best_bps or 8 * nbytes / moved_s
        nbytes = grown

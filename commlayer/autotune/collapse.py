"""Withdraws what waits to be sent when a link has collapsed, so that the plan for the slower link need not wait for it."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable

from commlayer.cluster.calls.home_traffic import HOME
from commlayer.engine.job.job import DistributedJob
from commlayer.records import Plan
from commlayer.transport.flow.traffic import TRAFFIC

LOOK_S = 1.0
"""Seconds between two looks at a wait."""
LOOKS = 2
"""The rest of an exchange is withdrawn if so many looks in a row find that it would take too long."""
LEAST_S, BEYOND = 2.0, 1.5
"""It would take too long if sending it takes LEAST_S, and BEYOND times as long as the steps between two exchanges usually take.
"""


class CollapseWatch:
    """Thread that watches the exchanges of an automatic plan, until close(). Each plan is withdrawn from once: if the
    controller keeps it, its exchanges take their time."""

    def __init__(self, context: DistributedJob, usual_s: Callable[[], float]) -> None:
        """`usual_s` returns the usual step time in seconds, 0 before it is known."""
        self._context, self._usual_s = context, usual_s
        self._given_up: Plan | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-collapse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before, at, looks = TRAFFIC.sent_nbytes, time.monotonic(), 0
        while not self._closing.wait(LOOK_S):
            sent, now = TRAFFIC.sent_nbytes, time.monotonic()
            rate, before, at = (sent - before) / (now - at), sent, now
            worker = self._context.worker
            plan = worker.plan
            usual_s = self._usual_s() * plan.exchange_steps
            beyond = is_far_beyond(usual_s, worker.unsent_nbytes / max(rate, 1.0))
            looks = looks + 1 if beyond and plan is not self._given_up and not HOME.is_limited else 0
            if looks == LOOKS and (nbytes := worker.withdraw()):
                self._given_up = plan
                self._context.log_decision(f"the link has become much slower: {nbytes / 1e6:.3g} MB of this exchange will be "
                                           "sent with the next one", logging.WARNING)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * LOOK_S)


def is_far_beyond(usual_s: float, left_s: float) -> bool:
    """Returns whether an exchange of which `left_s` seconds are left takes far longer than usual.

    >>> is_far_beyond(0.0, 100.0), is_far_beyond(1.0, 5.0), is_far_beyond(10.0, 20.0)
    (False, True, False)
    """
    return usual_s > 0 and left_s > max(LEAST_S, BEYOND * usual_s)

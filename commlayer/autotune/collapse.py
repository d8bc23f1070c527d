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

CHECK_S = 1.0
"""Seconds between two checks of what waits to be sent."""
CHECKS = 2
"""Number of checks in a row that must find the link too slow."""
LEAST_S, BEYOND = 2.0, 1.5
"""The link is too slow if sending the rest of an exchange would take LEAST_S, and BEYOND times as long as the steps between two
exchanges usually take."""


class CollapseWatch:
    """Thread that withdraws contributions to exchanges of automatic plans with local steps, until close(). It withdraws from at
    most one exchange of each plan. If the controller then keeps the plan, its next exchanges are sent completely."""

    def __init__(self, context: DistributedJob, usual_s: Callable[[], float]) -> None:
        """`usual_s` returns the usual step time in seconds, 0 before it is known."""
        self._context, self._usual_s = context, usual_s
        self._withdrawn_from: Plan | None = None
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="commlayer-collapse", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        before, at, slow = TRAFFIC.sent_nbytes, time.monotonic(), 0
        while not self._closing.wait(CHECK_S):
            sent, now = TRAFFIC.sent_nbytes, time.monotonic()
            rate, before, at = (sent - before) / (now - at), sent, now
            worker = self._context.worker
            plan = worker.plan
            usual_s = self._usual_s() * plan.exchange_steps
            too_slow = is_too_slow(usual_s, worker.unsent_nbytes / max(rate, 1.0))
            slow = slow + 1 if too_slow and plan is not self._withdrawn_from and not HOME.is_limited else 0
            if slow >= CHECKS and plan.steps_locally and worker.may_withdraw and (nbytes := self._context.withdraw()):
                self._withdrawn_from = plan
                self._context.log_decision(f"the link has become much slower: {nbytes / 1e6:.3g} MB of this exchange will be "
                                           "sent with the next one", logging.WARNING, own=True)

    def close(self) -> None:
        self._closing.set()
        self._thread.join(2 * CHECK_S)


def is_too_slow(usual_s: float, left_s: float) -> bool:
    """Returns whether a link is too slow over which the rest of an exchange takes `left_s` seconds. `usual_s`: the time of the
    steps between two exchanges.

    >>> is_too_slow(0.0, 100.0), is_too_slow(1.0, 5.0), is_too_slow(10.0, 14.0)
    (False, True, False)
    """
    return usual_s > 0 and left_s > max(LEAST_S, BEYOND * usual_s)

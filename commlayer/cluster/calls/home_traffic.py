"""Counts what a process of a home sends and receives, and limits its uploads by the home's caps (observe/caps.py).

A cap is a slower link: `allowed_bps` is the rate with which the planner plans and to which this process is limited.
"""

from __future__ import annotations

import atexit
import logging
import math
import os
import threading
import time

from commlayer.config import Config, read_launch
from commlayer.observe.caps import Caps, Month, add_to_month, parse_caps
from commlayer.transport.flow.traffic import TRAFFIC

log = logging.getLogger("commlayer")

LOOK_S = 1.0
BEAT_NBYTES = 100
"""Bytes of a heartbeat or its answer. Heartbeats have a process of their own (heartbeat_sidecar.py)."""
DEADLINE_SHARE = 0.25
"""The cap of a month never makes an exchange take longer than this fraction of deadline_s. A home above the cap trains until it
must pause."""


class HomeTraffic:
    """The traffic of this process, as a part of its home's. Before `start` there are no caps."""

    def __init__(self) -> None:
        self.link_bps = 0.0
        """Measured upload rate of the home's link in bit/s; 0: unknown."""
        self.exchange_nbytes, self.up_part = 0.0, 0.5
        """Bytes that this process sends in an exchange (0: unknown), and the fraction of both directions that is sent."""
        self._caps, self._month = Caps(), Month()
        self._workers, self._follows, self._deadline_s, self._beats_s = 1, False, math.inf, math.inf
        self._counted, self._beaten, self._warned = 0, time.monotonic(), False
        self._lock = threading.Lock()

    def start(self, config: Config) -> None:
        """Begins to count in the file of the month. Raises InvalidInput if the caps are not valid."""
        self._caps = parse_caps(config.monthly, config.upload_share)
        self._deadline_s, self._beats_s, self._workers = config.deadline_s, config.heartbeat_s, read_launch().local_world
        self.look()
        threading.Thread(target=self._loop, name="commlayer-traffic", daemon=True).start()
        owner = os.getpid()
        # After the session has left the job. Not in a forked child, whose copy of the lock may be held.
        atexit.register(lambda: self.look() if os.getpid() == owner else None)

    def _loop(self) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look()

    @property
    def is_capped(self) -> bool:
        return self._caps != Caps()

    @property
    def is_limited(self) -> bool:
        """True: caps hold, because the link was measured or the plan is not automatic."""
        return self.is_capped and self._follows

    @property
    def needs_link(self) -> bool:
        """Whether a cap is a share of a rate that is not known yet."""
        return bool(self._caps.shares) and not self.link_bps

    def follow(self, link_bps: float, workers: int) -> None:
        """Sets the measured upload rate of the home's link, 0 if unknown, and limits uploads from now on. `workers`: of this
        home, which share the rate."""
        self.link_bps, self._workers, self._follows = link_bps or self.link_bps, workers, True
        self._limit()

    def allowed_bps(self, link_bps: float, least_bps: float = 0.0) -> float:
        """Returns the rate at which the home may send now, if its link sends at `link_bps` (infinite: unknown). A monthly cap
        allows at least `least_bps`."""
        here, used = self._month.local_time, self._month.used
        # Results arrive as an answer to what was sent, so a limit of uploads limits both directions.
        return min(link_bps * self._caps.share(here), max(least_bps, self.up_part * self._caps.monthly_bps(used, here)))

    def count(self) -> Month:
        """Adds what this process has sent and received since the last call to the count of the month. Raises InvalidInput if
        that is impossible; the next call adds it then."""
        with self._lock:
            nbytes = TRAFFIC.sent_nbytes + TRAFFIC.received_nbytes
            self._month = add_to_month(nbytes - self._counted)
            self._counted = nbytes
            return self._month

    def look(self) -> None:
        """Counts traffic, and sets this process's limits."""
        while time.monotonic() - self._beaten > self._beats_s:
            self._beaten += self._beats_s
            TRAFFIC.call(BEAT_NBYTES, BEAT_NBYTES)
        try:
            self.count()
        except Exception as error:  # the launcher pauses a home whose month is capped; limits must follow the hour
            if not self._warned:
                self._warned = True
                log.warning("%s", error)
        self._limit()

    def _limit(self) -> None:
        if not self.is_capped:
            return
        gradients_bps = states_bps = self.up_part * self._caps.last_bps(self._month.used)
        if self.is_limited:
            share, link_bps = self._caps.share(self._month.local_time), self.link_bps or math.inf
            # Before the first exchange it is not known how long one would take.
            least_bps = self._workers * 8 * self.exchange_nbytes / (DEADLINE_SHARE * self._deadline_s) or math.inf
            allowed_bps = min(self.allowed_bps(link_bps, least_bps), gradients_bps)
            gradients_bps = allowed_bps if allowed_bps < link_bps else math.inf
            states_bps = min(states_bps, share * link_bps / 2 if share < 1 else math.inf)
        for flow, bps in ((TRAFFIC.gradients, gradients_bps), (TRAFFIC.states, states_bps)):
            flow.set(bps / self._workers if bps < math.inf else 0.0)


HOME = HomeTraffic()
"""Of this process."""

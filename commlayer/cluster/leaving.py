"""The end of a process's part in a job: it leaves, then waits while others need the servers that it started."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from commlayer.cluster.embedded import Embedded
from commlayer.cluster.uplink import Uplink

log = logging.getLogger("commlayer")

SAID_S = 5.0
"""After this time a warning names the workers that the process waits for."""


def end(
    link: Uplink | None, children: Sequence[Embedded], reason: str, exchanges: int, *, stay_s: float, notice_s: float,
) -> None:
    """Without a `reason` the process leaves in order: what it has sent arrives, and its servers outlive the last worker, for
    `stay_s` at most. With a `reason` the servers stay for `notice_s`, so that the others learn the reason.
    `exchanges`: how many it has contributed to, for the others.
    """
    until = time.monotonic() + (notice_s if reason else stay_s)
    delivered = link is None or link.close(reason, stay_s, exchanges)
    if not delivered:
        until = time.monotonic() + notice_s  # without a coordinator it cannot know whether others still need it
    try:
        if children and delivered and not reason and not children[0].over(min(SAID_S, stay_s)):
            names = ", ".join(link.staying) if link is not None and link.staying else "others"
            log.warning("this process has ended, but it hosts a server that %s may still need: it stays until they have ended, "
                        "for %.0f s at most (deadline_s)", names, stay_s)
        for child in children:
            child.over(until - time.monotonic())
    finally:
        for child in children:
            child.close()

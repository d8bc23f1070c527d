"""The end of a process's part in a job: it leaves, then stays as long as others need its servers. Knows no training."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from commlayer.cluster.embedded import Embedded
from commlayer.cluster.uplink import Uplink

log = logging.getLogger("commlayer")

SAID_S = 5.0
"""After so long it is said whom the end waits for."""


def end(
    link: Uplink | None, children: Sequence[Embedded], reason: str, exchanges: int, *, stay_s: float, notice_s: float,
) -> None:
    """Without a `reason` the end is an orderly one: what this process has sent arrives, and its servers outlive the last
    worker, for `stay_s` at most. With one they stay for `notice_s`, until the others have heard who left.
    The others hear of how many `exchanges` it has made.
    """
    until = time.monotonic() + (notice_s if reason else stay_s)
    heard = link is None or link.close(reason, stay_s, exchanges)
    if not heard:
        until = time.monotonic() + notice_s  # the coordinator is gone, so nobody is waited for
    try:
        if children and heard and not reason and not children[0].over(min(SAID_S, stay_s)):
            names = ", ".join(link.staying) if link is not None and link.staying else "others"
            log.warning("this process has ended, but it hosts a server that %s may still need: it stays until they have ended, "
                        "for %.0f s at most (deadline_s)", names, stay_s)
        for child in children:
            child.over(until - time.monotonic())
    finally:
        for child in children:
            child.close()

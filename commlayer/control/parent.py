"""A child's side of embedded.py: the job's secret, and the parent's end, as they come by standard input. Knows no job."""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable

END = b"end\n"
"""What the parent says when the child is to end."""
LOOK_S = 1.0
GRACE_S = 5.0


def read_secret() -> str:
    """In the child: the first line of its standard input, before anything else is read of it."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(0, 1)
        if not more:
            break
        line += more
    return line.decode().strip()


def follow_parent(parent: int, stop: threading.Event, orphaned: Callable[[], None]) -> None:
    """In the child: sets `stop` when the parent says so or, after a call of `orphaned`, has ended. Leaves the process if that
    is not heeded.
    """

    def follow() -> None:
        told = b""
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], LOOK_S)
            if readable:
                told = os.read(0, len(END))
                break
        if not told and not stop.is_set():
            orphaned()
        stop.set()
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=follow, name="commlayer-parent", daemon=True).start()

"""A child's side of embedded.py: its parent's end, as it comes by standard input or without a word. Knows no job."""

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

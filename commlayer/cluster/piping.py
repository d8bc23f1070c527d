"""How a parent controls a child process: over the child's standard input, with a first line and an end message.

Secrets are passed this way, since command lines and environments can be read by others.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import threading
import time
from collections.abc import Callable

END = b"end\n"
"""Sent by the parent when the child is to end."""
LOOK_S = 1.0
GRACE_S = 5.0


def tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    """Sends a line to the child. Ignores a child that has ended, which other code detects."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def hear(descriptor: int = 0) -> bytes:
    """In the child: reads the first line and no byte more. Empty if the parent ended before it sent the line."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(descriptor, 1)
        if not more:
            return b""
        line += more
    return line[:-1]


def follow_parent(parent: int, stop: threading.Event, orphaned: Callable[[], None]) -> None:
    """In the child: sets `stop` when the parent requests it, or has ended; `orphaned` is called first in that case. Exits the
    process if it has not stopped after GRACE_S."""

    def follow() -> None:
        message = b""
        while os.getppid() == parent:
            readable, _, _ = select.select([0], [], [], LOOK_S)
            if readable:
                message = os.read(0, len(END))
                break
        if not message and not stop.is_set():
            orphaned()
        stop.set()
        time.sleep(GRACE_S)
        os._exit(1)

    threading.Thread(target=follow, name="commlayer-parent", daemon=True).start()

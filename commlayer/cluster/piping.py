"""What a child process hears from its parent by its standard input: a first line, and the end. Knows pipes; no job.

Secrets go this way: a command line and an environment are everybody's to read.
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
"""What the parent says when the child is to end."""
LOOK_S = 1.0
GRACE_S = 5.0


def tell(process: subprocess.Popen[bytes], line: bytes) -> None:
    """In the parent. To a child that has ended it says nothing: who watches that child will see."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):
        process.stdin.write(line + b"\n")
        process.stdin.flush()


def hear(descriptor: int = 0) -> bytes:
    """In the child, before anything else is read there; nothing more is taken. Empty if the parent has ended before it told."""
    line = b""
    while not line.endswith(b"\n"):
        more = os.read(descriptor, 1)
        if not more:
            return b""
        line += more
    return line[:-1]


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

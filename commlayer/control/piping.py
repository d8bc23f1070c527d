"""The first line that a child process hears from its parent, by its standard input. Knows pipes; not what is said.

Secrets go this way: a command line and an environment are everybody's to read.
"""

from __future__ import annotations

import contextlib
import os
import subprocess


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

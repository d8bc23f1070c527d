"""Writes files atomically, locks them, and replaces the text between two marks of a documentation page."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Mapping
from pathlib import Path

from commlayer.errors import InvalidInput

RETRY_S = 0.005
"""Seconds between two attempts to lock a file."""


def try_lock(descriptor: int, wait_s: float) -> bool:
    """Locks an open file against other processes and other descriptors, while the descriptor is open. Returns False if another
    one holds the lock for `wait_s`."""
    import fcntl  # Windows lacks it

    deadline = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError:
            if time.monotonic() > deadline:
                return False
        time.sleep(RETRY_S)


def write_whole(contents: Mapping[Path, bytes], *, durable: bool = False, mode: int = 0o666) -> None:
    """Writes all files or none, each by replacing its old version. Raises OSError, which names the file that cannot be written.

    `durable`: True flushes the files to disk before the function returns. `mode`: access rights from the first byte on,
    restricted by the umask.
    """
    # The process id in the name separates two processes that write the same file; the last one wins.
    parts = {path: path.with_name(f"{path.name}.{os.getpid()}.part") for path in contents}
    path = next(iter(parts))
    try:
        for path, part in parts.items():
            with contextlib.suppress(FileNotFoundError):
                part.unlink()  # left by an earlier process with the same id, perhaps with another mode
            with os.fdopen(os.open(part, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
                file.write(contents[path])
            if durable:
                sync(part)
        for path, part in parts.items():
            part.replace(path)
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(path)) from None
    finally:
        for part in parts.values():
            with contextlib.suppress(OSError):
                part.unlink()
    if durable:
        for folder in {path.parent for path in parts}:
            sync(folder)


def sync(path: Path) -> None:
    """Flushes a file's contents, or a folder's entries, to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def replace_between_marks(page: str, begin: str, end: str, made: str) -> str:
    r"""Returns the page with the text between two marks replaced by `made`. Each mark must be alone on its line. Raises
    InvalidInput if a mark is missing.

    >>> replace_between_marks("a\n<\nold\n>\nb", "<", ">", "new")
    'a\n<\nnew\n>\nb'
    """
    before, first, rest = page.partition(begin)
    _, last, after = rest.partition(end)
    if not first or not last:
        raise InvalidInput("E-ARGUMENT", f"the page has no {begin} before {end}")
    return f"{before}{begin}\n{made}\n{end}{after}"
